"""A request's body, read within bounds before anything is made of it.

Protects against: bodies that are larger than allowed (whether they say so or arrive in chunks),
compressed ones, and small bodies that a JSON parser turns into gigabytes (``[],[],[],…`` takes
100 times its size as a tree, measured with pydantic-core 2.50).
"""

import re
from collections.abc import Mapping

from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive

from rollyard.types import FieldProblem
from rollyard_service.admission import Admission
from rollyard_service.refusal import invalid, too_large

DENSE_BYTES = 256 * 1024
"""Bodies up to this size are parsed as they are: at worst they take some tens of MB."""
MAX_STRUCTURE_BYTES = 1024 * 1024
"""Bytes outside strings. 1024 indented runs with every field have about half of it."""
MAX_STRINGS = 256 * 1024
"""Strings, names of fields included. 1024 runs with every field and 100 files each fit."""

_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)


class HeldBody:
    """A request's body as far as it counts among the bytes that this process holds."""

    __slots__ = ("_admission", "_headers", "_receive", "size")

    def __init__(
        self, admission: Admission, headers: Mapping[bytes, bytes], receive: Receive
    ) -> None:
        self._admission = admission
        self._headers = headers
        self._receive = receive
        self.size = 0
        """Bytes counted: all that is declared, or what has come."""

    def held(self) -> Receive:
        """Count the body from now on, at once where its size is declared; what to read it with.

        Raises:
            Refusal: 503, all bodies together would be too large.
        """
        size = declared_bytes(self._headers)
        if size or b"transfer-encoding" not in self._headers:
            self._hold(size)
            return self._receive
        return self._receive_counted

    def release(self) -> None:
        """The request is answered."""
        self._admission.release(self.size)
        self.size = 0

    async def _receive_counted(self) -> Message:
        message = await self._receive()
        self._hold(len(message.get("body", b"")))
        return message

    def _hold(self, size: int) -> None:
        self._admission.hold(size)
        self.size += size


async def read_body(headers: Mapping[bytes, bytes], receive: Receive, *, max_bytes: int) -> bytes:
    """Return the whole body of a request that HeldBody lets pass.

    Raises:
        Refusal: 413 above ``max_bytes`` (where no length was declared), 422 with a
            Content-Encoding or with more structure than any valid request has.
        ClientDisconnect: the caller went away while sending.
    """
    encoding = headers.get(b"content-encoding", b"").strip().lower()
    if encoding not in (b"", b"identity"):
        message = f"{encoding[:40].decode('latin-1')!r} is not supported; send the body as it is"
        raise invalid([FieldProblem(field="content-encoding", message=message)])
    chunks: list[bytes] = []
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        chunk: bytes = message.get("body", b"")
        size += len(chunk)
        if size > max_bytes:
            raise too_large(max_bytes)
        chunks.append(chunk)
        more = message.get("more_body", False)
    body = chunks[0] if len(chunks) == 1 else b"".join(chunks)
    if size > DENSE_BYTES and not has_sane_structure(body):
        message = f"more than {MAX_STRUCTURE_BYTES} bytes outside strings or {MAX_STRINGS} strings"
        raise invalid([FieldProblem(field="", message=message)])
    return body


def declared_bytes(headers: Mapping[bytes, bytes]) -> int:
    """What Content-Length says; 0 where it says nothing of use."""
    declared = headers.get(b"content-length", b"")
    return int(declared[:20]) if declared.isdigit() else 0


def has_sane_structure(body: bytes) -> bool:
    """True when a JSON text has few enough strings and bytes outside strings to be parsed.

    Stops at the first bound that is passed; a body of one large string costs one scan.
    """
    structure = end = 0
    for strings, match in enumerate(_STRING.finditer(body), start=1):
        structure += match.start() - end
        end = match.end()
        if structure > MAX_STRUCTURE_BYTES or strings > MAX_STRINGS:
            return False
    return structure + len(body) - end <= MAX_STRUCTURE_BYTES
