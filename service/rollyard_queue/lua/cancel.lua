#!lua flags=allow-oom
-- Cancels runs, or stops one gateway's waiting for them.
-- ARGV[4] the gateway that abandons, or '' to cancel for all; then run ids.
-- Answers the state met per run: queued, running, done, unknown.
-- Reads done:<period>. Writes what finish and dequeue write, gone:<period>, inbox:<worker>.
local abandons = ARGV[4]
local answer, settled = {}, {}

-- The record without the gateway; false when it is not one of them, '' when it was the last.
local function without(record)
  local rest, found = {}, false
  for _, gateway in ipairs(who(record).gateways) do
    if gateway == abandons then
      found = true
    else
      rest[#rest + 1] = gateway
    end
  end
  if not found then
    return false
  elseif #rest == 0 then
    return ''
  end
  local head = #record - #who(record).text
  return string.sub(record, 1, head) .. who(record).job .. '\n' .. table.concat(rest, '\n')
end

-- Leaves nothing of the run but, where some worker may still report it, its attempt number.
local function abandon(id, attempt)
  forgotten[#forgotten + 1] = id
  if attempt > 0 then
    local key = TAG .. 'gone:' .. digits(math.floor(NOW / 1000 / GONE_PERIOD_MS))
    redis.call('HSET', key, id, digits(attempt))
    redis.call('PEXPIRE', key, 2 * GONE_PERIOD_MS)
  end
end

local function stop(id, record, state)
  if abandons ~= '' then
    local rest = without(record)
    if not rest then
      return
    elseif rest ~= '' then
      redis.call('HSET', RUNS, id, rest)
      return
    end
  end
  local job, owner, attempt = who(record).job, '', attempts_of(id)
  if state == 'queued' then
    dequeue(id, record)
    queue_changed(job, -1, -redis.call('HSTRLEN', PAYLOADS, id))
  else
    owner, attempt = owner_of(id)
    redis.call('ZREM', LEASES, id)
    stops(id, job, owner)
    redis.call('RPUSH', TAG .. 'inbox:' .. owner, id)
    redis.call('PEXPIRE', TAG .. 'inbox:' .. owner, INBOX_TTL_MS)
  end
  settled[id] = abandons == '' and 'done' or 'unknown'
  if abandons ~= '' then
    abandon(id, attempt)
  else
    local message = state == 'queued' and 'cancelled before it ran' or 'cancelled while it ran'
    settle(id, record, who(record), result_of(id, 'cancelled', message, since_of(record), attempt, owner))
  end
end

local function is_done(id)
  for back = 0, 2 do
    if redis.call('HEXISTS', TAG .. 'done:' .. digits(PERIOD - back), id) == 1 then
      return true
    end
  end
  return false
end

for i = 5, #ARGV do
  local id = ARGV[i]
  local record = not settled[id] and redis.call('HGET', RUNS, id)
  if record then
    answer[#answer + 1] = redis.call('HEXISTS', OWNERS, id) == 1 and 'running' or 'queued'
    stop(id, record, answer[#answer])
  else
    answer[#answer + 1] = settled[id] or (is_done(id) and 'done') or 'unknown'
  end
end
flush()
return answer
