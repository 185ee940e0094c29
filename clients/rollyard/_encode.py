"""Runs as they travel.

Validating a request and writing it out costs 13 µs, and most calls of a client differ in their code
alone. So what else was asked for is validated and written once, and kept: the next such call costs
1 µs. Whatever is not plainly right takes the long way, which says what is wrong.
"""

import re
from typing import NamedTuple

from pydantic_core import PydanticSerializationError, to_json

from rollyard._call import PLAIN, Call, Options
from rollyard._request import make_request
from rollyard.errors import BadRequest
from rollyard.types import RUN_ID_PATTERN, Limits, RunRequest

KEPT = 256
_APART = {"run_id", "code", "deadline_s"}
_RUN_ID = re.compile(RUN_ID_PATTERN)
_MAX_DEADLINE_S = 86400  # as RunRequest has it
_PAGE = 4096


class _Shape(NamedTuple):
    """All fields but id, code, stdin and deadline, as JSON without its opening brace."""

    fields: bytes
    disk_bytes: int
    timeout_s: float


class Encoder:
    """Fills in what a call needs before it is sent."""

    def __init__(self) -> None:
        self._shapes: dict[object, _Shape] = {}

    def encode(self, call: Call) -> None:
        """Set payload, deadline and time limit.

        Raises:
            BadRequest: what was asked for is malformed.
            TypeError: an argument cannot be used at all.
        """
        if not isinstance(call.asked, RunRequest):
            if self._encode_quickly(call, call.asked):
                return
            run_id = None if call.own_id else call.run_id
            call.asked = make_request(call.asked, job=call.job, run_id=run_id, options=call.options)
        request = call.asked
        call.deadline_s = request.deadline_s
        call.timeout_s = request.limits.timeout_s
        # Unset fields are left to the service; a set one travels even when equal to the default.
        fields = request.model_dump_json(exclude_unset=True, exclude=_APART).encode()
        call.payload = _payload(call, to_json(request.code), fields[1:])

    def _encode_quickly(self, call: Call, code: str) -> bool:
        options = call.options
        if options.files or options.fetch_files or not _plainly_right(call, code):
            return False
        shape = self._shape(call.job, options)
        # A character has up to four bytes in UTF-8; RunRequest counts exactly.
        if shape is None or 4 * len(code) + _PAGE > shape.disk_bytes:
            return False
        try:
            text = to_json(code)
            if options.stdin is not None:
                text += b',"stdin":' + to_json(options.stdin)
        except PydanticSerializationError:  # a lone surrogate
            return False
        call.deadline_s = options.deadline_s
        call.timeout_s = shape.timeout_s
        call.payload = _payload(call, text, shape.fields)
        return True

    def _shape(self, job: str, options: Options) -> _Shape | None:
        key: object = job
        if options is not PLAIN:
            limits = options.limits
            if limits is None:
                told: object = None
            elif isinstance(limits, Limits):
                told = limits.model_dump_json(exclude_unset=True)
            elif isinstance(limits, dict):  # pyright: ignore[reportUnnecessaryIsInstance]
                told = tuple(limits.items())
            else:
                return None
            key = (job, told, *options[4:10])
        try:
            shape = self._shapes.get(key)
        except TypeError:  # unhashable, hence malformed
            return None
        if shape is None:
            common = options._replace(stdin=None, deadline_s=None)
            try:
                request = make_request("", job=job, options=common)
            except BadRequest:  # the long way names all that is wrong
                return None
            fields = request.model_dump_json(exclude_unset=True, exclude=_APART).encode()
            shape = _Shape(fields[1:], request.limits.disk_bytes, request.limits.timeout_s)
            if len(self._shapes) >= KEPT:
                self._shapes.clear()
            self._shapes[key] = shape
        return shape


def _plainly_right(call: Call, code: str) -> bool:
    stdin, deadline_s = call.options.stdin, call.options.deadline_s
    return (
        type(code) is str
        and (stdin is None or type(stdin) is str)
        and (call.own_id or (type(call.run_id) is str and bool(_RUN_ID.fullmatch(call.run_id))))
        and (
            deadline_s is None
            or (type(deadline_s) in (int, float) and 0 < deadline_s <= _MAX_DEADLINE_S)
        )
    )


def _payload(call: Call, code: bytes, fields: bytes) -> bytes:
    # An id has nothing to escape. A request always has more fields: at least its job.
    return b'{"run_id":"%b","code":%b,%b' % (call.run_id.encode(), code, fields)
