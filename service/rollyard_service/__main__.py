"""``python -m rollyard_service``: one gateway process."""

import argparse
import gc
import os
import resource
import sys

from pydantic import ValidationError

from rollyard._ports import CannotListen
from rollyard_queue.redis import RedisQueue
from rollyard_service.app import create_app
from rollyard_service.logs import configure_logs
from rollyard_service.server import GatewayServer, prepare_socket_path
from rollyard_service.settings import GatewaySettings

GC_THRESHOLDS = (20_000, 20, 50)
"""New objects between two looks at the youngest; of these between two looks at the older ones."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m rollyard_service",
        description="One gateway process. Everything can be set by ROLLYARD_* in the environment;"
        " these flags come before it.",
    )
    parser.add_argument("--host", help="address to listen on (127.0.0.1)")
    parser.add_argument("--port", type=int, help="TCP port, 0 for a free one (8000)")
    parser.add_argument("--uds", help="Unix socket to listen on instead")
    parser.add_argument("--redis-url", help="redis://…, rediss://… or unix:///path/to.sock")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Serve until a signal. Exit code 2: the settings are wrong, or the port is taken."""
    given = vars(_parser().parse_args(argv))
    flags = {name: value for name, value in given.items() if value is not None}
    try:
        settings = GatewaySettings(**flags)
        configure_logs(form=settings.log_format, level=settings.log_level)
        os.umask(0o077)
        if settings.uds is not None:
            prepare_socket_path(settings.uds)
        queue = RedisQueue.from_url(
            settings.redis_url,
            name=settings.queue,
            shards=settings.shards,
            max_queued=settings.max_queued,
            max_queued_bytes=settings.max_queued_bytes,
            max_queued_per_job=settings.max_queued_per_job,
            max_queued_bytes_per_job=settings.max_queued_bytes_per_job,
        )
        server = GatewayServer(create_app(settings, queue), settings)
    except ValidationError as error:
        for problem in error.errors(include_url=False, include_input=False):
            name = ".".join(str(part) for part in problem["loc"])
            text = problem["msg"].removeprefix("Value error, ")  # pydantic's words for a raise
            print(f"{name or 'settings'}: {text}", file=sys.stderr)  # noqa: T201
        return 2
    except OSError as error:
        place = error.filename or given["uds"]
        said = f"{place}: {error.strerror}" if place and error.strerror else error
        print(f"rollyard_service: {said}", file=sys.stderr)  # noqa: T201
        return 2
    except (CannotListen, ValueError) as error:
        print(f"rollyard_service: {error}", file=sys.stderr)  # noqa: T201
        return 2
    # A connection for each caller: the usual soft limit of 1024 would refuse the rest.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    # Runs in flight are in no cycles: with 45,000 of them the collector's usual steps would look
    # at some hundred thousand objects again and again, for nothing.
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    server.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
