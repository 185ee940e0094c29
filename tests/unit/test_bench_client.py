"""What one client process of a load test is told, and what it makes of it."""

import pytest

from rollyard_loadtest.client import POOL, Order, pool
from rollyard_loadtest.scenario import load
from rollyard_loadtest.target import Address, TargetKind


def _order(kind: TargetKind = "sdk", *, null: bool = False, client: int = 0) -> Order:
    return Order(
        scenario="hostile-mix", load=load("hostile-mix").load.model_dump(), seed="1",
        address=Address(kind, "http://127.0.0.1:1", null), client=client, clients=2,
    )  # fmt: skip


def test_an_order_survives_the_pipe() -> None:
    order = _order(null=True)
    assert Order.from_json(order.to_json()) == order


def test_clients_send_different_programs() -> None:
    first, second = pool(_order(client=0)), pool(_order(client=1))
    assert len(first) == len(second) == POOL
    prints = [{w.stdout for w in works if w.kind == "print"} for works in (first, second)]
    assert not prints[0] & prints[1]


def test_null_workers_are_only_asked_for_an_answer() -> None:
    real, null = pool(_order()), pool(_order(null=True))
    assert [w.code for w in null] == [w.code for w in real]
    assert {(w.outcome, w.stdout) for w in null} == {("ok", None)}
    assert len({w.outcome for w in real}) > 4


@pytest.mark.parametrize("kind", ["sandboxfusion", "codejudge"])
def test_other_dialects_are_asked_for_what_they_can_say(kind: TargetKind) -> None:
    real, other = pool(_order()), pool(_order(kind))
    classes = {(a.outcome, b.outcome) for a, b in zip(real, other, strict=True)}
    assert classes == {
        ("ok", "ok"), ("error", "error"), ("memory", "error"), ("signal", "error"),
        ("output_limit", "error"), ("timeout", "timeout"), ("cpu_timeout", "timeout"),
    }  # fmt: skip
    assert all(w.stdout is None or w.stdout == w.stdout.strip() for w in other)
