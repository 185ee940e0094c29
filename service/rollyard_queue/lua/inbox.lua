#!lua flags=allow-oom
-- Empties a worker's inbox after a first id was popped from it, and leaves out what the worker
-- holds again: such a notice was about an earlier attempt.
-- ARGV[3] worker, [4] the popped id. Answers run ids to stop.
-- Reads run:<id>. Writes inbox:<worker>.
local worker, inbox = ARGV[3], TAG .. 'inbox:' .. ARGV[3]
local ids = redis.call('LRANGE', inbox, 0, -1)
redis.call('DEL', inbox)
table.insert(ids, 1, ARGV[4])
local stop = {}
for _, id in ipairs(ids) do
  local run = redis.call('HMGET', TAG .. 'run:' .. id, 'state', 'owner')
  if not (run[1] == 'running' and run[2] == worker) then
    stop[#stop + 1] = id
  end
end
return stop
