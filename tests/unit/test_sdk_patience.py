"""How long a run is tried for."""

import asyncio

import pytest

from rollyard._call import Call
from rollyard._patience import FIRST_CONTACT_S, PATIENCE_S, Patience

START = 1000.0


def call(*, bounded: bool = False, deadline_s: float | None = None) -> Call:
    async def make() -> Call:
        return Call("", asyncio.get_running_loop(), bounded=bounded)

    made = asyncio.run(make())
    made.started = START
    made.deadline_s = deadline_s
    return made


def over_at(patience: Patience, one: Call, *, step_s: float = 1.0) -> float | None:
    """Seconds after the start at which a call that fails every second is given up."""
    for number in range(2000):
        now = START + number * step_s
        patience.count(one, got_on=False, busy=False, now=now)
        if patience.is_over(one, now):
            return now - START
    return None


def test_wrong_address_is_given_up_soon() -> None:
    assert over_at(Patience(None), call()) == FIRST_CONTACT_S + 1


def test_drain_of_half_a_minute_is_waited_for() -> None:
    patience = Patience(None)
    patience.got_through(START - 500)
    assert over_at(patience, call()) == PATIENCE_S + 1


def test_patience_is_as_long_as_the_deadline_to_start() -> None:
    patience = Patience(None)
    patience.got_through(START)
    assert over_at(patience, call(deadline_s=600.0)) == 601
    assert over_at(patience, call(deadline_s=1.0)) == PATIENCE_S + 1


def test_time_out_of_the_call_is_the_only_bound_where_there_is_one() -> None:
    assert over_at(Patience(None), call(bounded=True)) is None


@pytest.mark.parametrize("bounded", [True, False])
def test_count_of_tries_decides_where_it_is_set(bounded: bool) -> None:
    assert over_at(Patience(0), call(bounded=bounded)) == 0
    assert over_at(Patience(5), call(bounded=bounded)) == 5
    assert over_at(Patience(1000), call(bounded=bounded)) == 1000


def test_answers_to_neighbours_in_the_batch_start_the_count_anew() -> None:
    patience, one = Patience(1), call()
    for number in range(50):
        patience.count(one, got_on=True, busy=False, now=START + number * 100)
        assert not patience.is_over(one, START + number * 100)


def test_full_queue_that_takes_others_is_no_failure() -> None:
    patience, one = Patience(None), call()
    for number in range(100):
        now = START + 10.0 * number
        patience.got_through(now)
        patience.count(one, got_on=False, busy=True, now=now)
        assert not patience.is_over(one, now)


def test_run_that_fails_while_others_get_on_is_given_up() -> None:
    patience, one = Patience(None), call()
    for number in range(int(PATIENCE_S) + 1):
        patience.got_through(START + number)
        patience.count(one, got_on=False, busy=False, now=START + number)
        assert not patience.is_over(one, START + number)
    assert patience.is_over(one, START + PATIENCE_S + 1)
