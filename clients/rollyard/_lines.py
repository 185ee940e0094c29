"""NDJSON out of a stream of bytes."""


class LineSplitter:
    """Cuts a stream into lines, at ``\\n`` only.

    JSON strings may hold every other character at which str.splitlines would cut. Empty lines are
    keep-alives and dropped. A last line without ``\\n`` never comes out: what broke off is no
    answer. The cost is linear in the bytes, however a line of megabytes is cut into chunks.
    """

    __slots__ = ("_parts",)

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def feed(self, chunk: bytes) -> list[bytes]:
        """Take the next piece of the stream; return the lines it completes."""
        first, *rest = chunk.split(b"\n")
        if not rest:
            self._parts.append(chunk)
            return []
        self._parts.append(first)
        lines = [b"".join(self._parts), *rest[:-1]]
        self._parts = [rest[-1]]
        return [line for line in lines if line]
