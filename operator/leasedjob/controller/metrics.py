"""The operator's Prometheus metrics. Labels are bounded: outcomes, verdicts and reasons, never names of objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from leasedjob import __version__
from leasedjob.controller.outcome import Result
from leasedjob.lease.rows import JobSchedulerStatus, Run
from leasedjob.protocol import (
    SHUTDOWN_BUCKETS,
    SHUTDOWN_METRIC,
    SHUTDOWN_OUTCOMES,
    SHUTDOWN_PHASES,
    PhaseEnd,
)

SKEW_BUCKETS: Final = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 60.0, 300.0)
KNOWN_REASONS: Final = frozenset(
    {
        "Completed", "CompletedOnStop", "Reported", "Error", "OOMKilled", "Fenced", "Interrupted", "DeadlineExceeded",
        "PendingDeadlineExceeded", "InitContainerFailed", "LivenessProbeFailed", "NeverStarted", "Replaced",
        "Cancelled", "InterruptionLimitExceeded", "ContainerStatusUnknown", "StartError", "ContainerCannotRun",
    }
)  # fmt: skip


class Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        r = self.registry
        self.runs: Counter = Counter("leasedjob_runs", "Runs that reached a final state.", ["outcome"], registry=r)
        self.attempts = Counter(
            "leasedjob_attempts", "Attempts finalized by this replica.", ["outcome", "reason"], registry=r
        )
        self.claims = Counter("leasedjob_claims", "Answers to claims, by verdict.", ["verdict"], registry=r)
        self.claim_seconds = Histogram(
            "leasedjob_claim_seconds", "One round trip of a batch of claims.", registry=r,
            buckets=(0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10),
        )  # fmt: skip
        self.skew_seconds = Histogram(
            "leasedjob_start_skew_seconds",
            "From the tick's start, jitter included, to the Pod's creation.",
            registry=r,
            buckets=SKEW_BUCKETS,
        )
        self.pods_created = Counter("leasedjob_pods_created", "Pods created by this replica.", registry=r)
        self.pods_refused = Counter("leasedjob_pods_refused", "Pods that could not be created.", registry=r)
        self.ticks_missed = Counter("leasedjob_ticks_missed", "Ticks that did not run.", ["reason"], registry=r)
        self.ticks_skipped = Counter("leasedjob_ticks_skipped", "Ticks skipped by policy.", ["reason"], registry=r)
        self.database_errors = Counter("leasedjob_database_errors", "Statements that failed.", registry=r)
        self.reconcile_errors = Counter("leasedjob_reconcile_errors", "Reconciles that hit a bug.", registry=r)
        self.credential_rotations = Counter(
            "leasedjob_credential_rotations", "Namespaces' database credentials replaced by this replica.", registry=r
        )
        self.database_up = Gauge("leasedjob_database_up", "1 if the last poll of the database worked.", registry=r)
        self.jobs = Gauge("leasedjob_jobs", "LeasedJobs known to this replica.", registry=r)
        self.active_runs = Gauge("leasedjob_active_runs", "Runs that are held, in this cluster.", registry=r)
        self.watch_lag_seconds = Gauge(
            "leasedjob_watch_staleness_seconds", "For how long a list has shown what the watch has not.", registry=r
        )
        self.shutdown_seconds = Histogram(
            SHUTDOWN_METRIC, "Seconds that a phase of a workload's shutdown took.", ["phase", "outcome"], registry=r,
            buckets=SHUTDOWN_BUCKETS,
        )  # fmt: skip
        info = Gauge("leasedjob_build_info", "Constant 1; the version is the label.", ["version"], registry=r)
        info.labels(__version__).set(1)

    def attempt_ended(self, result: Result, reason: str) -> None:
        self.attempts.labels(result.value, reason if reason in KNOWN_REASONS else "Other").inc()

    def stopped(self, ends: Sequence[PhaseEnd]) -> None:
        """How a workload has stopped. Its words are the workload's own, so only known ones become labels."""
        for end in ends:
            phase = end.phase if end.phase in SHUTDOWN_PHASES else "other"
            outcome = end.outcome if end.outcome in SHUTDOWN_OUTCOMES else "other"
            self.shutdown_seconds.labels(phase, outcome).observe(end.seconds)

    def run_ended(self, run: Run) -> None:
        failed = run.stopped_as.lower() or "fail"
        self.runs.labels("success" if run.status is JobSchedulerStatus.SUCCESS else failed).inc()
