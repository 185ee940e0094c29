"""The server's maximum for each limit of a run."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Protocol

from rollyard.types import FieldProblem, Limits


class LimitsLike(Protocol):
    """The fields of :class:`rollyard.types.Limits`, whoever parsed them."""

    @property
    def timeout_s(self) -> float: ...
    @property
    def cpu_s(self) -> float | None: ...
    @property
    def memory_bytes(self) -> int: ...
    @property
    def disk_bytes(self) -> int: ...
    @property
    def pids(self) -> int: ...
    @property
    def output_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """One maximum per field of :class:`rollyard.types.Limits`, in the same unit."""

    timeout_s: float
    cpu_s: float
    memory_bytes: int
    disk_bytes: int
    pids: int
    output_bytes: int

    def cover(self, limits: LimitsLike) -> bool:
        """True when nothing in ``limits`` is above its maximum (the usual case, kept cheap)."""
        return (
            limits.timeout_s <= self.timeout_s
            and (limits.timeout_s if limits.cpu_s is None else limits.cpu_s) <= self.cpu_s
            and limits.memory_bytes <= self.memory_bytes
            and limits.disk_bytes <= self.disk_bytes
            and limits.pids <= self.pids
            and limits.output_bytes <= self.output_bytes
        )

    def problems(self, limits: Limits, path: str) -> Iterator[FieldProblem]:
        """Name every limit that the caller set above its maximum; ``path`` leads to it."""
        for field in fields(self):
            asked, maximum = getattr(limits, field.name), getattr(self, field.name)
            if asked is not None and asked > maximum and field.name in limits.model_fields_set:
                yield FieldProblem(
                    field=f"{path}.{field.name}",
                    message=f"{asked} is above this server's maximum of {maximum}",
                )

    def lowered(self, limits: Limits) -> Limits:
        """Return ``limits`` with each default that is above its maximum set to the maximum.

        Only what the caller left out is lowered: a limit silently changed would change what a
        result means.
        """
        update: dict[str, float] = {}
        for field in fields(self):
            value, maximum = getattr(limits, field.name), getattr(self, field.name)
            if value is not None and value > maximum:
                update[field.name] = maximum
        if limits.cpu_s is None and limits.timeout_s > self.cpu_s:
            update["cpu_s"] = self.cpu_s
        return limits.model_copy(update=update)
