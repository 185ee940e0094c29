#!lua flags=allow-oom
-- Counts, and forgets workers that were not announced again in time.
-- Answers {queued, leased, queued bytes, µs of the oldest queued run as text, workers, slots,
-- finished, redelivered}.
-- Reads load, leases, ring, job:<job>, totals. Writes workers, slots.
for _, worker in ipairs(redis.call('ZRANGE', WORKERS, '-inf', digits(NOW), 'BYSCORE')) do
  redis.call('ZREM', WORKERS, worker)
  redis.call('HDEL', SLOTS, worker)
end
local slots = 0
for _, count in ipairs(redis.call('HVALS', SLOTS)) do
  slots = slots + tonumber(count)
end
local oldest = NOW
for _, job in ipairs(redis.call('ZRANGE', RING, 0, -1)) do
  local first = redis.call('ZRANGE', TAG .. 'job:' .. job, 0, 0, 'WITHSCORES')
  oldest = math.min(oldest, tonumber(first[2]))
end
local queued = redis.call('HMGET', LOAD, 'runs', 'bytes')
local totals = redis.call('HMGET', TOTALS, 'finished', 'redelivered')
return {
  tonumber(queued[1] or 0), redis.call('ZCARD', LEASES), tonumber(queued[2] or 0),
  digits(NOW - oldest), redis.call('ZCARD', WORKERS), slots,
  tonumber(totals[1] or 0), tonumber(totals[2] or 0),
}
