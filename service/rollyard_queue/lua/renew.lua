#!lua flags=allow-oom
-- Extends the leases that a worker still holds; also one that has ended and was not reaped yet.
-- ARGV[4] worker, [5] lease in µs, then run ids. Answers the ids that it does not hold any more.
-- Reads owners. Writes leases.
local worker, lease_end = ARGV[4], digits(NOW + tonumber(ARGV[5]))
local lost, held, whose = {}, {}, {}
local some = { unpack(ARGV, 6) }
for i, owner in ipairs(redis.call('HMGET', OWNERS, unpack(some))) do
  if owner and whose[owner] == nil then
    whose[owner] = string.match(owner, '^%d+ (.*)$') == worker
  end
  if owner and whose[owner] then
    held[#held + 1], held[#held + 2] = lease_end, some[i]
  else
    lost[#lost + 1] = some[i]
  end
end
if #held > 0 then
  redis.call('ZADD', LEASES, 'XX', unpack(held))
end
return lost
