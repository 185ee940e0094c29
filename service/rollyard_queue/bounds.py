"""What a queue admits and keeps, as one value that all processes of the queue share."""

import msgspec


class Bounds(msgspec.Struct, frozen=True):
    """Gateways and workers of one queue must agree on these."""

    max_queued: int = 100_000
    """Runs that may wait; what runs is not counted."""
    max_queued_bytes: int = 1 << 30
    """Payload bytes that waiting runs may take."""
    max_queued_per_job: int = 0
    """Runs of one job that may wait; 0: only the whole queue is bounded."""
    max_queued_bytes_per_job: int = 0
    """Payload bytes of one job's waiting runs; 0: only the whole queue is bounded."""
    max_running_per_job: int = 0
    """Runs of one job under a lease at once; 0: as many as workers take. Used by claims."""
    max_attempts: int = 3
    """Deliveries after which a run whose workers were all lost ends with ``infra_error``."""
    result_ttl_s: float = 60
    """Seconds that a result is kept at least, for late duplicates."""

    def of_one_shard(self, shards: int) -> "Bounds":
        """The part of each of ``shards``, rounded up: runs spread evenly by their id."""
        if shards == 1:
            return self
        return msgspec.structs.replace(
            self,
            max_queued=-(-self.max_queued // shards),
            max_queued_bytes=-(-self.max_queued_bytes // shards),
            max_queued_per_job=-(-self.max_queued_per_job // shards),
            max_queued_bytes_per_job=-(-self.max_queued_bytes_per_job // shards),
            max_running_per_job=-(-self.max_running_per_job // shards),
        )
