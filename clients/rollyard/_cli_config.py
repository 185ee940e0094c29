"""``rollyard config``: the settings that hold in this environment, and where each comes from."""

import importlib
import json
import os
import sys
from typing import Any

from pydantic import BaseModel, SecretStr, ValidationError

from rollyard._cli_serve import complain, require_extra
from rollyard.errors import ServiceStartError

OURS, USAGE = 3, 2
PREFIX = "ROLLYARD_"
_PARTS = {
    "gateway": ("rollyard_service.settings", "GatewaySettings", "service"),
    "worker": ("rollyard_sandbox.settings", "WorkerSettings", "sandbox"),
}
_SECRET = ("key", "secret", "password", "token")


def print_config(*, as_json: bool) -> int:
    """Print the effective settings of gateway and worker; return the exit code."""
    report: dict[str, list[dict[str, Any]]] = {}
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
                field = ".".join(map(str, problem["loc"]))
                complain(f"{part}: {PREFIX}{field.upper()}: {problem['msg']}")
            return USAGE
    if as_json:
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
    else:
        _print_table(report)
    return 0


def _rows(settings: type[BaseModel]) -> list[dict[str, Any]]:
    values = settings()
    present = {name.upper() for name in os.environ}
    rows: list[dict[str, Any]] = []
    for name, field in settings.model_fields.items():
        variable = f"{PREFIX}{name}".upper()
        rows.append(
            {
                "setting": name,
                "variable": variable,
                "value": _shown(name, getattr(values, name)),
                "source": "environment" if variable in present else "default",
                "meaning": field.description or "",
            }
        )
    return rows


def _shown(name: str, value: Any) -> Any:
    if isinstance(value, SecretStr) or any(word in name for word in _SECRET):
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
    from rich.table import Table

    for part, rows in report.items():
        table = Table("variable", "value", "from", title=part, title_justify="left")
        for row in rows:
            table.add_row(row["variable"], str(row["value"]), row["source"])
        Console().print(table)
