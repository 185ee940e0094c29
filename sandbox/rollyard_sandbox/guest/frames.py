"""Length-prefixed messages on a stream socket: four bytes, big-endian, then the body."""

import socket
import struct

_LENGTH = struct.Struct(">I")
MAX_FRAME_BYTES = 512 * 1024 * 1024


def send_frame(sock: socket.socket, body: bytes) -> None:
    sock.sendall(_LENGTH.pack(len(body)) + body)


def recv_frame(sock: socket.socket) -> bytes | None:
    """Return the next body, or None at end of file.

    Raises:
        ValueError: the length is out of bounds, so the stream is out of step.
    """
    head = _recv_exactly(sock, _LENGTH.size)
    if head is None:
        return None
    (length,) = _LENGTH.unpack(head)
    if length > MAX_FRAME_BYTES:
        raise ValueError(f"frame of {length} bytes")
    return _recv_exactly(sock, length)


def _recv_exactly(sock: socket.socket, length: int) -> bytes | None:
    first = sock.recv(length) if length else b""
    if len(first) == length:
        return first
    parts = [first]
    missing = length - len(first)
    while missing and parts[-1]:
        parts.append(sock.recv(min(missing, 1 << 20)))
        missing -= len(parts[-1])
    return None if missing else b"".join(parts)
