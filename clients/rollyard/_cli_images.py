"""The command ``rollyard images``: the guest images of this machine, and removing old ones."""

from typing import Annotated, NoReturn

from cyclopts import App, Parameter
from cyclopts.validators import Number

from rollyard._cli_serve import exec_module

_HELP = """A worker runs programs in a read-only image: a Python with libraries, some hundred
megabytes below ROLLYARD_STATE_DIR. A new version of Rollyard, of Python or of the libraries builds
another. Each build then removes the images that no worker uses, but for the two of each Python
version that were used last and whatever was used within the hour.
"""

app = App(name="images", help="List the guest images of this machine.", help_epilogue=_HELP)

_Flag = Annotated[bool, Parameter(negative="")]
_MODULE = "rollyard_sandbox.images_command"


@app.default
def images(*, json: _Flag = False) -> NoReturn:
    """List them: size, when one was last taken into use, and whether one is in use.

    Parameters
    ----------
    json
        Print a JSON array instead of a table.
    """
    exec_module(_MODULE, "sandbox", ["--json"] if json else [])


@app.command(help_epilogue="")
def prune(
    *,
    keep: Annotated[int, Parameter(validator=Number(gte=0))] = 2,
    dry_run: _Flag = False,
) -> NoReturn:
    """Remove the images that no worker uses, but for those used last.

    Safe at any time: an image that a worker runs from, or starts with, stays.

    Parameters
    ----------
    keep
        How many of each Python version stay although nothing uses them.
    dry_run
        Only name those that would go.
    """
    flags = ["--prune", "--keep", str(keep), *(["--dry-run"] if dry_run else [])]
    exec_module(_MODULE, "sandbox", flags)


__all__ = ["app"]
