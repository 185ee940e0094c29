"""The queue: its contract, its Lua scripts, and the Redis/Valkey implementation."""
