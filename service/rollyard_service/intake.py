"""From a body's bytes to runs that the queue takes: the one place where input is validated."""

import secrets
from collections.abc import Sequence
from typing import NamedTuple

from pydantic import BaseModel, ValidationError

from rollyard.types import BatchRequest, FieldProblem, RunRequest
from rollyard_queue.records import QueuedRun
from rollyard_service.ceilings import Ceilings
from rollyard_service.refusal import invalid
from rollyard_service.wire import WireRun, digest_of, read_batch, read_run, written

MAX_PROBLEMS = 64
"""Problems named in one answer; more would only repeat them."""
MAX_TEXT_CHARS = 300
"""Characters of a field path or message: both may quote what the caller sent."""


class AcceptedRun(NamedTuple):
    """A valid run, and how long its caller's answer may take."""

    queued: QueuedRun
    patience_s: float


class Intake:
    """Validates requests against the wire contract and this server's ceilings."""

    def __init__(self, *, ceilings: Ceilings, max_wait_s: float, slack_s: float) -> None:
        self.ceilings = ceilings
        self._max_wait_s = max_wait_s
        self._slack_s = slack_s

    def run(self, body: bytes) -> AcceptedRun:
        """Take one RunRequest.

        Raises:
            Refusal: 422, with every malformed field named.
        """
        if (quick := read_run(body, self.ceilings)) is not None:
            return self._taken(quick)[0]
        return self._accept([_validated(RunRequest, body)], prefix="")[0]

    def batch(self, body: bytes) -> list[AcceptedRun]:
        """Take one BatchRequest; runs in the order of the request.

        Raises:
            Refusal: 422, with every malformed field named, such as ``runs.3.limits.timeout_s``.
        """
        if (quick := read_batch(body, self.ceilings)) is not None:
            return self._taken(quick)
        return self._accept(_validated(BatchRequest, body).runs, prefix="runs.{}.")

    def accept(self, runs: Sequence[RunRequest]) -> list[AcceptedRun]:
        """Take runs that were made here, for another interface.

        Raises:
            Refusal: 422, a limit is above the server's maximum.
        """
        return self._accept(runs, prefix="runs.{}.")

    def _accept(self, runs: Sequence[RunRequest], *, prefix: str) -> list[AcceptedRun]:
        problems: list[FieldProblem] = []
        seen: set[str] = set()
        accepted: list[AcceptedRun] = []
        for index, run in enumerate(runs):
            update: dict[str, object] = {}
            if not self.ceilings.cover(run.limits):
                path = f"{prefix.format(index)}limits"
                problems += self.ceilings.problems(run.limits, path)
                update["limits"] = self.ceilings.lowered(run.limits)
            run_id = run.run_id or secrets.token_hex(16)
            if run.run_id is None:
                update["run_id"] = run_id
            if run_id in seen:
                message = f"{run_id!r} is already the id of an earlier run of this batch"
                problems.append(
                    FieldProblem(field=f"{prefix.format(index)}run_id", message=message)
                )
            seen.add(run_id)
            digest = b"" if run.run_id is None or problems else digest_of(run)
            run = run.model_copy(update=update) if update else run
            accepted.append(self._encoded(run, run_id, digest))
        if problems:
            raise invalid(problems[:MAX_PROBLEMS])
        return accepted

    def _taken(self, runs: Sequence[WireRun]) -> list[AcceptedRun]:
        """The same for runs that msgspec read, of which nothing is left to check."""
        wait_s = self._max_wait_s + self._slack_s
        accepted: list[AcceptedRun] = []
        for run in runs:
            run_id, deadline_s, priority = run.run_id or "", run.deadline_s, run.priority
            payload, digest = written(run)
            if deadline_s is None:
                queued = QueuedRun(run_id, payload, run.job, None, priority, digest)
                accepted.append(AcceptedRun(queued, wait_s + run.limits.timeout_s))
            else:
                queued = QueuedRun(run_id, payload, run.job, _ms(deadline_s), priority, digest)
                accepted.append(self._with_deadline(queued, deadline_s, run.limits.timeout_s))
        return accepted

    def _encoded(self, run: RunRequest, run_id: str, digest: bytes) -> AcceptedRun:
        payload, deadline_s = run.model_dump_json().encode(), run.deadline_s
        expires_in_ms = None if deadline_s is None else _ms(deadline_s)
        queued = QueuedRun(run_id, payload, run.job, expires_in_ms, run.priority, digest)
        return self._with_deadline(queued, deadline_s, run.limits.timeout_s)

    def _with_deadline(
        self, queued: QueuedRun, deadline_s: float | None, timeout_s: float
    ) -> AcceptedRun:
        wait_s = self._max_wait_s if deadline_s is None else min(self._max_wait_s, deadline_s)
        return AcceptedRun(queued, wait_s + self._slack_s + timeout_s)


def _ms(deadline_s: float) -> int:
    return max(1, round(deadline_s * 1000))


def _validated[M: BaseModel](model: type[M], body: bytes) -> M:
    try:
        # Strict: in JSON, "5" is not a number, 1 is not text, and true is not 1.
        return model.model_validate_json(body, strict=True)
    except ValidationError as error:
        raise invalid(problems_of(error)) from None  # the original quotes the caller's input


def problems_of(error: ValidationError) -> list[FieldProblem]:
    """What is malformed, field by field, bounded and printable."""
    details = error.errors(include_url=False, include_context=False, include_input=False)
    return [
        FieldProblem(
            field=".".join(_printable(str(part)) for part in detail["loc"])[:MAX_TEXT_CHARS],
            message=_printable(detail["msg"].removeprefix("Value error, "))[:MAX_TEXT_CHARS],
        )
        for detail in details[:MAX_PROBLEMS]
    ]


def _printable(text: str) -> str:
    """Escape control characters: field names come from the caller and end up in terminals."""
    return text if text.isprintable() else text.encode("unicode_escape").decode()
