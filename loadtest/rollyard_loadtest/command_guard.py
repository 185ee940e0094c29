"""How ``rollyard bench`` and ``rollyard plan`` end: what one can do something about is a line."""

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

from rollyard.errors import ServiceStartError

USAGE, OURS = 2, 3
MISSING = "rollyard: this command needs more: pip install 'rollyard[local,bench]'"


def guarded(command: str, work: Callable[[], int]) -> int:
    """Do the work of a command; return its exit code, or 2 or 3 with the reason on stderr."""
    try:
        from rollyard._up import require_python

        require_python()
        from rollyard_loadtest.costs_calls import WrongAnswer
        from rollyard_loadtest.scenario import ScenarioError
        from rollyard_loadtest.stack import NotReady
        from rollyard_loadtest.stage import ClientDied

        try:
            return work()
        # Before OSError, which a ConnectionError is. It is the service's: what befalls standard
        # output is no exception (rollyard._cli_output).
        except (NotReady, ClientDied, WrongAnswer, ConnectionError) as error:
            return _said(command, str(error), OURS)
        except (ScenarioError, ValueError, OSError) as error:  # a file, an impossible wish
            return _said(command, str(error), USAGE)
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None
    except ServiceStartError as error:
        return _said(command, error.message, OURS)
    except ImportError as error:  # the work has imports of its own
        sys.stderr.write(f"{MISSING} (no {error.name})\n")
        return OURS


def check_folder(prefix: Path) -> None:
    """Refuse before the work is done what could not be written after it.

    Raises:
        ValueError: the folder of the files is not there.
    """
    if not prefix.parent.is_dir():
        raise ValueError(f"--output {prefix}: there is no folder {prefix.parent}")


def _said(command: str, message: str, code: int) -> int:
    sys.stderr.write(f"rollyard {command}: {message}\n")
    return code
