r"""Is the answer right? The last ``<answer>``, in it the last ``\boxed{}``, then compare.

Integers are compared here. Anything else is compared by math-verify, as a run of the service with
a hard limit of time and memory: symbolic comparison can take for ever, and its own time-outs rest
on signals that do not work outside the main thread. What could not be compared is
``unverifiable``, which is not ``wrong``.
"""

import json
import re
from typing import Literal

from rollyard import RollyardError
from rollyard_trainer.env import Runner

Verdict = Literal["correct", "wrong", "no_answer", "unverifiable"]

_INTEGER = re.compile(r"[+-]?\d+(?:\.0*)?")
_MISSING = 77  # exit code of the program below when the image has no math-verify

PROGRAM = f"""\
import json, sys
import sympy  # math-verify's own dependency, named so that the warm interpreter with it is taken
gold, given = json.load(sys.stdin)
try:
    from math_verify import parse, verify
except ImportError:
    sys.exit({_MISSING})
# No time-outs of its own: the run has one.
gold = parse("$" + gold + "$", parsing_timeout=None)
given = parse("$" + given + "$", parsing_timeout=None)
if not gold:
    sys.exit({_MISSING})
print(json.dumps(bool(given) and verify(gold, given, timeout_seconds=None)))
"""


def extract(text: str) -> str | None:
    r"""The final answer: in the last complete ``<answer>``, the last ``\boxed{}``; else None."""
    blocks = re.findall(r"<answer>((?:(?!<answer>).)*?)</answer>", text, re.DOTALL)
    if not blocks:
        return None
    start = blocks[-1].rfind("\\boxed{")
    if start < 0:
        return None
    start += len("\\boxed{")
    depth = 1
    for place in range(start, len(blocks[-1])):
        depth += {"{": 1, "}": -1}.get(blocks[-1][place], 0)
        if depth == 0:
            return blocks[-1][start:place].strip()
    return None


def as_integer(text: str) -> int | None:
    """The integer that the text is, with thousands separators, dollar signs or .0; else None."""
    plain = re.sub(r"(?<=\d),(?=\d{3}(?!\d))|\\[,!]|[$\s]", "", text)
    return int(plain.partition(".")[0]) if _INTEGER.fullmatch(plain) and len(plain) < 4000 else None


async def check(text: str, gold: str, run: Runner | None = None) -> Verdict:
    """Compare the answer in ``text``, all that the policy wrote, with ``gold``.

    Args:
        run: Compares what is no integer; None: such answers are unverifiable.
    """
    given = extract(text)
    if given is None:
        return "no_answer"
    if given == gold.strip():
        return "correct"
    left, right = as_integer(given), as_integer(gold)
    if left is not None and right is not None:
        return "correct" if left == right else "wrong"
    if run is None:
        return "unverifiable"
    try:
        result = await run(PROGRAM, json.dumps([gold, given]))
    except RollyardError:
        return "unverifiable"
    if not result.ok or result.stdout.strip() not in ("true", "false"):
        return "unverifiable"
    return "correct" if result.stdout.strip() == "true" else "wrong"


def reward(verdict: Verdict) -> float | None:
    """1 or 0 (equation 3); None for unverifiable: the rollout leaves its group."""
    return None if verdict == "unverifiable" else float(verdict == "correct")
