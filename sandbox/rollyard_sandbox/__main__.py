"""``python -m rollyard_sandbox``: one worker."""

import argparse
import asyncio
import contextlib
import logging
import resource
import signal
import sys
from pathlib import Path
from typing import Any, Literal

import structlog
import uvloop
from pydantic import ValidationError

from rollyard_queue.base import QueueError
from rollyard_queue.redis import RedisQueue
from rollyard_sandbox import null
from rollyard_sandbox.image import ImageError
from rollyard_sandbox.jail import JailError
from rollyard_sandbox.machine import open_machine
from rollyard_sandbox.metrics import WorkerMetrics, endpoint
from rollyard_sandbox.settings import WorkerSettings
from rollyard_sandbox.slots import SlotLost
from rollyard_sandbox.worker import Worker, new_worker_id

_EXIT_CANNOT_RUN = 3  # as every rollyard command
_EXIT_USAGE = 2


def _options() -> tuple[WorkerSettings, float | None]:
    """The settings; and the service time in seconds of a null worker, None for a real one."""
    parser = argparse.ArgumentParser(
        prog="rollyard worker",
        description="Drain the queue into jails on this machine.",
        epilog="Every option is also ROLLYARD_<NAME> in the environment; see 'rollyard config'.",
    )
    parser.add_argument("--redis-url", help="redis://, rediss:// or unix:// of the queue's server")
    parser.add_argument("--slots", type=int, help="runs at once (default: 16 for each core)")
    parser.add_argument("--templates", help="warm interpreters, comma separated: bare,science,plot")
    parser.add_argument(
        "--allow-degraded",
        action="store_true",
        default=None,
        help="start although a sandbox layer is missing here; each result then names it",
    )
    parser.add_argument(
        "--null-for-benchmarks",
        action="store_true",
        default=None,
        help=argparse.SUPPRESS,  # run nothing, answer ok: to measure gateway and queue, no more
    )
    parser.add_argument(
        "--null-service-ms",
        type=float,
        default=None,
        help=argparse.SUPPRESS,  # milliseconds after which it answers; 0: at once
    )
    given = {name: value for name, value in vars(parser.parse_args()).items() if value is not None}
    is_null = bool(given.pop("null_for_benchmarks", False))
    service_ms: float = given.pop("null_service_ms", 0.0)
    if is_null:
        given.setdefault("slots", null.DEFAULT_SLOTS)
    try:
        settings = WorkerSettings(**given)
        settings.template_names()
    except ValidationError as error:
        parser.error("; ".join(_problem(detail["loc"], detail["msg"]) for detail in error.errors()))
    except ValueError as error:
        parser.error(str(error))
    return settings, service_ms / 1e3 if is_null else None


def _problem(path: tuple[int | str, ...], message: str) -> str:
    return f"{'.'.join(map(str, path))}: {message.removeprefix('Value error, ')}"


def _configure_logs(form: Literal["json", "console"] | None) -> None:
    for_people = form == "console" or (form is None and sys.stderr.isatty())
    shared: list[Any] = [
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.stdlib.ExtraAdder(),
    ]
    last: Any = (
        structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
        if for_people
        else structlog.processors.JSONRenderer()
    )
    handler = logging.StreamHandler()
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.format_exc_info,
                last,
            ],
        )
    )
    logging.basicConfig(level=logging.INFO, handlers=[handler])


def _queue(settings: WorkerSettings) -> RedisQueue:
    try:
        return RedisQueue.from_url(
            settings.redis_url,
            name=settings.queue,
            shards=settings.shards,
            max_running_per_job=settings.max_running_per_job,
        )
    except ValueError as error:
        _say(f"rollyard worker: redis_url: {error}")
        raise SystemExit(_EXIT_USAGE) from None


async def _serve(settings: WorkerSettings) -> int:
    stop = _stop_event()
    queue = _queue(settings)
    async with contextlib.aclosing(_Closing(queue)), open_machine(settings, say=_say) as machine:
        if machine.missing and not settings.allow_degraded:
            _say(
                f"rollyard: this machine lacks {', '.join(machine.missing)}. See what that means "
                "with 'rollyard doctor'; to run without, give --allow-degraded."
            )
            return _EXIT_CANNOT_RUN
        metrics = WorkerMetrics(settings.slots, missing=machine.missing)
        worker = Worker(
            queue, machine.pool, worker_id=new_worker_id(), slots=settings.slots,
            lease_s=settings.lease_s, drain_s=settings.drain_s, degraded=machine.missing,
            metrics=metrics,
        )  # fmt: skip
        with endpoint(metrics, settings.metrics_host, settings.metrics_port):
            await _until_stopped(worker, stop)
    return 0


async def _serve_null(settings: WorkerSettings, service_s: float) -> int:
    stop = _stop_event()
    queue = _queue(settings)
    async with contextlib.aclosing(_Closing(queue)):
        worker = null.NullWorker(
            queue, worker_id=new_worker_id(), slots=settings.slots, service_s=service_s,
            lease_s=settings.lease_s,
        )  # fmt: skip
        await _until_stopped(worker, stop)
    return 0


def _stop_event() -> asyncio.Event:
    """An event that SIGINT and SIGTERM set."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


async def _until_stopped(worker: Worker | null.NullWorker, stop: asyncio.Event) -> None:
    serving = asyncio.create_task(worker.run())
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    worker.stop()
    await serving


class _Closing:
    def __init__(self, queue: RedisQueue) -> None:
        self._queue = queue

    async def aclose(self) -> None:
        await self._queue.close()


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")


def main() -> int:
    """Exit code 0: stopped as asked; 2: usage; 3: this machine or the queue does not allow it."""
    settings, null_service_s = _options()
    _configure_logs(settings.log_format)
    if null_service_s is not None:
        return uvloop.run(_serve_null(settings, null_service_s))
    # When memory runs out the kernel should take programs, which set themselves to 1000.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("-500")
    # Each slot takes about ten descriptors; the usual soft limit of 1024 would not do.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        return uvloop.run(_serve(settings))
    except (ImageError, JailError, SlotLost, QueueError, OSError) as error:
        _say(f"rollyard: {error}")
        return _EXIT_CANNOT_RUN


if __name__ == "__main__":
    sys.exit(main())
