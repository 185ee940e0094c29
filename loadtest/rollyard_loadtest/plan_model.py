"""From measured costs to what the simulation and the formulas take."""

import math
from dataclasses import replace
from statistics import mean, pvariance

from rollyard_loadtest.costs import Costs
from rollyard_loadtest.costs_calls import Called
from rollyard_loadtest.simulation_model import Cluster, Measured, RunClass

HOPS = 5
"""Steps between processes on a run's way: gateway, queue, claim, result, gateway."""


def seconds(values_ms: list[float]) -> Measured:
    return Measured(tuple(value / 1e3 for value in values_ms))


def classes_of(costs: Costs) -> list[RunClass]:
    """The mix, as measured."""
    return [
        RunClass(
            name=kind.name, share=kind.share, cpu=seconds(costs.crowded_ms(kind)),
            sleep=seconds(kind.sleep_ms), stopped=kind.stopped,
        )
        for kind in costs.kinds
    ]  # fmt: skip


def trace_of(costs: Costs, called: list[Called]) -> tuple[tuple[float, RunClass], ...]:
    """What was asked for, when: each program of its kind, one that is stopped with its limit."""
    both = zip(costs.kinds, classes_of(costs), strict=True)
    kinds = {kind.name: (kind, run_class) for kind, run_class in both}
    trace: list[tuple[float, RunClass]] = []
    for one in sorted(called, key=lambda call: (call.asked_s, call.number)):
        kind, run_class = kinds[one.kind]
        if kind.stopped:
            beside_s = (kind.cpu_ms[0] - kind.own_ms[0]) / 1e3
            run_class = replace(run_class, cpu=Measured((one.timeout_s + beside_s,)))
        trace.append((one.asked_s, run_class))
    return tuple(trace)


def this_machine(costs: Costs, *, slots: int | None = None, background: float = 0.0) -> Cluster:
    """What ``rollyard up`` starts here, callers included: everything on the same cores."""
    parts = costs.mixed
    return Cluster(
        workers=1, cores=costs.machine.cores, slots=slots, one_machine=True,
        background=background, hop_s=costs.latency_ms / 1e3 / HOPS,
        gateway_s=parts.gateway_ms / 1e3, shard_s=parts.valkey_ms / 1e3,
        worker_s=parts.worker_ms / 1e3, client_s=parts.client_ms / 1e3,
    )  # fmt: skip


def squared_variation(costs: Costs) -> float:
    """c²ₛ of the CPU that a run takes: variance by squared mean, over the whole mix."""
    drawn = [(kind.share, costs.crowded_ms(kind)) for kind in costs.kinds]
    first = sum(share * mean(values) for share, values in drawn)
    second = sum(share * (pvariance(values) + mean(values) ** 2) for share, values in drawn)
    return second / first**2 - 1 if first else 0.0


def erlang_c(servers: int, offered: float) -> float:
    """Probability of having to wait in M/M/k (Erlang 1917), by the stable recursion for B.

    Args:
        servers: k, at least 1.
        offered: a = λ/µ in erlangs; from k on everybody waits.
    """
    if offered >= servers:
        return 1.0
    blocked = 1.0
    for number in range(1, servers + 1):
        blocked = offered * blocked / (number + offered * blocked)
    return blocked / (1 - (offered / servers) * (1 - blocked))


def mean_wait_s(servers: int, rate_per_s: float, service_s: float, c2: float) -> float:
    """Mean wait in M/G/k by Allen and Cunneen: M/M/k's times (1 + c²ₛ) / 2.

    (A. O. Allen, Probability, Statistics and Queueing Theory, 2nd ed. 1990, 5.2.2; exact for k = 1,
    where it is Pollaczek-Khinchine's, and for exponential service.)
    """
    offered = rate_per_s * service_s
    if offered >= servers:
        return math.inf
    waiting = erlang_c(servers, offered) * service_s / (servers - offered)
    return waiting * (1 + c2) / 2


def wait_quantile_s(
    servers: int, rate_per_s: float, service_s: float, c2: float, q: float
) -> float:
    """The wait that a share ``q`` of runs does not exceed; who waits, waits exponentially long
    (exact for M/M/k, the usual approximation beyond)."""
    offered = rate_per_s * service_s
    if offered >= servers:
        return math.inf
    waits = erlang_c(servers, offered)
    if waits <= 1 - q:
        return 0.0
    return mean_wait_s(servers, rate_per_s, service_s, c2) / waits * math.log(waits / (1 - q))
