#!lua flags=allow-oom
-- Puts unstarted runs back to their old place, ahead of younger ones; the attempt is not counted.
-- ARGV[3] worker, then run ids. Answers how many the worker held.
-- Reads run:<id>. Writes run:<id>, leases, job:<job>, ring, deadlines, load, wake.
local worker = ARGV[3]
local released, bytes = 0, 0
for i = 4, #ARGV do
  local id = ARGV[i]
  local key = TAG .. 'run:' .. id
  local run = redis.call('HMGET', key, 'state', 'owner', 'attempt', 'job', 'since', 'expires',
    'bytes')
  if run[1] == 'running' and run[2] == worker then
    redis.call('ZREM', LEASES, id)
    redis.call('HSET', key, 'state', 'queued', 'attempt', tonumber(run[3]) - 1)
    redis.call('HDEL', key, 'owner')
    enqueue(id, run[4], run[5], run[6])
    released, bytes = released + 1, bytes + tonumber(run[7])
  end
end
if released > 0 then
  queue_changed(released, bytes)
  wake(released)
end
return released
