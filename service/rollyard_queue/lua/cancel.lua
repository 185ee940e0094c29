#!lua flags=allow-oom
-- Cancels runs, or stops one gateway's waiting for them.
-- ARGV[3] the gateway that abandons, or '' to cancel for all; then run ids.
-- Answers the state met per run: queued, running, done, unknown.
-- Reads run:<id>. Writes run:<id>, job:<job>, ring, deadlines, leases, load, wake, totals,
-- inbox:<worker>, replies:<gateway>.
local abandons = ARGV[3]
local GONE_TTL_MS = 120000 -- several leases: by then its worker has been told, or is dead
local answer, runs, bytes = {}, 0, 0

-- The waiters without the gateway, or false when it is not one of them.
local function others(waiters)
  local rest, found = {}, false
  for gateway in string.gmatch(waiters, '[^\n]+') do
    if gateway == abandons then
      found = true
    else
      rest[#rest + 1] = gateway
    end
  end
  return found and table.concat(rest, '\n')
end

-- Leaves nothing of the run but, where some worker may still report it, its attempt number.
local function forget(key, attempt)
  redis.call('DEL', key)
  if attempt > 0 then
    redis.call('HSET', key, 'state', 'gone', 'attempt', attempt)
    redis.call('PEXPIRE', key, GONE_TTL_MS)
  end
end

local function stop(id, state)
  local key = TAG .. 'run:' .. id
  local run = redis.call('HMGET', key, 'waiters', 'job', 'expires', 'bytes', 'owner', 'since',
    'attempt')
  local waiters, owner, attempt = run[1], run[5] or '', tonumber(run[7])
  if abandons ~= '' then
    local rest = others(waiters)
    if not rest then
      return
    elseif rest ~= '' then
      redis.call('HSET', key, 'waiters', rest)
      return
    end
  end
  if state == 'queued' then
    dequeue(id, run[2], run[3])
    runs, bytes = runs + 1, bytes + tonumber(run[4])
  else
    redis.call('ZREM', LEASES, id)
    redis.call('RPUSH', TAG .. 'inbox:' .. owner, id)
    redis.call('PEXPIRE', TAG .. 'inbox:' .. owner, INBOX_TTL_MS)
  end
  if abandons ~= '' then
    forget(key, attempt)
  else
    local message = state == 'queued' and 'cancelled before it ran' or 'cancelled while it ran'
    settle(id, waiters,
      result_of(id, 'cancelled', message, tonumber(run[6]), attempt, owner))
  end
end

for i = 4, #ARGV do
  local state = redis.call('HGET', TAG .. 'run:' .. ARGV[i], 'state')
  if state == 'queued' or state == 'running' then
    stop(ARGV[i], state)
  end
  answer[#answer + 1] = (not state or state == 'gone') and 'unknown' or state
end
if runs > 0 then
  queue_changed(-runs, -bytes)
end
sent()
return answer
