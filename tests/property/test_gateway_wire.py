"""What msgspec takes, pydantic takes too, and means the same by it."""

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollyard.types import MIB, BatchRequest, Limits, RunRequest
from rollyard_queue.records import RunSpec
from rollyard_service.ceilings import Ceilings
from rollyard_service.intake import Intake
from rollyard_service.refusal import Refusal
from rollyard_service.settings import GatewaySettings
from rollyard_service.wire import MAX_CODE_CHARS, WireRun, digest_of, read_batch, read_run, written

CEILINGS = GatewaySettings().ceilings
INTAKE = Intake(ceilings=CEILINGS, max_wait_s=100, slack_s=5)

numbers = st.sampled_from(
    [0, 1, -1, 5, 5.0, 0.5, 1e-9, 3600, 3601, 16 * MIB, 1 << 40, (1 << 40) + 1, 4096, 4097, 1 << 70,
     True, None, "5", [], -100, 101]
)  # fmt: skip
texts = st.one_of(
    st.text(max_size=20),
    st.sampled_from(
        ["", "a", "a b", "a\n", "a\nb", "x" * 64, "x" * 65, "x" * 129, "é", "a/b", "\0"]
    ),
)
names = st.sampled_from(["auto", "bare", "warm", "fresh", "python", "cpp", "stop", "truncate", ""])
limits = st.dictionaries(st.sampled_from([*Limits.model_fields, "x"]), numbers, max_size=4)
values: dict[str, st.SearchStrategy[Any]] = {
    "code": texts | numbers,
    "stdin": texts | numbers,
    "run_id": texts | numbers,
    "job": texts | numbers,
    "deadline_s": numbers,
    "priority": numbers,
    "echo_last": st.booleans() | numbers,
    "limits": limits | numbers,
    "files": st.dictionaries(texts, texts, max_size=2) | numbers,
    "fetch_files": st.lists(texts, max_size=2) | numbers,
    **dict.fromkeys(("language", "isolation", "template", "on_output_limit"), names | numbers),
    "other": numbers,
}
plain = st.fixed_dictionaries({"code": texts})
odd = st.fixed_dictionaries({}, optional=values)
rest = {name: value for name, value in values.items() if name != "code"}
mixed = st.fixed_dictionaries({"code": texts}, optional=rest)
runs = st.lists(st.one_of(plain, plain, mixed, odd), max_size=4)


def payloads(body: bytes, intake: Intake = INTAKE) -> list[dict[str, Any]] | None:
    """What the models of rollyard.types make of a batch, ids of ours aside; None: refused."""
    try:
        accepted = intake.accept(BatchRequest.model_validate_json(body, strict=True).runs)
    except (Refusal, ValueError):
        return None
    return [seen(run.queued.payload) for run in accepted]


def seen(payload: bytes) -> dict[str, Any]:
    """A payload as a worker reads it."""
    return msgspec.to_builtins(msgspec.json.decode(payload, type=RunSpec))


@given(runs)
def test_quick_reader_takes_only_what_the_models_take(batch: Sequence[dict[str, Any]]) -> None:
    body = json.dumps({"runs": batch}).encode()
    quick = read_batch(body, CEILINGS)
    if quick is None:
        return
    expected = payloads(body)
    assert expected is not None
    for run, given_run, wanted in zip(quick, batch, expected, strict=True):
        got = seen(msgspec.json.encode(run))
        if given_run.get("run_id") is None:
            assert len(got.pop("run_id")) == 32
            wanted.pop("run_id")
        assert got == wanted


@given(runs)
def test_digest_is_the_same_whichever_way_a_run_goes(batch: Sequence[dict[str, Any]]) -> None:
    """A neighbour with files sends a whole batch the other way: a retry must not differ for it."""
    body = json.dumps({"runs": batch}).encode()
    quick = read_batch(body, CEILINGS)
    if quick is None:
        return
    models = BatchRequest.model_validate_json(body, strict=True).runs
    assert [written(run)[1] for run in quick] == [digest_of(run) for run in models]


@given(
    st.fixed_dictionaries({"code": texts}, optional=rest),
    st.fixed_dictionaries({"code": texts}, optional=rest),
)
def test_digest_tells_programs_apart_and_leaves_out_id_and_time(
    one: dict[str, Any], other: dict[str, Any]
) -> None:
    apart = {"run_id": "mine", "deadline_s": 7, "priority": 3}
    try:
        first, second = RunRequest.model_validate(one), RunRequest.model_validate(other)
        again = RunRequest.model_validate(one | apart)
    except ValueError:
        return
    assert digest_of(first) == digest_of(again)
    differ = {"run_id": None, "deadline_s": None, "priority": 0}
    if first.model_copy(update=differ) != second.model_copy(update=differ):
        assert digest_of(first) != digest_of(second)


@given(runs, st.randoms(use_true_random=False))
def test_intake_takes_exactly_what_the_models_take(
    batch: Sequence[dict[str, Any]], chance: random.Random
) -> None:
    """Whichever way a batch goes; also when its bytes are damaged."""
    text = bytearray(json.dumps({"runs": batch}, ensure_ascii=False).encode("utf-8", "replace"))
    if chance.random() < 0.3:
        text[chance.randrange(len(text))] = chance.randrange(256)
    body = bytes(text)
    try:
        taken = [seen(run.queued.payload) for run in INTAKE.batch(body)]
    except Refusal as refusal:
        assert refusal.error.problems
        assert payloads(body) is None
        return
    wanted = payloads(body)
    assert wanted is not None
    for one, other in zip(taken, wanted, strict=True):
        if len(one["run_id"]) == 32:
            other["run_id"] = one["run_id"]
        assert one == other


@pytest.mark.parametrize(
    "run",
    [
        {"code": "x", "files": {"a": "b"}},
        {"code": "x", "fetch_files": ["*"]},
        {"code": "x" * (MAX_CODE_CHARS + 1)},
        {"code": "x", "limits": {"timeout_s": 601}},
        {"code": "x", "echo_last": True, "language": "bash"},
        {"code": "x", "run_id": "a\n"},
        {"code": "x", "job": "a\n"},
    ],
)
def test_what_needs_thought_is_left_to_the_models(run: dict[str, Any]) -> None:
    assert read_run(json.dumps(run).encode(), CEILINGS) is None


def test_usual_run_goes_the_quick_way_unless_defaults_are_too_high() -> None:
    assert read_run(b'{"code": "x", "limits": {"pids": 3}}', CEILINGS) is not None
    low = replace(CEILINGS, pids=8)
    assert read_run(b'{"code": "x"}', low) is None
    assert read_run(b'{"code": "x", "limits": {"pids": 3}}', low) is not None


def test_three_descriptions_of_a_run_agree() -> None:
    """Defaults that a payload leaves out must mean the same to gateway and worker."""
    run = RunRequest(run_id="a", code="b")
    body = b'{"run_id": "a", "code": "b"}'
    wire, spec = msgspec.json.decode(body, type=WireRun), msgspec.json.decode(body, type=RunSpec)
    for model, one, two in ((run, wire, spec), (run.limits, wire.limits, spec.limits)):
        assert set(one.__struct_fields__) == set(type(model).model_fields)
        for structure in (one, two):
            for name in structure.__struct_fields__:
                if name != "limits":
                    assert getattr(structure, name) == getattr(model, name), name


def test_ceilings_are_compared_on_both_ways() -> None:
    tight = Ceilings(
        timeout_s=5, cpu_s=5, memory_bytes=1 << 30, disk_bytes=1 << 30, pids=100, output_bytes=MIB
    )
    intake = Intake(ceilings=tight, max_wait_s=1, slack_s=1)
    lowered = seen(intake.run(b'{"code": "x"}').queued.payload)
    assert lowered["limits"]["timeout_s"] == 5
