"""From a case's words to Rollyard's and back."""

import json
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollyard import RunResult

HERE = Path(__file__).parent
MIB = 1 << 20
SERIAL = "serial_same_worker"
_CALM = {"worker_alive", "next_call_ok", "host_canary_untouched"}
_STATUS = {
    "cpu_timeout": "timeout",
    "infra_error": "infra",
    "expired": "infra",
    "cancelled": "infra",
}
# Unguessable, so that a program can print it only by letting the tests run to their end.
_TOKEN = secrets.token_hex(16)


@dataclass(frozen=True)
class Case:
    """One file of ``data/``."""

    id: str
    kind: str
    endpoint: str
    danger: str
    request: dict[str, Any]
    expect: dict[str, Any]

    @property
    def runs(self) -> list[dict[str, Any]]:
        """The runs of a ``run`` or ``batch`` case."""
        if self.endpoint == "run":
            return [self.request]
        if pattern := self.request.get("items_gen"):
            return [
                {**pattern, "code": pattern["code"].replace("{i}", str(i))}
                for i in range(pattern["count"])
            ]
        return self.request["items"]

    @property
    def after(self) -> list[str]:
        return self.expect.get("after", [])

    @property
    def is_serial(self) -> bool:
        return self.request.get("mode") == SERIAL

    @property
    def is_calm(self) -> bool:
        """True when neighbours cannot change what it observes, nor it what they observe."""
        expected = [self.expect, *self.expect.get("items", [])]
        return (
            self.danger == "none"
            and not self.is_serial
            and set(self.after) <= _CALM
            and not any({"wall_s_max", "order_preserved"} & one.keys() for one in expected)
        )


def load_cases() -> dict[str, Case]:
    """All cases by id, in order."""
    cases: dict[str, Case] = {}
    for path in sorted((HERE / "data").glob("*.json")):
        one: dict[str, Any] = json.loads(path.read_text())
        cases[one["id"]] = Case(
            **{
                name: one[name]
                for name in ("id", "kind", "endpoint", "danger", "request", "expect")
            }
        )
    return cases


def not_served() -> dict[str, str]:
    """Ids that no test runs yet, each with its reason."""
    lines = (HERE / "not_served.txt").read_text().splitlines()
    pairs = [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]
    return {case_id: reason for case_id, reason in pairs}  # noqa: C416 - typed


def wire(run: dict[str, Any], run_id: str) -> dict[str, Any]:
    """A case's run as the JSON of ``POST /v1/runs``."""
    code = run["code"]
    if "test_code" in run:
        code = f"{code}\n{run['test_code']}\nprint({_TOKEN!r})"
    body: dict[str, Any] = {"run_id": run_id, "code": code}
    stdin = run.get("stdin")
    if made := run.get("stdin_gen"):
        stdin = made["repeat"] * made["times"] + made["suffix"]
    if stdin is not None:
        body["stdin"] = stdin
    for name in ("files", "fetch_files"):
        if run.get(name):
            body[name] = run[name]
    limits: dict[str, Any] = {}
    for theirs, ours, unit in (
        ("timeout_s", "timeout_s", 1), ("memory_mb", "memory_bytes", MIB),
        ("disk_mb", "disk_bytes", MIB), ("max_output_bytes", "output_bytes", 1),
    ):  # fmt: skip
        if theirs in run:
            limits[ours] = run[theirs] * unit
    return body | ({"limits": limits} if limits else {})


def observe(run: dict[str, Any], result: RunResult, wall_s: float | None) -> dict[str, Any]:
    """A result in the words of ``evaluate.check``."""
    status = _STATUS.get(result.outcome, result.outcome)
    if wall_s is not None and status == "timeout":
        wall_s -= _grace_s(run, result)
    seen: dict[str, Any] = {
        "status": status,
        "http_status": 200,
        "wall_s": wall_s,
        "duration_s": result.wall_ms / 1e3,
        # The one place where a limit that struck a child of the program is said.
        "metrics": {"oom_killed": "memory limit" in result.message},
    }
    for name in ("exit_code", "signal", "stdout", "stderr", "stdout_truncated",
                 "stderr_truncated", "files"):  # fmt: skip
        seen[name] = getattr(result, name)
    if "expected_output" in run:
        seen["match"] = result.stdout.strip() == run["expected_output"].strip()
        seen["success"] = seen["match"] and status == "ok"
    if "test_code" in run:
        proven = result.exit_code == 0 and result.stdout.splitlines()[-1:] == [_TOKEN]
        seen["test_verdict"] = "pass" if proven else "fail"
    return seen


def _grace_s(run: dict[str, Any], result: RunResult) -> float:
    """Time that a run was given back because others had the cores.

    The cases' bounds are for an idle machine, which a developer's is not. Never for a run that
    used more CPU time than its limit: that one was let run for too long.
    """
    over_s = result.wall_ms / 1e3 - run["timeout_s"]
    return max(0.0, over_s) if result.cpu_ms / 1e3 <= run["timeout_s"] + 0.1 else 0.0


def gateway_body(request: dict[str, Any]) -> bytes:
    """The bytes that a ``gateway`` case sends, with a time limit at its place in our API."""
    if "raw_body" in request:
        try:
            return json.dumps(_with_limits(json.loads(request["raw_body"]))).encode()
        except ValueError:
            return request["raw_body"].encode()
    if "json" in request:
        return json.dumps(_with_limits(request["json"])).encode()
    if made := request.get("json_gen"):
        text = made["prefix"] + made["repeat"] * made["times"] + made["suffix"]
        return json.dumps({made["field"]: text}).encode()
    made = request["body_gen"]
    if "gzip_of" in made:
        return _gzip_of(made["gzip_of"])
    return (made["prefix"] + made["repeat"] * made["times"] + made["suffix"]).encode()


def _with_limits(body: dict[str, Any]) -> dict[str, Any]:
    if "timeout_s" not in body:
        return body
    rest = {name: value for name, value in body.items() if name != "timeout_s"}
    return {**rest, "limits": {"timeout_s": body["timeout_s"]}}


def _gzip_of(made: dict[str, Any]) -> bytes:
    """Many members of a mebibyte: a valid gzip stream, without compressing a gibibyte here."""
    import gzip

    block = made["repeat"].encode() * MIB
    return gzip.compress(block) * (made["times"] // len(block))
