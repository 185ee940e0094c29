"""Additive increase, multiplicative decrease of the runs in flight."""

from typing import cast

from rollyard import Overloaded
from rollyard._config import Address
from rollyard._gateway import Gateway
from rollyard._retry import RetryPolicy
from rollyard._transport import Transport
from rollyard._window import LEAST_RUNS, MAX_RUNS, QUIET_S, STEP, Window


def shrunk(limit: float = 1000.0) -> Window:
    window = Window()
    window.sent(int(2 * limit))
    window.refused(int(limit), sent_at=0.0, now=1.0)
    window.admitted()
    assert window.limit == window.in_flight == limit
    return window


def test_it_hinders_nobody_until_something_is_refused() -> None:
    window = Window()
    window.sent(45_000)
    assert window.room == MAX_RUNS - 45_000
    window.answered(45_000, now=1.0)
    assert (window.in_flight, window.limit) == (0, MAX_RUNS)


def test_one_wave_of_refusals_lowers_it_once_to_what_was_taken() -> None:
    window = Window()
    for _ in range(10):
        window.sent(512)
    for number in range(8):
        window.refused(512, sent_at=0.0, now=1.0 + number)
    assert window.limit == window.in_flight == 2 * 512
    window.sent(512)
    window.refused(512, sent_at=20.0, now=21.0)
    assert window.limit == 2 * 512 / 2


def test_answers_open_it_by_a_step_for_each_window() -> None:
    window = shrunk(1000.0)
    for _ in range(1000):
        window.answered(1, now=1.1)
        window.sent(1)
    assert 1000 + 0.98 * STEP < window.limit <= 1000 + STEP


def test_after_a_quiet_time_it_doubles_with_each_window() -> None:
    window = shrunk(1000.0)
    for _ in range(1000):
        window.answered(1, now=1.0 + QUIET_S + 0.1)
        window.sent(1)
    assert window.limit == 2000


def test_a_window_that_is_not_used_does_not_open() -> None:
    window = shrunk(1000.0)
    window.gone(990)
    window.answered(10, now=100.0)
    assert window.limit == 1000


def test_refused_again_and_again_it_goes_down_to_one_run() -> None:
    window = Window()
    for number in range(12):
        runs = min(64, window.room)
        window.sent(runs)
        window.refused(runs, sent_at=float(number), now=number + 0.5)
    assert window.limit == 1.0
    assert window.room == 1
    window.sent(1)
    assert window.room == 0


def test_a_first_refusal_of_a_small_batch_costs_nothing() -> None:
    window = Window()
    window.sent(5)
    window.refused(5, sent_at=0.0, now=1.0)
    assert window.limit == LEAST_RUNS


def full(retry_after_s: float) -> Overloaded:
    return Overloaded("full", status=429, retry_after_s=retry_after_s)


def gateway() -> Gateway:
    never_used = cast("Transport", None)
    policy = RetryPolicy(uniform=lambda low, _: low)
    return Gateway(Address("http://gateway"), never_used, policy)


def test_answers_open_it_before_the_time_that_a_refusal_named() -> None:
    one = gateway()
    one.sent(300)
    one.admitted(sent_at=0.0)
    one.sent(64)
    one.failed(full(30.0), 64, sent_at=1.0, now=2.0)
    assert (one.opens_at, one.takes(2.1, 10)) == (32.0, 0)
    one.answered(149, now=3.0)
    assert one.takes(3.0, 10) == 0
    one.answered(1, now=3.0)
    assert one.takes(3.0, 10) == 10


def test_refused_again_it_waits_as_long_as_it_is_told() -> None:
    one = gateway()
    one.sent(300)
    one.failed(full(30.0), 100, sent_at=0.0, now=1.0)
    one.answered(150, now=2.0)
    assert one.takes(2.0, 10) == 10
    one.sent(10)
    one.failed(full(30.0), 10, sent_at=2.0, now=3.0)
    one.answered(50, now=4.0)
    assert one.takes(32.0, 10) == 0
    assert one.takes(33.0, 10) == 10


def test_refusals_of_one_wave_count_once() -> None:
    one = gateway()
    one.sent(300)
    for number in range(3):
        one.failed(full(0.0), 100, sent_at=0.0, now=1.0 + number)
    assert one.opens_at == 1.0 + 0.05
    assert one.load.refused == 300
