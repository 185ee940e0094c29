#!lua
-- Queues a batch, all or nothing. Refused by the server itself when it is out of memory.
-- ARGV[4] gateway, [5] max queued runs, [6] max queued bytes, [7] and [8] the same for one job
-- (0: no bound of its own), [9] the digests of all runs, one after the other, [10] how many classes
-- there are; then per class: job, ms until the deadline or '', priority; then per run: id, payload,
-- number of its class.
-- Answers {'full', job or '', seconds to wait as text, queued runs, queued bytes} or {'conflict',
-- number of a run, ...}: those whose id belongs to another content; it has then changed nothing. Or
-- {states, result, ...}: states has a letter for each run, a for accepted, j for joined and d for
-- done, and each d has a result, in order.
-- Reads load, totals, done:<period>, gone:<period>. Writes runs, payloads, history, queue:<job>, ring,
-- deadlines, load, bytes, wake.
local gateway, max_runs, max_bytes = ARGV[4], tonumber(ARGV[5]), tonumber(ARGV[6])
local job_max_runs, job_max_bytes = tonumber(ARGV[7]), tonumber(ARGV[8])
local digests = ARGV[9]
local NO_DEADLINE_MS = 86400000 -- the longest that a caller may name: in order, after all others
local SURE_US, UNSURE_S = 3000000, 2 -- until this much work was seen, nobody waits longer for a guess
local now_ms = math.floor(NOW / 1000)

local jobs, classes, first = {}, {}, 11 + 3 * tonumber(ARGV[10])
for i = 11, first - 1, 3 do
  local job, named = ARGV[i], ARGV[i + 1] ~= ''
  local due = now_ms + (named and tonumber(ARGV[i + 1]) or NO_DEADLINE_MS)
  local order = due - tonumber(ARGV[i + 2]) * PRIORITY_STEP
  jobs[job] = jobs[job] or { runs = 0, bytes = 0, n = 0, places = {} }
  classes[digits((i - 8) / 3)] = { -- by the text of its number
    job = jobs[job], due = named and digits(due), order = digits(order),
    head = string.format('%+017.0f', order) .. (named and 'd' or '-'),
    head_of_digest = string.format('%+017.0f', order) .. (named and 'D' or '+'),
    tail = job .. '\n' .. gateway,
  }
end

local run_ids, n = {}, 0
for i = first, #ARGV, 3 do
  n = n + 1
  run_ids[n] = ARGV[i]
end
local live = redis.call('HMGET', RUNS, unpack(run_ids))

-- id to value, of the newest periods of done:<period> or gone:<period> that have it.
local function recent(kind, period, periods, wanted)
  local found = {}
  for back = 0, periods - 1 do
    local key = TAG .. kind .. digits(period - back)
    if redis.call('EXISTS', key) == 1 then
      for i, value in ipairs(redis.call('HMGET', key, unpack(wanted))) do
        found[wanted[i]] = found[wanted[i]] or value
      end
    end
  end
  return found
end

local absent = {}
for i = 1, n do
  if not live[i] then
    absent[#absent + 1] = run_ids[i]
  end
end
local found = #absent > 0 and recent('done:', PERIOD, 3, absent) or {}

local function digest_at(i)
  return sub(digests, DIGEST_BYTES * (i - 1) + 1, DIGEST_BYTES * i)
end

-- Whether the id of run i stands for another content: of a live run, one that ended, or run k.
local function is_taken(i, k)
  local id, mine, other = run_ids[i], digest_at(i), NO_DIGEST
  if live[i] then
    other = digest_in(live[i], 36)
  elseif k then
    other = digest_at(k)
  else
    other = digest_in(found[id], 1)
  end
  return mine ~= other and mine ~= NO_DIGEST and other ~= NO_DIGEST
end

local new, new_runs, new_bytes = {}, 0, 0
local taken = { 'conflict' }
for i = 1, n do
  local id = run_ids[i]
  if not live[i] and not found[id] and not new[id] then
    local at = first + 3 * (i - 1)
    local job = classes[ARGV[at + 2]].job
    new[id] = i
    new_runs, new_bytes = new_runs + 1, new_bytes + #ARGV[at + 1]
    job.runs, job.bytes = job.runs + 1, job.bytes + #ARGV[at + 1]
  elseif is_taken(i, new[id]) then
    taken[#taken + 1] = i
  end
end
if #taken > 1 then
  return taken
end

-- Seconds until the excess has drained, at the rate of the last two windows. While the queue was
-- empty no rate was to be seen: that time is left out, and what is left must be long enough.
local function retry_after(runs_over, bytes_over, queued, queued_bytes, jobs_served)
  local seen = redis.call('HMGET', TOTALS, 'window', 'now', 'before')
  local window = math.floor(NOW / WINDOW_US)
  local age = window - (tonumber(seen[1]) or 0)
  local drained = (age == 0 and (tonumber(seen[2]) or 0) + (tonumber(seen[3]) or 0))
    or (age == 1 and (tonumber(seen[2]) or 0)) or 0
  if drained == 0 then
    return 1
  end
  local busy_us = NOW - tonumber(redis.call('HGET', LOAD, 'since') or NOW)
  local seen_us, longest_s = WINDOW_US + NOW - window * WINDOW_US, UNSURE_S
  if busy_us >= SURE_US then
    seen_us, longest_s = math.min(seen_us, busy_us), 30
  end
  local rate = drained / (seen_us / 1000000) / jobs_served
  local share = math.max(runs_over, bytes_over / math.max(1, queued_bytes) * queued)
  return math.min(longest_s, math.max(0.1, share / rate))
end

local function refusal(name, queued, queued_bytes, more, most_runs, most_bytes)
  local runs_over = most_runs > 0 and queued + more.runs - most_runs or 0
  local bytes_over = most_bytes > 0 and queued_bytes + more.bytes - most_bytes or 0
  if runs_over > 0 or bytes_over > 0 then
    -- Jobs take turns, so that one job has its share of the rate.
    local served = name == '' and 1 or math.max(1, redis.call('ZCARD', RING))
    local wait_s = retry_after(runs_over, bytes_over, queued, queued_bytes, served)
    return { 'full', name, string.format('%.3f', wait_s), queued, queued_bytes }
  end
end

if new_runs > 0 then
  local now = redis.call('HMGET', LOAD, 'runs', 'bytes')
  local refused = refusal('', tonumber(now[1] or 0), tonumber(now[2] or 0),
    { runs = new_runs, bytes = new_bytes }, max_runs, max_bytes)
  if not refused and (job_max_runs > 0 or job_max_bytes > 0) then
    for name, job in pairs(jobs) do
      if job.runs > 0 and not refused then
        refused = refusal(name, redis.call('ZCARD', TAG .. 'queue:' .. name),
          tonumber(redis.call('HGET', BYTES, name) or 0), job, job_max_runs, job_max_bytes)
      end
    end
  end
  if refused then
    return refused
  end
end

local records, payloads, deadlines, states, answer = {}, {}, {}, {}, { '' }
local now, queued = digits(NOW), 0

local function queue(i, id)
  local at = first + 3 * (i - 1)
  local class = classes[ARGV[at + 2]]
  -- Within a batch the order is the caller's.
  local suffix, job, k = string.char(40 + math.floor(i / 32), 40 + i % 32), class.job, queued
  local digest, record = digest_at(i), nil
  if digest == NO_DIGEST then
    record = now .. suffix .. class.head .. class.tail
  else
    record = now .. suffix .. class.head_of_digest .. digest .. class.tail
  end
  records[k + 1], records[k + 2] = id, record
  payloads[k + 1], payloads[k + 2] = id, ARGV[at + 1]
  queued = k + 2
  local places, m = job.places, job.n
  places[m + 1], places[m + 2] = class.order, now .. suffix .. id
  job.n = m + 2
  if class.due then
    deadlines[#deadlines + 1], deadlines[#deadlines + 2] = class.due, id
  end
end

for i = 1, n do
  local id = run_ids[i]
  if found[id] then
    local result = found[id]
    if byte(result) == 43 or byte(result) == 68 then -- before it stands a digest
      result = sub(result, 2 + DIGEST_BYTES)
    end
    states[i], answer[#answer + 1] = 'd', result
  elseif new[id] == i then
    states[i] = 'a'
    queue(i, id)
  else
    states[i] = 'j'
    local record = not new[id] and redis.call('HGET', RUNS, id)
    if record and not string.find(record .. '\n', '\n' .. gateway .. '\n', 37, true) then
      redis.call('HSET', RUNS, id, record .. '\n' .. gateway)
    end
  end
end
if new_runs > 0 then
  call('HSET', RUNS, records)
  call('HSET', PAYLOADS, payloads)
  call('ZADD', DEADLINES, deadlines)
  for name, job in pairs(jobs) do
    if job.runs > 0 then
      call('ZADD', TAG .. 'queue:' .. name, job.places)
      redis.call('ZADD', RING, 'NX', now, name)
      queue_changed(name, job.runs, job.bytes)
    end
  end
  -- A worker may still hold an abandoned life of an id: going on with its attempt numbers keeps
  -- that worker's late result from being taken for this life's.
  for id, attempts in pairs(recent('gone:', math.floor(NOW / 1000 / GONE_PERIOD_MS), 2, absent)) do
    if attempts and new[id] then
      redis.call('HSET', HISTORY, id, attempts .. ' ' .. attempts)
    end
  end
  flush()
  wake(new_runs)
end
answer[1] = table.concat(states)
return answer
