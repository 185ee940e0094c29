#!lua flags=allow-oom
-- Redelivers runs whose lease has ended, or ends them when too many workers were lost; answers
-- queued runs past their deadline; repairs a lost wake token (its taker died before its claim).
-- ARGV[4] max runs to touch. Answers how many were touched.
-- Reads leases, deadlines. Writes what finish and enqueue write, inbox:<worker>.
local limit = tonumber(ARGV[4])
local touched, redelivered, back = 0, 0, {}

local function take_back(id)
  local record, owner, attempt = redis.call('HGET', RUNS, id), owner_of(id)
  redis.call('ZREM', LEASES, id)
  redis.call('HDEL', OWNERS, id)
  if not record or not owner then
    forgotten[#forgotten + 1] = id
    return -- somebody deleted the run by hand: one lost run must not stop the queue
  end
  local _, base = attempts_of(id)
  local job, lost = who(record).job, attempt - base
  stops(id, job, owner)
  -- The owner may merely be slow: told now, it stops before its next renewal says so.
  redis.call('RPUSH', TAG .. 'inbox:' .. owner, id)
  redis.call('PEXPIRE', TAG .. 'inbox:' .. owner, INBOX_TTL_MS)
  if lost >= MAX_ATTEMPTS then
    local message = lost .. (lost == 1 and ' worker was' or ' workers were')
      .. ' lost while it ran; not tried again'
    settle(id, record, who(record), result_of(id, 'infra_error', message, since_of(record), attempt, owner))
  else
    redis.call('HSET', HISTORY, id, digits(attempt) .. ' ' .. digits(base))
    enqueue(id, record, lost)
    queue_changed(job, 1, redis.call('HSTRLEN', PAYLOADS, id))
    redelivered = redelivered + 1
  end
end

for _, id in ipairs(redis.call('ZRANGE', LEASES, '-inf', digits(NOW), 'BYSCORE', 'LIMIT', 0,
  limit)) do
  take_back(id)
  touched = touched + 1
end
local now_ms = digits(math.floor(NOW / 1000))
for _, id in ipairs(redis.call('ZRANGE', DEADLINES, '-inf', now_ms, 'BYSCORE', 'LIMIT', 0,
  limit - touched)) do
  local record = redis.call('HGET', RUNS, id)
  if record then
    dequeue(id, record)
    queue_changed(who(record).job, -1, -redis.call('HSTRLEN', PAYLOADS, id))
    expire(id, record)
  else
    redis.call('ZREM', DEADLINES, id)
  end
  touched = touched + 1
end

flush()
if has_work() then
  wake(math.max(1, redelivered))
end
if redelivered > 0 then
  redis.call('HINCRBY', TOTALS, 'redelivered', redelivered)
  redis.call('PEXPIRE', TOTALS, TOTALS_TTL_MS)
end
return touched
