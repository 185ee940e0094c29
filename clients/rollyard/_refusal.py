"""An answer that is not 200, read and understood."""

import json
import re
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import cast

from rollyard._retry import error_class, parse_retry_after
from rollyard._transport import Answer
from rollyard.errors import Overloaded, StatusError

MAX_ERROR_BYTES = 1 << 20  # a batch's problems are listed run by run
_MEMBER = re.compile(r"^(?:body\.)?runs\.(\d+)(?:\.(.*))?$")


@dataclass(frozen=True, slots=True)
class Refusal:
    """What an error answer says. Read leniently: a proxy in between may have written it."""

    status: int
    message: str
    retry_after_s: float | None = None
    request_id: str = ""
    problems: dict[int, list[str]] = field(default_factory=dict[int, list[str]])
    """Place in the batch to what is wrong with that run."""
    kind: str = ""
    """The gateway's own word for it, as ``ErrorResponse.error`` has them."""

    def error(self, member: int | None = None) -> StatusError:
        """The exception for the whole request, or for one member of its batch."""
        message = self.message
        if member is not None and member in self.problems:
            message = "; ".join(self.problems[member])
        # A 503 says that nobody gets in: the queue is full, or it is gone. These are two things.
        full = self.status == 503 and self.kind == "overloaded"
        return (Overloaded if full else error_class(self.status))(
            f"{self.status}: {message}" if message else f"HTTP status {self.status}",
            status=self.status,
            request_id=self.request_id,
            retry_after_s=self.retry_after_s,
        )


async def read_refusal(answer: Answer) -> Refusal:
    """Read the body of an error answer (at most 1 MiB of it).

    Raises:
        TransportFault: it broke off.
    """
    body = bytearray()
    async with aclosing(answer.chunks()) as chunks:
        async for chunk in chunks:
            body += chunk
            if len(body) > MAX_ERROR_BYTES:
                break
    fields = _fields(bytes(body))
    named = fields.get("retry_after_s")
    retry_after = parse_retry_after(answer.headers)
    if isinstance(named, int | float) and not isinstance(named, bool) and named >= 0:
        retry_after = float(named)  # finer than the header's whole seconds
    return Refusal(
        status=answer.status,
        message=str(fields.get("message") or body[:500].decode(errors="replace").strip()),
        kind=str(fields.get("error") or ""),
        retry_after_s=retry_after,
        request_id=str(fields.get("request_id") or answer.headers.get("x-request-id", "")),
        problems=_problems(fields.get("problems")),
    )


def _fields(body: bytes) -> dict[str, object]:
    try:
        parsed: object = json.loads(body)
    except ValueError:
        return {}
    return cast("dict[str, object]", parsed) if isinstance(parsed, dict) else {}


def _problems(listed: object) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for problem in cast("list[object]", listed) if isinstance(listed, list) else []:
        if not isinstance(problem, dict):
            continue
        entry = cast("dict[str, object]", problem)
        match = _MEMBER.match(str(entry.get("field", "")))
        if match:
            where = match[2] or "run"
            found.setdefault(int(match[1]), []).append(f"{where}: {entry.get('message', '')}")
    return found
