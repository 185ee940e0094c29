#!lua flags=allow-oom
-- Redelivers runs whose lease has ended, or ends them when too many workers were lost; answers
-- queued runs past their deadline; repairs a lost wake token (its taker died before its claim).
-- ARGV[3] max attempts, [4] max runs to touch. Answers how many were touched.
-- Reads leases, deadlines. Writes run:<id>, job:<job>, ring, deadlines, leases, load, wake, totals,
-- inbox:<worker>, replies:<gateway>.
local max_attempts, limit = tonumber(ARGV[3]), tonumber(ARGV[4])
local due, touched = digits(NOW), 0
local runs, bytes, redelivered = 0, 0, 0

local function take_back(id)
  local key = TAG .. 'run:' .. id
  local run = redis.call('HMGET', key, 'attempt', 'base', 'owner', 'waiters', 'job', 'since',
    'expires', 'bytes')
  redis.call('ZREM', LEASES, id)
  if not run[1] then
    return -- somebody deleted the run's key by hand: one lost run must not stop the queue
  end
  local attempt, lost = tonumber(run[1]), tonumber(run[1]) - tonumber(run[2])
  -- The owner may merely be slow: told now, it stops before its next renewal says so.
  redis.call('RPUSH', TAG .. 'inbox:' .. run[3], id)
  redis.call('PEXPIRE', TAG .. 'inbox:' .. run[3], INBOX_TTL_MS)
  if lost >= max_attempts then
    local message = lost .. (lost == 1 and ' worker was' or ' workers were')
      .. ' lost while it ran; not tried again'
    settle(id, run[4],
      result_of(id, 'infra_error', message, tonumber(run[6]), attempt, run[3]))
  else
    redis.call('HSET', key, 'state', 'queued')
    redis.call('HDEL', key, 'owner')
    enqueue(id, run[5], run[6], run[7])
    runs, bytes, redelivered = runs + 1, bytes + tonumber(run[8]), redelivered + 1
  end
end

for _, id in ipairs(redis.call('ZRANGE', LEASES, '-inf', due, 'BYSCORE', 'LIMIT', 0, limit)) do
  take_back(id)
  touched = touched + 1
end
for _, id in ipairs(redis.call('ZRANGE', DEADLINES, '-inf', due, 'BYSCORE', 'LIMIT', 0,
  limit - touched)) do
  local run = redis.call('HMGET', TAG .. 'run:' .. id, 'job', 'bytes', 'waiters', 'since', 'attempt')
  dequeue(id, run[1], true)
  runs, bytes = runs - 1, bytes - tonumber(run[2])
  expire(id, run[3], tonumber(run[4]), tonumber(run[5]))
  touched = touched + 1
end

if touched > 0 then
  queue_changed(runs, bytes)
end
if redis.call('EXISTS', LOAD) == 1 then
  wake(math.max(1, redelivered))
end
if redelivered > 0 then
  redis.call('HINCRBY', TOTALS, 'redelivered', redelivered)
  redis.call('PEXPIRE', TOTALS, TOTALS_TTL_MS)
end
sent()
return touched
