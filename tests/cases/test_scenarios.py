"""Cases that are told as a scenario rather than as one request, each played once."""

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
from aftermath import Before, faults
from cases.mapping import load_cases
from live_service import Service
from process_tree import until

import rollyard

CASES = load_cases()


def disconnect(service: Service, request: dict[str, Any], expect: dict[str, Any]) -> None:
    """A caller that goes away gives its slot back."""
    body = b'{"code": %b, "limits": {"timeout_s": %d}}' % (
        b'"import time\\ntime.sleep(20)\\n"',
        request["json"]["timeout_s"],
    )
    with socket.socket(socket.AF_UNIX) as caller:
        caller.connect(str(service.directory / "gateway.sock"))
        caller.sendall(
            b"POST /v1/runs HTTP/1.1\r\nHost: service\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        assert until(lambda: bool(service.family().programs))
    free_s = expect["slot_free_within_s"]
    assert until(lambda: not service.family().programs, timeout_s=free_s)


def repeat(service: Service, request: dict[str, Any], expect: dict[str, Any]) -> None:
    """The same idempotency key gives the same result, from one run."""
    results = [
        service.client.run(request["json"]["code"], run_id=request["json"]["idempotency_key"])
        for _ in range(request["times"])
    ]
    assert expect["results_equal"] and len({one.stdout for one in results}) == 1


def cancel_storm(service: Service, request: dict[str, Any], expect: dict[str, Any]) -> None:
    """Calls that are cancelled while under way never leave their answer for another."""
    pattern = request["json"]["code"]

    async def storm() -> list[str]:
        async with rollyard.AsyncClient(service.address) as client:
            doomed = [
                asyncio.create_task(client.run(f"print('doomed-{i}')"))
                for i in range(request["cancel"])
            ]
            await asyncio.sleep(0.01)  # some are on their way, some not yet, some answered
            for task in doomed:
                task.cancel()
            runs = [client.run(pattern.replace("{i}", str(i))) for i in range(request["then"])]
            results = await asyncio.gather(*runs)
            await asyncio.gather(*doomed, return_exceptions=True)
            return [one.stdout for one in results]

    wanted = expect["each_stdout_equals"]
    assert asyncio.run(storm()) == [wanted.replace("{i}", str(i)) for i in range(request["then"])]


def several_loops(service: Service, request: dict[str, Any], expect: dict[str, Any]) -> None:
    """One client in several event loops, one after the other."""
    client = rollyard.AsyncClient(service.address)

    async def step(number: int) -> str:
        return (await client.run(f"print({number})")).stdout

    assert [asyncio.run(step(number)) for number in range(3)] == ["0\n", "1\n", "2\n"]
    asyncio.run(client.aclose())


def after_fork(service: Service, request: dict[str, Any], expect: dict[str, Any]) -> None:
    """A client that was used before a fork works in every child."""
    program = """
import os, sys, warnings
import rollyard
warnings.simplefilter("ignore", DeprecationWarning)  # forking with threads is the point here
address, count = sys.argv[1], int(sys.argv[2])
client = rollyard.Client(address)
assert client.run("print('parent')").stdout == "parent\\n"
children = []
for number in range(count):
    pid = os.fork()
    if pid == 0:
        right = client.run(f"print({number})").stdout == f"{number}\\n"
        os._exit(0 if right else 1)
    children.append(pid)
codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
assert client.run("print('parent')").stdout == "parent\\n"
client.close()
sys.exit(any(codes))
"""
    command = [sys.executable, "-c", program, service.address, str(request["processes"])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def limit_arrives(service: Service, request: dict[str, Any], expect: dict[str, Any]) -> None:
    """The time limit of a call is the one that ends its run."""
    timeout_s = request["call"]["timeout_s"]
    began = time.monotonic()
    result = service.client.run("import time; time.sleep(30)", limits={"timeout_s": timeout_s})
    assert result.outcome == "timeout"
    assert timeout_s <= result.wall_ms / 1e3 <= time.monotonic() - began < 30


SCENARIOS: dict[str, Callable[[Service, dict[str, Any], dict[str, Any]], None]] = {
    "gw-009": disconnect,
    "gw-010": repeat,
    "gw-015": cancel_storm,
    "cli-006": several_loops,
    "cli-007": after_fork,
    "cli-011": limit_arrives,
}


@pytest.mark.parametrize("case_id", SCENARIOS)
def test_scenario(case_id: str, service: Service) -> None:
    case = CASES[case_id]
    before = Before.of(service)
    SCENARIOS[case_id](service, case.request, case.expect)
    assert faults(before, case.after) == []
