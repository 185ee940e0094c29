"""What to watch: tool hygiene, ways to game the selection, entropy, collapse.

A penalty, or a selection by one, can be gamed: calls that compute nothing dilute the error share,
and ``except: pass`` turns an error into a success. Both are counted here.
"""

import ast
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rollyard_trainer.roc import ERRORS, ToolCall
from rollyard_trainer.trajectory import Trajectory


def is_swallowed(code: str) -> bool:
    """True when the program hides exceptions: a handler of everything that does not raise."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler):
            everything = node.type is None or (
                isinstance(node.type, ast.Name) and node.type.id in ("Exception", "BaseException")
            )
            if everything and not any(isinstance(n, ast.Raise) for n in ast.walk(node)):
                return True
    return False


def is_vacuous(code: str) -> bool:
    """True when the program computes nothing: no operator, call (but print), loop or definition."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp | ast.Compare | ast.For | ast.While | ast.comprehension
                      | ast.FunctionDef | ast.ClassDef):  # fmt: skip
            return False
        if isinstance(node, ast.Call) and not (
            isinstance(node.func, ast.Name) and node.func.id == "print"
        ):
            return False
    return True


def describe(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Means over rollouts; those that the service or the verifier failed are left out.

    ``error_share`` is that of figure 4: failed calls among all calls of correct rollouts.
    ``error_share_honest`` leaves out vacuous calls and counts swallowed exceptions as failed.
    ``format_share``: correct rollouts without exactly one answer. Shares of nothing are NaN.
    """
    scored = [one for one in trajectories if one.reward is not None and one.stop != "infra"]
    correct = [one for one in scored if (one.reward or 0) > 0]
    made = [call for one in scored for call in one.calls]
    seen = [call for one in correct for call in one.calls]
    honest = [call for call in seen if not is_vacuous(call.code) or call.status != "ok"]
    return {
        "accuracy": _share(len(correct), len(scored)),
        "error_share": _share(sum(call.status in ERRORS for call in seen), len(seen)),
        "error_share_honest": _share(sum(_failed(call) for call in honest), len(honest)),
        "error_share_all": _share(sum(call.status in ERRORS for call in made), len(made)),
        "format_share": _share(sum(one.answers != 1 for one in correct), len(correct)),
        "tokens": _share(sum(one.written for one in scored), len(scored)),
        "calls": _share(len(made), len(scored)),
        "vacuous": _share(
            sum(call.status == "ok" and is_vacuous(call.code) for call in made), len(made)
        ),
        "swallowed": _share(sum(is_swallowed(call.code) for call in made), len(made)),
        "truncated": _share(sum(one.stop in ("length", "turns") for one in scored), len(scored)),
        "infra": _share(len(trajectories) - len(scored), len(trajectories)),
    }


def _failed(call: ToolCall) -> bool:
    return call.status in ERRORS or is_swallowed(call.code)


def _share(part: float, whole: int) -> float:
    return part / whole if whole else float("nan")


@dataclass(slots=True)
class CollapseGuard:
    """Says when to stop, by a rule on validation accuracy that is fixed before the run.

    Collapsed: below ``share`` of the best so far at ``patience`` evaluations in a row. The paper's
    policy collapsed after step 510 and nothing it tried helped, so the rule is to go back to
    :attr:`best_step` and stop.
    """

    share: float = 0.7
    patience: int = 2
    best: float = 0.0
    best_step: int = 0
    _below: int = field(default=0)

    def collapsed(self, step: int, accuracy: float) -> bool:
        """Note one evaluation; True when the run should end."""
        if accuracy > self.best:
            self.best, self.best_step = accuracy, step
        self._below = self._below + 1 if accuracy < self.share * self.best else 0
        return self._below >= self.patience


def forking_tokens(
    entropies: np.ndarray, ids: np.ndarray, *, share: float = 0.2
) -> list[tuple[int, float, int]]:
    """Tokens at which the policy hesitates: the top ``share`` of positions by entropy (paper §5.2).

    Args:
        entropies: (N,) in nats, of the distributions from which tokens were drawn.
        ids: (N,) the tokens drawn.

    Returns:
        (token id, mean entropy, count) of tokens drawn there, the most frequent first.
    """
    if not len(entropies):
        return []
    top = entropies >= np.quantile(entropies, 1 - share)
    found, counts = np.unique(ids[top], return_counts=True)
    order = np.argsort(-counts, kind="stable")
    return [
        (int(found[i]), float(entropies[top & (ids == found[i])].mean()), int(counts[i]))
        for i in order
    ]
