"""The worker's self-check: does each wall really stand on this machine?

A program that a hostile model could write is run in a real slot, and what it managed is compared
with what it must not. The same facts are ``rollyard doctor``'s table.
"""

import platform
from dataclasses import dataclass
from typing import Any

import msgspec

from rollyard_queue.records import LimitsSpec, RunSpec
from rollyard_sandbox.cgroups import Cgroups
from rollyard_sandbox.execution import Execution
from rollyard_sandbox.guest.filter import ARCHITECTURES
from rollyard_sandbox.pool import Pool
from rollyard_sandbox.reports import Evidence, SlotReport
from rollyard_sandbox.slots import SlotLost

_PROGRAM = r"""
import ctypes, errno, json, os, resource, socket
libc = ctypes.CDLL(None, use_errno=True)
def refused(call, *arguments):
    failed = libc.syscall(call, *arguments) == -1
    return failed and ctypes.get_errno() in (errno.EPERM, errno.ENOSYS)
def fails(action):
    try:
        action()
    except OSError:
        return True
    return False
def refusal(action):
    try:
        action()
    except OSError as error:
        return error.errno
lines = open("/proc/self/status").read().splitlines()
status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
processes = [name for name in os.listdir("/proc") if name.isdigit()]
places = ("/x", "/usr/x", "/opt/python/x", "/etc/passwd")
readonly = all(fails(lambda p=p: open(p, "w")) for p in places)
sets = ("CapEff", "CapPrm", "CapInh", "CapBnd", "CapAmb")
interfaces = [line.split(":")[0].strip() for line in open("/proc/self/net/dev") if ":" in line]
print(json.dumps({
    "user": os.getuid() != 0 and os.geteuid() != 0 and fails(lambda: os.setuid(0)),
    "mount": readonly and fails(lambda: os.listdir("/root")) and not os.path.exists("/sys"),
    "pid": len(processes) == 1 and os.getppid() == 1,
    "ipc": os.listdir("/dev/shm") == [],
    "uts": socket.gethostname() == "rollyard",
    "network": set(interfaces) <= {"lo"}
        and fails(lambda: socket.create_connection(("192.0.2.1", 9), 0.5)),
    "capabilities": all(int(status[name], 16) == 0 for name in sets),
    "no_new_privileges": status["NoNewPrivs"] == "1",
    "seccomp_tree": int(status.get("Seccomp_filters", "0")) >= 1 and refused(CALLS['bpf'], 0, 0, 0),
    "seccomp_slot": int(status.get("Seccomp_filters", "0")) >= 2
        and refused(CALLS['unshare'], 0x10000000) and refused(CALLS['mount'], 0, 0, 0, 0, 0)
        and refused(CALLS['io_uring_setup'], 1, 0),
    "landlock": refusal(lambda: socket.create_connection(("192.0.2.1", 9), 0.5)) == errno.EACCES,
    "descriptors": all(fails(lambda n=n: os.fstat(n)) for n in range(3, 256)),
    "rlimits": resource.getrlimit(resource.RLIMIT_CORE)[1] == 0
        and resource.getrlimit(resource.RLIMIT_NOFILE)[1] <= 1024
        and resource.getrlimit(resource.RLIMIT_NPROC)[1] <= 64,
    "tmpfs": os.statvfs("/box/work").f_blocks * os.statvfs("/box/work").f_frsize <= (64 << 20),
    "warm_memory": any("rollyard-warm" in line for line in open("/proc/self/maps")),
    "environment": not any("ROLLYARD" in k or "TOKEN" in k or "KEY" in k for k in os.environ),
}))
"""
_MEMORY_HOG = "b = bytearray(256 << 20)\nfor i in range(0, len(b), 4096): b[i] = 1\n"
_FORK_FLOOD = """
import os, time
born = 0
try:
    for _ in range(100):
        if os.fork() == 0:
            time.sleep(30)
        born += 1
except OSError:
    pass
print(born)
"""

WHAT = {
    "user": "user namespace: the program is an unprivileged user, mapped to unused host ids",
    "mount": "mount namespace: read-only root of what the guest needs, no host path, no /sys",
    "pid": "PID namespace: the program sees only its own processes",
    "ipc": "IPC namespace and private /dev/shm",
    "uts": "UTS namespace",
    "network": "network namespace: nothing is reachable, and refused at once",
    "capabilities": "no capability in any set",
    "no_new_privileges": "no new privileges",
    "seccomp_tree": "system-call filter of the whole tree",
    "seccomp_slot": "stricter system-call filter of the slot",
    "landlock": "Landlock, a second wall: no writing outside the box, no TCP (Linux 6.7 and newer)",
    "descriptors": "no descriptor but 0, 1 and 2",
    "rlimits": "resource limits",
    "tmpfs": "private file system with a size",
    "environment": "environment scrubbed",
    "warm_memory": "forks share the template's memory without copying page tables (speed only; "
    "needs a C compiler, cc, on PATH when the worker first starts)",
    "cgroup_memory": "control group: memory limit of the whole run, kills told apart",
    "cgroup_pids": "control group: processes of the whole run",
}


SPEED = frozenset({"warm_memory"})  # no wall: without it all is as safe, and slower
OPTIONAL = SPEED | {"landlock"}
# What it costs to do without these.
COSTS = {
    # docs/benchmarks.md, "What a run costs, part by part"
    "warm_memory": "as safe, but a run with science libraries takes three to five times the CPU, "
    "and an idle slot 128 MB for 2; install a C compiler (cc) and start the worker again",
    "landlock": "the walls that it doubles stand, with no second one behind them; Linux 6.7 has it",
}


@dataclass(frozen=True)
class Layer:
    name: str
    works: bool
    detail: str = ""

    @property
    def required(self) -> bool:
        """False for a second wall, behind which the first one stands, and for speed."""
        return self.name not in OPTIONAL

    @property
    def cost(self) -> str:
        """What it costs to do without it; "" where a worker refuses to."""
        return COSTS.get(self.name, "")

    @property
    def what(self) -> str:
        return WHAT[self.name]


_MEMORY_BYTES, _DISK_BYTES = 128 << 20, 64 << 20


async def _run(pool: Pool, template: str, code: str, pids: int) -> tuple[SlotReport, Evidence]:
    limits = LimitsSpec(
        timeout_s=20.0, cpu_s=None, memory_bytes=_MEMORY_BYTES, disk_bytes=_DISK_BYTES, pids=pids,
        output_bytes=65536,
    )  # fmt: skip
    spec = RunSpec(
        run_id="probe", code=code, stdin=None, files={}, fetch_files=[], limits=limits,
        template=template, on_output_limit="truncate", job="probe",
    )  # fmt: skip
    slot = await pool.acquire(template, _DISK_BYTES)
    try:
        return await Execution(slot, spec).run()
    finally:
        await pool.release(slot)


async def probe(pool: Pool, cgroups: Cgroups | None, template: str) -> list[Layer]:
    """Run the checks in a slot of ``template``.

    Raises:
        SlotLost, JailError, OSError: no slot can be made here at all.
    """
    facts = await _facts(pool, template)
    layers = [Layer(name, bool(works)) for name, works in facts.items()]
    if cgroups is None:
        return [*layers, Layer("cgroup_memory", False), Layer("cgroup_pids", False)]
    return [*layers, await _memory(pool, cgroups, template), await _pids(pool, cgroups, template)]


async def _facts(pool: Pool, template: str) -> dict[str, Any]:
    machine = platform.machine()
    architecture = ARCHITECTURES.get(machine)
    numbers = {
        name: architecture.calls[name] if architecture else -1
        for name in ("bpf", "unshare", "mount", "io_uring_setup")
    }
    report, evidence = await _run(pool, template, f"CALLS = {numbers!r}{_PROGRAM}", 64)
    try:
        return msgspec.json.decode(report.stdout, type=dict[str, Any])
    except msgspec.DecodeError as error:
        text = (
            f"the probe did not answer on {machine} (exit code {report.exit_code}, "
            f"signal {report.signal}, {report.killed or 'no limit'}, {evidence.oom_kills} killed "
            f"for memory, {report.wall_ms:.0f} ms): {report.stderr}"
        )
        raise SlotLost(text, evidence) from error


async def _memory(pool: Pool, cgroups: Cgroups, template: str) -> Layer:
    try:
        _, evidence = await _run(pool, template, _MEMORY_HOG, 64)
    except SlotLost as lost:
        evidence = lost.evidence
    return Layer("cgroup_memory", evidence.oom_kills > 0, f"version {cgroups.version}")


async def _pids(pool: Pool, cgroups: Cgroups, template: str) -> Layer:
    # The resource limit counts the program's user alone; the group counts PID 1 as well.
    report, _ = await _run(pool, template, _FORK_FLOOD, 16)
    born = report.stdout.strip()
    works = born.isdigit() and 0 < int(born) <= 16
    return Layer("cgroup_pids", works, f"version {cgroups.version}")
