#!lua flags=allow-oom
-- Hands queued runs to a worker under a lease: one on probation if it holds none, then round-robin
-- between jobs, in a job by order.
-- ARGV[4] worker, [5] max runs, [6] lease in µs, [7] max running runs of one job, 0 for no bound.
-- Answers {this server's µs as text, {place, ...}, {payload, ...}, {index, attempt, ...}}; the last
-- names the runs whose attempt is not the first.
-- Writes queue:<job>, ring, probation, trials, owners, leases, running, deadlines, load, bytes, wake,
-- totals; and of expired runs what finish writes.
local worker, want, lease_us = ARGV[4], tonumber(ARGV[5]), tonumber(ARGV[6])
local max_running = tonumber(ARGV[7])
local now_ms = math.floor(NOW / 1000)
local places, payloads, repeated, n = {}, {}, {}, 0
local owners, leases, met, taken = {}, {}, {}, 0
local begun, lease_end = {}, digits(NOW + lease_us)
local tried_before, first = redis.call('EXISTS', HISTORY) == 1, '1 ' .. worker
-- Bounds the time that a pile of expired runs may block the server; the wake goes on after it.
local budget = want + 1000

local function room_of(job)
  if max_running == 0 then
    return want
  end
  return max_running - tonumber(redis.call('HGET', RUNNING, job) or 0) - (begun[job] or 0)
end

local late_orders = {}
local function is_late(order)
  local late = late_orders[order]
  if late == nil then
    late = tonumber(order) % PRIORITY_STEP <= now_ms
    late_orders[order] = late
  end
  return late
end

local function deliver(id, place, payload, attempts)
  n = n + 1
  places[n], payloads[n] = place, payload
  owners[2 * n - 1], owners[2 * n] = id, first
  leases[2 * n - 1], leases[2 * n] = lease_end, id
  if attempts then
    local attempt = digits(tonumber(string.match(attempts, '^%d+')) + 1)
    owners[2 * n] = attempt .. ' ' .. worker
    repeated[#repeated + 1], repeated[#repeated + 2] = n, attempt
  end
end

-- Takes what was popped: {place, order, ...}. Without a job, each run's record names its own.
local function take(popped, job)
  local some = {}
  for i = 1, #popped, 2 do
    some[#some + 1] = string.sub(popped[i], 19)
  end
  local found = redis.call('HMGET', PAYLOADS, unpack(some))
  local attempts = tried_before and redis.call('HMGET', HISTORY, unpack(some)) or {}
  local bytes, before = 0, n
  for i, id in ipairs(some) do
    local payload = found[i]
    taken = taken + 1
    met[taken] = id
    if not payload then -- somebody deleted it by hand: one lost run must not stop the queue
      forgotten[#forgotten + 1] = id
    else
      bytes = bytes + #payload
      if is_late(popped[2 * i]) then
        expire(id, redis.call('HGET', RUNS, id))
      else
        deliver(id, popped[2 * i - 1], payload, attempts[i])
      end
    end
  end
  queue_changed(job, -#some, -bytes)
  begun[job] = (begun[job] or 0) + n - before
end

local function take_one_on_probation()
  if redis.call('EXISTS', PROBATION) == 0 or redis.call('HEXISTS', TRIALS, worker) == 1 then
    return
  end
  local head = redis.call('ZRANGE', PROBATION, 0, 0, 'WITHSCORES')
  local id = string.sub(head[1], 19)
  local record = redis.call('HGET', RUNS, id)
  if record and room_of(who(record).job) <= 0 and not is_late(head[2]) then
    return
  end
  redis.call('ZREM', PROBATION, head[1])
  if record then
    take(head, who(record).job)
  end
  if n > 0 then
    redis.call('HSET', TRIALS, worker, id)
  end
end

take_one_on_probation()
local served, more_on_probation = 0, n > 0 and redis.call('EXISTS', PROBATION) == 1
while n < want and taken < budget do
  local job = redis.call('ZRANGE', RING, 0, 0)[1]
  if not job then
    break
  end
  local share = math.max(1, math.floor((want - n) / redis.call('ZCARD', RING)))
  share = math.min(share, room_of(job))
  if share <= 0 then
    redis.call('ZREM', RING, job) -- the end of one of its running runs brings it back
  else
    local popped = redis.call('ZPOPMIN', TAG .. 'queue:' .. job, share)
    served = served + 1
    if #popped < 2 * share or redis.call('EXISTS', TAG .. 'queue:' .. job) == 0 then
      redis.call('ZREM', RING, job)
    else
      redis.call('ZADD', RING, digits(NOW + served), job)
    end
    if #popped > 0 then
      take(popped, job)
    end
  end
end

local function drained()
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

if taken > 0 then
  call('HSET', OWNERS, owners)
  call('ZADD', LEASES, leases)
  if redis.call('EXISTS', DEADLINES) == 1 then
    call('ZREM', DEADLINES, met)
  end
  for job, runs in pairs(begun) do
    if runs > 0 then
      redis.call('HINCRBY', RUNNING, job, runs)
    end
  end
  drained()
  flush()
end
if more_on_probation or redis.call('EXISTS', RING) == 1 then
  wake(1)
end
return { digits(NOW), places, payloads, repeated }
