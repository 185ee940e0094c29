"""What is kept of one stream of a program: its head and its tail, with a bound."""

_PARTIAL_MAX = 3  # bytes of a UTF-8 sequence that a cut can leave behind


class KeptOutput:
    """Takes all bytes, keeps at most ``limit``: the first half and the last."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.total = 0
        self._head = bytearray()
        self._tail = bytearray()
        self._head_room = limit - limit // 2
        self._tail_room = limit // 2

    def add(self, data: bytes) -> None:
        self.total += len(data)
        if self._head_room:
            taken = data[: self._head_room]
            self._head += taken
            self._head_room -= len(taken)
            data = data[len(taken) :]
        if data:
            self._tail += data
            # Cut seldom, in large steps: memory stays below twice the bound.
            if len(self._tail) > 2 * self._tail_room + 65536:
                del self._tail[: len(self._tail) - self._tail_room]

    @property
    def truncated(self) -> bool:
        return self.total > self.limit

    def text(self) -> str:
        """The kept bytes as text, undecodable ones as U+FFFD, a marker line where some miss."""
        if not self.truncated:
            self._head += self._tail
            return self._head.decode("utf-8", "replace")
        tail = bytes(self._tail[len(self._tail) - self._tail_room :]) if self._tail_room else b""
        head = _without_partial_end(bytes(self._head))
        tail = _without_partial_start(tail)
        dropped = self.total - len(head) - len(tail)
        return "".join(
            (
                head.decode("utf-8", "replace"),
                f"\n[... {dropped} bytes dropped ...]\n",
                tail.decode("utf-8", "replace"),
            )
        )


def _without_partial_end(data: bytes) -> bytes:
    for back in range(1, min(_PARTIAL_MAX, len(data)) + 1):
        byte = data[-back]
        if byte < 0x80:
            break
        if byte >= 0xC0:  # a lead byte: complete only if all its followers are there
            length = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return data[:-back] if back < length else data
    return data


def _without_partial_start(data: bytes) -> bytes:
    start = 0
    while start < min(_PARTIAL_MAX, len(data)) and 0x80 <= data[start] < 0xC0:
        start += 1
    return data[start:]
