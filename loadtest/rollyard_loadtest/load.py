"""How runs arrive: a constant number in flight, a Poisson process, or a training step's turns."""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

_Seconds = Annotated[float, Field(gt=0, le=86400, allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=1)]


class Load(BaseModel):
    """What all ways of arriving have."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    duration_s: _Seconds = 20.0
    """Measured seconds, after the warm-up. A burst ends with its last answer, or here."""
    warmup_s: Annotated[float, Field(ge=0, le=3600)] = 3.0
    """Seconds of load before, whose runs are not counted (their verdicts are)."""
    drain_s: _Seconds = 60.0
    """Seconds after the end in which answers may still come; what has none then is lost."""
    batch: Annotated[int, Field(ge=1, le=1024)] = 1
    """Runs that arrive together and travel in one request."""
    clients: Annotated[int, Field(ge=1, le=64)] = 1
    """Processes that make the load."""
    retries: Annotated[int, Field(ge=0, le=20)] = 0
    """How often a refused request is sent again, after the time that the service named."""
    deadline_s: _Seconds | None = None
    """Seconds within which a run must have started, else the service drops it as ``expired``."""
    jobs: Annotated[int, Field(ge=1, le=1000)] = 1
    """Training jobs that the runs belong to, in turn."""

    def common(self) -> dict[str, Any]:
        """The fields of this class."""
        return {name: getattr(self, name) for name in Load.model_fields}

    def with_field(self, name: str, value: object) -> Self:
        """A copy with one field changed, checked as the file's own are."""
        return type(self).model_validate({**self.model_dump(), name: value})

    def summary(self) -> str:
        """In a few words."""
        raise NotImplementedError


class Closed(Load):
    """A constant number of runs in flight: the next is sent when one is answered."""

    arrivals: Literal["closed"]
    in_flight: _Count

    @property
    def runs_per_request(self) -> int:
        """``batch``, or fewer: a sweep that begins with 1 in flight cannot have 64 in a request."""
        return min(self.batch, self.in_flight)

    def summary(self) -> str:
        return f"{self.in_flight:,} in flight"


class Poisson(Load):
    """Requests come at random, independent of the answers (open loop)."""

    arrivals: Literal["poisson"]
    rate_per_s: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    """Runs a second, on average."""

    def summary(self) -> str:
        return f"{self.rate_per_s:,.0f} runs/s"


class Burst(Load):
    """A training step: all rollouts make their first call at once, and each its next one after
    it has read the answer and thought."""

    arrivals: Literal["burst"]
    rollouts: _Count
    turns: _Count = 1
    """Calls of each rollout, one after the other."""
    think_s: tuple[Annotated[float, Field(ge=0)], Annotated[float, Field(ge=0)]] = (1.0, 10.0)
    """Between an answer and the next call: median and 99th percentile of a log-normal."""
    warmup_runs: Annotated[int, Field(ge=0)] = 64
    """Runs made before the burst, so that connections and templates exist."""

    def summary(self) -> str:
        return f"{self.rollouts:,} at once" + (f", {self.turns} turns" if self.turns > 1 else "")


AnyLoad = Annotated[Closed | Poisson | Burst, Field(discriminator="arrivals")]
