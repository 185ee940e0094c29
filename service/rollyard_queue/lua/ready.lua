#!lua
-- Answers 1 where runs would be taken: without flags, a server that is full or read-only refuses it.
return 1
