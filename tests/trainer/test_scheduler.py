"""Admission by KV cache: never over capacity, nobody starves, and what it gains in simulation."""

import asyncio

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollyard_trainer.scheduler import Scheduler, kv_capacity
from rollyard_trainer.simulation import Scene, simulate

VLLM = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 2.0
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",cache_dtype="auto",enable_prefix_caching="True",\
engine="0",gpu_memory_utilization="0.82",num_cpu_blocks="None",num_gpu_blocks="573"} 1.0
"""
SGLANG = """\
# TYPE sglang:num_used_tokens gauge
sglang:num_used_tokens{model_name="m",tp_rank="0"} 1000.0
# TYPE sglang:max_total_num_tokens gauge
sglang:max_total_num_tokens{model_name="m",tp_rank="0"} 471258.0
"""


@pytest.mark.parametrize(("page", "tokens"), [(VLLM, 573 * 16), (SGLANG, 471_258)])
def test_capacity_is_read_from_engines_metrics(page: str, tokens: int) -> None:
    assert kv_capacity(page) == tokens


def test_ranks_of_one_page_are_added() -> None:
    assert kv_capacity(VLLM + VLLM.replace('engine="0"', 'engine="1"')) == 2 * 573 * 16


@pytest.mark.parametrize("page", ["", VLLM.replace("573", "None"), "sglang:token_usage 0.5"])
def test_a_page_without_capacity_says_what_to_do(page: str) -> None:
    with pytest.raises(ValueError, match="enable-metrics"):
        kv_capacity(page)


@given(
    st.lists(st.integers(1, 100), min_size=1, max_size=40),
    st.lists(st.integers(100, 250), min_size=1, max_size=4),
    st.randoms(use_true_random=False),
)
def test_capacity_holds_and_all_are_served(
    sizes: list[int], rooms: list[int], chance: "np.random.Generator"
) -> None:
    capacity = {str(index): room for index, room in enumerate(rooms)}
    order: list[int] = []

    async def main() -> None:
        scheduler = Scheduler(capacity)
        held = dict.fromkeys(capacity, 0)

        async def rollout(index: int, tokens: int) -> None:
            async with scheduler.place(tokens) as engine:
                order.append(index)
                held[engine] += tokens
                assert held[engine] <= capacity[engine]
                for _ in range(int(chance.random() * 5)):
                    await asyncio.sleep(0)
                held[engine] -= tokens

        await asyncio.gather(*(rollout(i, size) for i, size in enumerate(sizes)))
        assert all(scheduler.free_tokens(name) == room for name, room in capacity.items())

    asyncio.run(main())
    assert order == sorted(order)  # first come, first served


async def test_a_cancelled_rollout_gives_its_room_back() -> None:
    scheduler = Scheduler({"a": 10})
    entered, leave = asyncio.Event(), asyncio.Event()

    async def holder() -> None:
        async with scheduler.place(8):
            entered.set()
            await leave.wait()

    async def taker(tokens: int) -> str:
        async with scheduler.place(tokens) as engine:
            return engine

    first = asyncio.create_task(holder())
    await entered.wait()
    big, small = asyncio.create_task(taker(9)), asyncio.create_task(taker(2))
    while scheduler.free_tokens("a") != 2:
        await asyncio.sleep(0)
    big.cancel()
    assert await small == "a"  # it no longer waits behind the one that gave up
    first.cancel()
    await asyncio.gather(first, big, return_exceptions=True)
    assert scheduler.free_tokens("a") == 10


async def test_a_closed_engine_gets_nothing_more_and_who_fits_no_other_is_told() -> None:
    scheduler = Scheduler({"a": 20, "b": 10})
    entered, leave = asyncio.Event(), asyncio.Event()

    async def taker(tokens: int) -> str:
        async with scheduler.place(tokens) as engine:
            entered.set()
            await leave.wait()
            return engine

    first = asyncio.create_task(taker(15))
    await entered.wait()
    large, small = asyncio.create_task(taker(12)), asyncio.create_task(taker(9))
    await asyncio.sleep(0)
    scheduler.close("a")
    scheduler.close("a")
    with pytest.raises(ValueError, match="fits no engine"):
        await large
    leave.set()
    assert [await first, await small] == ["a", "b"]
    scheduler.open("a", 20)
    assert scheduler.free_tokens("a") == 20  # what was held before gives back nothing to it


async def test_what_fits_nowhere_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="fits no engine"):
        async with Scheduler({"a": 10, "b": 20}).place(21):
            pass
    with pytest.raises(ValueError, match="room"):
        Scheduler({})


@pytest.mark.parametrize("seed", range(3))
def test_where_cache_is_scarce_admission_never_evicts_and_wins(seed: int) -> None:
    scene = Scene(seed=seed)
    static, dynamic = simulate(scene, dynamic=False), simulate(scene, dynamic=True)
    assert dynamic.evictions == dynamic.recomputed == 0
    assert static.evictions > 0
    assert static.recomputed > 0
    assert dynamic.ticks < static.ticks
    assert dynamic.idle < static.idle


def test_where_cache_is_plenty_reserving_the_worst_case_loses() -> None:
    scene = Scene(capacity=240_000, median=1800)
    static, worst = simulate(scene, dynamic=False), simulate(scene, dynamic=True)
    mean = simulate(scene, dynamic=True, reserve=int(scene.lengths().mean()))
    assert static.evictions == 0
    assert static.ticks < worst.ticks
    assert mean.ticks < worst.ticks


def test_both_end_with_one_engine_and_little_room() -> None:
    scene = Scene(engines=1, rollouts=12, capacity=9000, limit=8192)
    for dynamic in (False, True):
        outcome = simulate(scene, dynamic=dynamic)
        assert outcome.ticks >= scene.lengths().max()
        assert 0 <= outcome.idle < 1
