"""What a workload measures, where prometheus_client is installed (the extra `metrics`); else nothing.

`app_shutdown_duration_seconds` by phase and outcome; and of the outbox how much is pending, waiting and parked, for how
long, and what its relays have done.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from leasedjob.protocol import SHUTDOWN_BUCKETS, SHUTDOWN_METRIC
from leasedjob.workload.phases import PhaseReport

if TYPE_CHECKING:
    from leasedjob.workload.outbox.batch import Relayed
    from leasedjob.workload.outbox.operations import OutboxStatus


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


class OutboxMetrics:
    """Of one relay, by its name."""

    def __init__(self, relay: str) -> None:
        self._relay, self._metrics = relay, _outbox()

    @property
    def wanted(self) -> bool:
        """Whether anybody can see them, so that the database is asked."""
        return bool(self._metrics)

    def relayed(self, done: Relayed) -> None:
        if self._metrics:
            for outcome in ("published", "refused", "parked", "unavailable"):
                self._metrics["messages"].labels(self._relay, outcome).inc(getattr(done, outcome))

    def seen(self, status: OutboxStatus) -> None:
        if self._metrics:
            for gauge in ("pending", "waiting", "parked", "lag"):
                self._metrics[gauge].labels(self._relay).set(getattr(status, gauge))


@lru_cache(maxsize=1)
def _outbox() -> dict[str, Any]:
    try:
        from prometheus_client import Counter, Gauge
    except ImportError:
        return {}
    name = "leasedjob_outbox"
    by_relay = ("relay",)
    return {
        "messages": Counter(f"{name}_messages", "What became of messages", ("relay", "outcome")),
        "pending": Gauge(f"{name}_pending", "Messages to be published, those that wait included", by_relay),
        "waiting": Gauge(f"{name}_waiting", "Messages that wait for another try", by_relay),
        "parked": Gauge(f"{name}_parked", "Messages that are not tried any more", by_relay),
        "lag": Gauge(f"{name}_lag_seconds", "Age of the oldest message to be published", by_relay),
    }
