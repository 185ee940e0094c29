#!lua flags=allow-oom
-- Passes on a wake token that a worker took and has no use for.
-- Answers 1 if there is work to wake for, else 0.
-- Reads ring, probation. Writes wake.
if not has_work() then
  return 0
end
wake(1)
return 1
