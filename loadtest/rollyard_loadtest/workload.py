"""Kinds of programs that a scenario mixes, each with the answer that it must get.

Every program carries its own number into its output where it can, so that an answer that reached
the wrong caller is seen. Nothing here knows how programs are sent.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, count
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, model_validator

from rollyard.types import Limits, Outcome

LOOPS_PER_MS = 7000
"""Turns of the loop program that take about 1 ms of one core of a 2020s server at full speed."""
NUMPY_S, SYMPY_SOLVE_S, SYMPY_INTEGRAL_S = 0.0005, 0.025, 0.027
"""CPU seconds in a fork of a warm interpreter (shared baselines; a planner measures its own)."""


@dataclass(frozen=True, slots=True)
class Work:
    """One run to be made: what is asked, and what must come of it."""

    kind: str
    code: str
    outcome: Outcome = "ok"
    """The only right outcome."""
    stdout: str | None = None
    """The only right output; None: not looked at."""
    stdin: str | None = None
    limits: dict[str, Any] = field(default_factory=dict[str, Any])
    """Fields of :class:`rollyard.Limits`; those left out are at the service's default."""
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    """Further fields of a run's request (native API only)."""
    nominal_s: float = 0.0
    """CPU or sleep seconds that the program itself takes on a core of full speed."""

    def request(self) -> dict[str, Any]:
        """Fields of a :class:`rollyard.RunRequest`, without its id."""
        asked: dict[str, Any] = {"code": self.code, **self.options}
        if self.stdin is not None:
            asked["stdin"] = self.stdin
        if self.limits:
            asked["limits"] = self.limits
        return asked


class Kind(BaseModel):
    """What all kinds have: their share of the mix."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """Share of the mix, relative to the other kinds' weights."""

    @property
    def name(self) -> str:
        """How results call it."""
        return str(getattr(self, "kind"))  # noqa: B009 - each subclass has its own literal

    def make(self, chance: random.Random, number: int) -> Work:
        """Draw one program; ``number`` makes its output its own."""
        raise NotImplementedError


type Range = tuple[Annotated[float, Field(ge=0)], Annotated[float, Field(ge=0)]]
"""``[least, most]``, drawn uniformly."""


def _between(chance: random.Random, bounds: tuple[float, float]) -> float:
    return chance.uniform(*bounds)


class Print(Kind):
    """``print``: the smallest program."""

    kind: Literal["print"]

    def make(self, chance: random.Random, number: int) -> Work:
        return Work("print", f"print({number} + 1)", stdout=f"{number + 1}\n", nominal_s=2e-5)


class Loop(Kind):
    """``loop``: pure Python that computes for ``ms``, drawn between two bounds."""

    kind: Literal["loop"]
    ms: Range = (1.0, 20.0)
    """CPU milliseconds at full speed: least and most."""

    def make(self, chance: random.Random, number: int) -> Work:
        took_ms = _between(chance, self.ms)
        turns = max(1, round(took_ms * LOOPS_PER_MS))
        code = f"total = {number}\nfor i in range({turns}):\n    total += i * i\nprint(total)\n"
        total = number + (turns - 1) * turns * (2 * turns - 1) // 6
        return Work("loop", code, stdout=f"{total}\n", nominal_s=took_ms / 1000)


class Numpy(Kind):
    """``numpy``: a determinant."""

    kind: Literal["numpy"]

    def make(self, chance: random.Random, number: int) -> Work:
        code = (
            "import numpy as np\n"
            "a = np.arange(100.0).reshape(10, 10) + np.eye(10)\n"
            f"print(round(float(np.linalg.det(a))) + {number})\n"
        )
        return Work("numpy", code, stdout=f"{number - 7754}\n", nominal_s=NUMPY_S)


class Sympy(Kind):
    """``sympy``: factor and solve a polynomial, or integrate."""

    kind: Literal["sympy"]
    task: Literal["solve", "integral"] = "solve"

    def make(self, chance: random.Random, number: int) -> Work:
        if self.task == "integral":
            code = (
                "import sympy as sp\nx = sp.symbols('x')\n"
                f"print(sp.integrate(sp.sin(x) * sp.exp(x), x), {number})\n"
            )
            stdout = f"exp(x)*sin(x)/2 - exp(x)*cos(x)/2 {number}\n"
            return Work("sympy", code, stdout=stdout, nominal_s=SYMPY_INTEGRAL_S)
        low = chance.randrange(1, 50)
        high = low + chance.randrange(1, 50)
        code = (
            "import sympy as sp\nx = sp.symbols('x')\n"
            f"p = x**2 - {low + high}*x + {low * high}\n"
            f"print(sp.factor(p).subs(x, 0), sorted(sp.solve(p, x)), {number})\n"
        )
        stdout = f"{low * high} [{low}, {high}] {number}\n"
        return Work("sympy", code, stdout=stdout, nominal_s=SYMPY_SOLVE_S)


class Raise(Kind):
    """``raise``: prints, then ends with an uncaught exception."""

    kind: Literal["raise"]

    def make(self, chance: random.Random, number: int) -> Work:
        code = f"print({number})\nraise ValueError({number})\n"
        return Work("raise", code, "error", f"{number}\n", nominal_s=1e-4)


class Endless(Kind):
    """``endless``: computes for ever, and is stopped at its time limit."""

    kind: Literal["endless"]
    timeout_s: Range = (1.0, 2.0)
    """Wall-clock limit of the run: least and most."""

    def make(self, chance: random.Random, number: int) -> Work:
        limit_s = round(_between(chance, self.timeout_s), 3)
        return Work(
            "endless", f"n = {number}\nwhile True:\n    n += 1\n", "timeout",
            limits={"timeout_s": limit_s}, nominal_s=limit_s,
        )  # fmt: skip


class Sleep(Kind):
    """``sleep``: waits without computing, as a program does that talks to something."""

    kind: Literal["sleep"]
    s: Range = (1.0, 1.0)
    """Seconds asleep: least and most."""

    def make(self, chance: random.Random, number: int) -> Work:
        for_s = round(_between(chance, self.s), 3)
        code = f"import time\ntime.sleep({for_s})\nprint({number})\n"
        limits = {"timeout_s": for_s + 30}
        return Work("sleep", code, stdout=f"{number}\n", limits=limits, nominal_s=for_s)


class Code(Kind):
    """``code``: a program written out; ``{{n}}`` in it becomes its number."""

    kind: Literal["code"]
    title: str = "code"
    """How results call it."""
    code: str
    outcome: Outcome = "ok"
    """The outcome that it must have."""
    stdout: str | None = None
    """The output that it must have; ``{{n}}`` becomes the number. Left out: not looked at."""
    stdin: str | None = None
    limits: dict[str, Any] = Field(default_factory=dict[str, Any])
    options: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Further fields of the run's request, such as ``template`` or ``on_output_limit``."""
    nominal_s: Annotated[float, Field(ge=0)] = 0.0
    """Seconds that it computes or sleeps, as far as known; for the capacity planner."""

    @model_validator(mode="after")
    def _limits_exist(self) -> Self:
        try:
            Limits.model_validate(self.limits)
        except ValidationError as error:
            problem = error.errors()[0]
            known = ", ".join(Limits.model_fields)
            field = ".".join(map(str, problem["loc"]))
            raise ValueError(f"limits.{field}: {problem['msg']}; there are {known}") from None
        return self

    @property
    def name(self) -> str:
        return self.title

    def make(self, chance: random.Random, number: int) -> Work:
        def filled(text: str | None) -> str | None:
            return None if text is None else text.replace("{{n}}", str(number))

        return Work(
            self.title, filled(self.code) or "", self.outcome, filled(self.stdout),
            filled(self.stdin), self.limits, self.options, self.nominal_s,
        )  # fmt: skip


class Listed(Kind):
    """``jsonl``: programs of a JSON Lines file, in random order."""

    kind: Literal["jsonl"]
    path: str
    """Relative to the scenario's file; ``.gz`` is unpacked."""
    _works: list[Work] = PrivateAttr(default_factory=list[Work])

    def fill(self, works: Sequence[Work]) -> None:
        """Give it the file's programs (done by the scenario's loader)."""
        self._works.extend(works)

    def make(self, chance: random.Random, number: int) -> Work:
        return chance.choice(self._works)


AnyKind = Annotated[
    Print | Loop | Numpy | Sympy | Raise | Endless | Sleep | Code | Listed,
    Field(discriminator="kind"),
]


def works(kinds: Sequence[Kind], seed: str, *, first: int = 0) -> Iterator[Work]:
    """Programs without end, drawn by weight; the same for the same seed and first number."""
    chance = random.Random(f"{seed}-{first}")  # noqa: S311 - not for secrets
    bounds = list(accumulate(kind.weight for kind in kinds))
    for number in count(first):
        [kind] = chance.choices(kinds, cum_weights=bounds)
        yield kind.make(chance, number)
