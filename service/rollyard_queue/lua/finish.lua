#!lua flags=allow-oom
-- Records results, first one wins; fenced by owner and attempt. Runs under memory pressure too:
-- it frees more than it takes.
-- ARGV[4] worker, then per run: id, attempt, result. Answers a letter per run: 1 recorded, 0 not.
-- Reads runs, owners. Writes runs, payloads, owners, history, leases, running, trials, totals,
-- done:<period>, replies:<gateway>, and ring and wake where a job comes below its cap.
local worker = ARGV[4]
local some, n, fences, seen, answer = {}, 0, {}, {}, {}
for i = 5, #ARGV, 3 do
  n = n + 1
  some[n] = ARGV[i]
end
local owners = redis.call('HMGET', OWNERS, unpack(some))
local records = redis.call('HMGET', RUNS, unpack(some))
local trial = redis.call('HGET', TRIALS, worker)
for i, id in ipairs(some) do
  local attempt = ARGV[3 * i + 3]
  local fence = fences[attempt]
  if not fence then
    fence = attempt .. ' ' .. worker
    fences[attempt] = fence
  end
  if owners[i] == fence and records[i] and not seen[id] then
    seen[id] = true
    answer[i] = '1'
    local whose = who(records[i])
    local job = whose.job
    settle(id, records[i], whose, ARGV[3 * i + 4])
    stopped[job] = (stopped[job] or 0) + 1
    if id == trial then
      redis.call('HDEL', TRIALS, worker)
    end
  else
    answer[i] = '0'
  end
end
if ended > 0 then
  call('ZREM', LEASES, ids)
  flush()
end
return table.concat(answer)
