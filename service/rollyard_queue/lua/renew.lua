#!lua flags=allow-oom
-- Extends the leases that a worker still holds; also one that has ended and was not reaped yet.
-- ARGV[3] worker, [4] lease in µs, then run ids. Answers the ids that it does not hold any more.
-- Reads run:<id>. Writes leases.
local worker, lease_end = ARGV[3], digits(NOW + tonumber(ARGV[4]))
local lost = {}
for i = 5, #ARGV do
  local run = redis.call('HMGET', TAG .. 'run:' .. ARGV[i], 'state', 'owner')
  if run[1] == 'running' and run[2] == worker then
    redis.call('ZADD', LEASES, 'XX', lease_end, ARGV[i])
  else
    lost[#lost + 1] = ARGV[i]
  end
end
return lost
