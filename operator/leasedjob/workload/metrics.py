"""`app_shutdown_duration_seconds`, where prometheus_client is installed (the extra `metrics`); else nothing."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from leasedjob.protocol import SHUTDOWN_BUCKETS, SHUTDOWN_METRIC
from leasedjob.workload.phases import PhaseReport


def observe(report: PhaseReport) -> None:
    """Takes a phase's duration down, by phase and outcome."""
    if (histogram := _histogram()) is not None:
        histogram.labels(phase=report.phase.value, outcome=report.outcome.value).observe(report.seconds)


@lru_cache(maxsize=1)
def _histogram() -> Any:
    try:
        from prometheus_client import Histogram
    except ImportError:
        return None
    return Histogram(
        SHUTDOWN_METRIC, "Seconds that a phase of the shutdown took", ("phase", "outcome"), buckets=SHUTDOWN_BUCKETS
    )
