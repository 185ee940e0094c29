"""deploy/ against the real thing: expressions name what is exposed, permissions suffice."""

import json
import re
import subprocess
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from deployment import DEPLOY, TARGET_LABELS, Names, expressions, services
from metered import Metered, metered

from rollyard.types import OUTCOMES

UNISTD = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")  # of g++, which C++ runs need
_UNDER_FILTER = """
import ctypes, os, struct, sys
numbers, command = [int(word) for word in sys.argv[1].split(",")], sys.argv[2:]
LOAD, EQUAL, RETURN = 0x20, 0x15, 0x06
code = [(LOAD, 0, 0, 0)]
for place, number in enumerate(numbers):
    code.append((EQUAL, len(numbers) - place, 0, number))
code += [(RETURN, 0, 0, 0x7fff0000), (RETURN, 0, 0, 0x00050001)]
filled = b"".join(struct.pack("HBBI", *one) for one in code)
buffer = ctypes.create_string_buffer(filled, len(filled))
program = struct.pack("HxxxxxxP", len(code), ctypes.addressof(buffer))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, program, 0, 0) == 0, ctypes.get_errno()
assert libc.syscall(101, 0, 0, 0, 0) == -1 and ctypes.get_errno() == 1  # ptrace: the filter works
os.execv(command[0], command)
"""


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def service(anyio_backend: str) -> AsyncGenerator[Metered]:
    async with metered() as one:
        async with one.gateway.client() as client:
            answer = await client.post("/v1/runs", json={"code": "print(1)"})
            assert answer.json()["outcome"] == "ok"
        yield one


async def test_alerts_and_dashboard_name_what_is_exposed(service: Metered) -> None:
    exposed: dict[str, set[str]] = {"up": set()}
    for page in await service.scrape():
        for name, labels in page.labels().items():
            exposed.setdefault(name, set()).update(labels)
            family = page.families.get(name)
            if family is not None and family.type == "histogram":
                exposed |= {f"{name}_{end}": labels for end in ("sum", "count")}
                exposed[f"{name}_bucket"] = labels | {"le"}
    # Families that have no sample in a healthy service, as docs/metrics.md has them.
    exposed["rollyard_worker_layer_missing"] = {"layer"}
    exposed["rollyard_worker_template_restarts_total"] = {"template"}
    used: set[str] = set()
    for where, expression in expressions():
        names = Names.of(expression)
        used |= names.metrics
        for metric in names.metrics:
            assert metric in exposed, f"{where}: {metric} is not exposed"
        known = TARGET_LABELS.union(*(exposed[metric] for metric in names.metrics))
        assert names.labels <= known, f"{where}: {names.labels - known}"
        assert names.values.get("outcome", set()) <= set(OUTCOMES), where
    ours = {name for name in exposed if name.startswith("rollyard_")}
    seen = {re.sub(r"_(bucket|sum|count)$", "", name) for name in used}
    silent = {re.sub(r"_(bucket|sum|count)$", "", name) for name in ours} - seen
    assert silent == {
        # Seen by people who look for something, not on the dashboard.
        "rollyard_gateway_info",
        "rollyard_worker_info",
        "rollyard_worker_runs_total",
        "rollyard_worker_run_queued_seconds",
        "rollyard_worker_run_wall_seconds",
        "rollyard_worker_run_total_seconds",
        "rollyard_worker_redelivered_runs_total",
        "rollyard_worker_leases_renewed_total",
        "rollyard_worker_template_up",
        "rollyard_queue_finished_total",
    }


def test_expressions_with_mistakes_are_found() -> None:
    with pytest.raises(ValueError, match="parenthesis"):
        Names.of("sum(rate(a[5m])")
    assert Names.of('max by (x) (a{b="c"}) / d').labels == {"x", "b"}
    assert Names.of("histogram_quantile(0.9, rate(a_bucket[1m])) or b").metrics == {"a_bucket", "b"}


def test_the_worker_s_permissions_suffice_for_every_layer() -> None:
    """The doctor with the container's capabilities, under its filter, without new privileges."""
    worker = services()["worker"]
    capabilities = ",".join(["-all", *(f"+{name.lower()}" for name in worker["cap_add"])])
    numbers = dict[str, str](re.findall(r"#define __NR_(\w+) (\d+)", UNISTD.read_text()))
    profile = json.loads((DEPLOY / "compose" / "worker-seccomp.json").read_text())
    refused = [numbers[name] for rule in profile["syscalls"] for name in rule["names"]]
    doctor = [sys.executable, "-P", "-m", "rollyard_sandbox.doctor", "--json"]
    done = subprocess.run(
        ["setpriv", f"--bounding-set={capabilities}", "--inh-caps=-all", "--no-new-privs",
         sys.executable, "-I", "-c", _UNDER_FILTER, ",".join(refused), *doctor],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    facts = json.loads(done.stdout)
    assert facts["ok"]
    assert all(layer["works"] for layer in facts["layers"] if layer["required"])
