"""The floor: what any fork server must pay for a program. No jail, no queue, no HTTP.

Imports the same modules as the template, runs the program once (as the template warms up), then
for each run: fork, exec(compile(code)), flush, _exit, wait. Prints one JSON line.
Run with the interpreter of the guest image, so that the libraries are the same files.
"""

import gc
import importlib
import json
import os
import resource
import sys
import time


def main() -> None:
    code, modules, runs = sys.argv[1], sys.argv[2].split(), int(sys.argv[3])
    for module in modules:
        importlib.import_module(module)
    output = os.open(os.devnull, os.O_WRONLY)
    kept = os.dup(1)
    os.dup2(output, 1)
    exec(compile(code, "main.py", "exec"), {})  # noqa: S102
    sys.stdout.flush()
    gc.collect()
    gc.freeze()
    gc.disable()
    walls: list[float] = []
    before = _cpu_s()
    for _ in range(runs):
        started = time.perf_counter()
        pid = os.fork()
        if pid == 0:
            exec(compile(code, "main.py", "exec"), {"__name__": "__main__"})  # noqa: S102
            sys.stdout.flush()
            os._exit(0)
        os.waitpid(pid, 0)
        walls.append(time.perf_counter() - started)
    cpu_ms = (_cpu_s() - before) / runs * 1e3
    walls.sort()
    os.dup2(kept, 1)
    line = json.dumps({"cpu_ms": cpu_ms, "wall_p50_ms": walls[len(walls) // 2] * 1e3})
    os.write(1, line.encode() + b"\n")


def _cpu_s() -> float:
    used = 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(who)
        used += usage.ru_utime + usage.ru_stime
    return used


if __name__ == "__main__":
    main()
