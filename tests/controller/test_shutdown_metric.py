"""app_shutdown_duration_seconds: what a Pod's sidecar has stored is exported by one operator of its cluster, once."""

from __future__ import annotations

import urllib.request
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from leasedjob.protocol import SHUTDOWN_METRIC, PhaseEnd
from tests.controller.control_plane import Bench, Kubelet, OperatorProcess, wait_until


def samples(*operators: OperatorProcess) -> dict[tuple[str, str], tuple[float, float]]:
    """(phase, outcome) -> count and sum, of all replicas together."""
    found: dict[tuple[str, str], list[float]] = {}
    for operator in operators:
        with urllib.request.urlopen(f"http://127.0.0.1:{operator.metrics}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        for family in text_string_to_metric_families(text):
            if family.name != SHUTDOWN_METRIC:
                continue
            for sample in family.samples:
                place = {"_count": 0, "_sum": 1}.get(sample.name.removeprefix(SHUTDOWN_METRIC))
                if place is not None:
                    key = (sample.labels["phase"], sample.labels["outcome"])
                    found.setdefault(key, [0.0, 0.0])[place] += sample.value
    return {key: (count, total) for key, (count, total) in found.items()}


def test_each_report_is_counted_once_by_one_of_two_replicas(bench: Bench) -> None:
    one, other = bench.operator("op-1"), bench.operator("op-2")
    bench.apply("job", suspend=True)
    bench.run_now("job")
    kubelet = Kubelet(bench, bench.pod_for("job"))
    kubelet.run()
    assert kubelet.report_shutdown(PhaseEnd("http", "done", 1.5), PhaseEnd("pools", "cut", 5.0))
    for _ in range(3):
        assert kubelet.report_shutdown(PhaseEnd("http", "done", 0.5), PhaseEnd("a later version's", "word", 2.0))
    kubelet.end(0)
    bench.row_when("job", lambda r: r["status"] == "SUCCESS", "the end")
    assert kubelet.report_shutdown(PhaseEnd("background", "failed", 3.0)), "a program may stop after its outcome"

    wanted: Any = {
        ("http", "done"): (4.0, 3.0),
        ("pools", "cut"): (1.0, 5.0),
        ("other", "other"): (3.0, 6.0),
        ("background", "failed"): (1.0, 3.0),
    }
    wait_until("the metric", lambda: samples(one, other) == wanted, seconds=60)
    assert bench.sql("SELECT 1 FROM leasedjob.shutdown_report WHERE exported_at IS NULL") == []
