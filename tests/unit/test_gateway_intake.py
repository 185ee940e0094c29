"""From bytes to queued runs: ceilings, identities, bounds on structure."""

import json
from typing import Any

import msgspec
import pytest

from rollyard.types import MIB, Limits
from rollyard_queue.records import RunSpec
from rollyard_service.body import DENSE_BYTES, MAX_STRINGS, has_sane_structure
from rollyard_service.ceilings import Ceilings
from rollyard_service.intake import MAX_PROBLEMS, Intake
from rollyard_service.refusal import Refusal

CEILINGS = Ceilings(
    timeout_s=60, cpu_s=60, memory_bytes=1 << 30, disk_bytes=1 << 30, pids=100, output_bytes=MIB
)
INTAKE = Intake(ceilings=CEILINGS, max_wait_s=100, slack_s=5)


def batch(*runs: dict[str, Any]) -> bytes:
    return json.dumps({"runs": runs}).encode()


def test_payload_is_complete() -> None:
    accepted = INTAKE.run(b'{"code": "print(1)\\u0000\\ud83d\\ude00"}')
    spec = msgspec.json.decode(accepted.queued.payload, type=RunSpec)
    assert spec.run_id == accepted.queued.run_id
    assert spec.code == "print(1)\0\N{GRINNING FACE}"
    assert spec.limits.timeout_s == Limits().timeout_s
    assert accepted.queued.job == "default"
    assert accepted.queued.expires_in_ms is None
    assert accepted.patience_s == 100 + 10 + 5


def test_deadline_bounds_the_wait() -> None:
    [one, two] = INTAKE.batch(
        batch({"code": "", "deadline_s": 2.5, "job": "j"}, {"code": "", "deadline_s": 1e-6})
    )
    assert (one.queued.expires_in_ms, one.patience_s, one.queued.job) == (2500, 17.5, "j")
    assert two.queued.expires_in_ms == 1


def test_each_run_gets_an_id_of_its_own() -> None:
    accepted = INTAKE.batch(batch({"code": ""}, {"code": ""}, {"code": "", "run_id": "mine"}))
    run_ids = [run.queued.run_id for run in accepted]
    assert len(set(run_ids)) == 3
    assert run_ids[2] == "mine"


def test_every_limit_above_its_maximum_is_named() -> None:
    limits = {"timeout_s": 61, "cpu_s": 61, "memory_bytes": 1 << 31, "pids": 101}
    limits |= {"disk_bytes": 1 << 31, "output_bytes": 2 * MIB}
    with pytest.raises(Refusal) as caught:
        INTAKE.batch(batch({"code": ""}, {"code": "", "limits": limits}))
    problems = caught.value.error.problems
    assert [problem.field for problem in problems] == [
        f"runs.1.limits.{name}"
        for name in ("timeout_s", "cpu_s", "memory_bytes", "disk_bytes", "pids", "output_bytes")
    ]
    assert "maximum of 60" in problems[0].message


def test_defaults_above_a_maximum_are_lowered() -> None:
    small = Ceilings(
        timeout_s=5, cpu_s=2, memory_bytes=64 * MIB, disk_bytes=MIB, pids=8, output_bytes=1024
    )
    intake = Intake(ceilings=small, max_wait_s=1, slack_s=1)
    run = intake.run(b'{"code": "", "limits": {"pids": 3}}')
    limits = msgspec.json.decode(run.queued.payload, type=RunSpec).limits
    assert (limits.timeout_s, limits.cpu_s, limits.memory_bytes) == (5, 2, 64 * MIB)
    assert (limits.disk_bytes, limits.pids, limits.output_bytes) == (MIB, 3, 1024)
    assert run.patience_s == 7
    with pytest.raises(Refusal, match=r"limits\.timeout_s"):
        intake.run(b'{"code": "", "limits": {"timeout_s": 6}}')


def test_problems_are_bounded() -> None:
    body = json.dumps({f"field-{index}-{'x' * 1000}": 1 for index in range(200)}).encode()
    with pytest.raises(Refusal) as caught:
        INTAKE.run(body)
    problems = caught.value.error.problems
    assert len(problems) == MAX_PROBLEMS
    assert max(len(problem.field) for problem in problems) <= 300


@pytest.mark.parametrize(
    ("body", "sane"),
    [
        (b'{"code":"' + b"[]," * 700_000 + b'"}', True),
        (b'{"code":"' + b'\\"' * 700_000 + b'"}', True),
        (b'{"code":"' + b"\\\\" * 700_000 + b'"}', True),
        (b'{"code":[' + b"[]," * 700_000 + b"1]}", False),
        (b'["a"' + b',"b"' * MAX_STRINGS + b"]", False),
        (b" " * 2_000_000, False),
        (b'"' + b"a" * 2_000_000, False),  # never closed
        (batch(*[{"code": "x" * 3000, "stdin": "", "limits": {"timeout_s": 5}}] * 1024), True),
    ],
)
def test_structure_is_bounded_and_content_is_not(body: bytes, sane: bool) -> None:
    assert len(body) > DENSE_BYTES
    assert has_sane_structure(body) is sane
