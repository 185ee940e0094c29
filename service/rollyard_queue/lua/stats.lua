#!lua flags=allow-oom
-- Counts, and forgets workers that were not announced again in time.
-- Answers {queued, leased, queued bytes, µs of the oldest queued run as text, workers, slots,
-- finished, redelivered}. The oldest is looked for at both ends of each job's order, so that a run
-- of the lowest priority that starves is seen.
-- Reads load, leases, bytes, queue:<job>, probation, totals. Writes workers, slots.
for _, worker in ipairs(redis.call('ZRANGE', WORKERS, '-inf', digits(NOW), 'BYSCORE')) do
  redis.call('ZREM', WORKERS, worker)
  redis.call('HDEL', SLOTS, worker)
end
local slots = 0
for _, count in ipairs(redis.call('HVALS', SLOTS)) do
  slots = slots + tonumber(count)
end

local oldest = NOW
local function look(place)
  if place then
    oldest = math.min(oldest, since_of(place))
  end
end
local function look_at(key)
  look(redis.call('ZRANGE', key, 0, 0)[1])
  local last = redis.call('ZRANGE', key, -1, -1, 'WITHSCORES')[2]
  if last then
    local priority = math.floor(tonumber(last) / PRIORITY_STEP) * PRIORITY_STEP
    look(redis.call('ZRANGE', key, digits(priority), '+inf', 'BYSCORE', 'LIMIT', 0, 1)[1])
  end
end
for _, job in ipairs(redis.call('HKEYS', BYTES)) do
  look_at(TAG .. 'queue:' .. job)
end
look_at(PROBATION)

local queued = redis.call('HMGET', LOAD, 'runs', 'bytes')
local totals = redis.call('HMGET', TOTALS, 'finished', 'redelivered')
return {
  tonumber(queued[1] or 0), redis.call('ZCARD', LEASES), tonumber(queued[2] or 0),
  digits(NOW - oldest), redis.call('ZCARD', WORKERS), slots,
  tonumber(totals[1] or 0), tonumber(totals[2] or 0),
}
