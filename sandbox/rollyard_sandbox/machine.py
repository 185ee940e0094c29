"""One machine's sandbox, set up and taken down: image, control groups, pool and self-check."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from pathlib import Path

from rollyard_sandbox import image, jail
from rollyard_sandbox.cgroups import Cgroups, open_cgroups
from rollyard_sandbox.pool import Pool
from rollyard_sandbox.probe import Layer, probe
from rollyard_sandbox.settings import WorkerSettings

_RUNTIME_PREFIX = "rollyard-worker-"


@dataclass(frozen=True)
class Machine:
    """A running pool and what its self-check found."""

    pool: Pool
    layers: list[Layer]
    templates: tuple[str, ...]

    @property
    def missing(self) -> list[str]:
        return [layer.name for layer in self.layers if layer.required and not layer.works]


@contextlib.asynccontextmanager
async def open_machine(
    settings: WorkerSettings, *, say: Callable[[str], None]
) -> AsyncGenerator[Machine]:
    """Start the templates and check every layer; on leaving, nothing of them is left.

    Raises:
        ImageError, JailError, SlotLost, OSError: this machine cannot run a jail at all; the
            message says why.
    """
    names = settings.template_names()
    with image.open_image(settings.state_dir, names, say=say) as root:
        code = jail.guest_code(settings.state_dir)
        cgroups = _cgroups(say)
        runtime_dir = _make_runtime_dir()
        pool = Pool(
            root=root, code=code, runtime_dir=runtime_dir, names=names, max_slots=settings.slots,
            cgroups=cgroups,
        )  # fmt: skip
        try:
            await pool.start()
            layers = await probe(pool, cgroups, names[0])
            yield Machine(pool, layers, names)
        finally:
            await pool.stop()
            if cgroups is not None:
                cgroups.close()
            shutil.rmtree(runtime_dir, ignore_errors=True)


def _make_runtime_dir() -> Path:
    """A private folder for jail configurations; those of killed workers are removed."""
    parent = Path(tempfile.gettempdir())
    for left in parent.glob(f"{_RUNTIME_PREFIX}*-*"):
        pid = left.name.removeprefix(_RUNTIME_PREFIX).partition("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(left, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{_RUNTIME_PREFIX}{os.getpid()}-"))


def _cgroups(say: Callable[[str], None]) -> Cgroups | None:
    try:
        return open_cgroups()
    except OSError as error:
        say(f"rollyard: {error}" + ("" if os.geteuid() == 0 else " (not root)"))
        return None
