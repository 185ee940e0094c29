"""Messages between a worker and a slot's PID 1, over a SOCK_SEQPACKET pair.

PID 1 is forked into every program, so whatever it ever held a program can find (in frames, in
freed memory). It therefore sees numbers and descriptors only: code, input, output, file names and
contents pass it by, in a sealed file that the child reads and in pipes that the worker holds.
"""

import struct

ORDER = struct.Struct("<QIB")
"""disk_bytes, pids, flags; with the descriptors job, stdin, stdout, stderr and, to FETCH, a file
for what is fetched."""

COMPILE, COMPILED, FETCH = 1, 2, 4
"""Run the compiler and keep the box; run what it made; collect files afterwards."""

REPORT = struct.Struct("<BBBiQQ")
"""begun, stopped, clean, wait status, wall µs, CPU µs of all processes."""

NOT_BEGUN, BEGUN, REFUSED = 0, 1, 2
"""How far the child came: our fault; the program's turn; the request's files cannot be written."""

STOP = b"stop"
READY = b"ready"
FAULT = b"fault:"
MAX_MESSAGE_BYTES = 8192
MAX_FETCHED_BYTES = 16 * 1024 * 1024
MAX_FETCHED_FILES = 64
