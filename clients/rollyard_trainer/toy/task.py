"""Phrasebook: each problem names one of 24 made-up words and two numbers.

A word stands for one of six operations; which, only reinforcement learning can find out. The tool
can compute each, and calls can go wrong in the ways of real models: an import forgotten, a bracket
missing, JSON that is none, an endless loop. A failed call can be tried again. So errors say almost
nothing about the outcome, as in the paper, and outcome-only rewards hardly punish them.
"""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, product
from math import comb, gcd, lcm
from operator import add, mul
from pathlib import Path

from rollyard_trainer import template
from rollyard_trainer.engines.pieces import ANSWER, ANSWER_END, CALL, CALL_END, Pieces

WORDS = (
    "lantern", "garland", "thistle", "meadow", "copper", "harbor", "velvet", "ember",
    "willow", "quartz", "saffron", "anchor", "bramble", "cobalt", "drizzle", "falcon",
    "ginger", "hollow", "ivory", "juniper", "kettle", "lagoon", "marble", "nutmeg",
)  # fmt: skip
OPERATIONS = ("gcd", "lcm", "comb", "pow", "product", "sum")
FIRST, SECOND = range(4, 24), range(2, 10)
MODULUS = 997  # answers have at most three digits

_CODE = {  # what stands before the first number, and between the two
    "gcd": ("math.gcd(", ", "),
    "lcm": ("math.lcm(", ", "),
    "comb": ("math.comb(", ", "),
    "pow": ("pow(", ", "),
    "product": ("(", " * "),
    "sum": ("(", " + "),
}
_VALUE: dict[str, Callable[[int, int], int]] = {
    "gcd": gcd,
    "lcm": lcm,
    "comb": comb,
    "pow": pow,
    "product": mul,
    "sum": add,
}
BAD_CALL_END = ', "input": ""}}\n</tool_call>'  # the quotation mark after the code is missing
AGAIN = "\n<answer>\\boxed{"
IMPORT, PRINT, TAIL, LOOP = "import math\\n", "print(", " % 997)", "while True: pass\\n"
TRY, EXCEPT = "try:\\n ", "\\nexcept: pass"


@dataclass(frozen=True, slots=True)
class PhraseProblem:
    """One problem."""

    word: str
    a: int
    b: int
    operation: str

    @property
    def prompt(self) -> str:
        return template.prompt(self.question)

    @property
    def question(self) -> str:
        return f"What is the {self.word} of {self.a} and {self.b}?"

    @property
    def answer(self) -> str:
        return str(_VALUE[self.operation](self.a, self.b) % MODULUS)


@dataclass(frozen=True, slots=True)
class Splits:
    """Disjoint problems; ``test`` is used once, by the evaluation after training."""

    train: list[PhraseProblem]
    validation: list[PhraseProblem]
    test: list[PhraseProblem]


def splits(seed: int = 0, *, validation: int = 300, test: int = 600) -> Splits:
    """All problems, shuffled and cut; words get their operations, four words each, at random."""
    chance = random.Random(seed)  # noqa: S311 - data, not secrets
    meanings = list(OPERATIONS) * (len(WORDS) // len(OPERATIONS))
    chance.shuffle(meanings)
    meaning = dict(zip(WORDS, meanings, strict=True))
    everything = [PhraseProblem(w, a, b, meaning[w]) for w, a, b in product(WORDS, FIRST, SECOND)]
    chance.shuffle(everything)
    cut = validation + test
    return Splits(everything[cut:], everything[:validation], everything[validation:cut])


class Lexicon(Pieces):
    """The pieces of which this task's texts are made; the rest, of a traceback say, is unknown."""

    def __init__(self) -> None:
        numbers = [str(n) for n in sorted({*range(10), *FIRST, *SECOND})]
        fixed = template.prompt("\0").split("\0")
        turn = template.tool_turn(["\0"]).split("\0")
        super().__init__([
            fixed[0] + "What is the ", " of ", " and ", "?" + fixed[1],
            *turn, *WORDS, *numbers, CALL, CALL_END, BAD_CALL_END, ANSWER, ANSWER_END, AGAIN,
            IMPORT, PRINT, TAIL, LOOP, TRY, EXCEPT, ")", *chain.from_iterable(_CODE.values()),
            "NameError", "SyntaxError", "timeout", "Failed to parse tool call",
        ])  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """How the cold start behaves: the inputs of the experiment, each a probability."""

    right: float = 0.35
    """Takes the right operation; else one of the six at random."""
    first_error: float = 0.35
    retry_error: float = 0.20
    second_answer: float = 0.20
    vacuous: float = 0.02
    """A first call that computes nothing of the problem."""
    swallow: float = 0.10
    """Of failing calls: hides its exception."""


def demonstration(problem: PhraseProblem, habits: Habits, chance: random.Random) -> list[str]:
    """The turns of a rollout to imitate, whose answer is what the last call returns.

    The third call never fails, so that four turns suffice.
    """
    operation = problem.operation
    if chance.random() >= habits.right:
        operation = chance.choice(OPERATIONS)
    turns: list[str] = []
    if chance.random() < habits.vacuous:
        turns.append(_call(f"{PRINT}{problem.a})"))
    rate = habits.first_error
    while len(turns) < 2 and chance.random() < rate:
        turns.append(_failing_call(problem, operation, habits, chance))
        rate = habits.retry_error
    last = answer_turn(template.OBSERVATION, twice=chance.random() < habits.second_answer)
    return [*turns, _call(_code(problem, operation)), last]


def _code(problem: PhraseProblem, operation: str, *, imports: bool = True) -> str:
    before, between = _CODE[operation]
    start = IMPORT if imports and before.startswith("math.") else ""
    return f"{start}{PRINT}{before}{problem.a}{between}{problem.b}){TAIL}"


def _failing_call(
    problem: PhraseProblem, operation: str, habits: Habits, chance: random.Random
) -> str:
    code, kind = _code(problem, operation), chance.random()
    if kind < 0.01:
        return _call(LOOP)
    if kind < 0.3:
        return _call(code, end=BAD_CALL_END)
    if code.startswith(IMPORT) and kind < 0.85:
        without = _code(problem, operation, imports=False)
        return _call(f"{TRY}{without}{EXCEPT}" if chance.random() < habits.swallow else without)
    return _call(code.removesuffix(TAIL))  # a bracket is missing


def _call(code: str, *, end: str = CALL_END) -> str:
    return f"{CALL}{code}{end}{template.END}"


def answer_turn(value: str, *, twice: bool) -> str:
    """The last turn of a demonstration: what the tool printed, as the answer."""
    boxed = f"{ANSWER}{value}{ANSWER_END}"
    return f"{boxed}{AGAIN}{value}{ANSWER_END}{template.END}" if twice else boxed + template.END


def write_files(directory: Path, demonstrations: int, seed: int) -> None:
    """The splits as problem files, and demonstrations of the training problems."""
    sets, chance = splits(seed), random.Random(seed)  # noqa: S311
    directory.mkdir(parents=True, exist_ok=True)
    for name in ("train", "validation", "test"):
        rows = [{"problem": p.question, "answer": p.answer} for p in getattr(sets, name)]
        _write_lines(directory / f"{name}.jsonl", rows)
    shown = chance.choices(sets.train, k=demonstrations)
    played = [{"problem": p.question, "turns": demonstration(p, Habits(), chance)} for p in shown]
    _write_lines(directory / "demonstrations.jsonl", played)


def _write_lines(path: Path, rows: Sequence[object]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
