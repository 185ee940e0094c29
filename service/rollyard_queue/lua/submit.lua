#!lua
-- Queues a batch, all or nothing. Refused by the server itself when it is out of memory.
-- ARGV[3] gateway, [4] max queued runs, [5] max queued bytes,
-- then per run: id, payload, job, ms until its deadline or ''.
-- Answers {'full', seconds to wait as text, queued runs, queued bytes} and has changed nothing, or
-- {'ok', state, ...}: per run 'accepted', 'joined', or {'done', result}.
-- Reads load, totals. Writes run:<id>, job:<job>, ring, deadlines, load, wake.
local gateway, max_runs, max_bytes = ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])

local new, new_runs, new_bytes, states = {}, 0, 0, {}
for i = 6, #ARGV, 4 do
  local id = ARGV[i]
  local state = new[id] and 'queued' or redis.call('HGET', TAG .. 'run:' .. id, 'state')
  states[#states + 1] = state or 'new'
  if not state or state == 'gone' then
    new[id] = true
    new_runs = new_runs + 1
    new_bytes = new_bytes + #ARGV[i + 1]
  end
end

-- Seconds until the excess has drained, at the rate of the last two windows.
local function retry_after(runs_over, bytes_over, queued, queued_bytes)
  local seen = redis.call('HMGET', TOTALS, 'window', 'now', 'before')
  local window = math.floor(NOW / WINDOW_US)
  local age = window - (tonumber(seen[1]) or 0)
  local drained = (age == 0 and (tonumber(seen[2]) or 0) + (tonumber(seen[3]) or 0))
    or (age == 1 and (tonumber(seen[2]) or 0)) or 0
  if drained == 0 then
    return 1
  end
  local rate = drained / ((WINDOW_US + NOW - window * WINDOW_US) / 1000000)
  local share = math.max(runs_over, bytes_over / math.max(1, queued_bytes) * queued)
  return math.min(30, math.max(0.1, share / rate))
end

if new_runs > 0 then
  local now = redis.call('HMGET', LOAD, 'runs', 'bytes')
  local queued, queued_bytes = tonumber(now[1] or 0), tonumber(now[2] or 0)
  local runs_over = queued + new_runs - max_runs
  local bytes_over = queued_bytes + new_bytes - max_bytes
  if runs_over > 0 or bytes_over > 0 then
    local wait_s = retry_after(runs_over, bytes_over, queued, queued_bytes)
    return { 'full', string.format('%.3f', wait_s), queued, queued_bytes }
  end
end

local answer, n = { 'ok' }, 0
for i = 6, #ARGV, 4 do
  n = n + 1
  local id, state = ARGV[i], states[n]
  local key = TAG .. 'run:' .. id
  if state == 'done' then
    answer[n + 1] = { 'done', redis.call('HGET', key, 'result') }
  elseif state == 'new' or state == 'gone' then
    -- A worker may still hold an abandoned life of this id: going on with its attempt numbers
    -- keeps that worker's late result from being taken for this life's.
    local base = 0
    if state == 'gone' then
      base = redis.call('HGET', key, 'attempt')
      redis.call('DEL', key)
    end
    -- Within a batch the order is the caller's: one µs apart.
    local payload, job, since = ARGV[i + 1], ARGV[i + 2], digits(NOW + n - 1)
    redis.call('HSET', key, 'state', 'queued', 'payload', payload, 'bytes', #payload, 'job', job,
      'since', since, 'attempt', base, 'base', base, 'waiters', gateway)
    local expires = false
    if ARGV[i + 3] ~= '' then
      expires = digits(NOW + tonumber(ARGV[i + 3]) * 1000)
      redis.call('HSET', key, 'expires', expires)
    end
    enqueue(id, job, since, expires)
    answer[n + 1] = 'accepted'
  else
    local waiters = redis.call('HGET', key, 'waiters')
    if not string.find('\n' .. waiters .. '\n', '\n' .. gateway .. '\n', 1, true) then
      redis.call('HSET', key, 'waiters', waiters .. '\n' .. gateway)
    end
    answer[n + 1] = 'joined'
  end
end
if new_runs > 0 then
  queue_changed(new_runs, new_bytes)
  wake(new_runs)
end
return answer
