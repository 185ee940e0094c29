"""What the commands share: exit codes, how they speak, and what they need."""

import sys
from typing import Annotated, Any

from cyclopts import Parameter

OK, USAGE, OURS, COLLAPSED, INTERRUPTED = 0, 2, 3, 4, 130

Url = Annotated[str | None, Parameter(name="--base-url", env_var="ROLLYARD_URL")]


def say(text: str) -> None:
    """Progress and errors; what was asked for goes to standard output."""
    sys.stderr.write(text + "\n")


def torch_or_exit() -> Any:
    """The module, or exit and say how to get it."""
    try:
        import torch  # pyright: ignore
    except ImportError:
        say(
            "rollyard-trainer: this needs torch: pip install 'rollyard[trainer-torch]'\n"
            "A build for CPUs is enough; in a checkout, scripts/setup-trainer gets one."
        )
        raise SystemExit(OURS) from None
    return torch  # pyright: ignore
