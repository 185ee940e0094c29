"""The figures of a load test: what is written as JSON and drawn in the report."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

SCHEMA: Literal["rollyard-bench/1"] = "rollyard-bench/1"
"""Version of the JSON. Fields may be added under it; none changes its meaning or goes."""


class _Figures(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Machine(_Figures):
    """Where it ran."""

    cores: int
    cpu: str
    memory_bytes: int
    kernel: str
    python: str
    load_average: float
    """Of the minute before the first stage: what else was going on."""


class Second(_Figures):
    """What came in during one second, or one part of one."""

    at_s: float
    """Its end, since the load began."""
    during_s: float = 1.0
    """Its length."""
    in_flight: int
    good: int
    wrong: int
    unjudged: int
    refused: int
    lost: int
    p50_s: float | None = None
    p99_s: float | None = None


class KindFigures(_Figures):
    """Means over the right answers of one kind of program."""

    runs: int
    wall_ms: float
    """From the program's start to its end."""
    cpu_ms: float
    queued_ms: float
    """From admission until a worker started it."""


class StageFigures(_Figures):
    """What came of one load."""

    name: str
    target: str
    """``sdk``, ``http``, ``sandboxfusion`` or ``codejudge``."""
    load: dict[str, Any]
    elapsed_s: float
    """Measured seconds: the window, or for a burst until its last answer."""
    offered_per_s: float
    """Runs that were due, a second."""
    goodput_per_s: float
    """Right answers that came in the window, a second."""
    due: int
    good: int
    wrong: int
    unjudged: int
    """infra_error, expired or cancelled: they say nothing about the program."""
    refused: int
    lost: int
    retried: int
    redelivered: int
    outcomes: dict[str, int]
    latency_s: dict[str, float | None]
    """Quantile (0.5, 0.9, …) to seconds, from the intended time to the right answer."""
    mean_s: float | None = None
    max_s: float | None = None
    refusal_p99_s: float | None = None
    client_behind_p99_s: float | None = None
    """How late the load generator itself was; it is in the latencies, as it should."""
    kinds: dict[str, KindFigures] = Field(default_factory=dict[str, KindFigures])
    cpu_ms_per_run: dict[str, float] = Field(default_factory=dict[str, float])
    """Part (gateway, valkey, worker, slots, client) to CPU milliseconds a right answer."""
    pss_bytes: dict[str, int] = Field(default_factory=dict[str, int])
    """Part to memory, shared pages shared out, while the load was on."""
    processes: dict[str, int] = Field(default_factory=dict[str, int])
    slow: float | None = None
    """How much slower than at its best this machine computed meanwhile; 1.0 is full speed."""
    seconds: list[Second] = Field(default_factory=list[Second])
    examples: list[str] = Field(default_factory=list[str])
    """Wrong, lost and unjudged answers in words; a few."""
    histogram: str = ""
    """HdrHistogram (V2, compressed, base64) of the latencies, in microseconds."""

    @property
    def failed(self) -> bool:
        """True when a verdict was wrong or a run was lost."""
        return self.wrong > 0 or self.lost > 0

    @property
    def p50_s(self) -> float | None:
        """Median latency."""
        return self.latency_s.get("0.5")

    @property
    def p99_s(self) -> float | None:
        """99th percentile of the latency."""
        return self.latency_s.get("0.99")


class Goal(_Figures):
    """One figure that the scenario asks for."""

    name: str
    wanted: float
    got: float | None
    met: bool


class BenchFigures(_Figures):
    """All of one ``rollyard bench``."""

    schema_version: Literal["rollyard-bench/1"] = SCHEMA
    rollyard: str
    commit: str = ""
    command: str
    started: str
    """UTC, ISO 8601."""
    machine: Machine
    scenario: dict[str, Any]
    null_workers: bool = False
    seed: str
    stages: list[StageFigures]
    goals: list[Goal] = Field(default_factory=list[Goal])
    rounds: int = 0
    """Of a comparison: how often the targets took turns."""

    @property
    def failed(self) -> bool:
        """True when any stage is."""
        return any(stage.failed for stage in self.stages)
