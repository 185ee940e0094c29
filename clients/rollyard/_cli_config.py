"""``rollyard config``: the settings that hold in this environment, and where each comes from."""

import ast
import importlib
import inspect
import itertools
import json
import os
import re
import sys
import textwrap
from typing import Any

from pydantic import BaseModel, SecretStr, ValidationError

from rollyard._cli_serve import complain, require_extra
from rollyard._config import DEFAULT_URL
from rollyard.errors import ServiceStartError

OURS, USAGE = 3, 2
PREFIX = "ROLLYARD_"
_PARTS = {
    "gateway": ("rollyard_service.settings", "GatewaySettings", "service"),
    "worker": ("rollyard_sandbox.settings", "WorkerSettings", "sandbox"),
}
_CLIENT = (
    ("url", "ROLLYARD_URL", DEFAULT_URL,
     "Where the gateway is, as http://…, https://… or unix:///path; several with commas."),
    ("api_key", "ROLLYARD_API_KEY", None, "The bearer key that is sent."),
)  # fmt: skip
_SECRET = re.compile(r"(key|secret|password|token)s?$")


def print_config(*, as_json: bool) -> int:
    """Print the effective settings of client, gateway and worker; return the exit code."""
    report: dict[str, list[dict[str, Any]]] = {"client": _client_rows()}
    for part, (module, name, extra) in _PARTS.items():
        try:
            require_extra(extra)
            # By name: the SDK does not depend on the service or the sandbox.
            settings: type[BaseModel] = getattr(importlib.import_module(module), name)
            report[part] = _rows(settings)
        except ServiceStartError as error:
            complain(f"{part}: {error.message}")
            return OURS
        except ValidationError as error:
            for problem in error.errors():
                # A check of several settings together has no place and names them itself.
                place = "".join(f"{PREFIX}{name}: ".upper() for name in problem["loc"][:1])
                complain(f"{part}: {place}{problem['msg'].removeprefix('Value error, ')}")
            return USAGE
    if as_json:
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
    else:
        _print_table(report)
    return 0


def _client_rows() -> list[dict[str, Any]]:
    return [
        {
            "setting": name,
            "variable": variable,
            "value": _shown(name, os.environ.get(variable) or default),
            "source": "environment" if os.environ.get(variable) else "default",
            "meaning": meaning,
        }
        for name, variable, default, meaning in _CLIENT
    ]


def _rows(settings: type[BaseModel]) -> list[dict[str, Any]]:
    values = settings()
    present = {name.upper() for name, value in os.environ.items() if value}
    meanings = _meanings(settings)
    rows: list[dict[str, Any]] = []
    for name in settings.model_fields:
        variable = f"{PREFIX}{name}".upper()
        rows.append(
            {
                "setting": name,
                "variable": variable,
                "value": _shown(name, getattr(values, name)),
                "source": "environment" if variable in present else "default",
                "meaning": meanings.get(name, ""),
            }
        )
    return rows


def _meanings(settings: type[BaseModel]) -> dict[str, str]:
    """The docstring below each field: written once, read by developers and by users."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(settings))).body[0]
    assert isinstance(tree, ast.ClassDef)
    found: dict[str, str] = {}
    for field, after in itertools.pairwise(tree.body):
        match field, after:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                found[name] = " ".join(text.replace("``", "").split())
            case _:
                pass
    return found


def _shown(name: str, value: Any) -> Any:
    is_number = isinstance(value, (int, float))  # max_in_flight_per_key is no key
    if isinstance(value, SecretStr) or (_SECRET.search(name) and not is_number):
        return "(set)" if value else "(none)"
    if isinstance(value, (str, int, float, bool)) or value is None:
        return _without_password(value) if isinstance(value, str) else value
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_shown(name, one) for one in value]  # type: ignore[reportUnknownVariableType]
    return str(value)


def _without_password(text: str) -> str:
    """A Redis URL may carry a password: ``redis://user:password@host``."""
    scheme, separator, rest = text.partition("://")
    if separator and "@" in rest:
        return f"{scheme}://***@{rest.rpartition('@')[2]}"
    return text


def _print_table(report: dict[str, list[dict[str, Any]]]) -> None:
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    for part, rows in report.items():
        name = Column("variable", no_wrap=True)
        table = Table(name, "value", "from", "meaning", title=part, title_justify="left", box=None)
        for row in rows:
            value = Text(str(row["value"]))  # not markup: it is the user's
            table.add_row(row["variable"], value, row["source"], Text(row["meaning"], style="dim"))
        Console().print(table)
