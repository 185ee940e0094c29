"""``rollyard doctor``: what this machine gives, layer by layer, found by trying."""

import argparse
import asyncio
import json
import os
import platform
import sys
from typing import Any

from rollyard._cli_output import end_with
from rollyard_sandbox import attack, image
from rollyard_sandbox.image import ImageError
from rollyard_sandbox.jail import JailError, nsjail_binary
from rollyard_sandbox.machine import open_machine
from rollyard_sandbox.settings import WorkerSettings, explained
from rollyard_sandbox.slots import SlotLost


async def examine(settings: WorkerSettings) -> dict[str, Any]:
    """Try everything; never raises for what the machine lacks, but says it."""
    facts: dict[str, Any] = {
        "kernel": platform.release(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "user": "root" if os.geteuid() == 0 else f"uid {os.geteuid()}",
        "cores": len(os.sched_getaffinity(0)),
    }
    said: list[str] = []
    try:
        facts["nsjail"] = str(nsjail_binary())
        async with open_machine(settings, say=said.append) as machine:
            facts["layers"] = [
                {
                    "name": layer.name,
                    "works": layer.works,
                    "required": layer.required,
                    "what": layer.what,
                    "detail": layer.detail,
                    "cost": layer.cost,
                }
                for layer in machine.layers
            ]
            facts["ok"] = not machine.missing
    except (ImageError, JailError, SlotLost, OSError) as error:
        facts.update(ok=False, layers=[], problem=str(error))
    facts["notes"] = said
    return facts


def _table(facts: dict[str, Any]) -> str:
    lines = [
        f"{name:<8} {facts[name]}" for name in ("kernel", "machine", "python", "user", "cores")
    ]
    lines.append(f"nsjail   {facts.get('nsjail', 'not found')}")
    lines.append("")
    for layer in facts["layers"]:
        mark = "works" if layer["works"] else "MISSING" if layer["required"] else "absent"
        detail = f" ({layer['detail']})" if layer["detail"] else ""
        lines.append(f"{mark:<7}  {layer['name']:<18} {layer['what']}{detail}")
    lines += ["", *facts["notes"]]
    if problem := facts.get("problem"):
        lines.append(f"No jail can run here: {problem}")
    else:
        lines += _verdict(facts["layers"])
    return "\n".join(lines) + "\n"


def _verdict(layers: list[dict[str, Any]]) -> list[str]:
    """What follows for a worker; each layer that is not there by name."""
    missing = [layer["name"] for layer in layers if layer["required"] and not layer["works"]]
    spared = [layer for layer in layers if not layer["required"] and not layer["works"]]
    if missing:
        said = f"A worker refuses to start here without {', '.join(missing)}, unless given "
        first = f"{said}--allow-degraded; every result then names what is missing."
    elif spared:
        names = ", ".join(layer["name"] for layer in spared)
        first = f"A worker will start: every layer that it demands works. Absent: {names}."
    else:
        first = "Every layer works: a worker will start."
    return [first, *(f"Without {layer['name']}: {layer['cost']}." for layer in spared)]


def _settings() -> WorkerSettings:
    """A worker's, with its image if that is there: a container may have no other, nor build one."""
    settings = WorkerSettings(slots=2)
    if image.image_path(settings.state_dir, settings.template_names()).is_dir():
        return settings
    return WorkerSettings(slots=2, templates="bare")


def main() -> int:
    """Exit code 0: every layer works, every attempt was held; 1: not so; 2: wrong settings."""
    parser = argparse.ArgumentParser(
        prog="rollyard doctor", description="Try every sandbox layer on this machine."
    )
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    parser.add_argument("--attack", action="store_true", help="try to get out of the sandbox")
    options = parser.parse_args()
    try:
        settings = _settings()
    except ValueError as error:
        sys.stderr.write(f"rollyard doctor: {explained(error)}\n")
        return 2
    if options.attack:
        facts = asyncio.run(attack.examine(settings))
        sys.stdout.write(attack.as_text(facts, as_json=options.json))
        return 0 if facts["ok"] else 1
    facts = asyncio.run(examine(settings))
    sys.stdout.write(json.dumps(facts, indent=2) + "\n" if options.json else _table(facts))
    return 0 if facts["ok"] else 1


if __name__ == "__main__":
    end_with(main)
