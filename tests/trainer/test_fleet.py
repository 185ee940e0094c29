"""Rollouts over several servers of a model: real HTTP, vLLM's metrics page, real tool calls."""

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from rollyard import AsyncClient, RunResult
from rollyard_trainer import cli_eval, parse, template, terminal
from rollyard_trainer.engines import Sampling
from rollyard_trainer.engines.fleet import Fleet
from rollyard_trainer.engines.openai import ModelError
from rollyard_trainer.engines.pieces import Pieces, pieces_of
from rollyard_trainer.env import PythonToolEnv, service
from rollyard_trainer.evals.protocol import Result

PIECES: Pieces = pieces_of([])
SAMPLING = Sampling(max_turns=3, max_tokens=700)
PAGE = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="m"}} {running}
# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{{block_size="16",cache_dtype="auto",engine="0",\
num_cpu_blocks="None",num_gpu_blocks="{blocks}"}} 1.0
"""


class Served(ThreadingHTTPServer):
    """Two turns, token in and token out: a call that names the rollout, then its answer."""

    daemon_threads = True

    def __init__(self, blocks: int) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.blocks, self.lock = blocks, threading.Lock()
        self.turns: Counter[str] = Counter()
        self.under_way: set[str] = set()
        self.peak = 0
        self.hold: dict[str, threading.Event] = {}
        self.answers = 1 << 30  # then it is lost
        self.gone_for = 1 << 30  # requests, and then it is there again
        self.url = f"http://127.0.0.1:{self.server_port}/v1"

    def write(self, ids: list[int]) -> str:
        text = PIECES.decode(ids)
        name = text.partition("rollout ")[2].partition("<")[0]
        with self.lock:
            self.turns[name] += 1
            self.under_way.add(name)
            self.peak = max(self.peak, len(self.under_way))
        if name in self.hold:
            assert self.hold[name].wait(30)
        if "<tool_response>" not in text:
            call = {"name": parse.TOOL_NAME, "arguments": {"code": f"print('{name}' * 2)"}}
            return f"</reason>\n<tool_call>\n{json.dumps(call)}\n</tool_call>{template.END}"
        said = text.rpartition("<tool_response>\n")[2].partition("\n")[0]
        with self.lock:
            self.under_way.discard(name)
        return f"</reason>\n<answer>\\boxed{{{said}}}</answer>{template.END}"


class Handler(BaseHTTPRequestHandler):
    server: Served  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        page = PAGE.format(running=len(self.server.under_way), blocks=self.server.blocks)
        self._send(page.encode() if self.path == "/metrics" else b"", 200)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.answers -= 1
            lost = self.server.answers < 0 and self.server.gone_for > 0
            self.server.gone_for -= lost
        if lost:
            self._send(b"engine is dead", 503)
            return
        given = body["prompt"]
        says = self.server.write(PIECES.encode(given) if isinstance(given, str) else given)
        ids = PIECES.encode(says)
        choice: dict[str, Any] = {"finish_reason": "stop", "text": says}
        if "return_token_ids" in body:
            choice |= {"token_ids": ids, "logprobs": {"token_logprobs": [-0.5] * len(ids)}}
        answer = {"choices": [choice], "usage": {"completion_tokens": len(ids)}}
        self._send(json.dumps(answer).encode(), 200)

    def _send(self, content: bytes, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


def prompt(name: str) -> str:
    return template.prompt(f"rollout {name}")


ROOM = len(PIECES.encode(prompt("r00"))) + SAMPLING.max_tokens


@pytest.fixture
def servers() -> Iterator[list[Served]]:
    made = [Served(blocks=-(-ROOM * count // 16)) for count in (2, 3)]
    threads = [threading.Thread(target=one.serve_forever) for one in made]
    for thread in threads:
        thread.start()
    yield made
    for one, thread in zip(made, threads, strict=True):
        one.shutdown()
        thread.join()
        one.server_close()


async def test_each_server_has_as_many_rollouts_as_its_cache_holds_and_keeps_them(
    servers: list[Served], address: str
) -> None:
    names = [f"r{i:02}" for i in range(24)]
    urls = [one.url for one in servers]
    async with (
        AsyncClient(address) as client,
        Fleet(urls, "m", tokenizer=PIECES) as fleet,
    ):
        env = PythonToolEnv(run=service(client))
        rollouts = await fleet.rollout([prompt(name) for name in names], env, SAMPLING)
        assert fleet.scheduler is not None
        for one in servers:
            assert fleet.scheduler.free_tokens(one.url) == one.blocks * 16
    for name, one in zip(names, rollouts, strict=True):
        assert f"\\boxed{{{name * 2}}}" in one.own_text
        assert (one.stop, one.turns) == ("answer", 2)
        assert PIECES.decode(one.prompt_ids + one.ids) == prompt(name) + one.text
    assert [one.peak for one in servers] == [2, 3]
    assert not set(servers[0].turns) & set(servers[1].turns)  # sticky
    assert set((servers[0].turns + servers[1].turns).values()) == {2}


async def test_rollouts_of_a_lost_server_begin_anew_on_another(
    servers: list[Served], address: str, caplog: pytest.LogCaptureFixture
) -> None:
    names = [f"r{i:02}" for i in range(12)]
    servers[0].answers = 3
    async with (
        AsyncClient(address) as client,
        Fleet([one.url for one in servers], "m", tokenizer=PIECES, retries=0) as fleet,
    ):
        env = PythonToolEnv(run=service(client))
        first = await fleet.rollout([prompt(name) for name in names], env, SAMPLING)
        assert servers[0].turns.total() == 3
        servers[0].answers = 1 << 30  # it is there again, and gets its share of the next batch
        again = await fleet.rollout([prompt(name) for name in names], env, SAMPLING)
        assert servers[0].turns.total() > 3
        # Both are gone for a moment, and neither for good.
        for one in servers:
            one.gone_for, one.answers = 1, 0
        moment = await fleet.rollout([prompt(name) for name in names], env, SAMPLING)
        for one in servers:
            one.gone_for, one.answers = 1 << 30, 0
        with pytest.raises(ExceptionGroup) as caught:
            await fleet.rollout([prompt("x")], env, SAMPLING)
        assert caught.group_contains(ModelError, match="503: engine is dead")
    for rollouts in (first, again, moment):
        for name, one in zip(names, rollouts, strict=True):
            assert f"\\boxed{{{name * 2}}}" in one.own_text
            assert (one.stop, one.turns) == ("answer", 2)
            assert PIECES.decode(one.prompt_ids + one.ids) == prompt(name) + one.text
    assert "its rollouts go elsewhere" in caplog.text


async def test_a_tool_call_goes_out_while_others_still_write(servers: list[Served]) -> None:
    """The first turn of rollout one ends only when the call of rollout two has been run."""
    called = threading.Event()
    for one in servers:
        one.hold["one"] = called

    async def run(code: str, stdin: str) -> RunResult:
        if "two" in code:
            called.set()
        return RunResult(run_id="x", outcome="ok", stdout="done\n")

    async with Fleet([servers[0].url], "m", tokenizer=PIECES) as fleet:
        env = PythonToolEnv(run=run)
        both = fleet.rollout([prompt("one"), prompt("two")], env, SAMPLING)
        rollouts = await asyncio.wait_for(both, 30)
    assert [one.stop for one in rollouts] == ["answer", "answer"]


async def test_what_cannot_be_placed_or_measured_is_said(servers: list[Served]) -> None:
    env = PythonToolEnv(run=None)  # pyright: ignore[reportArgumentType] - makes no call
    async with Fleet([servers[0].url], "m", tokenizer=PIECES) as fleet:
        with pytest.raises(ExceptionGroup) as caught:
            await fleet.rollout([prompt("x")], env, Sampling(max_tokens=100_000))
        assert caught.group_contains(ValueError, match="fits no engine")
    servers[0].blocks = 0
    with pytest.raises(ModelError, match=r"/metrics.*enable-metrics"):
        await Fleet([servers[0].url], "m").__aenter__()
    given = {servers[0].url: 5000}
    async with Fleet(list(given), "m", capacity=given, tokenizer=PIECES) as fleet:
        assert fleet.scheduler is not None
        assert fleet.scheduler.free_tokens(servers[0].url) == 5000
    with pytest.raises(ModelError, match="context manager"):  # it was never entered
        await Fleet(list(given), "m").rollout(["x"], env, SAMPLING)


def test_an_evaluation_is_spread_over_servers(
    servers: list[Served], address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    problems, out = tmp_path / "problems.jsonl", tmp_path / "out.json"
    rows = [{"problem": f"rollout 1{i}", "answer": f"1{i}1{i}"} for i in range(8)]
    problems.write_text("\n".join(json.dumps(row) for row in rows))

    def evaluate() -> int:
        urls = tuple(one.url for one in servers)
        return cli_eval.evaluate(problems, model="m", model_url=urls, model_key=None, out=out, k=1,
                                 max_tokens=700, base_url=address)  # fmt: skip

    assert evaluate() == terminal.OURS
    assert "fits no engine" in capsys.readouterr().err
    for one in servers:
        one.blocks = 2 * (len(prompt("10").encode()) + 700) // 16
    assert evaluate() == terminal.OK
    assert Result.read(out).scores == [[1.0]] * 8
    assert all(one.peak <= 2 and one.turns for one in servers)
