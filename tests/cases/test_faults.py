"""Cases in which parts of a service are killed, stopped, starved or flooded while it serves.

Each has a service of its own, whose parts the test starts and harms. Times are shorter than the
cases say where that changes nothing: the floods last 4 s instead of 20 and 30, and a frozen worker
stays so for more than two leases (of 2 s) instead of 60 s.
"""

import ast
import asyncio
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import httpx2
import pytest
from aftermath import Before, faults
from cases.crew import SHORT_LEASE_S, Crew, crew, until_true
from cases.evaluate import check
from cases.mapping import Case, gateway_body, load_cases, observe
from process_tree import until

from rollyard import RunResult

CASES = load_cases()
FLOOD_S = 4.0
# Expectations of a case as a whole: its test looks at them, `evaluate.check` does not know them.
OF_ALL = {
    "answer_wall_s_max",
    "every_request_answered",
    "no_body_contains",
    "recovered_within_s",
    "results_per_request",
    "retry_after_on_429",
}
SAYS_WHEN = {429, 503}
JSON = {"Content-Type": "application/json"}
ROOT = Path(__file__).parents[2]


@dataclass
class Answer:
    """One HTTP answer, or the lack of one (status 0)."""

    status: int
    text: str
    headers: dict[str, str]
    wall_s: float

    @property
    def result(self) -> RunResult:
        return RunResult.model_validate_json(self.text)

    def seen(self) -> dict[str, Any]:
        """In the words of the cases."""
        seen: dict[str, Any] = {"http_status": self.status, "body": self.text}
        if self.status == 200:
            seen |= observe({}, self.result, None)
        return seen | {"wall_s": self.wall_s}


async def ask(http: httpx2.AsyncClient, body: bytes) -> Answer:
    """Send one run, once: nothing here tries again."""
    began = time.monotonic()
    try:
        answer = await http.post("/v1/runs", content=body, headers=JSON)
    except httpx2.HTTPError as error:
        return Answer(0, repr(error), {}, time.monotonic() - began)
    wall_s = time.monotonic() - began
    return Answer(answer.status_code, answer.text, dict(answer.headers), wall_s)


async def ask_bare(address: str, body: bytes) -> Answer:
    """As :func:`ask`, on a connection of its own, without the cost of an HTTP library."""
    began = time.monotonic()
    host, _, port = address.removeprefix("http://").partition(":")
    try:
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            b"POST /v1/runs HTTP/1.1\r\nHost: service\r\nContent-Type: application/json\r\n"
            b"Connection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        head, _, text = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        await writer.wait_closed()
        status = int(head.split(maxsplit=2)[1])
    except (OSError, IndexError, ValueError) as error:
        return Answer(0, repr(error), {}, time.monotonic() - began)
    return Answer(status, text.decode(), {}, time.monotonic() - began)


def connect(service: Crew, connections: int = 100) -> httpx2.AsyncClient:
    limits = httpx2.Limits(max_connections=connections, max_keepalive_connections=connections)
    return httpx2.AsyncClient(base_url=service.address, timeout=60, limits=limits)


def ask_now(service: Crew, body: bytes) -> Answer:
    async def once() -> Answer:
        async with connect(service) as http:
            return await ask(http, body)

    return asyncio.run(once())


async def flood(
    http: httpx2.AsyncClient, body: bytes, *, callers: int, go_on: Callable[[], bool]
) -> list[Answer]:
    """Callers that each ask again as soon as they are answered."""

    async def caller() -> list[Answer]:
        answers: list[Answer] = []
        while go_on():
            answers.append(await ask(http, body))
            if answers[-1].status != 200:
                await asyncio.sleep(0.1)  # the pace of an impatient caller, not a wait
        return answers

    everything = await asyncio.gather(*(caller() for _ in range(callers)))
    return [answer for answers in everything for answer in answers]


async def meanwhile[T](work: Awaitable[T], look: Callable[[], Awaitable[None]]) -> T:
    """Do something over and over for as long as the work takes."""
    working = asyncio.ensure_future(work)
    while not working.done():
        await look()
        await asyncio.wait([working], timeout=0.1)
    return await working


def differences(expect: dict[str, Any], answers: list[Answer]) -> list[str]:
    """What of the expectations for each single answer does not hold."""
    each = {name: want for name, want in expect.items() if name not in OF_ALL}
    return [text for answer in answers for text in check(each, answer.seen())]


def gw_011(case: Case) -> None:
    """A flood of ten times what it can do: early refusals, and health checks answer."""
    slots = 8
    callers = slots * case.request["concurrency_factor"]
    body = gateway_body(case.request)
    health: list[float] = []

    async def play(service: Crew) -> list[Answer]:
        async with connect(service, callers) as http, connect(service) as probe:

            async def look() -> None:
                began = time.monotonic()
                assert (await probe.get("/healthz")).status_code == 200
                health.append(time.monotonic() - began)

            end = time.monotonic() + FLOOD_S
            work = flood(http, body, callers=callers, go_on=lambda: time.monotonic() < end)
            return await meanwhile(work, look)

    with crew("flood", workers=1, slots=slots, max_queued=2 * slots) as service:
        before = Before.of(service)
        answers = asyncio.run(play(service))
        assert differences(case.expect, answers) == []
        assert faults(before, case.after) == []
    assert max(answer.wall_s for answer in answers) <= case.expect["answer_wall_s_max"]
    refused = [answer for answer in answers if answer.status in SAYS_WHEN]
    assert refused and all(float(answer.headers["retry-after"]) > 0 for answer in refused)
    served = [answer for answer in answers if answer.status == 200]
    assert {answer.result.outcome for answer in served} == {"ok"}
    assert len(served) >= slots * FLOOD_S / 2  # what it can do, it does under the flood too
    assert len(health) > FLOOD_S and max(health) < 1.0


def gw_012(case: Case) -> None:
    """The queue's server dies and comes back: 503 meanwhile, and runs in flight are answered."""
    body = gateway_body(case.request)
    slow = json.dumps({"code": "import time\ntime.sleep(1)\nprint('slow')\n"}).encode()

    async def play(service: Crew) -> Answer:
        async with connect(service) as http:
            under_way = asyncio.create_task(ask(http, slow))
            await asyncio.to_thread(service.holder)
            service.queue_server.kill()
            await asyncio.to_thread(service.gateway.said, "queue.lost")
            during = [await ask(http, body) for _ in range(10)]
            assert differences(case.expect["during"], during) == []
            await asyncio.to_thread(service.workers[0].said, "queue.unavailable")
            # Not by a thread of the loop's: the server dies with the thread that started it.
            service.start_queue_server()
            back = time.monotonic()
            within_s = case.expect["after_fault"]["recovered_within_s"]
            while (last := await ask(http, body)).status != 200:
                assert last.status == 503 and time.monotonic() < back + within_s, last
                await asyncio.sleep(0.05)
            assert differences(case.expect["after_fault"], [last]) == []
            assert time.monotonic() < back + within_s
            return await under_way

    with crew("outage", workers=1, slots=4) as service:
        answer = asyncio.run(play(service))
        assert (answer.status, answer.result.outcome, answer.result.stdout) == (200, "ok", "slow\n")
        assert until(lambda: not service.unfinished_keys())


def gw_013(case: Case) -> None:
    """A worker is killed in the middle of a run."""
    body = gateway_body(case.request)

    async def play(service: Crew) -> Answer:
        async with connect(service) as http:
            under_way = asyncio.create_task(ask(http, body))
            victim = await asyncio.to_thread(service.holder)
            victim.kill()
            service.workers.remove(victim)
            return await under_way

    with crew("killed", workers=2, slots=2, lease_s=SHORT_LEASE_S) as service:
        answer = asyncio.run(play(service))
        assert differences(case.expect, [answer]) == []
        # Not merely one of the case's alternatives: another worker took it over, and it is said.
        assert (answer.result.outcome, answer.result.attempt) == ("ok", 2)
        service.start_workers(1)  # as a supervisor does; it sweeps what the killed one left
        for worker in service.workers:
            until_true(lambda worker=worker: not service.programs_of(worker), 5)
        assert until(lambda: not service.unfinished_keys())


def gw_014(case: Case) -> None:
    """A worker is frozen while it holds runs, and thaws when others have answered them."""
    marked = {f"frozen-{number}": f"print('x-{number}')\n" for number in range(6)}
    runs = [
        {"run_id": run_id, "code": f"import time\ntime.sleep(0.7)\n{code}"}
        for run_id, code in marked.items()
    ]
    request = {"runs": runs}
    lines: list[RunResult] = []

    def read(service: Crew) -> None:
        accept = {"Accept": "application/x-ndjson"}
        with (
            service.http() as http,
            http.stream("POST", "/v1/batches", json=request, headers=accept) as stream,
        ):
            lines.extend(RunResult.model_validate_json(one) for one in stream.iter_lines())

    async def play(service: Crew) -> float:
        reading = asyncio.create_task(asyncio.to_thread(read, service))
        victim = await asyncio.to_thread(service.holder)
        began = time.monotonic()
        with victim.frozen():
            await reading
            at_least_s = 2 * SHORT_LEASE_S  # as long as it takes for the thaw to come late
            await asyncio.to_thread(until, lambda: time.monotonic() > began + at_least_s)
        # The late worker learns what it no longer holds, and serves on, alone.
        [other] = [one for one in service.workers if one is not victim]
        service.workers.remove(other)
        assert await asyncio.to_thread(other.stop) == 0
        async with connect(service) as http:
            answer = await ask(http, gateway_body(case.request))
        assert (answer.status, answer.result.stdout) == (200, "x\n")
        until_true(lambda: not service.programs_of(victim), 5)
        return time.monotonic() - began

    with crew("frozen", workers=2, slots=4, lease_s=SHORT_LEASE_S) as service:
        wall_s = asyncio.run(play(service))
        assert wall_s <= case.expect["wall_s_max"]
        stats = service.client.stats()
        assert until(lambda: not service.unfinished_keys())
    counts = Counter(line.run_id for line in lines)
    assert counts == dict.fromkeys(marked, case.expect["results_per_request"])
    for line in lines:
        number = line.run_id.removeprefix("frozen-")
        assert (line.outcome, line.stdout) == ("ok", f"x-{number}\n")
    # A run that was delivered twice says so, and was still recorded once.
    twice = [line for line in lines if line.attempt > 1]
    assert twice and stats["redelivered_total"] >= len(twice)
    assert stats["finished_total"] == len(marked) + 1


def gw_016(case: Case) -> None:
    """Far more callers, with a connection each, than the queue's server takes connections."""
    count = case.request["concurrency"]
    body = gateway_body(case.request)

    async def play(service: Crew) -> list[Answer]:
        return await asyncio.gather(*(ask_bare(service.address, body) for _ in range(count)))

    with crew("narrow", workers=1, slots=16) as service:
        service.limit_connections(case.request["redis_max_connections"])
        answers = asyncio.run(play(service))
    assert len(answers) == count
    assert differences(case.expect, answers) == []
    unwanted = [*case.expect["no_body_contains"], "max number of clients"]
    assert not [answer for answer in answers if any(text in answer.text for text in unwanted)]
    served = [answer for answer in answers if answer.status == 200]
    assert served and {answer.result.stdout for answer in served} == {"1\n"}


def gw_017(case: Case) -> None:
    """The id of a run is its ticket: who asks again late gets that run's result.

    Instead of waiting 30 s, the stored result is made 30 s older; then it is made to expire.
    """
    body = json.dumps({**case.request["json"], "run_id": "late"}).encode()
    with crew("late", workers=1, slots=2) as service, service.valkey() as server:
        first = ask_now(service, body)
        [key] = cast("list[bytes]", server.keys("{rollyard:0}:done:*"))  # pyright: ignore[reportUnknownMemberType]
        left_ms = server.pttl(key)
        older_ms = left_ms - case.request["wait_s"] * 1000
        assert older_ms > 0, "a result must be kept for longer than the case waits"
        server.pexpire(key, older_ms)
        late = ask_now(service, body)
        assert differences(case.expect, [first, late]) == []
        assert late.text == first.text
        assert service.client.stats()["finished_total"] == 1
        server.pexpire(key, 1)
        assert until(lambda: not server.exists(key))
        expired = ask_now(service, body)  # run anew: never an empty result
        assert differences(case.expect, [expired]) == []
        assert service.client.stats()["finished_total"] == 2


def gw_019(case: Case) -> None:
    """Each worker in turn is replaced and asked to stop, while callers go on."""
    body = gateway_body(case.request)
    count = 2

    async def play(service: Crew) -> list[Answer]:
        rolled = asyncio.Event()

        async def roll() -> None:
            for old in list(service.workers):
                await asyncio.to_thread(service.start_workers, 1)
                await asyncio.to_thread(service.holder)
                assert await asyncio.to_thread(old.stop) == 0
                service.workers.remove(old)
            rolled.set()

        callers = case.request["concurrency"]
        async with connect(service, callers) as http:
            rolling = asyncio.create_task(roll())
            rolling.add_done_callback(lambda _: rolled.set())
            answers = await flood(http, body, callers=callers, go_on=lambda: not rolled.is_set())
            await rolling
            return answers

    with crew("rolling", workers=count, slots=16) as service:
        answers = asyncio.run(play(service))
        assert until(lambda: not service.unfinished_keys())
    assert {answer.status for answer in answers} == {200}
    assert differences(case.expect, answers) == []
    # What ran was finished, what had not started was handed back uncounted: nothing ran twice.
    assert {answer.result.attempt for answer in answers} == {1}
    assert len({answer.result.worker_id for answer in answers}) > count


def gw_020(case: Case) -> None:
    """The only worker's clocks are ten minutes ahead of gateway and queue.

    ``skewed.py`` says how far that reaches. Beside the case's run: one with a deadline, which a
    stamp of ten minutes later would drop, and the times that are told must be the run's own.
    """
    off_s = 600
    body = gateway_body(case.request)
    with_deadline = json.dumps({**case.request["json"], "deadline_s": 30}).encode()
    with crew("skewed", workers=1, slots=2, clock_off_s=off_s) as service:
        # The clocks are off indeed: its log says so.
        [ready] = service.workers[0].events("worker.ready")
        [listening] = service.gateway.events("gateway.listening")
        stamps = [datetime.fromisoformat(one["timestamp"]) for one in (ready, listening)]
        assert abs((stamps[0] - datetime.now(UTC)).total_seconds() - off_s) < 60
        assert abs((stamps[1] - datetime.now(UTC)).total_seconds()) < 60
        answers = [ask_now(service, one) for one in (body, with_deadline)]
        assert differences(case.expect, answers) == []
        for answer in answers:
            assert answer.result.outcome == "ok"
            assert 0 <= answer.result.queued_ms <= answer.wall_s * 1e3
            assert 0 < answer.result.wall_ms <= answer.wall_s * 1e3
        assert service.client.stats()["workers"] == 1  # it counts as alive, for as long as it is


FAULTS: dict[str, Callable[[Case], None]] = {
    "gw-011": gw_011,
    "gw-012": gw_012,
    "gw-013": gw_013,
    "gw-014": gw_014,
    "gw-016": gw_016,
    "gw-017": gw_017,
    "gw-019": gw_019,
    "gw-020": gw_020,
}


@pytest.mark.parametrize("case_id", FAULTS)
@pytest.mark.usefixtures("placed")
def test_fault(case_id: str) -> None:
    FAULTS[case_id](CASES[case_id])


# A client case needs a server that misbehaves to order, which no real one does; the SDK's own
# tests have one.
CLIENT = {
    "cli-001": "tests/integration/sdk/test_sdk_faults.py::test_service_fault_is_no_wrong_answer",
    "cli-002": "tests/integration/sdk/test_sdk_faults.py::test_timeout_of_the_code_is_a_result",
    "cli-003": "tests/integration/sdk/test_sdk_batch.py::test_retried_runs_land_in_their_places",
    "cli-009": "tests/unit/test_sdk_call.py::test_silence_is_explained_by_queue_and_run_time",
    "cli-010": "tests/integration/sdk/test_sdk_batch.py"
    "::test_infra_error_of_one_does_not_sink_the_batch",
}


@pytest.fixture(scope="session")
def collected() -> Iterator[str]:
    """What pytest collects of the tests that play client cases."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *CLIENT.values()]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    yield done.stdout


@pytest.mark.parametrize("case_id", CLIENT)
def test_client_case_is_played_by_the_sdks_own_tests(case_id: str, collected: str) -> None:
    path, _, name = CLIENT[case_id].partition("::")
    assert CLIENT[case_id] in collected
    [test] = [
        node
        for node in ast.parse((ROOT / path).read_text()).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name
    ]
    assert f"Case {case_id}: " in (ast.get_docstring(test) or "")
