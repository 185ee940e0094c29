#!lua flags=allow-oom
-- Empties a worker's inbox after a first id was popped from it, and leaves out what the worker
-- holds again: such a notice was about an earlier attempt.
-- ARGV[4] worker, [5] the popped id. Answers run ids to stop.
-- Reads owners. Writes inbox:<worker>.
local worker, inbox = ARGV[4], TAG .. 'inbox:' .. ARGV[4]
local notices = redis.call('LRANGE', inbox, 0, -1)
redis.call('DEL', inbox)
table.insert(notices, 1, ARGV[5])
local stop = {}
for _, id in ipairs(notices) do
  if owner_of(id) ~= worker then
    stop[#stop + 1] = id
  end
end
return stop
