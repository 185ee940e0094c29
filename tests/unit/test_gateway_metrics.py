"""Counting of results: exact, bounded in labels, and unimpressed by any bytes."""

import random

from prometheus_client.parser import text_string_to_metric_families

from rollyard_queue.records import QueueStats
from rollyard_service.metrics import Metrics
from rollyard_service.run_times import BUCKETS_S, FOLD_AT
from rollyard_service.verdict import infra_error


def samples(metrics: Metrics) -> dict[tuple[str, ...], float]:
    """Name and label values (by label's name) to value."""
    text = metrics.render().decode()
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def result(outcome: str, template: str, queued_ms: float, wall_ms: float) -> bytes:
    return (
        b'{"run_id":"a","outcome":"%b","template":"%b","queued_ms":%b,"wall_ms":%b,"stdout":"x"}'
        % (outcome.encode(), template.encode(), str(queued_ms).encode(), str(wall_ms).encode())
    )


def test_any_result_is_counted() -> None:
    metrics = Metrics(in_flight=lambda: 3)
    metrics.count_results(
        [
            (infra_error("a", "b"), 900.0),
            (b'{"outcome": "new-word", "queued_ms": 5, "other": {"x": [1]}}', 0.1),
            (b"not json", 0.1),
            (result("ok", "template-of-tomorrow", 1, 2), 0.1),
        ]
    )
    seen = samples(metrics)
    assert seen["rollyard_gateway_runs_total", "infra_error"] == 1
    assert seen["rollyard_gateway_runs_total", "other"] == 2
    assert seen["rollyard_gateway_run_total_seconds_sum", "infra_error", "none"] == 900
    # Those carry no measured times.
    assert seen["rollyard_gateway_run_queued_seconds_count", "infra_error", "none"] == 0
    assert seen["rollyard_gateway_run_wall_seconds_count", "ok", "other"] == 1
    assert seen["rollyard_gateway_runs_in_flight",] == 3


def test_histograms_are_exact_across_folds() -> None:
    metrics = Metrics(in_flight=lambda: 0)
    dice = random.Random(7)
    totals = [dice.choice([*BUCKETS_S, dice.uniform(0, 1000)]) for _ in range(2 * FOLD_AT + 99)]
    for start in range(0, len(totals), 500):
        part = totals[start : start + 500]
        metrics.count_results((result("ok", "bare", 1e3 * one, 1e3 * one), one) for one in part)
    seen = samples(metrics)
    for bound in BUCKETS_S:
        below = sum(one <= bound for one in totals)
        name = "rollyard_gateway_run_total_seconds_bucket"
        assert seen[name, str(bound), "ok", "bare"] == below
    assert seen["rollyard_gateway_run_total_seconds_bucket", "+Inf", "ok", "bare"] == len(totals)
    assert seen["rollyard_gateway_runs_total", "ok"] == len(totals)
    assert abs(seen["rollyard_gateway_run_total_seconds_sum", "ok", "bare"] - sum(totals)) < 1e-3


def test_labels_are_bounded() -> None:
    """Nothing that a caller or a worker makes up becomes a new series without end."""
    metrics = Metrics(in_flight=lambda: 0)
    for number in range(1000):
        name = f"made-up-{number}"
        metrics.count_results([(result(name, name, 1, 1), 0.1)])
        metrics.count_request("POST", "none", 404)
    assert len(samples(metrics)) < 250
    assert len({labels for labels in samples(metrics) if "made-up" in str(labels)}) == 0


def test_queue_figures_are_absent_while_it_is_away() -> None:
    metrics = Metrics(in_flight=lambda: 0, max_queued=7)
    stats = QueueStats(1, 2, 3, 4000.0, 5, 6, 7, 8)
    assert b"rollyard_queue_oldest_seconds 4.0" in metrics.render(stats)
    away = metrics.render()
    assert b"rollyard_queue_up 0.0" in away
    assert b"rollyard_queue_max_runs 7.0" in away
    assert b"rollyard_queue_oldest_seconds" not in away


def test_each_refused_request_has_a_reason() -> None:
    metrics = Metrics(in_flight=lambda: 0)
    given = ((429, "job_full"), (503, "overloaded"), (504, "busy"), (422, "invalid_request"))
    for status, reason in given:
        metrics.count_request("POST", "/v1/runs", status, refused_as=reason)
        assert samples(metrics)["rollyard_gateway_refusals_total", reason] == 1
    for status, reason in ((418, "other"), (499, "caller_gone")):
        metrics.count_request("POST", "/v1/runs", status)
        assert samples(metrics)["rollyard_gateway_refusals_total", reason] == 1
    metrics.count_request("POST", "/v1/runs", 400, refused_as="made-up")
    assert samples(metrics)["rollyard_gateway_refusals_total", "other"] == 2
    metrics.count_request("POST", "/v1/runs", 200)
    refusals = {
        key: value
        for key, value in samples(metrics).items()
        if key[0] == "rollyard_gateway_refusals_total"
    }
    assert sum(refusals.values()) == 7
