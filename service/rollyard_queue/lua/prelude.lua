-- Put in front of every other script of this folder: the keys, the clock, and the steps that
-- several scripts share. It is never run alone.
--
-- Every key of a shard begins with one hash tag, `{<queue name>:<shard>}:`, so that a shard lives
-- on one slot of a cluster. Every script gets the same KEYS in this order; keys of one job,
-- gateway, worker or period are built from the tag inside the scripts (same slot, so a cluster
-- allows it). What is kept per run is a field of a shared hash, not a key: one call serves a batch.
--
--   KEYS[1]  load       hash  runs, bytes: queued runs and their payload bytes; since: µs when the
--                             first of them met an empty queue. Gone when runs is 0.
--   KEYS[2]  ring       zset  jobs with queued runs; score: µs when last served. A job that has
--                             queue:<job> and is not here is at its cap of running runs; the end
--                             of one of those brings it back.
--   KEYS[3]  leases     zset  running run ids; score: µs when the lease ends. The same ids as owners.
--   KEYS[4]  deadlines  zset  queued run ids whose deadline the caller named; score: its ms.
--   KEYS[5]  wake       list  wake tokens, at most MAX_WAKE. Gone when nothing is queued. One token
--                             wakes one idle worker; a claim that leaves work adds a token.
--   KEYS[6]  totals     hash  finished, redelivered: counts since the start; window, now, before:
--                             runs drained in this and the previous window. TTL TOTALS_TTL_MS.
--   KEYS[7]  workers    zset  worker ids; score: µs until which they count as alive. TTL: longest.
--   KEYS[8]  slots      hash  worker id to its number of slots. TTL as workers.
--   KEYS[9]  runs       hash  id of a queued or running run to its record, see below.
--   KEYS[10] payloads   hash  id of a queued or running run to its payload.
--   KEYS[11] owners     hash  id of a running run to "<attempt> <worker>": fences finish.
--   KEYS[12] history    hash  id of a queued or running run to "<attempts> <base>": deliveries
--                             counted before the present one, and those of an abandoned earlier
--                             life among them. Absent for "0 0".
--   KEYS[13] running    hash  job to its running runs. Absent for 0.
--   KEYS[14] bytes      hash  job to the payload bytes of its queued runs. Absent for 0.
--   KEYS[15] probation  zset  as queue:<job>, of all jobs: runs at their last attempt. A worker
--                             holds at most one of them at a time, so that a run that kills workers
--                             takes no other with it to its end.
--   KEYS[16] trials     hash  worker to the id of the run on probation that it holds.
--   KEYS[17] absent           never exists. While a cluster moves a slot it stops a script at the
--                             first key that is not there, which may be after others were written;
--                             one that names such a key is refused whole.
--
--   queue:<job>         zset  places of the job's queued runs; score: order. Gone when empty.
--   done:<period>       hash  id to result, for late duplicates; before the result of a run that has
--                             a digest stand its flag and that. TTL; found for the result's TTL to one
--                             and a half times that.
--   gone:<period>       hash  id to attempts of an abandoned life whose worker may still report.
--   replies:<gateway>   stream  what was sent together is an entry of two fields: "<id> <bytes> <id>
--                             <bytes> ..." and the results, one after the other. Deleted entry by
--                             entry by the reader; TTL REPLIES_TTL_MS from the last push, so the
--                             stream of a dead gateway goes by itself.
--   inbox:<worker>      list  ids of running runs taken away from the worker. TTL INBOX_TTL_MS.
--
-- A record is <since><suffix><order><flag><digest><job>\n<gateway>\n<gateway>...: since is the µs of
-- admission (16 digits), suffix two characters for the place within its batch, order a signed number
-- (17 characters): ms of the deadline less priority * PRIORITY_STEP, least first. The flag is d or D
-- where the caller named the deadline, and + or D where a digest follows: 8 bytes that tell the
-- run's content from another's. A place is <since><suffix><id>.
--
-- ARGV[1] is the tag with its colon, ARGV[2] the result's TTL in ms, ARGV[3] the attempts that a
-- run has; a script's own arguments follow from ARGV[4]. Times that decide anything are this
-- server's TIME.

local LOAD, RING, LEASES, DEADLINES = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local WAKE, TOTALS, WORKERS, SLOTS = KEYS[5], KEYS[6], KEYS[7], KEYS[8]
local RUNS, PAYLOADS, OWNERS, HISTORY = KEYS[9], KEYS[10], KEYS[11], KEYS[12]
local RUNNING, BYTES, PROBATION, TRIALS = KEYS[13], KEYS[14], KEYS[15], KEYS[16]
local TAG, MAX_ATTEMPTS = ARGV[1], tonumber(ARGV[3])

local MAX_WAKE = 4 -- wakes a few workers at once; each claim passes the wake on
local REPLIES_TTL_MS = 120000
local INBOX_TTL_MS = 60000
local GONE_PERIOD_MS = 120000 -- several leases: by then its worker has been told, or is dead
local TOTALS_TTL_MS = 7 * 86400 * 1000
local WINDOW_US = 5000000 -- drain rate: over this window and the one before
local PRIORITY_STEP = 4398046511104 -- 2^42: more ms than any deadline has until 2109
local DIGEST_BYTES = 8
local NO_DIGEST = string.rep('\0', DIGEST_BYTES) -- equal to any
local UNPACK = 4000 -- even, for pairs; Lua's stack takes 8000

local clock = redis.call('TIME')
local NOW = tonumber(clock[1]) * 1000000 + tonumber(clock[2])
local DONE_PERIOD_MS = math.max(1, math.ceil(tonumber(ARGV[2]) / 2))
local PERIOD = math.floor(NOW / 1000 / DONE_PERIOD_MS)

-- Lua's tostring keeps 14 digits; a time in µs has 16.
local function digits(number)
  return string.format('%.0f', number)
end

local function call(command, key, list)
  for i = 1, #list, UNPACK do
    redis.call(command, key, unpack(list, i, math.min(i + UNPACK - 1, #list)))
  end
end

local function wake(tokens)
  local missing = math.min(tokens, MAX_WAKE - redis.call('LLEN', WAKE))
  if missing > 0 then
    redis.call('RPUSH', WAKE, unpack({ '1', '1', '1', '1' }, 1, missing))
  end
end

local function has_work()
  return redis.call('EXISTS', RING, PROBATION) > 0
end

-- A record's parts. The job and the gateways of most runs in a batch are the same text.
local parsed = {}
local sub, byte = string.sub, string.byte
local function who(record)
  local flag = byte(record, 36)
  local tail = sub(record, (flag == 43 or flag == 68) and 37 + DIGEST_BYTES or 37) -- + or D
  local known = parsed[tail]
  if not known then
    known = { gateways = {}, text = tail }
    for line in string.gmatch(tail, '[^\n]+') do
      if known.job then
        known.gateways[#known.gateways + 1] = line
      else
        known.job = line
      end
    end
    parsed[tail] = known
  end
  return known
end

-- The digest in a record (at 36), or before a result in done:<period> (at 1).
local function digest_in(text, at)
  local flag = byte(text, at)
  return (flag == 43 or flag == 68) and sub(text, at + 1, at + DIGEST_BYTES) or NO_DIGEST
end

local function since_of(record)
  return tonumber(string.sub(record, 1, 16))
end

local function attempts_of(id)
  local attempts, base = string.match(redis.call('HGET', HISTORY, id) or '0 0', '^(%d+) (%d+)$')
  return tonumber(attempts), tonumber(base)
end

local function owner_of(id)
  local attempt, worker = string.match(redis.call('HGET', OWNERS, id) or '', '^(%d+) (.*)$')
  return worker, tonumber(attempt)
end

-- What a script has changed, written together by flush() at its end.
local changed_runs, changed_bytes = 0, {} -- queued runs; payload bytes by job
local stopped = {} -- runs that run no more, by job
local ids, results, mail = {}, {}, {} -- ended runs; id, result, ...; the same by gateway
local forgotten = {} -- ids of which nothing stays

local function queue_changed(job, runs, bytes)
  changed_runs = changed_runs + runs
  changed_bytes[job] = (changed_bytes[job] or 0) + bytes
end

local function stops(id, job, worker)
  stopped[job] = (stopped[job] or 0) + 1
  if redis.call('HGET', TRIALS, worker) == id then
    redis.call('HDEL', TRIALS, worker)
  end
end

local function enqueue(id, record, lost)
  local job, place = who(record).job, string.sub(record, 1, 18) .. id
  local order = string.sub(record, 19, 35)
  if lost > 0 and lost >= MAX_ATTEMPTS - 1 then
    redis.call('ZADD', PROBATION, order, place)
  else
    redis.call('ZADD', TAG .. 'queue:' .. job, order, place)
    redis.call('ZADD', RING, 'NX', digits(NOW), job)
  end
  if string.find(record, '^[dD]', 36) then
    redis.call('ZADD', DEADLINES, digits(tonumber(order) % PRIORITY_STEP), id)
  end
end

local function dequeue(id, record)
  local job, place = who(record).job, string.sub(record, 1, 18) .. id
  if redis.call('ZREM', TAG .. 'queue:' .. job, place) == 0 then
    redis.call('ZREM', PROBATION, place)
  elseif redis.call('EXISTS', TAG .. 'queue:' .. job) == 0 then
    redis.call('ZREM', RING, job)
  end
  redis.call('ZREM', DEADLINES, id)
end

-- Ends a run: stores the result for late duplicates and sends it to every gateway that waits.
-- The caller has taken the run out of queue or leases, and calls flush() once at its end.
local ended = 0
local function settle(id, record, whose, result)
  ended = ended + 1
  ids[ended] = id
  local stored, flag = result, byte(record, 36)
  if flag == 43 or flag == 68 then
    stored = sub(record, 36, 36 + DIGEST_BYTES) .. result
  elseif byte(result) == 43 or byte(result) == 68 then -- it would be taken for a digest
    stored = '+' .. NO_DIGEST .. result
  end
  results[2 * ended - 1], results[2 * ended] = id, stored
  local gateways = whose.gateways
  for i = 1, #gateways do
    local box = mail[gateways[i]]
    if not box then
      box = { n = 0, index = {}, results = {} }
      mail[gateways[i]] = box
    end
    local n = box.n + 1
    box.n, box.results[n] = n, result
    box.index[2 * n - 1], box.index[2 * n] = id, #result
  end
end

local function forget(list)
  call('HDEL', RUNS, list)
  call('HDEL', PAYLOADS, list)
  call('HDEL', OWNERS, list)
  if redis.call('EXISTS', HISTORY) == 1 then
    call('HDEL', HISTORY, list)
  end
end

local function flush_ended()
  forget(ids)
  local done = TAG .. 'done:' .. digits(PERIOD)
  local first = redis.call('EXISTS', done) == 0
  call('HSET', done, results)
  if first then
    -- Two periods after its own it is not looked at any more, and freed at leisure; the TTL, which
    -- may be at the server's expense, is for a queue that stands still.
    redis.call('PEXPIRE', done, 4 * DONE_PERIOD_MS)
    redis.call('UNLINK', TAG .. 'done:' .. digits(PERIOD - 3))
  end
  for gateway, box in pairs(mail) do
    local key = TAG .. 'replies:' .. gateway
    redis.call('XADD', key, '*', table.concat(box.index, ' '), table.concat(box.results))
    redis.call('PEXPIRE', key, REPLIES_TTL_MS)
  end
  redis.call('HINCRBY', TOTALS, 'finished', ended)
  redis.call('PEXPIRE', TOTALS, TOTALS_TTL_MS)
end

local function flush()
  if ended > 0 then
    flush_ended()
  end
  if #forgotten > 0 then
    forget(forgotten)
  end
  local room = false -- for a job that was at its cap
  for job, runs in pairs(stopped) do
    if redis.call('HINCRBY', RUNNING, job, -runs) <= 0 then
      redis.call('HDEL', RUNNING, job)
    end
    if redis.call('EXISTS', TAG .. 'queue:' .. job) == 1 then
      room = redis.call('ZADD', RING, 'NX', digits(NOW), job) == 1 or room
    end
  end
  local bytes = 0
  for job, change in pairs(changed_bytes) do
    bytes = bytes + change
    if change ~= 0 and redis.call('HINCRBY', BYTES, job, change) <= 0 then
      redis.call('HDEL', BYTES, job)
    end
  end
  if changed_runs ~= 0 or bytes ~= 0 then
    local runs = redis.call('HINCRBY', LOAD, 'runs', changed_runs)
    if runs <= 0 then
      redis.call('DEL', LOAD, WAKE, BYTES)
    else
      if runs == changed_runs then
        redis.call('HSET', LOAD, 'since', digits(NOW))
      end
      redis.call('HINCRBY', LOAD, 'bytes', bytes)
    end
  end
  if room or (next(stopped) and redis.call('EXISTS', PROBATION) == 1) then
    wake(1)
  end
end

-- The JSON of a rollyard.types.RunResult that no worker wrote; every field is present.
local function result_of(id, outcome, message, since, attempt, worker)
  return '{"run_id":' .. cjson.encode(id) .. ',"outcome":"' .. outcome
    .. '","phase":"run","exit_code":null,"signal":null,"stdout":"","stderr":"","stdout_truncated":false,'
    .. '"stderr_truncated":false,"files":{},"wall_ms":0.0,"cpu_ms":0.0,"peak_memory_bytes":0,'
    .. '"queued_ms":' .. string.format('%.3f', math.max(0, NOW - since) / 1000)
    .. ',"attempt":' .. digits(math.max(1, attempt))
    .. ',"worker_id":' .. cjson.encode(worker) .. ',"template":"","degraded":[],"message":'
    .. cjson.encode(message) .. '}'
end

local function expire(id, record)
  local message = 'the deadline passed before a worker started it'
  settle(id, record, who(record), result_of(id, 'expired', message, since_of(record), attempts_of(id), ''))
end
