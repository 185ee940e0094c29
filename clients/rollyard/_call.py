"""One run on its way: what the caller asked for, as it is sent, and where the answer goes."""

import asyncio
import base64
import uuid
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, TypedDict

from pydantic import ValidationError

from rollyard.errors import BadRequest
from rollyard.types import Language, Limits, RunRequest, RunResult, Template

if TYPE_CHECKING:
    from rollyard._exchange import Exchange

# Seconds a run without deadline_s may wait in the queue before its silence is taken for a fault.
# Only a fault nobody noticed is found this way (TCP keepalive finds dead peers), so it is long.
QUEUE_ALLOWANCE_S = 600.0
# Start-up, delivery to another worker after a loss, and the way back.
MARGIN_S = 60.0
_RUN_ID = {"run_id"}
_DEFAULTS: dict[str, object] = {
    "template": "auto",
    "on_output_limit": "truncate",
    "language": "python",
    "isolation": "warm",
    "echo_last": False,
}
MIN_DEADLINE_S = 0.001  # the service takes no 0


class LimitsDict(TypedDict, total=False):
    """:class:`rollyard.Limits` as a dict; what is absent is at the service's default."""

    timeout_s: float
    compile_timeout_s: float
    cpu_s: float | None
    memory_bytes: int
    disk_bytes: int
    pids: int
    output_bytes: int


RunLike = str | RunRequest | Mapping[str, object]
"""A program, a request, or a dict with the fields of a request (files may be bytes)."""


class Call:
    """One run that somebody waits for."""

    __slots__ = (
        "_request",
        "_started",
        "exchange",
        "future",
        "own_id",
        "payload",
        "run_id",
        "silence_s",
    )

    def __init__(self, request: RunRequest) -> None:
        self.own_id = request.run_id is None
        """The id was made here, so nobody else can wait for this run."""
        self.run_id = request.run_id if request.run_id is not None else uuid.uuid4().hex
        self.payload = _payload(request, self.run_id)
        self._request = request if request.deadline_s is not None else None
        self._started = asyncio.get_running_loop().time()
        queue_s = request.deadline_s if request.deadline_s is not None else QUEUE_ALLOWANCE_S
        self.silence_s = queue_s + request.limits.timeout_s + MARGIN_S
        """Silence in seconds that this run explains: it may be queued, then running."""
        self.future: asyncio.Future[RunResult] = asyncio.get_running_loop().create_future()
        self.exchange: Exchange | None = None
        """The HTTP exchange that carries it, once it left the window."""

    def payload_now(self) -> bytes:
        """The payload, with what is left of its deadline: a retry must not prolong it.

        Past it the service still decides: the run may have started in time.
        """
        request = self._request
        if request is None or request.deadline_s is None:
            return self.payload
        waited_s = asyncio.get_running_loop().time() - self._started
        left_s = max(MIN_DEADLINE_S, request.deadline_s - waited_s)
        return _payload(request.model_copy(update={"deadline_s": left_s}), self.run_id)

    @property
    def answered(self) -> bool:
        """True when a result came; False while it waits, when it failed, or was given up."""
        future = self.future
        return future.done() and not future.cancelled() and future.exception() is None


def _payload(request: RunRequest, run_id: str) -> bytes:
    # Unset fields are left to the service; a set one travels even when equal to the default.
    fields = request.model_dump_json(exclude_unset=True, exclude=_RUN_ID)
    return f'{{"run_id":"{run_id}",{fields[1:]}'.encode()  # an id has nothing to escape


def make_request(
    code: str,
    *,
    job: str,
    stdin: str | None = None,
    limits: Limits | LimitsDict | None = None,
    files: Mapping[str, str | bytes] | None = None,
    fetch_files: Iterable[str] = (),
    template: Template = "auto",
    on_output_limit: str = "truncate",
    language: Language = "python",
    isolation: str = "warm",
    echo_last: bool = False,
    run_id: str | None = None,
    deadline_s: float | None = None,
) -> RunRequest:
    """Validate the arguments of ``run``.

    Raises:
        BadRequest: an argument is malformed; the message names it.
    """
    wanted = [fetch_files] if isinstance(fetch_files, str) else list(fetch_files)
    given: dict[str, object] = {
        "stdin": stdin,
        "limits": limits,
        "files": files or None,
        "fetch_files": wanted or None,
        "template": template,
        "on_output_limit": on_output_limit,
        "language": language,
        "isolation": isolation,
        "echo_last": echo_last,
        "run_id": run_id,
        "deadline_s": deadline_s,
    }
    # Spares most runs most fields, and an older service those that it does not know.
    fields = {name: value for name, value in given.items() if value != _DEFAULTS.get(name)}
    fields |= {"code": code, "job": job}
    return _validated(fields, where="")


def request_of(item: RunLike, *, job: str, index: int) -> RunRequest:
    """Validate one item of a batch; ``job`` is for those that name none.

    Raises:
        BadRequest: the item is malformed; the message names its place and field.
    """
    where = f"runs.{index}."
    if isinstance(item, str):
        return _validated({"code": item, "job": job}, where=where)
    if isinstance(item, RunRequest):
        return item if "job" in item.model_fields_set else item.model_copy(update={"job": job})
    return _validated({"job": job, **item}, where=where)


def _validated(fields: dict[str, object], *, where: str) -> RunRequest:
    files = fields.get("files")
    if isinstance(files, Mapping):
        fields["files"] = {path: _wire_content(content) for path, content in files.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    try:
        return RunRequest.model_validate(fields)
    except ValidationError as error:
        problems = [
            f"{where}{'.'.join(str(part) for part in problem['loc'])}: {problem['msg']}"
            for problem in error.errors(include_url=False, include_input=False)
        ]
        raise BadRequest("; ".join(problems), status=422) from error


def _wire_content(content: object) -> object:
    if isinstance(content, bytes | bytearray):
        return {"base64": base64.b64encode(content).decode()}
    return content
