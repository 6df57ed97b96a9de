"""What is counted, and of which jobs how much is exported."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from typing import Any
from uuid import uuid4

import pytest
from prometheus_client import generate_latest
from tests.unit import controller_builders as b

from leasedjob.controller.gauges import JobSeries, JobState
from leasedjob.controller.metrics import END_REASONS, Metrics
from leasedjob.controller.skew import MOST, WorkloadSkew
from leasedjob.lease.rows import Outcome, Transition, TransitionKind


def transition(kind: TransitionKind = TransitionKind.ENDED, **changes: Any) -> Transition:
    values: dict[str, Any] = {
        "kind": kind, "cluster": "east", "run_id": uuid4(), "namespace": "shop", "job_name": "sync", "job_uid": "u",
        "run_key": "k", "tick": None, "attempt": 1, "outcome": None, "counted": False, "final": False,
        "expired": False, "adopted": True, "from_cluster": "east", "reason": "", "happened_at": b.T0,
    }  # fmt: skip
    return Transition(**{**values, **changes})


def samples(metrics: Metrics, name: str) -> dict[tuple[str, ...], float]:
    """The samples of this name that aren't 0, by their labels' values."""
    return {
        tuple(s.labels.values()): s.value
        for family in metrics.registry.collect()
        for s in family.samples
        if s.name == name and s.value
    }


class TestTransitions:
    @pytest.mark.parametrize(
        ("outcome", "counted", "said", "run", "attempt", "reason"),
        [
            (Outcome.COMPLETE, False, "Completed", "success", "complete", "Completed"),
            (Outcome.COMPLETE, False, "", "success", "complete", "Reported"),
            (Outcome.FAIL, True, "OOMKilled: main", "fail", "fail", "OOMKilled"),
            (Outcome.FAIL, False, "PendingDeadlineExceeded: x", "fail", "ended", "PendingDeadlineExceeded"),
            (Outcome.RELEASE, False, "Cancelled: by hand", "cancelled", "release", "Cancelled"),
            (Outcome.RELEASE, False, "Replaced", "replaced", "release", "Replaced"),
            (Outcome.FAIL, True, "Whatever a tenant writes", "fail", "fail", "Other"),
        ],
    )
    def test_an_end_is_counted_by_outcome_and_reason(
        self, outcome: Outcome, counted: bool, said: str, run: str, attempt: str, reason: str
    ) -> None:
        metrics = Metrics()
        metrics.became(transition(final=True, outcome=outcome, counted=counted, reason=said))
        assert samples(metrics, "leasedjob_runs_total") == {(run, reason): 1}
        assert samples(metrics, "leasedjob_attempts_total") == {(attempt, reason): 1}

    def test_an_attempt_that_is_repeated_ends_no_run(self) -> None:
        metrics = Metrics()
        metrics.became(transition(outcome=Outcome.FAIL, counted=True, reason="Error: 1"))
        assert samples(metrics, "leasedjob_runs_total") == {}
        assert samples(metrics, "leasedjob_attempts_total") == {("fail", "Error"): 1}

    def test_a_run_that_is_given_up_ends_without_an_attempt(self) -> None:
        metrics = Metrics()
        metrics.became(transition(TransitionKind.GIVEN_UP, final=True, reason="JobDeleted"))
        assert samples(metrics, "leasedjob_runs_total") == {("fail", "JobDeleted"): 1}
        assert samples(metrics, "leasedjob_attempts_total") == {}

    def test_a_start_counts_nothing(self) -> None:
        metrics, before = Metrics(), generate_latest(Metrics().registry)
        metrics.became(transition(TransitionKind.STARTED, adopted=False))
        lines = [line for line in generate_latest(metrics.registry).splitlines() if b"_created" not in line]
        assert lines == [line for line in before.splitlines() if b"_created" not in line]

    def test_leases_fences_and_takeovers(self) -> None:
        metrics = Metrics()
        taken = transition(TransitionKind.TAKEN_OVER, expired=True)
        metrics.became(taken)
        metrics.became(replace(taken, from_cluster="west"))
        metrics.became(replace(taken, adopted=False))
        metrics.became(transition(outcome=Outcome.RELEASE, reason="Fenced: no answer", expired=True))
        assert samples(metrics, "leasedjob_takeovers_total") == {("same_cluster",): 2, ("other_cluster",): 1}
        assert samples(metrics, "leasedjob_leases_lost_total") == {("running",): 3, ("pending",): 1}
        assert samples(metrics, "leasedjob_fences_total") == {(): 1}

    def test_reasons_are_a_closed_list(self) -> None:
        metrics = Metrics()
        for reason in [*END_REASONS, *(f"Word{n}" for n in range(500))]:
            metrics.became(transition(outcome=Outcome.FAIL, final=True, reason=f"{reason}: text"))
        assert len(samples(metrics, "leasedjob_attempts_total")) == len(END_REASONS) + 1


def test_a_statement_is_timed_and_its_fault_counted() -> None:
    metrics = Metrics()
    metrics.asked("claim_runs", 0.004, "")
    metrics.asked("claim_runs", 30.0, "transient")
    assert samples(metrics, "leasedjob_database_statement_seconds_count") == {("claim_runs",): 2}
    assert samples(metrics, "leasedjob_database_errors_total") == {("transient",): 1}


class TestJobSeries:
    def states(self, count: int) -> dict[tuple[str, str], JobState]:
        return {("shop", f"job-{n}"): JobState(b.at(n), b.at(-n), b.at(60 * n)) for n in range(count)}

    def test_no_more_jobs_than_allowed(self) -> None:
        metrics = Metrics()
        JobSeries(metrics, 3).show(self.states(5))
        shown = samples(metrics, "leasedjob_job_next_schedule_timestamp_seconds")
        assert shown == {("shop", f"job-{n}"): b.at(n).timestamp() for n in range(3)}
        assert samples(metrics, "leasedjob_jobs_without_series") == {(): 2}

    def test_none_at_all(self) -> None:
        metrics = Metrics()
        JobSeries(metrics, 0).show(self.states(2))
        assert samples(metrics, "leasedjob_job_last_success_timestamp_seconds") == {}

    def test_what_is_gone_or_unknown_has_no_series(self) -> None:
        metrics = Metrics()
        series = JobSeries(metrics, 10)
        series.show(self.states(3))
        series.show({("shop", "job-1"): JobState(None, b.at(-1), None)})
        assert samples(metrics, "leasedjob_job_next_schedule_timestamp_seconds") == {}
        assert samples(metrics, "leasedjob_job_success_deadline_timestamp_seconds") == {}
        last = samples(metrics, "leasedjob_job_last_success_timestamp_seconds")
        assert last == {("shop", "job-1"): b.at(-1).timestamp()}


class TestWorkloadSkew:
    def setup_method(self) -> None:
        self.seen: list[float] = []
        self.skew = WorkloadSkew(self.seen.append)

    def look(self, pod: Any, now: datetime) -> None:
        self.skew.look([pod], now)

    def test_from_the_start_to_the_running_workload_once(self) -> None:
        starting, running = b.facts_of(b.running_pod(workload=b.waiting())), b.facts_of(b.running_pod())
        self.skew.expect(running.lease_id, b.T0)
        self.look(starting, b.at(1))
        assert self.seen == []
        self.look(running, b.at(2.25))
        self.look(running, b.at(9))
        assert self.seen == [2.25]

    def test_a_pod_of_another_replica_or_attempt_is_not_counted(self) -> None:
        self.look(b.facts_of(b.running_pod()), b.at(2))
        pod = b.facts_of(b.running_pod())
        self.skew.expect(pod.lease_id, b.T0)
        self.look(replace(pod, attempt=2), b.at(3))
        self.look(pod, b.at(4))
        assert self.seen == []

    def test_what_is_waited_for_is_bounded(self) -> None:
        first = b.facts_of(b.running_pod())
        self.skew.expect(first.lease_id, b.T0)
        for n in range(MOST):
            self.skew.expect(str(n), b.T0)
        self.look(first, b.at(1))
        assert self.seen == []
