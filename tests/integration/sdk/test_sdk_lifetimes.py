"""Clients across event loops, threads, processes, and their own end."""

import asyncio
import gc
import pickle  # noqa: TID251 - that clients can be pickled is a promise
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rollyard import AsyncClient, Client, TransportError, Unauthorized
from rollyard._call import Options
from rollyard._config import TransportKind
from rollyard._link import Link
from rollyard._loop_thread import LoopThread

from .peer import Gate, Peer, Serving, cut_after, hold, refuse


def test_one_client_in_several_loops(peer: Peer, transport: TransportKind) -> None:
    """Case cli-006: asyncio.run three times with one client, which nobody closes."""
    client = AsyncClient(peer.url, transport=transport)

    async def step() -> list[str]:
        results = await asyncio.gather(client.run("a"), client.run("b"))
        return [result.stdout for result in results]

    for _ in range(3):
        assert asyncio.run(step()) == ["a", "b"]
    gc.collect()  # a socket left open would warn here, and warnings are errors


def test_one_client_in_loops_at_the_same_time(peer: Peer) -> None:
    client = AsyncClient(peer.url)

    def step(i: int) -> str:
        return asyncio.run(client.run(f"p{i}")).stdout

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(step, range(24))) == [f"p{i}" for i in range(24)]


FORKS = """
import asyncio, os, sys, warnings
import rollyard
warnings.filterwarnings("ignore", message=".*fork.*", category=DeprecationWarning)
url, transport = sys.argv[1:]
client = rollyard.Client(url, transport=transport)
shared = rollyard.AsyncClient(url, transport=transport)
assert client.run("parent").stdout == "parent"
asyncio.run(shared.run("parent"))
children = []
for i in range(8):
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            mine = [client.run(f"child {i}.{j}").stdout for j in range(5)]
            assert mine == [f"child {i}.{j}" for j in range(5)], mine
            assert asyncio.run(shared.run(f"async {i}")).stdout == f"async {i}"
            client.close()
            code = 0
        finally:
            os._exit(code)
    children.append(pid)
assert [r.stdout for r in client.run_all(["x", "y"])] == ["x", "y"]
assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children] == [0] * 8
assert client.run("parent again").stdout == "parent again"
client.close()
"""


def test_client_used_after_fork(peer: Peer, transport: TransportKind) -> None:
    """Case cli-007: eight forked children and their parent use one client at the same time."""
    command = [sys.executable, "-W", "error", "-c", FORKS, peer.url, transport]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    codes = sorted(run["code"] for seen in peer.batches for run in seen.runs)
    assert len(codes) == len(set(codes)) + 1  # "parent", said by both clients
    assert len(codes) == 2 + 8 * 6 + 3


def test_pickled_client_keeps_its_settings(peer: Peer) -> None:
    with Client(peer.url, api_key="secret", job="j", batch_max_runs=2) as client:
        assert client.run("here").ok
        copy: Client = pickle.loads(pickle.dumps(client))
        assert copy.run("there").stdout == "there"
        copy.close()
    assert repr(copy) == repr(client)
    assert "secret" not in repr(client)
    assert {seen.headers["authorization"] for seen in peer.batches} == {"Bearer secret"}
    assert {run["job"] for seen in peer.batches for run in seen.runs} == {"j"}


def test_pickled_async_client_keeps_its_settings(peer: Peer) -> None:
    client = AsyncClient(peer.url, job="j", max_retries=3, transport="aiohttp")
    asyncio.run(client.run("here"))
    copy: AsyncClient = pickle.loads(pickle.dumps(client))
    assert repr(copy) == repr(client)
    assert asyncio.run(copy.run("there")).stdout == "there"


async def test_closing_ends_calls_under_way(peer: Peer, transport: TransportKind) -> None:
    gate = Gate()
    peer.always = hold({"slow": gate})
    client = AsyncClient(peer.url, transport=transport, max_connections=1)
    sent = asyncio.ensure_future(client.run("slow"))
    await peer.until(lambda: len(peer.requests) == 1)
    unsent = asyncio.ensure_future(client.run("never sent"))
    await asyncio.sleep(0)
    await client.aclose()
    gate.open()
    for call in (sent, unsent):
        with pytest.raises(TransportError, match="the client was closed"):
            await call
    assert (await client.run("again")).stdout == "again"
    await client.aclose()
    await client.aclose()


def test_closing_ends_calls_of_other_threads(peer: Peer, transport: TransportKind) -> None:
    gate = Gate()
    peer.always = hold({"slow": gate})
    client = Client(peer.url, transport=transport)
    with ThreadPoolExecutor(2) as pool:
        call = pool.submit(client.run, "slow")
        batch = pool.submit(client.run_all, ["slow"])
        peer.wait_until(lambda: sum(len(seen.runs) for seen in peer.batches) == 2)
        client.close()
        gate.open()
        for future in (call, batch):
            with pytest.raises(TransportError, match="the client was closed"):
                future.result(timeout=30)
    assert client.run("again").stdout == "again"
    client.close()


def test_stopped_loop_takes_no_more_work() -> None:
    thread = LoopThread()
    waiting = thread.start(asyncio.sleep(60))
    thread.stop()
    assert waiting.cancelled()
    with pytest.raises(TransportError):
        thread.call(asyncio.sleep(0))
    thread.stop()


def test_dropped_clients_close_themselves(peer: Peer, transport: TransportKind) -> None:
    before = set(threading.enumerate())  # other tests' clients may be open

    async def main() -> None:
        assert (await AsyncClient(peer.url, transport=transport).run("p")).ok
        gc.collect()

    asyncio.run(main())
    assert Client(peer.url, transport=transport).run("p").ok
    gc.collect()
    assert not [one.name for one in set(threading.enumerate()) - before if "rollyard" in one.name]


@pytest.mark.parametrize("turns", range(4))
def test_a_client_dropped_as_the_loop_ends_is_closed(
    peer: Peer, transport: TransportKind, turns: int
) -> None:
    """The loop's end cancels what closes it, sooner or later; what is left open warns and fails."""

    async def main() -> None:
        config = AsyncClient(peer.url, transport=transport)._config  # pyright: ignore[reportPrivateUsage]
        link = Link(config)
        await link.open()
        call = link.start("p", "default", None, Options(), None)
        assert (await call.future).ok
        del link, call
        gc.collect()
        for _ in range(turns):
            await asyncio.sleep(0)

    asyncio.run(main())
    gc.collect()


def test_client_still_open_at_exit_ends_quietly(peer: Peer, transport: TransportKind) -> None:
    script = (
        "import rollyard, sys\n"
        "client = rollyard.Client(sys.argv[1], transport=sys.argv[2])\n"
        "print(client.run('p').stdout)\n"
    )
    command = [sys.executable, "-W", "error", "-c", script, peer.url, transport]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "p\n", "")


def test_interrupt_cancels_the_run(peer: Peer) -> None:
    gate = Gate()
    peer.always = hold({"slow": gate})
    script = (
        "import rollyard, sys\n"
        "with rollyard.Client(sys.argv[1]) as client:\n"
        "    try:\n"
        "        client.run('slow')\n"
        "    except KeyboardInterrupt:\n"
        "        print('interrupted')\n"
    )
    command = [sys.executable, "-c", script, peer.url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        peer.wait_until(lambda: len(peer.requests) == 1)
        child.send_signal(2)
        peer.wait_until(lambda: peer.requests[0].gone.is_set())
        gate.open()
        assert child.communicate(timeout=30)[0] == "interrupted\n"


def test_unix_socket(tmp_path: Path, transport: TransportKind) -> None:
    with Serving(Peer(), uds=str(tmp_path / "gateway socket")) as peer:
        url = f"unix://{tmp_path}/gateway%20socket"
        with Client(url, transport=transport) as client:
            assert client.run("p").stdout == "p"
            assert client.healthy()
            assert client.ready()
        assert len(peer.requests) == 3


async def test_short_requests_are_retried_and_refused_as_runs_are(
    peer: Peer, transport: TransportKind
) -> None:
    async with AsyncClient(peer.url, transport=transport) as client:
        peer.short_scripts.extend([refuse(503), cut_after(0)])
        assert await client.stats() == {"queued": 3, "in_flight": 1}
        peer.short_scripts.append(refuse(401))
        with pytest.raises(Unauthorized):
            await client.cancel("some-run")
        peer.short_scripts.append(refuse(503))
        assert not await client.ready()
    assert len(peer.requests) == 5


async def test_short_requests(peer: Peer, transport: TransportKind) -> None:
    async with AsyncClient(peer.url + "/", transport=transport) as client:
        assert await client.healthy()
        assert await client.ready()
        assert await client.stats() == {"queued": 3, "in_flight": 1}
        assert await client.cancel("some-run")
        assert not await client.cancel("unknown")
        with pytest.raises(ValueError, match="run_id"):
            await client.cancel("../x")
    with Client(peer.url + "/prefix", transport=transport) as client:
        assert not client.healthy()
        assert not client.ready()
        assert client.cancel("some-run")
        with pytest.raises(ValueError, match="404"):
            client.stats()
    paths = [seen.path for seen in peer.requests]
    assert paths[:4] == ["/healthz", "/readyz", "/v1/stats", "/v1/runs/some-run"]
    assert paths[5:] == [
        "/prefix/healthz",
        "/prefix/readyz",
        "/prefix/v1/runs/some-run",
        "/prefix/v1/stats",
    ]


def test_client_dropped_within_a_cycle_closes_itself(peer: Peer) -> None:
    """The collector finalizes a cycle in any order: sockets must not be part of it."""
    for _ in range(3):
        cycle: list[object] = [client := Client(peer.url)]
        cycle.append(cycle)
        assert client.run("p").ok
        del client, cycle
        gc.collect()  # a socket left open would warn here, and warnings are errors
