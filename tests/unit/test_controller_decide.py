"""What a controller does next: one table a policy, and the order and bounds that hold for all of them."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit import controller_builders as b

from leasedjob.api.v1alpha1 import ConcurrencyPolicy, ExitZeroOnStop
from leasedjob.controller.decide import (
    EXPIRY_MARGIN,
    LAUNCH_GRACE,
    LAUNCH_PATIENCE,
    LAUNCH_RETRY_SECONDS,
    NOT_HELD,
    PREDECESSOR_GRACE,
    SUSPENDED_EVERY,
    Action,
    Claim,
    DeletePod,
    End,
    Launch,
    RecordTicks,
    ReleaseClaim,
    Stop,
    SuspendFailing,
    decide,
    launch_retry_ms,
    orphan,
    told,
)
from leasedjob.controller.model import JobView
from leasedjob.controller.outcome import Result
from leasedjob.identity import JobSchedulerType, run_key_for
from leasedjob.lease.rows import INTERRUPTION_LIMIT, JobSchedulerStatus, OverlapRule, Run
from leasedjob.protocol import Seen
from leasedjob.schedule import MissedRunPolicy, TickReason

RUNNING, SUCCESS, FAIL = JobSchedulerStatus.RUNNING, JobSchedulerStatus.SUCCESS, JobSchedulerStatus.FAIL
FORBID, ALLOW, REPLACE = ConcurrencyPolicy.FORBID, ConcurrencyPolicy.ALLOW, ConcurrencyPolicy.REPLACE
LATEST, ALL, SKIP = MissedRunPolicy.RunLatest, MissedRunPolicy.RunAll, MissedRunPolicy.Skip
HOUR = 3600.0
KEY = run_key_for(b.T0)
ORDER = ["End", "ReleaseClaim", "Stop", "DeletePod", "SuspendFailing", "RecordTicks", "Launch", "Claim"]


def actions(view: JobView) -> tuple[Action, ...]:
    return decide(view).actions


def only(view: JobView) -> Action:
    found = actions(view)
    assert len(found) == 1, found
    return found[0]


def nothing(view: JobView) -> datetime | None:
    """Asserts that there is nothing to do, and says when to look again."""
    found = decide(view)
    assert found.actions == ()
    return found.wake_at


def claims(view: JobView) -> list[Claim]:
    return [a for a in actions(view) if isinstance(a, Claim)]


def failing(view: JobView) -> list[Action]:
    return [a for a in actions(view) if isinstance(a, SuspendFailing)]


def active(tick: float = -HOUR, **more: Any) -> Run:
    """A run of an earlier tick that another cluster holds: it overlaps, and is not ours to tend."""
    return b.run(tick=b.at(tick), pod_uid="far", cluster=b.OTHER_CLUSTER, started=tick, expires=20 * HOUR, **more)


def waiting_for_retry(retry: float = 20 * HOUR, tick: float = -HOUR, **more: Any) -> Run:
    return b.run(FAIL, tick=b.at(tick), started=tick, pod_uid="old", failures=1, retry_at=b.at(retry), **more)


# --- ticks -----------------------------------------------------------------------------------------------------------


class TestTicks:
    def test_nothing_is_due(self) -> None:
        assert nothing(b.view(now=1800)) == b.at(HOUR), "the next tick wakes it"

    def test_a_tick_is_due_at_its_instant_and_not_before(self) -> None:
        assert nothing(b.view(now=HOUR - 0.001)) == b.at(HOUR)
        found = only(b.view(now=HOUR))
        assert isinstance(found, Claim)
        assert (found.type, found.run_key, found.tick) == (
            JobSchedulerType.SCHEDULE,
            "2026-07-20T04:00:00Z",
            b.at(HOUR),
        )
        assert not found.manual
        assert found.previous is None
        assert found.dropped == ()
        assert decide(b.view(now=HOUR)).wake_at == b.at(2 * HOUR)

    def test_the_watermark_says_from_when_ticks_count(self) -> None:
        nothing(b.view(now=HOUR + 5, watermark=b.at(HOUR)))
        assert claims(b.view(now=HOUR + 5, watermark=b.at(HOUR - 1)))

    def test_nothing_is_claimed_before_the_registration(self) -> None:
        expired = b.run(expires=-10)
        assert actions(b.view(expired, now=2 * HOUR, watermark=None)) == ()
        retry = b.run(FAIL, retry_at=b.at(1), failures=1)
        assert actions(b.view(retry, manual=[b.manual_run()], now=2 * HOUR, watermark=None)) == ()
        initial = b.view(watermark=None, type=JobSchedulerType.INITIAL, schedule=None)
        assert actions(initial) == ()

    def test_but_what_has_ended_is_finalized_before_it(self) -> None:
        body = b.pod()
        found = only(b.view(b.adopted(body), pods=[body], now=40, watermark=None))
        assert isinstance(found, End)

    @pytest.mark.parametrize("policy", [LATEST, ALL, SKIP])
    def test_suspended_ticks_are_written_down_and_none_starts(self, policy: MissedRunPolicy) -> None:
        found = only(b.view(now=5 * HOUR, suspend=True, missed=policy))
        assert isinstance(found, RecordTicks)
        (passed,) = found.ranges
        assert (found.through, found.suspended) == (passed.last, True)
        assert (passed.count, passed.reason, passed.reason.kind) == (5, TickReason.Suspended, "skipped")

    def test_suspended_ticks_are_written_down_together_some_time_after_the_first(self) -> None:
        when = b.at(HOUR) + SUSPENDED_EVERY
        assert nothing(b.view(now=-30, suspend=True)) == when
        assert nothing(b.view(now=2 * HOUR - 1, suspend=True)) == when
        assert isinstance(only(b.view(now=2 * HOUR, suspend=True)), RecordTicks)

    def test_a_schedule_that_failures_have_suspended(self) -> None:
        found = only(replace(b.view(now=5 * HOUR), suspended=True))
        assert isinstance(found, RecordTicks)
        assert (found.ranges[0].reason, found.suspended) == (TickReason.SuspendedAfterFailures, False)

    def test_failures_in_a_row_are_counted_by_the_database_before_anything_starts(self) -> None:
        failed = b.run(FAIL, reason="Error")
        found = actions(b.view(failed, suspend_after=3, now=HOUR))
        assert [type(a) for a in found] == [SuspendFailing, Claim]
        assert found[0] == SuspendFailing(failed, 3)
        assert not failing(b.view(failed))
        assert not failing(replace(b.view(failed, suspend_after=3), suspended=True))

    @pytest.mark.parametrize(
        "changes", [{"manual": True}, {"retry_at": b.at(9)}, {"reason": "Cancelled"}, {"reason": "Replaced"}]
    )
    def test_what_is_no_failure_of_the_schedule(self, changes: dict[str, Any]) -> None:
        assert failing(b.view(b.run(FAIL, reason="Error"), suspend_after=1))
        assert not failing(b.view(b.run(FAIL, **{"reason": "Error", **changes}), suspend_after=1))

    def test_the_latest_run_decides_whether_failures_are_counted(self) -> None:
        failed, good = b.run(FAIL, reason="Error"), b.run(SUCCESS, tick=b.at(HOUR), started=HOUR)
        assert not failing(b.view(failed, good, suspend_after=1, now=HOUR + 60, watermark=b.at(HOUR)))

    def test_past_ticks_that_a_person_asked_for_cost_the_schedule_no_tick(self) -> None:
        (claim,) = claims(b.view(active(), now=HOUR))
        assert claim.overlap is OverlapRule.SKIP
        past = active(manual=True)
        assert not claims(b.view(past, now=HOUR)), "it waits, and isn't skipped"
        own = b.run(
            tick=None, run_key="manual/a/b/c", pod_uid="far", cluster=b.OTHER_CLUSTER, expires=9 * HOUR, manual=True
        )
        for rows in ((own,), (own, past)):
            (claim,) = claims(b.view(*rows, now=HOUR))
            assert claim.overlap is OverlapRule.SKIP, "a run of its own is one as any other"

    def test_a_suspended_job_s_runs_go_on(self) -> None:
        body = b.pod()
        assert isinstance(only(b.view(b.adopted(body), pods=[body], suspend=True, now=40)), End)
        retry = b.run(FAIL, retry_at=b.at(1))
        assert isinstance(only(b.view(retry, suspend=True)), Claim)
        assert isinstance(only(b.view(manual=[b.manual_run()], suspend=True)), Claim), "a person asked"

    def test_a_schedule_without_a_next_tick(self) -> None:
        assert nothing(b.view(schedule=None, now=5 * HOUR)) is None


OVERLAPS = {
    # concurrency, missed runs -> the rule that the claim carries
    (FORBID, LATEST): OverlapRule.SKIP,
    (FORBID, SKIP): OverlapRule.SKIP,
    (FORBID, ALL): OverlapRule.WAIT,
    (ALLOW, LATEST): OverlapRule.ALLOW,
    (ALLOW, SKIP): OverlapRule.ALLOW,
    (ALLOW, ALL): OverlapRule.ALLOW,
    (REPLACE, LATEST): OverlapRule.REPLACE,
    (REPLACE, SKIP): OverlapRule.REPLACE,
    (REPLACE, ALL): OverlapRule.REPLACE,
}


class TestConcurrency:
    @pytest.mark.parametrize(("policies", "rule"), OVERLAPS.items())
    def test_the_rule_that_a_claim_carries(self, policies: tuple[Any, Any], rule: OverlapRule) -> None:
        concurrency, missed = policies
        found = claims(b.view(now=HOUR + 1, concurrency=concurrency, missed=missed))
        assert [c.overlap for c in found] == [rule]

    @pytest.mark.parametrize(
        ("concurrency", "missed", "in_the_way", "asks"),
        [
            # Forbid: the database is asked, and records the skip.
            (FORBID, LATEST, active(), True),
            (FORBID, SKIP, active(), True),
            (FORBID, LATEST, waiting_for_retry(), True),
            # RunAll promises each tick its run, so the tick waits.
            (FORBID, ALL, active(), False),
            (FORBID, ALL, waiting_for_retry(), False),
            (ALLOW, LATEST, active(), True),
            (ALLOW, ALL, active(), True),
            # Replace: asked once, so that the stop request is written; then it waits for the end.
            (REPLACE, LATEST, active(), True),
            (REPLACE, LATEST, active(stop_requested_at=b.at(5)), False),
            # A run that only waits for its retry is given up by the database when it is asked.
            (REPLACE, LATEST, waiting_for_retry(), True),
            (REPLACE, ALL, waiting_for_retry(), True),
        ],
    )
    def test_while_another_run_is_active(self, concurrency: Any, missed: Any, in_the_way: Run, asks: bool) -> None:
        found = claims(b.view(in_the_way, now=HOUR + 1, concurrency=concurrency, missed=missed))
        assert [c.run_key for c in found] == (["2026-07-20T04:00:00Z"] if asks else [])

    @pytest.mark.parametrize(
        "other",
        [
            b.run(SUCCESS, tick=b.at(-HOUR), started=-HOUR),
            b.run(FAIL, tick=b.at(-HOUR), started=-HOUR),
        ],
    )
    @pytest.mark.parametrize(("concurrency", "missed"), list(OVERLAPS))
    def test_a_terminal_run_is_in_nobody_s_way(self, other: Run, concurrency: Any, missed: Any) -> None:
        assert len(claims(b.view(other, now=HOUR + 1, concurrency=concurrency, missed=missed))) == 1

    def test_replace_waits_only_while_all_that_run_are_stopping(self) -> None:
        stopping, fresh = active(stop_requested_at=b.at(5)), active(-2 * HOUR)
        assert claims(b.view(stopping, fresh, now=HOUR + 1, concurrency=REPLACE)), "one has not been asked to stop yet"
        retrying = waiting_for_retry(tick=-2 * HOUR)
        assert claims(b.view(stopping, retrying, now=HOUR + 1, concurrency=REPLACE)) == []

    def test_waiting_ends_with_the_lease_in_the_way(self) -> None:
        other = replace(active(), expires_at=b.at(HOUR + 9))
        assert nothing(b.view(other, now=HOUR + 1, concurrency=FORBID, missed=ALL)) == b.at(HOUR + 9) + EXPIRY_MARGIN


class TestMissedRuns:
    """Five ticks, 04:00 to 08:00, went by; it is 08:30 (or 08:00:30, where the last is on time)."""

    LATE, ON_TIME = 5.5 * HOUR, 5 * HOUR + 30

    @pytest.mark.parametrize(
        ("concurrency", "missed", "claimed", "dropped"),
        [
            (FORBID, LATEST, [5], [(1, 4, 4)]),
            (ALLOW, LATEST, [5], [(1, 4, 4)]),
            (REPLACE, LATEST, [5], [(1, 4, 4)]),
            (FORBID, ALL, [1], []),
            (REPLACE, ALL, [1], []),
            (ALLOW, ALL, [1, 2, 3, 4, 5], []),
        ],
    )
    def test_late(self, concurrency: Any, missed: Any, claimed: list[int], dropped: list[tuple[int, ...]]) -> None:
        found = claims(b.view(now=self.LATE, concurrency=concurrency, missed=missed))
        assert [c.tick for c in found] == [b.at(n * HOUR) for n in claimed]
        assert [c.run_key for c in found] == [run_key_for(b.at(n * HOUR)) for n in claimed]
        ranges = [(r.first, r.last, r.count) for c in found for r in c.dropped]
        assert ranges == [(b.at(f * HOUR), b.at(t * HOUR), n) for f, t, n in dropped]

    def test_skip_records_what_it_does_not_start(self) -> None:
        found = only(b.view(now=self.LATE, missed=SKIP))
        assert isinstance(found, RecordTicks)
        assert found.through == b.at(5 * HOUR)
        assert [(r.first, r.last, r.count, r.reason) for r in found.ranges] == [
            (b.at(HOUR), b.at(5 * HOUR), 5, TickReason.MissedRunPolicy)
        ]

    def test_skip_starts_one_that_is_on_time(self) -> None:
        found = only(b.view(now=self.ON_TIME, missed=SKIP))
        assert isinstance(found, Claim)
        assert found.tick == b.at(5 * HOUR)
        assert [r.count for r in found.dropped] == [4]

    @pytest.mark.parametrize("concurrency", [FORBID, ALLOW, REPLACE])
    def test_the_limit_drops_the_oldest(self, concurrency: ConcurrencyPolicy) -> None:
        found = claims(b.view(now=self.LATE, concurrency=concurrency, missed=ALL, missed_limit=2))
        assert [c.tick for c in found] == [b.at(4 * HOUR), b.at(5 * HOUR)][: 2 if concurrency is ALLOW else 1]
        assert [(r.count, r.reason) for r in found[0].dropped] == [(3, TickReason.MissedRunLimit)]
        assert all(c.dropped == () for c in found[1:]), "a dropped range is recorded once"

    @pytest.mark.parametrize("missed", [LATEST, ALL, SKIP])
    def test_past_the_starting_deadline_all_are_recorded(self, missed: MissedRunPolicy) -> None:
        found = only(b.view(now=self.LATE, missed=missed, starting_deadline=600))
        assert isinstance(found, RecordTicks)
        assert {r.reason for r in found.ranges} == {TickReason.StartingDeadline}
        assert found.through == b.at(5 * HOUR)

    def test_the_starting_deadline_of_each_tick(self) -> None:
        found = claims(b.view(now=self.LATE, concurrency=ALLOW, missed=ALL, starting_deadline=2 * 3600))
        assert [c.tick for c in found] == [b.at(4 * HOUR), b.at(5 * HOUR)]
        assert [(r.count, r.reason) for r in found[0].dropped] == [(3, TickReason.StartingDeadline)]

    def test_a_century_takes_bounded_work(self) -> None:
        found = claims(b.view(now=100 * 365 * 86400, concurrency=ALLOW, missed=ALL))
        assert len(found) == 100
        assert sum(not r.count_is_exact or r.count > 10_000 for r in found[0].dropped) == 1


# --- Initial, manual -------------------------------------------------------------------------------------------------


class TestInitial:
    JOB: b.Json = {"type": JobSchedulerType.INITIAL, "schedule": None}  # noqa: RUF012

    def test_it_is_claimed_at_once(self) -> None:
        found = only(b.view(**self.JOB))
        assert found == Claim(JobSchedulerType.INITIAL, None, None, OverlapRule.ALLOW)

    @pytest.mark.parametrize("status", [RUNNING, SUCCESS, FAIL])
    def test_once_ever(self, status: JobSchedulerStatus) -> None:
        row = b.run(status, kind=JobSchedulerType.INITIAL, tick=None, pod_uid="p", expires=1000)
        nothing(b.view(row, **self.JOB))

    def test_its_retries_are_the_row_s(self) -> None:
        row = b.run(FAIL, kind=JobSchedulerType.INITIAL, tick=None, retry_at=b.at(5), pod_uid="p", failures=1)
        found = only(b.view(row, **self.JOB))
        assert isinstance(found, Claim)
        assert (found.type, found.run_key, found.previous) == (JobSchedulerType.INITIAL, None, row)

    def test_suspended(self) -> None:
        nothing(b.view(suspend=True, **self.JOB))


class TestManual:
    @pytest.mark.parametrize(
        ("concurrency", "rule"),
        [(FORBID, OverlapRule.WAIT), (ALLOW, OverlapRule.ALLOW), (REPLACE, OverlapRule.REPLACE)],
    )
    def test_it_is_claimed_and_never_skipped(self, concurrency: ConcurrencyPolicy, rule: OverlapRule) -> None:
        found = only(b.view(manual=[b.manual_run()], concurrency=concurrency))
        assert isinstance(found, Claim)
        assert (found.run_key, found.tick, found.overlap, found.manual) == ("manual/billing/now/u1", None, rule, True)

    def test_with_a_tick(self) -> None:
        found = only(b.view(manual=[b.manual_run("2026-07-01T00:00:00Z")]))
        assert isinstance(found, Claim)
        assert found.tick == datetime.fromisoformat("2026-07-01T00:00:00Z")

    def test_forbid_waits_for_the_other(self) -> None:
        nothing(b.view(active(), manual=[b.manual_run()]))

    @pytest.mark.parametrize(("concurrency", "count"), [(FORBID, 1), (REPLACE, 1), (ALLOW, 3)])
    def test_several_at_once(self, concurrency: ConcurrencyPolicy, count: int) -> None:
        asked = [b.manual_run(f"manual/billing/now/{n}") for n in range(3)]
        found = claims(b.view(manual=asked, concurrency=concurrency))
        assert [c.run_key for c in found] == [m.run_key for m in asked[:count]], "oldest first"

    @pytest.mark.parametrize("status", [RUNNING, SUCCESS, FAIL])
    def test_one_that_has_its_row_is_not_asked_for_again(self, status: JobSchedulerStatus) -> None:
        row = b.run(status, run_key="manual/billing/now/u1", tick=None, pod_uid="p", manual=True)
        assert claims(b.view(row, manual=[b.manual_run()])) == []

    def test_a_cancelled_request_is_never_claimed(self) -> None:
        nothing(b.view(manual=[b.manual_run(cancel=True)]))


class TestCancel:
    CANCEL = b.manual_run(run_key_for(b.T0), cancel=True)

    @pytest.mark.parametrize(
        "row",
        [
            b.run(),
            b.run(pod_uid="p"),
            b.run(pod_uid="p", expires=5),
            b.run(expires=5),
            b.run(pod_uid="p", cluster=b.OTHER_CLUSTER),
            b.run(pod_uid="p", cluster=b.OTHER_CLUSTER, expires=5),
            b.run(FAIL, retry_at=b.at(5)),
            b.run(FAIL, retry_at=b.at(500)),
        ],
    )
    def test_in_each_position_the_run_is_stopped_through_its_row(self, row: Run) -> None:
        assert only(b.view(row, manual=[self.CANCEL])) == Stop(row, "Cancelled")

    @pytest.mark.parametrize("row", [b.run(SUCCESS), b.run(FAIL)])
    def test_what_is_over_is_left_alone(self, row: Run) -> None:
        nothing(b.view(row, manual=[self.CANCEL]))

    def test_then_its_pod_is_deleted(self) -> None:
        body = b.running_pod()
        row = b.adopted(body, stop_requested_at=b.at(5))
        found = only(b.view(row, pods=[body], manual=[self.CANCEL]))
        assert isinstance(found, DeletePod)
        assert found.reason == "StopRequested"

    def test_a_pod_that_is_going_is_not_deleted_again(self) -> None:
        body = b.running_pod(deleted=8)
        nothing(b.view(b.adopted(body, stop_requested_at=b.at(5)), pods=[body], manual=[self.CANCEL]))

    def test_a_claim_s_pod_goes_with_it(self) -> None:
        pending = b.pending_pod()
        row = b.run(FAIL, reason="Cancelled")  # an unadopted claim ends with the stop
        found = only(b.view(row, pods=[pending], manual=[self.CANCEL]))
        assert isinstance(found, DeletePod)

    def test_another_run_is_not_touched(self) -> None:
        nothing(b.view(b.run(pod_uid="p"), manual=[b.manual_run("2026-07-20T04:00:00Z", cancel=True)]))


# --- a claim and its Pod ---------------------------------------------------------------------------------------------


class TestClaims:
    def test_a_claim_without_a_pod_is_launched_by_another_replica_after_the_grace(self) -> None:
        row = b.run(started=0)
        grace = LAUNCH_GRACE.total_seconds()
        assert nothing(b.view(row, now=grace - 0.1)) == b.T0 + LAUNCH_GRACE
        assert only(b.view(row, now=grace)) == Launch(row)

    def test_while_others_create_pods_it_is_left_to_them_for_some_time(self) -> None:
        row = b.run(started=0)
        grace, patience = LAUNCH_GRACE.total_seconds(), LAUNCH_PATIENCE.total_seconds()

        def seen(now: float, helped: float) -> JobView:
            return replace(b.view(row, now=now), helped_at=b.at(helped))

        assert nothing(seen(grace, helped=grace - 0.1)) == b.at(2 * grace), "the winner is at work"
        assert only(seen(5, helped=5 - grace)) == Launch(row), "it is silent: perhaps it has died"
        assert nothing(seen(5, helped=4.9)) == b.at(5 + grace)
        assert only(seen(patience, helped=patience - 0.1)) == Launch(row), "not for ever"
        assert nothing(seen(patience - 0.1, helped=patience - 0.2)) == b.at(patience)

    def test_not_while_the_caches_are_cold(self) -> None:
        assert actions(b.view(b.run(), now=20, fresh=False)) == ()

    def test_not_that_of_another_cluster(self) -> None:
        nothing(b.view(b.run(cluster=b.OTHER_CLUSTER), now=20))

    def test_a_pod_of_an_earlier_attempt_is_not_its_pod(self) -> None:
        old = b.pod(attempt=1, phase="Failed", workload=b.ended(1, 5))
        row = b.run(attempt=2, started=20, created=0)
        assert Launch(row) in actions(b.view(row, pods=[old], now=30))

    def test_a_pending_pod_has_until_the_deadline(self) -> None:
        row = b.run(expires=2000)
        assert nothing(b.view(row, pods=[b.pending_pod()], now=899)) == b.at(900)

    def test_pending_deadline_before_the_adoption_releases_before_it_deletes(self) -> None:
        body = b.pending_pod(
            conditions=[{"type": "PodScheduled", "status": "False", "message": "no room", "reason": "Unschedulable"}]
        )
        row = b.run(expires=2000)
        released, deleted = actions(b.view(row, pods=[body], now=900))
        assert released == ReleaseClaim(row, "PendingDeadlineExceeded", "Unschedulable: no room", None)
        assert isinstance(deleted, DeletePod)

    def test_pending_deadline_after_the_adoption_stops_the_run_and_says_why(self) -> None:
        body = b.running_pod(phase="Pending", workload=b.waiting("ImagePullBackOff", "no such image"))
        row = b.adopted(body, expires=2000)
        assert nothing(b.view(row, pods=[body], now=899)) == b.at(900)
        found = only(b.view(row, pods=[body], now=900))
        assert found == Stop(row, "PendingDeadlineExceeded: ImagePullBackOff: no such image")

    def test_one_container_that_does_not_start_is_enough_for_the_pending_deadline(self) -> None:
        states = {"main": b.running(), "second": b.waiting("ImagePullBackOff", "no such image")}
        body = b.running_pod(workload=states)
        found = only(b.view(b.adopted(body, expires=2000), pods=[body], now=900))
        assert isinstance(found, Stop)

    def test_the_pending_deadline_is_over_once_the_workload_runs(self) -> None:
        body = b.running_pod()
        assert nothing(b.view(b.adopted(body, expires=2000), pods=[body], now=1500)) == b.at(2000) + EXPIRY_MARGIN

    def test_adopt_was_refused(self) -> None:
        body = b.pod(phase="Failed", adopt=b.ended(75, 3, message="lost"), hold=b.waiting(), workload=b.waiting())
        row = b.run()
        assert only(b.view(row, pods=[body])) == ReleaseClaim(row, "NotAdopted", "lost", 5000)

    def test_the_kubelet_would_not_have_the_pod(self) -> None:
        body = b.pending_pod(phase="Failed", reason="OutOfcpu", message="Node didn't have enough resource: cpu")
        row = b.run()
        found = only(b.view(row, pods=[body]))
        text = "OutOfcpu: Node didn't have enough resource: cpu"
        assert found == ReleaseClaim(row, "NotAdopted", text, 5000), "not once a second for ever"

    @pytest.mark.parametrize(
        "body",
        [
            b.pending_pod(deleted=5),
            b.pending_pod(phase="Failed", reason="Evicted", disrupted=("TerminationByKubelet", 5)),
        ],
    )
    def test_it_was_stopped_before_the_adoption(self, body: b.Json) -> None:
        row = b.run()
        found = only(b.view(row, pods=[body]))
        assert isinstance(found, ReleaseClaim)
        assert (found.reason, found.retry_ms) == ("Interrupted", 1000)

    def test_an_expired_claim_is_claimed_again(self) -> None:
        row = b.run(expires=5)
        found = only(b.view(row, now=10))
        assert isinstance(found, Claim)
        assert found.previous == row

    @pytest.mark.parametrize(
        ("concurrency", "overlap"),
        [(FORBID, OverlapRule.WAIT), (REPLACE, OverlapRule.WAIT), (ALLOW, OverlapRule.ALLOW)],
    )
    def test_what_has_begun_meanwhile_is_not_joined(self, concurrency: ConcurrencyPolicy, overlap: OverlapRule) -> None:
        found = only(b.view(b.run(expires=5), now=10, concurrency=concurrency))
        assert isinstance(found, Claim)
        assert found.overlap is overlap


class TestLaunchRetry:
    def test_the_first_series_ends_with_the_pending_deadline(self) -> None:
        found = [
            launch_retry_ms(b.view(now=now), n, b.T0) for n, now in enumerate([0, 5, 15, 35, 75, 400, 839, 841], 1)
        ]
        assert found == [5000, 10000, 20000, 40000, 60000, 60000, 60000, None]

    def test_a_run_that_worked_for_hours_before_may_wait_as_long_as_a_new_one(self) -> None:
        """Its third attempt's Pod is refused once, two hours after the first claim."""
        view = b.view(now=7200)
        assert launch_retry_ms(view, 3, b.T0, setbacks=2) == 5000
        assert launch_retry_ms(view, 4, b.T0, setbacks=2) == 10000

    @pytest.mark.parametrize("deadline", [30, 60, 900])
    def test_such_a_run_ends_at_last(self, deadline: int) -> None:
        view = b.view(now=7200, pending_deadline=deadline)
        waits: list[int] = []
        while (wait := launch_retry_ms(view, 3 + len(waits), b.T0, setbacks=2)) is not None:
            waits.append(wait)
            assert len(waits) < 100
        assert deadline - max(LAUNCH_RETRY_SECONDS) <= sum(waits) / 1000 < deadline

    def test_refusals_in_decide_know_of_the_setbacks(self) -> None:
        body = b.pending_pod(phase="Failed", reason="OutOfcpu", attempt=3)
        row = b.run(attempt=3, failures=1, interruptions=1, started=7200, created=0)
        found = only(b.view(row, pods=[body], now=7210, watermark=b.at(2 * HOUR)))
        assert isinstance(found, ReleaseClaim)
        assert found.retry_ms == 5000

    def test_a_run_whose_pods_were_refused_all_along_gives_up(self) -> None:
        row = b.run(FAIL, retry_at=b.at(950), created=0, started=890, attempt=15)
        found = only(b.view(row, now=901))
        assert found == Stop(row, f"PendingDeadlineExceeded: {row.reason}")
        tried = replace(row, failures=1)
        assert nothing(b.view(tried, now=901)) == b.at(950)


# --- an attempt that has ended ---------------------------------------------------------------------------------------


class TestEnds:
    @pytest.mark.parametrize(
        ("options", "result", "retry"),
        [
            ({}, Result.COMPLETE, None),
            ({"phase": "Failed", "workload": b.ended(1, 30)}, Result.FAIL, -1),
            ({"phase": "Failed", "workload": b.ended(143, 30), "deleted": 20}, Result.RELEASE, 0),
            ({"phase": "Failed", "hold": b.holder(b.said(Seen.FENCED))}, Result.RELEASE, 0),
        ],
    )
    def test_what_comes_after(self, options: b.Json, result: Result, retry: int | None) -> None:
        body = b.pod(**options)
        row = b.adopted(body)
        found = only(b.view(row, pods=[body], now=40))
        assert isinstance(found, End)
        assert (found.run, found.pod_uid, found.result, found.retry_ms) == (row, row.pod_uid, result, retry)

    @pytest.mark.parametrize(
        ("interruptions", "result"),
        [
            (0, Result.RELEASE),
            (INTERRUPTION_LIMIT - 1, Result.RELEASE),
            (INTERRUPTION_LIMIT, Result.ENDED),
            (INTERRUPTION_LIMIT + 5, Result.ENDED),
        ],
    )
    def test_the_interruption_limit(self, interruptions: int, result: Result) -> None:
        body = b.pod(phase="Failed", workload=b.ended(143, 30), deleted=20)
        found = only(b.view(b.adopted(body, interruptions=interruptions), pods=[body], now=40))
        assert isinstance(found, End)
        assert found.result is result
        assert (found.reason == "InterruptionLimitExceeded") == (result is Result.ENDED)

    def test_a_failure_is_not_an_interruption(self) -> None:
        body = b.pod(phase="Failed", workload=b.ended(1, 30))
        found = only(b.view(b.adopted(body, interruptions=INTERRUPTION_LIMIT), pods=[body], now=40))
        assert isinstance(found, End)
        assert found.result is Result.FAIL

    @pytest.mark.parametrize("expires", [35, 900])
    def test_also_after_the_lease_has_expired(self, expires: float) -> None:
        """Crash window: the workload exited, the outcome was not written. Finished work is what it was."""
        body = b.pod()
        assert isinstance(only(b.view(b.adopted(body, expires=expires), pods=[body], now=40)), End)

    def test_exit_zero_on_stop(self) -> None:
        body = b.pod(deleted=20)
        row = b.adopted(body)
        found = only(b.view(row, pods=[body], now=40, exit_zero_on_stop=ExitZeroOnStop.SUCCESS))
        assert isinstance(found, End)
        assert found.result is Result.COMPLETE

    def test_a_pod_that_the_row_does_not_name_decides_nothing(self) -> None:
        body = b.pod()
        row = b.adopted(body, pod_uid="another")
        assert [a for a in actions(b.view(row, pods=[body], now=40)) if isinstance(a, End)] == []

    def test_a_pod_that_proves_nothing_leaves_the_lease_to_expire(self) -> None:
        body = b.pod(hold=b.holder(""))
        row = b.adopted(body, expires=900)
        assert nothing(b.view(row, pods=[body], now=40)) == b.at(900) + EXPIRY_MARGIN
        found = only(b.view(row, pods=[body], now=900))
        assert isinstance(found, Claim)
        assert found.previous == row

    def test_after_a_restore_a_pod_that_is_found_still_says_how_it_ended(self) -> None:
        """`leasedjob restored` leaves such a row RUNNING, with a stop asked for; without its Pod it is ended."""
        body = b.pod()
        row = replace(b.adopted(body, expires=30), stop_requested_at=b.at(35), stop_reason="Restored: …")
        found = only(b.view(row, pods=[body], now=40))
        assert isinstance(found, End)
        assert found.result is Result.COMPLETE
        gone = replace(b.run(pod_uid="gone", expires=900), stop_requested_at=b.at(35), stop_reason="Restored: …")
        assert isinstance(only(b.view(gone, now=900)), Claim), "which the database answers by ending it"

    def test_a_pod_that_is_gone_proves_nothing(self) -> None:
        row = b.run(pod_uid="gone", expires=900)
        assert nothing(b.view(row, now=40)) == b.at(900) + EXPIRY_MARGIN
        assert isinstance(only(b.view(row, now=900)), Claim)

    def test_what_an_object_of_the_same_name_has_left_is_not_repeated(self) -> None:
        """Crash window: the LeasedJob was deleted, its attempt's end was never seen, and it was created anew."""
        row = b.run(pod_uid="gone", expires=900, job_uid="the one before")
        over = b.at(900) + PREDECESSOR_GRACE
        assert nothing(b.view(row, now=900)) == over
        assert only(b.view(row, now=900 + PREDECESSOR_GRACE.total_seconds())) == Stop(row, "JobDeleted")
        stopped = replace(row, stop_requested_at=over)
        assert isinstance(only(b.view(stopped, now=920)), Claim), "which the database answers by ending it"

    @pytest.mark.parametrize(
        "more",
        [{"cluster": b.OTHER_CLUSTER}, {"job_uid": ""}, {"kind": JobSchedulerType.INITIAL, "tick": None}],
        ids=str,
    )
    def test_but_what_another_cluster_held_or_what_happens_once_ever_is(self, more: dict[str, Any]) -> None:
        row = b.run(pod_uid="gone", expires=900, **{"job_uid": "the one before", **more})
        assert isinstance(only(b.view(row, now=1000)), Claim)

    def test_and_an_end_that_is_seen_is_recorded(self) -> None:
        body = b.pod()
        assert isinstance(only(b.view(b.adopted(body, job_uid="the one before"), pods=[body], now=2000)), End)

    def test_a_replaced_run_s_pod_is_told_at_once(self) -> None:
        body = b.running_pod()
        row = b.adopted(body, stop_requested_at=b.at(5))
        found = only(b.view(row, pods=[body]))
        assert isinstance(found, DeletePod)


class TestRetries:
    @pytest.mark.parametrize(("retry", "claimed"), [(5, True), (10, True), (11, False)])
    def test_backoff(self, retry: float, claimed: bool) -> None:
        row = b.run(FAIL, pod_uid="p", failures=1, retry_at=b.at(retry))
        view = b.view(row, now=10)
        if not claimed:
            assert nothing(view) == b.at(retry)
            return
        found = only(view)
        assert found == Claim(
            JobSchedulerType.SCHEDULE, run_key_for(b.T0), b.T0, OverlapRule.WAIT, manual=False, previous=row
        )

    def test_a_retry_of_another_cluster_s_run_is_anybody_s(self) -> None:
        row = b.run(FAIL, pod_uid="p", failures=1, retry_at=b.at(5), cluster=b.OTHER_CLUSTER)
        assert isinstance(only(b.view(row)), Claim)

    def test_a_manual_run_stays_manual(self) -> None:
        row = b.run(FAIL, run_key="manual/x", tick=None, pod_uid="p", failures=1, retry_at=b.at(5), manual=True)
        found = only(b.view(row))
        assert isinstance(found, Claim)
        assert found.manual

    @pytest.mark.parametrize("cluster", [b.CLUSTER, b.OTHER_CLUSTER])
    @pytest.mark.parametrize("pod_uid", [None, "p"])
    @pytest.mark.parametrize(("now", "claimed"), [(99.9, False), (100, True), (5000, True)])
    def test_expired_runs_of_this_and_another_cluster(
        self, cluster: str, pod_uid: str | None, now: float, claimed: bool
    ) -> None:
        row = b.run(cluster=cluster, pod_uid=pod_uid, expires=100)
        watermark = b.at(2 * HOUR)
        found = claims(b.view(row, now=now, watermark=watermark))
        assert [c.previous for c in found] == ([row] if claimed else [])


# --- tidying up ------------------------------------------------------------------------------------------------------


def finished(n: int, phase: str = "Succeeded", **options: Any) -> b.Json:
    return b.pod(tick=b.at(-HOUR * n), created=-HOUR * n, phase=phase, **options)


def rows_of(bodies: list[b.Json], status: JobSchedulerStatus) -> list[Run]:
    seen = [b.facts_of(p) for p in bodies]
    return [replace(b.adopted(p), status=status, expires_at=b.at(1e6)) for p, _ in zip(bodies, seen, strict=True)]


def deleted(view: JobView) -> set[str]:
    return {a.pod.name for a in actions(view) if isinstance(a, DeletePod)}


class TestHistory:
    @pytest.mark.parametrize("keep", [0, 1, 3, 10])
    @pytest.mark.parametrize(
        ("phase", "status", "limit"), [("Succeeded", SUCCESS, "keep_successful"), ("Failed", FAIL, "keep_failed")]
    )
    def test_the_newest_are_kept(self, keep: int, phase: str, status: JobSchedulerStatus, limit: str) -> None:
        bodies = [finished(n, phase) for n in (3, 1, 5, 2, 4)]
        gone = deleted(b.view(*rows_of(bodies, status), pods=bodies, now=40, **{limit: keep}))
        oldest = sorted(bodies, key=lambda p: p["metadata"]["creationTimestamp"])
        assert gone == {p["metadata"]["name"] for p in oldest[: max(0, 5 - keep)]}

    def test_success_and_failure_are_counted_apart(self) -> None:
        good, bad = [finished(n) for n in range(1, 5)], [finished(n, "Failed") for n in range(5, 9)]
        view = b.view(*rows_of(good, SUCCESS), *rows_of(bad, FAIL), pods=good + bad, now=40)
        assert len(deleted(view)) == 1 + 3

    def test_a_pod_that_is_not_finalized_yet_is_evidence(self) -> None:
        bodies = [finished(n, hold=b.holder("")) for n in range(1, 6)]
        assert deleted(b.view(*rows_of(bodies, RUNNING), pods=bodies, now=40, keep_successful=0)) == set()

    def test_an_earlier_attempt_is_closed(self) -> None:
        body = finished(1, "Failed", workload=b.ended(1, 30))
        row = replace(b.adopted(body), attempt=2, pod_uid="next", expires_at=b.at(1e6))
        assert deleted(b.view(row, pods=[body], now=40, keep_failed=0)) == {body["metadata"]["name"]}

    def test_a_pod_that_is_going_is_not_deleted_again(self) -> None:
        bodies = [finished(n, deleted=35) for n in range(1, 6)]
        assert deleted(b.view(*rows_of(bodies, SUCCESS), pods=bodies, now=40, keep_successful=0)) == set()

    @pytest.mark.parametrize(("age", "gone"), [(500, False), (700, True)])
    def test_a_pod_without_a_row_in_memory_only_when_it_is_old(self, age: float, gone: bool) -> None:
        body = b.pod(created=-age)
        assert bool(deleted(b.view(pods=[body], now=0, keep_successful=0))) is gone

    @pytest.mark.parametrize("situation", [{"watermark": None}, {"suspend": True}, {"fresh": False}])
    def test_whether_or_not_anything_can_be_created(self, situation: b.Json) -> None:
        bodies = [finished(n) for n in range(1, 6)]
        view = b.view(*rows_of(bodies, SUCCESS), pods=bodies, **({"now": 40} | situation))
        assert len(deleted(view)) == 2

    def test_also_while_a_tick_is_claimed(self) -> None:
        bodies = [finished(n) for n in range(1, 6)]
        view = b.view(*rows_of(bodies, SUCCESS), pods=bodies, now=HOUR)
        assert [type(a).__name__ for a in actions(view)] == ["DeletePod", "DeletePod", "Claim"]


class TestLosers:
    """Pods whose claim or lease is another's by now."""

    @pytest.mark.parametrize(
        ("body", "row", "goes"),
        [
            # a claim that was released or taken over: a Pod that nobody has room for would wait for ever
            (b.pending_pod(), b.run(FAIL), True),
            (b.pending_pod(), b.run(FAIL, retry_at=b.at(500)), True),
            (b.pending_pod(), b.run(attempt=2, pod_uid="next"), True),
            # a former holder that still runs: fenced, or its node is lost
            (b.running_pod(), b.run(attempt=2, pod_uid="next"), True),
            # the holder itself, and one that reported and winds down
            (b.running_pod(), b.adopted(b.running_pod()), False),
            (b.running_pod(), replace(b.adopted(b.running_pod()), status=SUCCESS), False),
            (b.running_pod(), replace(b.adopted(b.running_pod()), status=FAIL, retry_at=b.at(500)), False),
            (b.pending_pod(), b.run(expires=900), False),
            # over, or going already
            (b.pending_pod(deleted=5), b.run(FAIL), False),
            (b.pod(phase="Failed", adopt=b.ended(75, 3), workload=b.waiting()), b.run(FAIL), False),
        ],
    )
    def test_table(self, body: b.Json, row: Run, goes: bool) -> None:
        found = [a for a in actions(b.view(row, pods=[body])) if isinstance(a, DeletePod)]
        assert [a.reason for a in found] == ([NOT_HELD] if goes else [])

    def test_a_pod_without_a_row_is_left_alone(self) -> None:
        assert actions(b.view(pods=[b.pending_pod()])) == ()


class TestOrphans:
    """The LeasedJob was deleted while its Pod ran."""

    def orphan(self, body: b.Json, row: Run) -> End | None:
        return orphan(b.facts_of(body), row, exit_zero_on_stop=ExitZeroOnStop.RETRY)

    def test_its_outcome_is_written(self) -> None:
        body = b.pod()
        found = self.orphan(body, b.adopted(body))
        assert found is not None
        assert found.result is Result.COMPLETE

    def test_only_by_the_pod_that_holds_it_and_once_it_has_ended(self) -> None:
        body = b.pod()
        row = b.adopted(body)
        assert self.orphan(body, replace(row, attempt=2)) is None
        assert self.orphan(body, replace(row, pod_uid="another")) is None
        assert self.orphan(body, replace(row, status=SUCCESS)) is None
        assert self.orphan(b.running_pod(), b.adopted(b.running_pod())) is None


# --- what holds for all of them --------------------------------------------------------------------------------------

BODIES = [
    b.pod(),
    b.running_pod(),
    b.pending_pod(),
    b.pod(phase="Failed", workload=b.ended(1, 30)),
    b.pod(phase="Failed", workload=b.running(), hold=b.running()),
    b.pod(phase="Failed", adopt=b.ended(75, 3), hold=b.waiting(), workload=b.waiting()),
    b.pending_pod(phase="Failed", reason="OutOfcpu"),
    b.pod(deleted=20),
    b.running_pod(deleted=5),
]


@st.composite
def views(draw: st.DrawFn) -> JobView:
    rows, pods = [], []
    for n in range(draw(st.integers(0, 4))):
        tick = b.at(-n * HOUR)
        lease = b.lease_id_of(tick)
        body = draw(st.none() | st.sampled_from(BODIES))
        uid = None
        attempt = draw(st.integers(1, 3))
        if body is not None:
            metadata = body["metadata"] | {"name": f"p{n}", "uid": f"u{n}"}
            metadata["annotations"] = metadata["annotations"] | {
                "leasedjob.io/lease-id": str(lease),
                "leasedjob.io/attempt": str(draw(st.integers(1, 3))),
            }
            pods.append(body | {"metadata": metadata})
            uid = draw(st.sampled_from([None, f"u{n}", "other"]))
        status = draw(st.sampled_from(list(JobSchedulerStatus)))
        rows.append(
            b.run(
                status,
                tick=tick,
                started=-n * HOUR,
                pod_uid=uid,
                attempt=attempt,
                expires=draw(st.floats(-HOUR, 3 * HOUR)),
                cluster=draw(st.sampled_from([b.CLUSTER, b.OTHER_CLUSTER])),
                failures=draw(st.integers(0, 2)),
                interruptions=draw(st.integers(0, 21)),
                retry_at=b.at(draw(st.floats(-HOUR, HOUR))) if status is FAIL and draw(st.booleans()) else None,
                stop_requested_at=draw(st.sampled_from([None, b.at(1)])),
            )
        )
    asked = [b.manual_run(), b.manual_run(run_key_for(b.T0)), b.manual_run(run_key_for(b.T0), cancel=True)]
    return b.view(
        *rows,
        pods=pods,
        manual=draw(st.lists(st.sampled_from(asked), max_size=2, unique_by=lambda m: m.lock_key)),
        now=draw(st.floats(0, 5 * HOUR)),
        watermark=draw(st.sampled_from([None, b.T0, b.at(HOUR)])),
        fresh=draw(st.booleans()),
        concurrency=draw(st.sampled_from(list(ConcurrencyPolicy))),
        missed=draw(st.sampled_from(list(MissedRunPolicy))),
        suspend=draw(st.booleans()),
        starting_deadline=draw(st.sampled_from([None, 10, 3600])),
        keep_successful=draw(st.integers(0, 3)),
    )


@given(views())
def test_whatever_is_observed(view: JobView) -> None:
    found = decide(view)
    kinds = [isinstance(a, Claim | Launch) for a in found.actions]
    assert kinds == sorted(kinds), "ends come before claims"
    assert decide(view) == found, "a function of what was observed"

    for a in found.actions:
        match a:
            case End(run=run):
                assert run.status is RUNNING
                assert run.cluster == view.cluster
            case ReleaseClaim(run=run):
                assert run.status is RUNNING
                assert run.pod_uid is None
                assert run.cluster == view.cluster
            case Launch(run=run):
                assert view.fresh
                assert run.status is RUNNING
                assert run.expires_at > view.now
            case Claim(previous=None, manual=False, tick=tick) if tick is not None:
                assert not view.policy.suspend
                assert view.watermark is not None
                assert view.watermark < tick <= view.now
            case Claim(previous=previous) if previous is not None:
                assert previous.status is not SUCCESS
                assert previous.status is FAIL or previous.expires_at <= view.now
                assert previous.status is RUNNING or (previous.retry_at and previous.retry_at <= view.now)
            case DeletePod(pod=pod):
                assert not pod.deleting
            case _:
                pass
    if view.watermark is None:
        assert not any(isinstance(a, Claim | RecordTicks) for a in found.actions)
    acted = [a.run.id for a in found.actions if isinstance(a, End | ReleaseClaim | Stop | Launch)]
    acted += [a.previous.id for a in found.actions if isinstance(a, Claim) and a.previous]
    assert len(acted) == len(set(acted)), "one thing at a time for each row"
    keys = [(a.type, a.run_key) for a in found.actions if isinstance(a, Claim)]
    assert len(keys) == len(set(keys)), "a run is claimed once"


@given(views(), st.floats(0.001, 3600))
def test_nothing_changes_by_itself_before_the_wake(view: JobView, part: float) -> None:
    """What is to be done is the same until `wake_at`, so that no timer but the agenda's is needed."""
    first = decide(view)
    until = first.wake_at or view.now + timedelta(hours=1)
    later = min(view.now + timedelta(seconds=part), until - EXPIRY_MARGIN - timedelta(microseconds=1))
    if later <= view.now or first.actions:
        return
    starts = [a for a in decide(replace(view, now=later)).actions if isinstance(a, Claim | Launch | End | ReleaseClaim)]
    assert starts == []


class TestTold:
    """The log's one line for each decision: which run, what, and why."""

    @pytest.mark.parametrize(
        ("action", "line"),
        [
            (
                End(b.run(pod_uid="p"), "p", Result.FAIL, "OOMKilled", "container main exited with 137", -1),
                f"{KEY}, attempt 1: ends as fail: OOMKilled container main exited with 137",
            ),
            (
                ReleaseClaim(b.run(), "NotAdopted", "no route", 5000),
                f"{KEY}, attempt 1: the claim is given back: NotAdopted no route",
            ),
            (Stop(b.run(), "Cancelled"), f"{KEY}, attempt 1: is to stop: Cancelled"),
            (DeletePod(b.facts(), NOT_HELD), "attempt 1: Pod"),
            (Launch(b.run()), f"{KEY}, attempt 1: gets its Pod"),
            (
                Claim(JobSchedulerType.SCHEDULE, KEY, b.T0, OverlapRule.SKIP),
                f"{KEY}: to be claimed: due, overlap: skip",
            ),
            (Claim(JobSchedulerType.SCHEDULE, KEY, b.T0, OverlapRule.WAIT, manual=True), "asked for by a LeasedJobRun"),
            (Claim(JobSchedulerType.INITIAL, None, None, OverlapRule.ALLOW), "the initial run: to be claimed: due"),
            (
                Claim(JobSchedulerType.SCHEDULE, KEY, b.T0, OverlapRule.ALLOW, previous=b.run()),
                "claimed again: its lease has expired",
            ),
            (
                Claim(JobSchedulerType.SCHEDULE, KEY, b.T0, OverlapRule.ALLOW, previous=b.run(FAIL, reason="Error: x")),
                "attempt 1: to be claimed again: Error: x",
            ),
            (RecordTicks(b.T0, ()), "passed over: it has been run already"),
        ],
    )
    def test_an_action(self, action: Any, line: str) -> None:
        assert line in told(action)
        assert "\n" not in told(action)

    def test_what_is_waited_for(self) -> None:
        retry = b.run(FAIL, retry_at=b.at(40), reason="Error: x")
        assert decide(b.view(retry)).waits == (f"{KEY}, attempt 1: the next attempt is at 03:00:40 UTC: Error: x",)
        body = b.running_pod()
        (said,) = decide(b.view(b.adopted(body), pods=[body])).waits
        assert said == f"{KEY}, attempt 1: no outcome: the Pod has not ended"
