"""The operator's Prometheus metrics. Labels are bounded: outcomes, verdicts and reasons. Names of objects stand only in
the series of `gauges.JobSeries`, whose number is limited."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from leasedjob import __version__
from leasedjob.controller.outcome import REPORTED, Result
from leasedjob.lease.rows import (
    REASON_AFTER_FAILURES,
    REASON_CANCELLED,
    REASON_FORGOTTEN,
    REASON_INTERRUPTION_LIMIT,
    REASON_JOB_DELETED,
    REASON_RELEASED,
    REASON_REPLACED,
    REASON_RESTORED,
    Outcome,
    Transition,
    TransitionKind,
)
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
# What may stand in the label `reason` of runs and attempts; anything else is Other.
END_REASONS: Final = KNOWN_REASONS | {
    REASON_AFTER_FAILURES,
    REASON_FORGOTTEN,
    REASON_INTERRUPTION_LIMIT,
    REASON_JOB_DELETED,
    REASON_RELEASED,
    REASON_RESTORED,
    "NotAdopted",
    "PodNotCreated",
}
FENCED: Final = "Fenced"
OTHER: Final = "Other"
JOB_LABELS: Final = ("namespace", "leasedjob")
UNWANTED: Final = {REASON_CANCELLED: "cancelled", REASON_REPLACED: "replaced"}


class Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        r = self.registry
        self.runs: Counter = Counter(
            "leasedjob_runs", "Runs that reached a final state.", ["outcome", "reason"], registry=r
        )
        self.attempts = Counter("leasedjob_attempts", "Attempts that ended.", ["outcome", "reason"], registry=r)
        self.leases_lost = Counter(
            "leasedjob_leases_lost", "Leases that ran out before an end was recorded.", ["phase"], registry=r
        )
        self.fences = Counter("leasedjob_fences", "Attempts that their fence has stopped.", registry=r)
        self.takeovers = Counter(
            "leasedjob_takeovers", "Attempts that began because the lease of the one before had run out.", ["holder"],
            registry=r,
        )  # fmt: skip
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
        self.workload_skew_seconds = Histogram(
            "leasedjob_workload_start_skew_seconds",
            "From the tick's start, jitter included, to the first workload container that runs.",
            registry=r,
            buckets=SKEW_BUCKETS,
        )
        self.pods_created = Counter("leasedjob_pods_created", "Pods created by this replica.", registry=r)
        self.pods_refused = Counter("leasedjob_pods_refused", "Pods that could not be created.", registry=r)
        self.ticks_missed = Counter("leasedjob_ticks_missed", "Ticks that did not run.", ["reason"], registry=r)
        self.ticks_skipped = Counter("leasedjob_ticks_skipped", "Ticks skipped by policy.", ["reason"], registry=r)
        self.database_seconds = Histogram(
            "leasedjob_database_statement_seconds", "A statement, waiting for a connection included.", ["statement"],
            registry=r, buckets=(0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1, 5),
        )  # fmt: skip
        self.database_errors = Counter("leasedjob_database_errors", "Statements that failed.", ["kind"], registry=r)
        self.reconcile_errors = Counter("leasedjob_reconcile_errors", "Reconciles that hit a bug.", registry=r)
        self.credential_rotations = Counter(
            "leasedjob_credential_rotations", "Namespaces' database credentials replaced by this replica.", registry=r
        )
        self.database_up = Gauge("leasedjob_database_up", "1 if the last poll of the database worked.", registry=r)
        self.jobs = Gauge("leasedjob_jobs", "LeasedJobs known to this replica.", registry=r)
        self.jobs_not_ready = Gauge("leasedjob_jobs_not_ready", "LeasedJobs that are not Ready.", registry=r)
        self.jobs_suspended = Gauge("leasedjob_jobs_suspended", "LeasedJobs that are suspended.", registry=r)
        self.jobs_overdue = Gauge(
            "leasedjob_jobs_overdue", "LeasedJobs without a success for longer than their schedule allows.", registry=r
        )
        self.jobs_without_series = Gauge(
            "leasedjob_jobs_without_series", "LeasedJobs beyond the limit of series for each job.", registry=r
        )
        self.next_schedule = Gauge(
            "leasedjob_next_schedule_timestamp_seconds", "When the next tick of any job starts.", registry=r
        )
        self.job_next_schedule = Gauge(
            "leasedjob_job_next_schedule_timestamp_seconds", "When the job's next tick starts.", JOB_LABELS, registry=r
        )
        self.job_last_success = Gauge(
            "leasedjob_job_last_success_timestamp_seconds", "When a run last succeeded.", JOB_LABELS, registry=r
        )
        self.job_success_deadline = Gauge(
            "leasedjob_job_success_deadline_timestamp_seconds", "By when a run has to succeed.", JOB_LABELS, registry=r
        )
        self.claims_pending = Gauge(
            "leasedjob_claims_pending", "Claims of this cluster that no Pod has adopted yet.", registry=r
        )
        self.oldest_claim_seconds = Gauge(
            "leasedjob_oldest_pending_claim_seconds", "Age of the oldest claim that no Pod has adopted.", registry=r
        )
        self.pings = Counter(
            "leasedjob_pings", "Pings of spec.monitoring, by signal and result.", ["signal", "result"], registry=r
        )
        self.active_runs = Gauge("leasedjob_active_runs", "Runs that are held, in this cluster.", registry=r)
        self.watch_lag_seconds = Gauge(
            "leasedjob_watch_staleness_seconds", "For how long a list has shown what the watch has not.", registry=r
        )
        self.shutdown_seconds = Histogram(
            SHUTDOWN_METRIC, "Seconds that a phase of a workload's shutdown took.", ["phase", "outcome"], registry=r,
            buckets=SHUTDOWN_BUCKETS,
        )  # fmt: skip
        self.spans = Counter("leasedjob_spans", "Spans of traces, by what became of them.", ["result"], registry=r)
        self.cluster_cordoned = Gauge(
            "leasedjob_cluster_cordoned", "1 while this cluster takes no new runs.", registry=r
        )
        self.cluster_info = Gauge(
            "leasedjob_cluster_info", "Constant 1; the label is what the database calls this cluster.", ["cluster"],
            registry=r,
        )  # fmt: skip
        info = Gauge("leasedjob_build_info", "Constant 1; the version is the label.", ["version"], registry=r)
        info.labels(__version__).set(1)

    def became(self, transition: Transition) -> None:
        """What has become of a run. Each transition is given to one replica, so that their sum is the truth."""
        word = transition.reason.partition(":")[0] or REPORTED
        reason = word if word in END_REASONS else OTHER
        if transition.kind is TransitionKind.ENDED:
            self.attempts.labels(result_of(transition).value, reason).inc()
            if word == FENCED:
                self.fences.inc()
        elif transition.kind is TransitionKind.TAKEN_OVER:
            same = transition.from_cluster == transition.cluster
            self.takeovers.labels("same_cluster" if same else "other_cluster").inc()
        if transition.expired:
            self.leases_lost.labels("running" if transition.adopted else "pending").inc()
        if transition.final:
            outcome = "success" if transition.succeeded else UNWANTED.get(word, "fail")
            self.runs.labels(outcome, reason).inc()

    def asked(self, statement: str, seconds: float, fault: str) -> None:
        """A statement to the database. `fault`: what kind it failed with; "" if it didn't."""
        self.database_seconds.labels(statement).observe(seconds)
        if fault:
            self.database_errors.labels(fault).inc()

    def stopped(self, ends: Sequence[PhaseEnd]) -> None:
        """How a workload has stopped. Its words are the workload's own, so only known ones become labels."""
        for end in ends:
            phase = end.phase if end.phase in SHUTDOWN_PHASES else "other"
            outcome = end.outcome if end.outcome in SHUTDOWN_OUTCOMES else "other"
            self.shutdown_seconds.labels(phase, outcome).observe(end.seconds)


def result_of(transition: Transition) -> Result:
    """An attempt's end, as operators call it."""
    match transition.outcome:
        case Outcome.COMPLETE:
            return Result.COMPLETE
        case Outcome.RELEASE:
            return Result.RELEASE
        case _:
            return Result.FAIL if transition.counted else Result.ENDED
