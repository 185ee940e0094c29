"""A supervised child is started, heard, stopped and, above all, never left behind."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

from process_tree import alive, below, until

from rollyard._child import LOG_LINE_BYTES, Child


def _child(program: str, lines: list[tuple[str, str]] | None = None) -> Child:
    def keep(name: str, line: str) -> None:
        if lines is not None:
            lines.append((name, line))

    return Child("part", [sys.executable, "-c", program], log=keep, env=os.environ)


def test_log_lines_of_both_streams_arrive_with_the_name() -> None:
    lines: list[tuple[str, str]] = []

    async def scenario() -> int:
        child = _child("import sys; print('one'); print('two', file=sys.stderr)", lines)
        await child.start()
        return await child.wait()

    assert asyncio.run(scenario()) == 0
    assert lines == [("part", "one"), ("part", "two")]


def test_an_endless_line_is_cut_and_nothing_is_lost() -> None:
    lines: list[tuple[str, str]] = []
    length = 3 * LOG_LINE_BYTES + 7

    async def scenario() -> None:
        child = _child(f"print('x' * {length}); print('end')", lines)
        await child.start()
        await child.wait()

    asyncio.run(scenario())
    texts = [text for _, text in lines]
    assert texts[-1] == "end"
    assert sum(map(len, texts[:-1])) == length
    assert len(texts) > 2


def test_stop_is_clean_when_the_child_obeys() -> None:
    async def scenario() -> tuple[bool, int | None]:
        child = _child(
            "import signal, sys\n"
            "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n"
            "print('ready', flush=True)\n"
            "signal.pause()"
        )
        await child.start()
        await _seen(child, "ready")
        return await child.stop(timeout_s=20), child.exit_code

    assert asyncio.run(scenario()) == (True, 7)


def test_stop_kills_a_child_that_does_not_obey_and_its_whole_group() -> None:
    async def scenario() -> tuple[bool, int | None, bool]:
        child = _child(
            "import os, signal, time\n"
            "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
            "if os.fork():\n"  # one of the two speaks: unbuffered, their lines could mix
            "    print('ready', flush=True)\n"
            "signal.pause()"
        )
        await child.start()
        await _seen(child, "ready")
        family = {one for one in below(os.getpid()) if child.pid in (one.pid, one.parent)}
        clean = await child.stop(timeout_s=0.2)
        gone = until(lambda: not any(map(alive, family)))
        return clean, child.exit_code, gone and len(family) == 2

    assert asyncio.run(scenario()) == (False, -signal.SIGKILL, True)


def test_a_child_dies_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    said = tmp_path / "pid"
    program = f"""
import asyncio, os, sys
from pathlib import Path
from rollyard._child import Child, discard

async def main():
    child = Child("part", [sys.executable, "-c", "import signal; signal.pause()"],
                  log=discard, env=os.environ)
    await child.start()
    Path({str(said)!r}).write_text(str(child.pid))
    await child.wait()

asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", program]) as parent:
        try:
            assert until(lambda: said.exists() and bool(said.read_text()))
            (child,) = below(parent.pid)
            assert child.pid == int(said.read_text())
        finally:
            parent.kill()
    assert until(lambda: not alive(child))


async def _seen(child: Child, line: str) -> None:
    async with asyncio.timeout(20):
        while line not in child.tail:
            await asyncio.sleep(0.01)
