"""Messages between a worker and a slot's PID 1, over a SOCK_SEQPACKET pair.

PID 1 is forked into every program, so whatever it ever held a program can find (in frames, in
freed memory). It therefore sees numbers and descriptors only: code, input, output, file names and
contents pass it by, in a sealed file that the child reads and in pipes that the worker holds.
"""

import struct

ORDER = struct.Struct("<QQIB")
"""disk_bytes, data_bytes (0 where a control group limits memory), pids, flags; with the
descriptors job, stdin, stdout, stderr and, to FETCH, a file for what is fetched."""

COMPILE, COMPILED, FETCH = 1, 2, 4
"""Run the compiler and keep the box; run what it made; collect files afterwards."""

REPORT = struct.Struct("<BBBiQQQ")
"""begun, stopped, clean, wait status, wall µs, CPU µs of the processes that were waited for, CPU
µs of PID 1 itself."""

NOT_BEGUN, BEGUN, REFUSED = 0, 1, 2
"""How far the child came: our fault; the program's turn; the request's files cannot be written."""

HELLO, ADOPTED, READY = b"hello", b"adopted", b"ready"
"""PID 1 is there; it is in its control group; it stands behind all its walls."""
STOP = b"stop"
FAULT = b"fault:"
MAX_MESSAGE_BYTES = 8192
MAX_FETCHED_BYTES = 8 * 1024 * 1024
MAX_FETCHED_FILES = 64
