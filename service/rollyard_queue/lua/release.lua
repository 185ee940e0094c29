#!lua flags=allow-oom
-- Puts unstarted runs back to their old place, ahead of younger ones; the attempt is not counted.
-- ARGV[4] worker, then run ids. Answers how many the worker held.
-- Reads runs, history. Writes owners, leases, running, trials, and what enqueue writes.
local worker = ARGV[4]
local released = 0
for i = 5, #ARGV do
  local id = ARGV[i]
  local record = redis.call('HGET', RUNS, id)
  if record and owner_of(id) == worker then
    local attempts, base = attempts_of(id)
    redis.call('ZREM', LEASES, id)
    redis.call('HDEL', OWNERS, id)
    stops(id, who(record).job, worker)
    enqueue(id, record, attempts - base)
    queue_changed(who(record).job, 1, redis.call('HSTRLEN', PAYLOADS, id))
    released = released + 1
  end
end
if released > 0 then
  flush()
  wake(released)
end
return released
