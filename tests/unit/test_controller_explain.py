"""Why a tick ran or not, in one word and in a sentence: each kind of answer, and which evidence counts first."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest
from tests.unit import controller_builders as b

from leasedjob.api.v1alpha1 import Verdict
from leasedjob.controller.explain import SAID, Evidence, explain, ledger_range, tick_of
from leasedjob.controller.status import run_status
from leasedjob.identity import JobSchedulerType, run_key_for
from leasedjob.lease.rows import REASON_RESTORED, CodeState, JobSchedulerStatus, LedgerEntry, Run, Suspension
from leasedjob.schedule import InForce, TickReason, Timetable

RUNNING, SUCCESS, FAIL = JobSchedulerStatus.RUNNING, JobSchedulerStatus.SUCCESS, JobSchedulerStatus.FAIL
HOUR = 3600.0
TICK = b.at(HOUR)


def state(watermark: datetime = b.T0, **more: Any) -> CodeState:
    values: dict[str, Any] = {
        "code": b.CODE, "watermark": watermark, "created_at": b.T0, "counts": {}, "ledger": (), "suspension": None,
        "ledger_through": None, "pruned_through": None, "registered_uid": "u", "registered_suspended": False,
        "registered_schedule": "s", "active_elsewhere": False, "db_now": b.T0,
    }  # fmt: skip
    return CodeState(**values | more)


def evidence(run: Run | None = None, tick: datetime | None = TICK, *, now: float = 2 * HOUR, **more: Any) -> Evidence:
    values: dict[str, Any] = {
        "now": b.at(now), "tick": tick, "run_key": run_key_for(tick) if tick else None, "policy": b.policy(),
        "problem": None, "state": state(), "run": run, "shown": run_status(run, None) if run else None,
    }  # fmt: skip
    return Evidence(**values | more)


def row(status: JobSchedulerStatus = RUNNING, **more: Any) -> Run:
    return b.run(status, **{"tick": TICK, "started": HOUR, "pod_uid": "p", **more})


def entry(kind: str = "skipped", reason: str = "Overlap", count: int = 1, **more: Any) -> LedgerEntry:
    values: dict[str, Any] = {
        "code": b.CODE, "first": TICK, "last": TICK, "count": count, "count_is_exact": True, "kind": kind,
        "reason": reason, "decided_by": "east", "decided_at": TICK,
    }  # fmt: skip
    return LedgerEntry(**values | more)


SUSPENSION = Suspension(since=b.T0, by="east", runs=3, reason="2026-07-20T02:00:00Z: OOMKilled")


@pytest.mark.parametrize(
    ("seen", "verdict", "reason", "says"),
    [
        # its row
        (evidence(row(SUCCESS)), Verdict.RAN, "Success", "succeeded at"),
        (evidence(row(FAIL, reason="Error: exit 1")), Verdict.RAN, "Error", "as Failed, by"),
        (evidence(row(FAIL, reason="Cancelled")), Verdict.RAN, "Cancelled", "none follows: Cancelled"),
        (evidence(row(FAIL, reason="")), Verdict.RAN, "Failed", "none follows"),
        (evidence(row(FAIL, reason="OOMKilled", retry_at=b.at(9 * HOUR))), Verdict.RETRYING, "OOMKilled", "may begin"),
        (evidence(row(expires=9 * HOUR)), Verdict.RUNNING, "Adopted", "runs since"),
        (evidence(row(expires=9 * HOUR), waiting=("ImagePullBackOff", "no such image")), Verdict.PENDING,
         "ImagePullBackOff", "no such image"),
        (evidence(row(expires=1.5 * HOUR)), Verdict.PENDING, "LeaseExpired", "claimed again"),
        (evidence(row(pod_uid=None, expires=9 * HOUR)), Verdict.PENDING, "Claimed", "not taken the lease"),
        (evidence(row(pod_uid=None, expires=9 * HOUR), waiting=("Unschedulable", "no node")), Verdict.PENDING,
         "Unschedulable", "no node"),
        # the ledger
        (evidence(entry=entry()), Verdict.SKIPPED, "Overlap", "concurrencyPolicy is Forbid; decided by east"),
        (evidence(entry=entry("missed", "MissedRunLimit", 7)), Verdict.MISSED, "MissedRunLimit", "one of 7 ticks"),
        (evidence(entry=entry("missed", "StartingDeadline", 7, count_is_exact=False)), Verdict.MISSED,
         "StartingDeadline", "one of at least 7 ticks"),
        (evidence(entry=entry("dropped", "ScheduleEdited")), Verdict.DROPPED, "ScheduleEdited", "edited"),
        (evidence(entry=entry("skipped", "OfALaterVersion")), Verdict.SKIPPED, "OfALaterVersion", "OfALaterVersion"),
        # no tick
        (evidence(tick=TICK + timedelta(minutes=1)), Verdict.NOT_A_TICK, "NotATick", "the nearest: "),
        (evidence(policy=b.policy(type=JobSchedulerType.INITIAL, schedule=None)), Verdict.NOT_A_TICK, "NotATick",
         "no ticks"),
        # ahead
        (evidence(now=0), Verdict.PENDING, "Future", "due in 60 min"),
        (evidence(now=0, policy=b.policy(suspend=True)), Verdict.PENDING, "Future", "spec.suspend is true"),
        (evidence(now=0, state=state(suspension=SUSPENSION)), Verdict.PENDING, "Future", "3 runs in a row had failed"),
        # due
        (evidence(), Verdict.PENDING, "Due", "due since 60 min"),
        (evidence(state=None), Verdict.PENDING, "Due", "not decided yet"),
        (evidence(active=(b.run(tick=b.T0, pod_uid="x"),)), Verdict.PENDING, "Overlap", "it waits for 2026-07-20T03"),
        (evidence(problem=("CodeConflict", "another one")), Verdict.PENDING, "CodeConflict", "not Ready"),
        (evidence(policy=b.policy(suspend=True)), Verdict.SKIPPED, "Suspended", "not in the ledger yet"),
        (evidence(policy=b.policy(suspend=True), state=state(active_elsewhere=True)), Verdict.PENDING, "Suspended",
         "a cluster that is active"),
        (evidence(state=state(suspension=SUSPENSION)), Verdict.SKIPPED, "SuspendedAfterFailures", "OOMKilled"),
        # behind, without a record
        (evidence(state=state(TICK)), Verdict.BEFORE_WATERMARK, "BeforeWatermark", "was never due"),
        (evidence(state=state(TICK, ledger_through=TICK)), Verdict.PRUNED, "Pruned", "were deleted"),
        (evidence(state=state(TICK, pruned_through=b.at(9 * HOUR))), Verdict.PRUNED, "Pruned", "not known any more"),
        (evidence(state=state(TICK, pruned_through=b.T0)), Verdict.BEFORE_WATERMARK, "BeforeWatermark", "never due"),
        # runs that have no tick
        (evidence(tick=None, run_key="manual/a/b/c"), Verdict.NO_SUCH_RUN, "NoSuchRun", "no run manual/a/b/c"),
        (evidence(run_key=f"{run_key_for(TICK)}#r1"), Verdict.NO_SUCH_RUN, "NoSuchRun", "#r1 is recorded"),
        (evidence(tick=None, policy=b.policy(type=JobSchedulerType.INITIAL, schedule=None)), Verdict.PENDING,
         "NotClaimed", "once, ever"),
        (evidence(tick=None, policy=b.policy(type=JobSchedulerType.INITIAL, schedule=None, suspend=True)),
         Verdict.PENDING, "Suspended", "spec.suspend"),
    ],
)  # fmt: skip
def test_the_answer(seen: Evidence, verdict: Verdict, reason: str, says: str) -> None:
    found = explain(seen)
    assert (found.verdict, found.reason) == (verdict, reason)
    assert found.message is not None
    assert says in found.message


def test_a_run_counts_before_the_ledger_and_the_ledger_before_the_schedule() -> None:
    """A tick that was skipped and then run by name has run; one of a schedule that was edited is still skipped."""
    skipped = entry()
    assert explain(evidence(row(SUCCESS), entry=skipped)).verdict is Verdict.RAN
    assert explain(evidence(entry=skipped, tick=TICK + timedelta(minutes=1))).verdict is Verdict.SKIPPED
    assert explain(evidence(entry=skipped, state=state(TICK, pruned_through=TICK))).verdict is Verdict.SKIPPED


def test_what_is_shown_with_it() -> None:
    run = row(FAIL, failures=2, interruptions=1, attempt=4, reason="Error")
    found = explain(evidence(run, reruns=(run_status(row(SUCCESS), None),), entry=None))
    assert (found.failures, found.interruptions, found.tick, found.watermark) == (2, 1, TICK, b.T0)
    assert found.run is not None
    assert found.run.attempt == 4
    assert found.reruns is not None
    nearest = explain(evidence(tick=TICK + timedelta(minutes=1)))
    assert (nearest.previous_tick, nearest.next_tick) == (TICK, b.at(2 * HOUR))


def test_every_reason_of_the_ledger_is_said_in_words() -> None:
    assert SAID.keys() == {*TickReason, "Overlap", REASON_RESTORED}


def test_a_tick_that_a_restore_has_forgotten() -> None:
    found = explain(evidence(entry=entry("missed", REASON_RESTORED, count_is_exact=False)))
    assert (found.verdict, found.reason) == (Verdict.MISSED, REASON_RESTORED)
    assert found.message is not None
    assert "restored to an earlier point" in found.message
    assert "at least" not in found.message, "how many ticks there were isn't known"


HALF_PAST = Timetable.of(["30 * * * *"], code=b.CODE)


def then(ticks: Timetable | None, *, known: bool = True, still: bool = False) -> tuple[InForce, ...]:
    """What was in force."""
    return (InForce("then", known, ticks, b.at(-5 * HOUR), None if still else b.at(5 * HOUR)),)


def test_an_instant_in_a_range_that_no_schedule_of_then_had_is_no_tick() -> None:
    found = explain(evidence(entry=entry(count=9), in_force=then(HALF_PAST)))
    assert (found.verdict, found.reason, found.range) == (Verdict.NOT_A_TICK, "NotATick", None)
    assert found.message is not None
    assert '"30 * * * *" in Etc/UTC' in found.message
    assert (found.previous_tick, found.next_tick) == (TICK - timedelta(minutes=30), TICK + timedelta(minutes=30))
    found = explain(evidence(entry=entry(count=9), in_force=then(None)))
    assert (found.verdict, "no schedule" in str(found.message)) == (Verdict.NOT_A_TICK, True)


@pytest.mark.parametrize("known", [then(HALF_PAST) + then(b.policy().schedule), then(None, known=False), ()])
def test_a_range_counts_where_a_schedule_of_then_had_it_or_nobody_knows(known: tuple[InForce, ...]) -> None:
    assert explain(evidence(entry=entry(count=9), in_force=known)).verdict is Verdict.SKIPPED


def test_what_an_earlier_release_registered_is_not_known() -> None:
    past = state(b.at(3 * HOUR))
    found = explain(evidence(state=past, in_force=then(None, known=False)))
    assert (found.verdict, found.reason) == (Verdict.BEFORE_WATERMARK, "NotRecorded")
    assert explain(evidence(state=past, in_force=then(HALF_PAST))).reason == "BeforeWatermark"


def test_a_tick_of_another_clusters_schedule_is_decided_there() -> None:
    tick = TICK + timedelta(minutes=30)
    found = explain(evidence(tick=tick, in_force=then(HALF_PAST, still=True)))
    assert (found.verdict, found.reason) == (Verdict.PENDING, "SpecDiffers")
    assert explain(evidence(tick=tick, in_force=then(HALF_PAST))).verdict is Verdict.NOT_A_TICK, (
        "nobody has it any more"
    )


def test_a_range_as_it_is_shown() -> None:
    shown = ledger_range(entry("dropped", "ScheduleEdited", 3, count_is_exact=False)).to_json()
    assert shown == {
        "from": run_key_for(TICK), "to": run_key_for(TICK), "count": 3, "exact": False, "kind": "Dropped",
        "reason": "ScheduleEdited", "decidedBy": "east", "decidedAt": run_key_for(TICK),
    }  # fmt: skip
    assert "exact" not in ledger_range(entry()).to_json()


@pytest.mark.parametrize(
    ("key", "tick"),
    [
        ("2026-07-20T03:00:00Z", b.T0),
        ("2026-07-20T03:00:00Z#r12", b.T0),
        ("2026-07-20T03:00:00Z#r0", None),
        ("2026-13-20T03:00:00Z", None),
        ("manual/a/b/c", None),
        ("", None),
    ],
)
def test_the_tick_of_a_key(key: str, tick: datetime | None) -> None:
    assert tick_of(key) == tick


def test_a_message_is_bounded() -> None:
    found = explain(evidence(replace(row(FAIL), reason="Error: " + "x" * 5000)))
    assert len(found.to_json()["message"]) <= 1024
