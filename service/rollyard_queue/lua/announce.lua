#!lua flags=allow-oom
-- Counts a worker as alive, or forgets it and passes on a wake token that it may have taken.
-- ARGV[4] worker, [5] slots, [6] ttl in ms, 0 to retire.
-- Reads ring, probation. Writes workers, slots, wake, inbox:<worker>.
local worker, ttl_ms = ARGV[4], tonumber(ARGV[6])
if ttl_ms > 0 then
  redis.call('ZADD', WORKERS, digits(NOW + ttl_ms * 1000), worker)
  redis.call('HSET', SLOTS, worker, ARGV[5])
  local last = tonumber(redis.call('ZRANGE', WORKERS, -1, -1, 'WITHSCORES')[2])
  local keep_ms = digits(math.ceil((last - NOW) / 1000))
  redis.call('PEXPIRE', WORKERS, keep_ms)
  redis.call('PEXPIRE', SLOTS, keep_ms)
else
  redis.call('ZREM', WORKERS, worker)
  redis.call('HDEL', SLOTS, worker)
  redis.call('DEL', TAG .. 'inbox:' .. worker)
  if has_work() then
    wake(1)
  end
end
return 1
