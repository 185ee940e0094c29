"""What came of the runs of one client process: counts, verdicts and latencies."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rollyard_loadtest.histogram import Latencies
from rollyard_loadtest.workload import Work

MAX_EXAMPLES = 10
"""Wrong answers that are kept in words."""
UNJUDGED = frozenset({"infra_error", "expired", "cancelled"})
"""Outcomes that say nothing about the program: neither right nor wrong."""


class Answer(NamedTuple):
    """What a service said of one run."""

    outcome: str
    stdout: str = ""
    wall_ms: float = 0.0
    cpu_ms: float = 0.0
    queued_ms: float = 0.0
    attempt: int = 1
    message: str = ""


@dataclass
class KindSum:
    """Sums over the judged runs of one kind; a planner divides."""

    runs: int = 0
    wall_ms: float = 0.0
    cpu_ms: float = 0.0
    queued_ms: float = 0.0


@dataclass
class Tally:
    """Counts of one client. Times are seconds since the load began."""

    window: tuple[float, float]
    """From when until when the measurement goes; before is warm-up."""
    outcomes: Counter[str] = field(default_factory=Counter[str])
    """Of runs that were due in the window."""
    due: int = 0
    """Runs whose intended time was in the window."""
    good: int = 0
    """Right answers to runs that were due in the window."""
    good_in_window: int = 0
    """Right answers that came within the window, whenever they were due: the goodput."""
    wrong: int = 0
    """Wrong verdicts, in the warm-up too."""
    refused: int = 0
    """Runs of the window that the service refused (429, 503 or a dialect's word for busy)."""
    lost: int = 0
    """Runs, in the warm-up too, that got no answer at all."""
    retried: int = 0
    """Runs in requests that were sent again after a refusal."""
    redelivered: int = 0
    """Answers that say that a worker was lost on the way."""
    last_answer_s: float = 0.0
    latencies: Latencies = field(default_factory=Latencies)
    """From the intended time to the right answer, of runs due in the window."""
    refusal_latencies: Latencies = field(default_factory=Latencies)
    behind: Latencies = field(default_factory=Latencies)
    """How late this client itself was in sending: above some ms, it is the bottleneck."""
    kinds: dict[str, KindSum] = field(default_factory=dict[str, KindSum])
    examples: list[str] = field(default_factory=list[str])
    tick: "Tick" = field(default_factory=lambda: Tick())

    def _counts(self, due_s: float) -> bool:
        return self.window[0] <= due_s < self.window[1]

    def sent(self, runs: int, due_s: float, now_s: float) -> None:
        """Runs that were due together are on their way."""
        if self._counts(due_s):
            self.due += runs
            self.behind.record(now_s - due_s, runs)

    def answered(self, work: Work, answer: Answer, due_s: float, now_s: float) -> None:
        """A run has its answer."""
        if now_s > self.last_answer_s:
            self.last_answer_s = now_s
        self.redelivered += answer.attempt > 1
        counts = self.window[0] <= due_s < self.window[1]
        if counts:
            self.outcomes[answer.outcome] += 1
        if answer.outcome in UNJUDGED:
            self.tick.unjudged += 1
            self._example(work, f"{answer.outcome}: {answer.message}")
            return
        if problem := self._problem(work, answer):
            self.wrong += 1
            self.tick.wrong += 1
            self._example(work, problem)
            return
        self.tick.good += 1
        self.tick.latencies.record(now_s - due_s)
        if counts:
            self.good += 1
            self.latencies.record(now_s - due_s)
            total = self.kinds.get(work.kind) or self.kinds.setdefault(work.kind, KindSum())
            total.runs += 1
            total.wall_ms += answer.wall_ms
            total.cpu_ms += answer.cpu_ms
            total.queued_ms += answer.queued_ms
        if self._counts(now_s):
            self.good_in_window += 1

    def refuse(self, due_s: float, now_s: float) -> None:
        """A run was refused, for good."""
        self.tick.refused += 1
        if self._counts(due_s):
            self.refused += 1
            self.refusal_latencies.record(now_s - due_s)

    def lose(self, work: Work, why: str) -> None:
        """A run got no answer."""
        self.lost += 1
        self.tick.lost += 1
        self._example(work, f"lost: {why}")

    def duplicate(self, work: Work) -> None:
        """A run was answered twice: as bad as a wrong verdict."""
        self.wrong += 1
        self.tick.wrong += 1
        self._example(work, "answered twice")

    def _problem(self, work: Work, answer: Answer) -> str:
        if answer.outcome != work.outcome:
            return f"{answer.outcome} instead of {work.outcome} {answer.message}".rstrip()
        if work.stdout is not None and answer.stdout != work.stdout:
            return f"stdout is {answer.stdout[:80]!r} instead of {work.stdout[:80]!r}"
        return ""

    def _example(self, work: Work, text: str) -> None:
        if len(self.examples) < MAX_EXAMPLES:
            self.examples.append(f"{work.kind}: {text}")

    def report(self) -> dict[str, Any]:
        """JSON of all counts, histograms encoded."""
        plain = ("due", "good", "good_in_window", "wrong", "refused", "lost", "retried",
                 "redelivered", "last_answer_s", "examples")  # fmt: skip
        return {
            **{name: getattr(self, name) for name in plain},
            "outcomes": dict(self.outcomes),
            "latencies": self.latencies.encoded(),
            "refusal_latencies": self.refusal_latencies.encoded(),
            "behind": self.behind.encoded(),
            "kinds": {name: vars(total) for name, total in self.kinds.items()},
        }


@dataclass
class Tick:
    """What came in since the last tick; for the live view and the plots over time."""

    good: int = 0
    wrong: int = 0
    unjudged: int = 0
    refused: int = 0
    lost: int = 0
    latencies: Latencies = field(default_factory=Latencies)

    def report(self) -> dict[str, Any]:
        """JSON of it."""
        counts = ("good", "wrong", "unjudged", "refused", "lost")
        return {
            **{name: getattr(self, name) for name in counts},
            "latencies": self.latencies.encoded() if len(self.latencies) else "",
        }
