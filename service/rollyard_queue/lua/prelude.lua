-- Put in front of every other script of this folder: the keys, the clock, and the steps that
-- several scripts share. It is never run alone.
--
-- Every key begins with one hash tag, `{<queue name>}:`, so that a queue lives on one slot of a
-- cluster. Every script gets the same eight KEYS in this order; keys of one run, job, gateway or
-- worker are built from the tag inside the scripts (same slot, so a cluster allows it).
--
--   KEYS[1] load       hash  runs: queued runs; bytes: their payload bytes. Gone when runs is 0.
--   KEYS[2] ring       zset  jobs that have queued runs; score: µs when last served. A job is in
--                            it if and only if job:<job> exists.
--   KEYS[3] leases     zset  running run ids; score: µs when the lease ends. A run is in it if
--                            and only if its state is running.
--   KEYS[4] deadlines  zset  queued run ids that have a deadline; score: µs of the deadline.
--   KEYS[5] wake       list  wake tokens, at most MAX_WAKE. Gone when nothing is queued. One token
--                            wakes one idle worker; a claim that leaves work adds a token.
--   KEYS[6] totals     hash  finished, redelivered: counts since the start; window, now, before:
--                            runs drained in this and the previous window. TTL TOTALS_TTL_MS.
--   KEYS[7] workers    zset  worker ids; score: µs until which they count as alive. TTL: longest.
--   KEYS[8] slots      hash  worker id to its number of slots. TTL as workers.
--
--   run:<id>           hash  state: queued, running, done or gone (abandoned, late worker alive)
--                            payload, bytes, job, since (µs of admission, its place in the job),
--                            expires (µs, optional), attempt (deliveries counted; fences finish),
--                            base (attempts of an abandoned earlier life), owner (worker),
--                            waiters (gateways, one a line, never empty while queued or running).
--                            done: only state and result, TTL the result's. gone: only state and
--                            attempt, TTL GONE_TTL_MS. No TTL while queued or running.
--   job:<job>          zset  queued run ids of the job; score: since. Gone when empty.
--   replies:<gateway>  stream  run_id, result: not yet acknowledged by the gateway. Deleted entry
--                            by entry by the reader; TTL REPLIES_TTL_MS from the last push, so
--                            the stream of a dead gateway goes by itself.
--   inbox:<worker>     list  ids of running runs taken away from the worker. TTL INBOX_TTL_MS.
--
-- ARGV[1] is the tag with its colon, ARGV[2] the result's TTL in ms; a script's own arguments
-- follow from ARGV[3]. Times that decide anything are this server's TIME.

local LOAD, RING, LEASES, DEADLINES = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local WAKE, TOTALS, WORKERS, SLOTS = KEYS[5], KEYS[6], KEYS[7], KEYS[8]
local TAG, RESULT_TTL_MS = ARGV[1], ARGV[2]

local MAX_WAKE = 4 -- wakes a few workers at once; each claim passes the wake on
local REPLIES_TTL_MS = 120000
local INBOX_TTL_MS = 60000
local TOTALS_TTL_MS = 7 * 86400 * 1000
local WINDOW_US = 5000000 -- drain rate: over this window and the one before

local clock = redis.call('TIME')
local NOW = tonumber(clock[1]) * 1000000 + tonumber(clock[2])

-- Lua's tostring keeps 14 digits; a time in µs has 16.
local function digits(number)
  return string.format('%.0f', number)
end

local function queue_changed(runs, bytes)
  if redis.call('HINCRBY', LOAD, 'runs', runs) <= 0 then
    redis.call('DEL', LOAD, WAKE)
  else
    redis.call('HINCRBY', LOAD, 'bytes', bytes)
  end
end

local function wake(tokens)
  for _ = redis.call('LLEN', WAKE) + 1, math.min(tokens, MAX_WAKE) do
    redis.call('RPUSH', WAKE, '1')
  end
end

local function enqueue(id, job, since, expires)
  redis.call('ZADD', TAG .. 'job:' .. job, since, id)
  redis.call('ZADD', RING, 'NX', digits(NOW), job)
  if expires then
    redis.call('ZADD', DEADLINES, expires, id)
  end
end

local function dequeue(id, job, expires)
  redis.call('ZREM', TAG .. 'job:' .. job, id)
  if redis.call('EXISTS', TAG .. 'job:' .. job) == 0 then
    redis.call('ZREM', RING, job)
  end
  if expires then
    redis.call('ZREM', DEADLINES, id)
  end
end

-- Ends a run: stores the result for late duplicates and sends it to every gateway that waits.
-- The caller has taken the run out of queue or leases, and calls sent() once at its end.
local pushed, settled = {}, 0
local function settle(id, waiters, result)
  local key = TAG .. 'run:' .. id
  redis.call('DEL', key)
  redis.call('HSET', key, 'state', 'done', 'result', result)
  redis.call('PEXPIRE', key, RESULT_TTL_MS)
  for gateway in string.gmatch(waiters, '[^\n]+') do
    redis.call('XADD', TAG .. 'replies:' .. gateway, '*', 'run_id', id, 'result', result)
    pushed[gateway] = true
  end
  settled = settled + 1
end

local function sent()
  for gateway in pairs(pushed) do
    redis.call('PEXPIRE', TAG .. 'replies:' .. gateway, REPLIES_TTL_MS)
  end
  if settled > 0 then
    redis.call('HINCRBY', TOTALS, 'finished', settled)
    redis.call('PEXPIRE', TOTALS, TOTALS_TTL_MS)
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

local function expire(id, waiters, since, attempt)
  local message = 'the deadline passed before a worker started it'
  settle(id, waiters, result_of(id, 'expired', message, since, attempt, ''))
end
