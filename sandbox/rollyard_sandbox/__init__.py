"""The worker and its jails."""
