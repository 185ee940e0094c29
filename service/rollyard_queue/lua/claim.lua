#!lua flags=allow-oom
-- Hands queued runs to a worker under a lease, round-robin between jobs, oldest first in a job.
-- ARGV[3] worker, [4] max runs, [5] lease in µs.
-- Answers {id, payload, attempt, µs queued as text, ...}.
-- Reads ring. Writes job:<job>, run:<id>, leases, deadlines, load, wake, totals, replies:<gateway>.
local worker, want, lease_us = ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])
local lease_end = digits(NOW + lease_us)
local answer, taken, taken_bytes, served = {}, 0, 0, 0
-- Bounds the time that a pile of expired runs may block the server; the wake goes on after it.
local budget = want + 1000

local function deliver(id)
  local key = TAG .. 'run:' .. id
  local run = redis.call('HMGET', key, 'payload', 'since', 'attempt', 'expires', 'waiters')
  taken = taken + 1
  if not run[1] then
    return -- somebody deleted the run's key by hand: one lost run must not stop the queue
  end
  local payload, since, attempt = run[1], tonumber(run[2]), tonumber(run[3])
  taken_bytes = taken_bytes + #payload
  if run[4] then
    redis.call('ZREM', DEADLINES, id)
    if tonumber(run[4]) <= NOW then
      expire(id, run[5], since, attempt)
      return
    end
  end
  redis.call('HSET', key, 'state', 'running', 'owner', worker, 'attempt', attempt + 1)
  redis.call('ZADD', LEASES, lease_end, id)
  local n = #answer
  answer[n + 1], answer[n + 2], answer[n + 3] = id, payload, attempt + 1
  answer[n + 4] = digits(math.max(0, NOW - since))
end

while #answer / 4 < want and taken < budget do
  local job = redis.call('ZRANGE', RING, 0, 0)[1]
  if not job then
    break
  end
  local share = math.max(1, math.floor((want - #answer / 4) / redis.call('ZCARD', RING)))
  local ids = redis.call('ZPOPMIN', TAG .. 'job:' .. job, share)
  served = served + 1
  if redis.call('EXISTS', TAG .. 'job:' .. job) == 0 then
    redis.call('ZREM', RING, job)
  else
    redis.call('ZADD', RING, digits(NOW + served), job)
  end
  for i = 1, #ids, 2 do
    deliver(ids[i])
  end
end

if taken > 0 then
  queue_changed(-taken, -taken_bytes)
  local window = digits(math.floor(NOW / WINDOW_US))
  local seen = redis.call('HMGET', TOTALS, 'window', 'now')
  if seen[1] == window then
    redis.call('HINCRBY', TOTALS, 'now', taken)
  else
    local adjacent = tonumber(seen[1] or 0) + 1 == tonumber(window)
    redis.call('HSET', TOTALS, 'window', window, 'now', taken,
      'before', adjacent and seen[2] or 0)
  end
  redis.call('PEXPIRE', TOTALS, TOTALS_TTL_MS)
end
if redis.call('EXISTS', LOAD) == 1 then
  wake(1)
end
sent()
return answer
