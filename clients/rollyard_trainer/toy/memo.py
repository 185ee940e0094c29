"""Runs each distinct program once, and a share of the repetitions again to prove it may."""

import asyncio
import random

from rollyard import RunResult
from rollyard_trainer.env import Runner


class Memo:
    """A runner that remembers results: the toy's programs are deterministic and few are distinct.

    Args:
        run: Runs a program that is new, or is to be checked.
        recheck: Share of known programs to run again; 1: remember nothing.

    ``calls``, ``executed`` and ``mismatched`` count; a mismatch means that a program's result
    changed (it was not deterministic, or the machine was so slow that it ran out of time).
    """

    def __init__(self, run: Runner, *, recheck: float = 0.01, seed: int = 0) -> None:
        self._run, self._recheck = run, recheck
        self._chance = random.Random(seed)  # noqa: S311
        self._known: dict[tuple[str, str], asyncio.Task[RunResult]] = {}
        self.calls = self.executed = self.mismatched = 0

    async def __call__(self, code: str, stdin: str) -> RunResult:
        self.calls += 1
        key = (code, stdin)
        known = self._known.get(key)
        if known is None or self._recheck >= 1:
            self.executed += 1
            known = self._known[key] = asyncio.ensure_future(self._run(code, stdin))
            try:
                result = await asyncio.shield(known)
            except BaseException:
                self._known.pop(key, None)
                raise
            if result.is_infra:
                self._known.pop(key, None)
            return result
        first = await asyncio.shield(known)
        if self._chance.random() < self._recheck:
            self.executed += 1
            again = await self._run(code, stdin)
            if not again.is_infra and _shown(again) != _shown(first):
                self.mismatched += 1
        return first


def _shown(result: RunResult) -> tuple[str, str, str]:
    return result.outcome, result.stdout, result.stderr.rstrip().rpartition("\n")[2]
