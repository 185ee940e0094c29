#!lua flags=allow-oom
-- Records results, first one wins; fenced by owner and attempt. Runs under memory pressure too:
-- it frees more than it takes.
-- ARGV[3] worker, then per run: id, attempt, result. Answers 1 or 0 per run.
-- Reads run:<id>. Writes run:<id>, leases, totals, replies:<gateway>.
local worker = ARGV[3]
local answer = {}
for i = 4, #ARGV, 3 do
  local id = ARGV[i]
  local run = redis.call('HMGET', TAG .. 'run:' .. id, 'state', 'owner', 'attempt', 'waiters')
  if run[1] == 'running' and run[2] == worker and run[3] == ARGV[i + 1] then
    redis.call('ZREM', LEASES, id)
    settle(id, run[4], ARGV[i + 2])
    answer[#answer + 1] = 1
  else
    answer[#answer + 1] = 0
  end
end
sent()
return answer
