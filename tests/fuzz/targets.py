"""Fuzz targets: each takes any bytes to one parser of what crosses the wall, and checks what comes.

    request     a caller's JSON, through gateway, queue and worker, to the files in a box
    report      what a slot's PID 1 says, and what a program writes, to the worker
    collected   the file of fetched files, from the slot to the worker
    fetch       names that a program gave its files, and those that the caller asks for
    output      a program's output, in any pieces
    result      a worker's result to the SDK: as a line of a stream that is cut anywhere

A target raises for a fault only. ``tests/fuzz/test_corpus.py`` gives each its corpus on every test
run; ``scripts/fuzz`` searches for new inputs, guided by coverage.
"""

import asyncio
import contextlib
import os
import shutil
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec
from pydantic import ValidationError

from rollyard._lines import LineSplitter
from rollyard.types import RunRequest, RunResult
from rollyard_queue.records import LimitsSpec, RunSpec
from rollyard_sandbox import execution, reports
from rollyard_sandbox.guest import box, programs
from rollyard_sandbox.guest.protocol import MAX_MESSAGE_BYTES
from rollyard_sandbox.output import KeptOutput
from rollyard_sandbox.slots import Slot, SlotLost

# pyright: reportPrivateUsage=false

_ANSWER_S = 5.0
_MAX_PARTS = 8
_LIMITS = LimitsSpec(timeout_s=20.0, cpu_s=None, memory_bytes=64 << 20, disk_bytes=8 << 20,
                     pids=16, output_bytes=512)  # fmt: skip
_SPEC = RunSpec(
    run_id="fuzz", code="pass", stdin="input", files={}, fetch_files=["*"], limits=_LIMITS,
    template="bare", on_output_limit="truncate", job="fuzz",
)  # fmt: skip
_spec_decoder = msgspec.json.Decoder(RunSpec)


def parts(data: bytes) -> list[bytes]:
    """Cut by lengths that stand in the data itself, two bytes each; the last part is the rest."""
    found: list[bytes] = []
    while len(data) > 2 and len(found) < _MAX_PARTS:
        length = int.from_bytes(data[:2], "little")
        found.append(data[2 : 2 + length])
        data = data[2 + length :]
    return [*found, data]


def joined(*pieces: bytes) -> bytes:
    """What parts() cuts into these pieces (and an empty rest)."""
    return b"".join(len(piece).to_bytes(2, "little") + piece for piece in pieces)


def _memory_file(content: bytes) -> int:
    file = os.memfd_create("fuzz", os.MFD_CLOEXEC)
    os.write(file, content)
    return file


@contextlib.contextmanager
def _scratch_box():
    """A folder that stands for /box/work, with a neighbour that nobody may touch or read."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        root = Path(folder)
        (root / "work").mkdir()
        (root / "outside").write_text("secret")
        kept, box.WORK = box.WORK, str(root / "work")
        try:
            yield root
        finally:
            box.WORK = kept


# The targets ------------------------------------------------------------------------------------


def request(data: bytes) -> None:
    """No request that the gateway takes is unreadable to the worker, or leaves its box."""
    try:
        asked = RunRequest.model_validate_json(data, strict=True)
    except ValidationError:
        return
    asked = asked.model_copy(update={"run_id": asked.run_id or "fuzz"})
    spec = _spec_decoder.decode(asked.model_dump_json().encode())
    file = _memory_file(execution._job(spec))
    try:
        job = programs.read_job(file)
    finally:
        os.close(file)
    assert (job["code"], job["files"]) == (asked.code, spec.files)
    with _scratch_box() as root:
        with contextlib.suppress(OSError):  # a file below a file, names longer than they may be
            box.put(job["files"])
            for path, content in job["files"].items():
                wanted = RunResult.model_validate(
                    {"run_id": "fuzz", "outcome": "ok", "files": {path: content}}
                ).file_bytes(path)
                assert (root / "work" / path).read_bytes() == wanted or len(job["files"]) > 1
        assert sorted(os.listdir(root)) == ["outside", "work"]
        assert (root / "outside").read_text() == "secret"


_runners: list[asyncio.Runner] = []


def close() -> None:
    """End what the targets started."""
    while _runners:
        _runners.pop().close()


def report(data: bytes) -> None:
    """Whatever PID 1 says becomes a valid result, or a lost slot; never a fault of the worker."""
    if not _runners:
        _runners.append(asyncio.Runner())
    written, collected, *answers = [*parts(data), b""]
    _runners[0].run(_hear(written[:60000], collected, answers))


async def _hear(written: bytes, collected: bytes, answers: list[bytes]) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for one in (ours, theirs):
        one.setblocking(False)
    faults: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
    # Its number is ours, since no run of this slot is looked at or killed.
    slot = Slot(
        ours, template="bare", number=1, disk_bytes=8 << 20, pid=os.getpid(),
        pidfd=os.pidfd_open(os.getpid()), leaf=None, owner=os.getuid(),
    )  # fmt: skip
    try:
        running = asyncio.ensure_future(execution.Execution(slot, _SPEC).run())
        await asyncio.sleep(0)
        _, descriptors, _, _ = socket.recv_fds(theirs, MAX_MESSAGE_BYTES, 8)
        os.write(descriptors[2], written)
        os.write(descriptors[3], written[::-1])
        os.write(descriptors[4], collected)
        for descriptor in descriptors:
            os.close(descriptor)
        for answer in answers:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                theirs.send(answer)
        theirs.close()
        async with asyncio.timeout(_ANSWER_S):
            ended, evidence = await running
    except SlotLost as lost:
        assert str(lost)
    else:
        outcome, message = reports.judge(ended, evidence, msgspec.structs.asdict(_LIMITS))
        _valid(reports.ResultRecord(
            run_id="fuzz", outcome=outcome, exit_code=ended.exit_code, signal=ended.signal,
            stdout=ended.stdout, stderr=ended.stderr, files=ended.files, message=message,
            wall_ms=ended.wall_ms, cpu_ms=ended.cpu_ms,
        ))  # fmt: skip
    finally:
        asyncio.get_running_loop().remove_reader(ours)
        ours.close()
        theirs.close()
        os.close(slot._pidfd)
    assert faults == []


def _valid(record: reports.ResultRecord) -> None:
    encoded = reports.encode(record)
    assert b"\n" not in encoded, "it would be two lines of an NDJSON stream"
    assert len(encoded) <= reports.MAX_RESULT_BYTES
    RunResult.model_validate_json(encoded)


def collected(data: bytes) -> None:
    """Whatever stands in the file of fetched files, the result is one that the SDK can read."""
    file = _memory_file(data)
    try:
        files, left_out = execution._collected(file)
    finally:
        os.close(file)
    _valid(reports.ResultRecord(run_id="fuzz", outcome="ok", files=files,
                                message=", ".join(left_out)))  # fmt: skip


def fetch(data: bytes) -> None:
    """Nothing is read but regular files below the box, whatever they and the wish are called."""
    kinds, *names = [*parts(data), b""]
    with _scratch_box() as root:
        for kind, name in zip(kinds, names, strict=False):
            with contextlib.suppress(OSError, ValueError):
                _make(os.path.join(os.fsencode(root / "work"), name), kind)
        wanted = [name.decode("utf-8", "replace") for name in names]
        found, left_out = box.fetch(["*", *wanted], 4096, 4)
        assert len(found) <= 4
        assert "secret" not in found.values()
        msgspec.json.encode([found, left_out])
        file = _memory_file(msgspec.json.encode({"files": found, "left_out": left_out}))
        try:
            assert execution._collected(file)[0] == found
        finally:
            os.close(file)
        assert (root / "outside").read_text() == "secret"
        shutil.rmtree(root / "work")


def _make(path: bytes, kind: int) -> None:
    # A name from the fuzzer must not leave the scratch folder when the fuzzer makes it.
    if b".." in path or not os.path.realpath(path).startswith(os.fsencode(box.WORK)):
        return
    match kind % 6:
        case 0:
            os.symlink(b"../outside", path)
        case 1:
            os.mkfifo(path)
        case 2:
            os.makedirs(path)
        case 3:
            os.symlink(b"..", path)
        case _:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)  # never into an older pipe
            os.write(file, bytes(kind) * 40 if kind % 2 else path[-kind:])
            os.close(file)


def output(data: bytes) -> None:
    """Output in any pieces is kept, or its ends with a mark of what is missing."""
    limit, *pieces = [*parts(data), b""]
    kept = KeptOutput(int.from_bytes(limit[:1], "little"))
    for piece in pieces:
        kept.add(piece)
    whole = b"".join(pieces)
    truncated, text = kept.truncated, kept.text()
    assert kept.total == len(whole)
    assert truncated == (len(whole) > kept.limit)
    if not truncated:
        assert text == whole.decode("utf-8", "replace")
    text.encode()  # no lone surrogate ever


def result(data: bytes) -> None:
    """Cut anywhere, a stream gives the same lines; a line is a result or refused as none."""
    cuts, *pieces = [*parts(data), b""]
    stream = b"\n".join(pieces) + b"\n"
    splitter, lines, at = LineSplitter(), list[bytes](), 0
    for step in [*cuts, len(stream)]:
        lines += splitter.feed(stream[at : at + step])
        at += step
    lines += splitter.feed(stream[at:])
    assert lines == [line for line in stream.split(b"\n") if line]
    for line in lines:
        with contextlib.suppress(ValidationError):
            read = RunResult.model_validate_json(line)
            for name in read.files:
                read.file_bytes(name)


TARGETS: dict[str, Callable[[bytes], None]] = {
    target.__name__: target for target in (request, report, collected, fetch, output, result)
}
