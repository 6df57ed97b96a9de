"""The ledger of ticks that did not run: what grows, what is counted, what is written when ticks are passed, what goes;
a schedule that is suspended after failures; and what a person may do to a run."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest

from leasedjob.errors import DatabaseUnavailableError
from leasedjob.identity import RunIdentity, run_key_for
from leasedjob.lease import SyncJobSchedulerService
from leasedjob.lease.rows import (
    Asked,
    BackfillStep,
    ClaimRequest,
    ClaimVerdict,
    Outcome,
    OverlapRule,
    Passed,
    Released,
)
from leasedjob.lease.store import OperatorStore, SidecarStore
from leasedjob.schedule.due import TickRange, TickReason

from .conftest import CLUSTER, CODE, UID, Database, claim, claimed, lock_row, registered, registration, request

pytestmark = pytest.mark.integration
MINUTE = timedelta(minutes=1)
WEST = "west"


def ticks(first: datetime, count: int, reason: TickReason = TickReason.Suspended, *, exact: bool = True) -> TickRange:
    return TickRange(first, first + (count - 1) * MINUTE, count, exact, reason)


def asked(action: str = "Forget", request: str = "uid-1") -> Asked:
    return Asked(cluster=CLUSTER, action=action, by="shop/repair", request=request, why="by hand")


async def ended(
    store: OperatorStore, tick: datetime, outcome: Outcome = Outcome.FAIL, *, reason: str = "Error", **changes: Any
) -> Any:
    """A run of this tick that has ended for good."""
    run = await claimed(store, tick, **changes)
    assert await store.end_attempt(
        run.id, run.attempt or 1, None, outcome, counts=outcome is Outcome.FAIL, reason=reason, retry_ms=None
    )
    return run


# --- ranges that grow ------------------------------------------------------------------------------------------------


async def test_a_year_of_suspension_is_one_row(store: OperatorStore, database: Database) -> None:
    start = datetime.now(UTC).replace(second=0, microsecond=0) - timedelta(days=370)
    await registered(store, created_at=start - MINUTE, suspended=True)
    day = 24 * 60
    for n in range(365):
        part = ticks(start + n * day * MINUTE, day)
        assert (await store.record_suspended(CLUSTER, CODE, part.last, [part])).recorded
    last = start + (365 * day - 1) * MINUTE
    assert database.ledger() == [("skipped", "Suspended", start, last, 365 * day)]
    assert database.watermark() == last
    state = (await store.code_states(CLUSTER, [CODE]))[CODE]
    assert state.counts == {"skipped": 365 * day}


async def test_what_lies_between_two_ranges_keeps_them_apart(
    store: OperatorStore, database: Database, minute: datetime
) -> None:
    await registered(store)
    for n in (0, 1):
        assert (await store.record_ticks(CLUSTER, CODE, minute + n * MINUTE, [ticks(minute + n * MINUTE, 1)])).recorded
    await ended(store, minute + 2 * MINUTE, Outcome.COMPLETE)
    third = ticks(minute + 3 * MINUTE, 1)
    assert (await store.record_ticks(CLUSTER, CODE, third.last, [third])).recorded
    # another reason right behind it
    fourth = ticks(minute + 4 * MINUTE, 2, TickReason.MissedRunPolicy, exact=False)
    assert (await store.record_ticks(CLUSTER, CODE, fourth.last, [fourth])).recorded
    fifth = ticks(minute + 6 * MINUTE, 1, TickReason.MissedRunPolicy)
    assert (await store.record_ticks(CLUSTER, CODE, fifth.last, [fifth])).recorded
    assert database.ledger() == [
        ("skipped", "Suspended", minute, minute + MINUTE, 2),
        ("skipped", "Suspended", third.first, third.last, 1),
        ("missed", "MissedRunPolicy", fourth.first, fifth.last, 3),
    ]
    newest = (await store.ledger(CODE))[0]
    assert not newest.count_is_exact, "a sum of which a part is a bound is a bound"


async def test_a_range_that_two_clusters_decided_names_both(
    store: OperatorStore, database: Database, minute: datetime
) -> None:
    await registered(store)
    await registered(store, cluster=WEST)
    for n, cluster in enumerate((CLUSTER, WEST, CLUSTER)):
        part = ticks(minute + n * MINUTE, 1, TickReason.MissedRunPolicy)
        assert (await store.record_ticks(cluster, CODE, part.last, [part])).recorded
    (entry,) = await store.ledger(CODE)
    assert (entry.count, entry.decided_by) == (3, f"{CLUSTER}, {WEST}")


async def test_nothing_is_counted_twice(store: OperatorStore, database: Database, minute: datetime) -> None:
    await registered(store)
    part = ticks(minute, 3)
    assert (await store.record_ticks(CLUSTER, CODE, part.last, [part])).recorded
    assert (await store.record_ticks(CLUSTER, CODE, part.last, [part])).recorded, "asked again: nothing left to do"
    assert database.ledger() == [("skipped", "Suspended", minute, part.last, 3)]
    assert (await store.code_states(CLUSTER, [CODE]))[CODE].counts == {"skipped": 3}


# --- who writes while suspended, and what a resume leaves behind -----------------------------------------------------


async def test_a_suspended_cluster_writes_nothing_while_another_is_active(
    store: OperatorStore, database: Database, minute: datetime
) -> None:
    await registered(store, suspended=True)
    await registered(store, cluster=WEST)
    part = ticks(minute, 2)
    assert not (await store.record_suspended(CLUSTER, CODE, part.last, [part])).recorded
    assert database.ledger() == []
    assert (await claim(store, request(minute), cluster=WEST)).verdict is ClaimVerdict.CLAIMED
    await registered(store, cluster=WEST, suspended=True)
    later = ticks(minute + MINUTE, 1)
    assert (await store.record_suspended(CLUSTER, CODE, later.last, [later])).recorded


@pytest.mark.parametrize(
    ("before", "after", "reason", "kind"),
    [
        pytest.param({"suspended": True}, {}, TickReason.Suspended, "skipped", id="a resume"),
        pytest.param({}, {"schedule_hash": "schedule-2"}, TickReason.ScheduleEdited, "dropped", id="an edit"),
    ],
)
async def test_a_registration_writes_what_it_passes(
    store: OperatorStore,
    database: Database,
    minute: datetime,
    before: dict[str, Any],
    after: dict[str, Any],
    reason: TickReason,
    kind: str,
) -> None:
    created = minute - MINUTE
    await registered(store, created_at=created, **before)
    at = minute + 2 * MINUTE + timedelta(seconds=7)
    passed = {CODE: Passed(at=at, ranges=(ticks(minute, 3, reason),))}
    (answer,) = await store.register_jobs(CLUSTER, [registration(created_at=created, **after)], passed)
    assert answer.watermark == at, "the next tick, however soon, is due"
    assert database.ledger() == [(kind, reason.value, minute, minute + 2 * MINUTE, 3)]
    (again,) = await store.register_jobs(CLUSTER, [registration(created_at=created, **after)], passed)
    assert (again.watermark, len(database.ledger())) == (at, 1)


async def test_a_registration_that_moves_nothing_writes_nothing(
    store: OperatorStore, database: Database, minute: datetime
) -> None:
    await registered(store, created_at=minute - MINUTE, suspended=True)
    await registered(store, cluster=WEST, created_at=minute - MINUTE)
    passed = {CODE: Passed(at=minute + MINUTE, ranges=(ticks(minute, 2),))}
    await store.register_jobs(CLUSTER, [registration(created_at=minute - MINUTE)], passed)
    assert database.ledger() == []
    assert (await claim(store, request(minute), cluster=WEST)).verdict is ClaimVerdict.CLAIMED


async def test_what_was_computed_from_an_older_watermark_is_asked_for_again(
    store: OperatorStore, database: Database, minute: datetime
) -> None:
    await registered(store, created_at=minute - MINUTE)
    await ended(store, minute, Outcome.COMPLETE)
    passed = {CODE: Passed(at=minute + MINUTE, ranges=(ticks(minute, 2, TickReason.ScheduleEdited),))}
    (answer,) = await store.register_jobs(CLUSTER, [registration(schedule_hash="schedule-2")], passed)
    assert answer.busy
    assert database.ledger() == []
    assert (await store.code_states(CLUSTER, [CODE]))[CODE].registered_schedule == "schedule-1"


# --- what is read ----------------------------------------------------------------------------------------------------


async def test_the_state_of_codes(store: OperatorStore, database: Database, minute: datetime) -> None:
    before = await store.database_now()
    await registered(store, CODE, "shop/other", created_at=minute - MINUTE, suspended=True)
    await registered(store, cluster=WEST)
    for n in range(12):
        reason = TickReason.MissedRunPolicy if n % 2 else TickReason.MissedRunLimit
        part = ticks(minute - MINUTE + n * timedelta(seconds=5) + timedelta(seconds=1), 1, reason)
        assert (await store.record_ticks(CLUSTER, CODE, part.last, [part])).recorded
    states = await store.code_states(CLUSTER, [CODE, "shop/other", "nobody/knows"])
    assert set(states) == {CODE, "shop/other"}
    state = states[CODE]
    assert (state.watermark, state.counts) == (database.watermark(), {"missed": 12})
    assert [e.first for e in state.ledger] == sorted((e.first for e in await store.ledger(CODE)), reverse=True)[:10]
    assert state.ledger[0] == (await store.ledger(CODE))[0]
    assert (state.registered_uid, state.registered_suspended, state.active_elsewhere) == (UID, True, True)
    assert (states["shop/other"].ledger, states["shop/other"].counts) == ((), {})
    assert await store.codes_with_news(CLUSTER, before) == {CODE: state.ledger[0].decided_at}
    assert await store.codes_with_news("nowhere", before) == {}
    assert await store.codes_with_news(CLUSTER, await store.database_now()) == {}
    found = await store.ledger_at(CODE, state.ledger[3].first)
    assert found == state.ledger[3]
    assert await store.ledger_at(CODE, state.ledger[3].first + timedelta(seconds=1)) is None
    assert await store.ledger_at(CODE, minute - timedelta(days=1)) is None


# --- what goes -------------------------------------------------------------------------------------------------------


async def test_old_ranges_go_and_the_counts_stay(store: OperatorStore, database: Database, minute: datetime) -> None:
    old, young = minute - timedelta(days=100), minute - timedelta(days=10)
    jobs = SyncJobSchedulerService(database.dsn)
    await registered(store, created_at=old - MINUTE)
    for part in (ticks(old, 5), ticks(young, 1, TickReason.MissedRunPolicy)):
        assert (await store.record_ticks(CLUSTER, CODE, part.last, [part])).recorded
    assert jobs.prune_ledger(timedelta(days=90), dry_run=True) == 1
    assert jobs.prune_ledger(timedelta(days=90)) == 1
    assert database.ledger() == [("missed", "MissedRunPolicy", young, young, 1)]
    state = (await store.code_states(CLUSTER, [CODE]))[CODE]
    assert state.ledger_through == old + 4 * MINUTE
    assert state.counts == {"skipped": 5, "missed": 1}
    assert jobs.prune_ledger(timedelta(days=90)) == 0


async def test_a_code_that_is_locked_is_pruned_the_next_time(
    store: OperatorStore, database: Database, minute: datetime
) -> None:
    old = minute - timedelta(days=100)
    jobs = SyncJobSchedulerService(database.dsn)
    await registered(store, CODE, "shop/other", created_at=old - MINUTE)
    for code in (CODE, "shop/other"):
        assert (await store.record_ticks(CLUSTER, code, old, [ticks(old, 1)])).recorded
    holder = database.connect(autocommit=False)
    lock_row(holder, "job_code", "code", CODE)
    assert await asyncio.wait_for(asyncio.to_thread(jobs.prune_ledger, timedelta(days=90)), 60) == 1, "it doesn't wait"
    assert (len(database.ledger()), len(database.ledger("shop/other"))) == (1, 0)
    holder.rollback()
    assert jobs.prune_ledger(timedelta(days=90)) == 1


def test_an_age_that_would_delete_everything_is_refused(database: Database) -> None:
    with pytest.raises(ValueError, match="older_than must be more than nothing"):
        SyncJobSchedulerService(database.dsn).prune_ledger(timedelta(0))


# --- suspended after failures ----------------------------------------------------------------------------------------


async def test_so_many_failures_in_a_row_suspend_the_schedule_everywhere(
    store: OperatorStore, database: Database, minute: datetime
) -> None:
    await registered(store)
    await registered(store, cluster=WEST)
    await ended(store, minute - MINUTE, Outcome.COMPLETE)
    await ended(store, minute, reason="Error: exit code 1")
    assert await store.suspend_failing(CLUSTER, CODE, 2) == (False, False), "one failure"
    await ended(store, minute + MINUTE, Outcome.RELEASE, reason="Cancelled")
    await ended(store, minute + 2 * MINUTE, Outcome.RELEASE, reason="Replaced", cluster=WEST)
    assert await store.suspend_failing(CLUSTER, CODE, 2) == (False, False), "what was stopped has not failed"
    # what a person asked for says nothing of the schedule
    await ended(store, minute - 5 * MINUTE, manual=True, on_overlap=OverlapRule.ALLOW)
    assert await store.suspend_failing(CLUSTER, CODE, 2) == (False, False)
    last = await ended(store, minute + 3 * MINUTE, cluster=WEST, reason="OOMKilled")
    assert await store.suspend_failing(CLUSTER, CODE, 3) == (False, False), "the third last has succeeded"
    assert await store.suspend_failing(CLUSTER, CODE, 2) == (False, True)
    assert await store.suspend_failing(WEST, CODE, 2) == (False, False), "it is already"

    suspension = (await store.code_states(WEST, [CODE]))[CODE].suspension
    assert suspension is not None
    assert (suspension.by, suspension.runs) == (CLUSTER, 2)
    assert suspension.reason == f"{run_key_for(minute + 3 * MINUTE)}: OOMKilled"
    for cluster in (CLUSTER, WEST):
        answer = await claim(store, request(minute + 4 * MINUTE), cluster=cluster)
        assert (answer.verdict, answer.reason) == (ClaimVerdict.OVERLAP_WAIT, "SuspendedAfterFailures")
    by_name = await claim(store, request(minute + 4 * MINUTE, manual=True, on_overlap=OverlapRule.WAIT))
    assert by_name.verdict is ClaimVerdict.CLAIMED, "a person may try it"
    assert await store.end_attempt(by_name.id, 1, None, Outcome.COMPLETE, counts=False, reason="")
    assert database.row(last.id)["status"] == "FAIL"

    at = minute + 6 * MINUTE + timedelta(seconds=1)
    passed = Passed(at=at, ranges=(ticks(minute + 4 * MINUTE, 3, TickReason.SuspendedAfterFailures),))
    assert await store.resume_code(CODE, passed, asked("Resume")) == (False, True, at)
    assert await store.resume_code(CODE, passed, asked("Resume")) == (False, False, at)
    assert database.ledger()[-1][:2] == ("skipped", "SuspendedAfterFailures")
    assert (await claim(store, request(minute + 5 * MINUTE))).verdict is ClaimVerdict.PAST, "nothing is replayed"
    await ended(store, minute + 7 * MINUTE)
    assert await store.suspend_failing(CLUSTER, CODE, 2) == (False, False), "the failures before don't count any more"
    await ended(store, minute + 8 * MINUTE)
    assert await store.suspend_failing(CLUSTER, CODE, 2) == (False, True)
    (line,) = await store.audit(CODE)
    assert (line.action, line.did, line.asked_by, line.why) == ("Resume", "Resumed", "shop/repair", "by hand")


async def test_a_run_with_a_retry_left_has_not_failed(store: OperatorStore, minute: datetime) -> None:
    await registered(store)
    for n in range(2):
        run = await claimed(store, minute + n * MINUTE, backoff_limit=1, on_overlap=OverlapRule.ALLOW)
        assert await store.end_attempt(run.id, 1, None, Outcome.FAIL, counts=True, reason="Error")
    assert await store.suspend_failing(CLUSTER, CODE, 1) == (False, False)


async def test_another_object_of_the_code_begins_anew(store: OperatorStore, minute: datetime) -> None:
    await registered(store)
    await ended(store, minute)
    assert await store.suspend_failing(CLUSTER, CODE, 1) == (False, True)
    await registered(store, uid=str(uuid4()), created_at=minute + timedelta(seconds=30))
    assert (await store.code_states(CLUSTER, [CODE]))[CODE].suspension is None


async def test_a_locked_code_is_busy(store: OperatorStore, database: Database, minute: datetime) -> None:
    await registered(store)
    await ended(store, minute)
    holder = database.connect(autocommit=False)
    lock_row(holder, "job_code", "code", CODE)
    assert await store.suspend_failing(CLUSTER, CODE, 1) == (True, False)
    assert (await store.resume_code(CODE, Passed(at=minute, ranges=()), asked("Resume")))[0]


# --- repair ----------------------------------------------------------------------------------------------------------


async def adopted(store: OperatorStore, sidecar: SidecarStore, tick: datetime, **changes: Any) -> tuple[Any, Any]:
    run = await claimed(store, tick, **changes)
    token = uuid4()
    assert sidecar.adopt(run.id, run.owner_token, token, pod_uid="pod-1", pod_name="pod-1").verdict == "adopted"
    return run, token


async def test_release_of_a_claim_gives_it_back(
    store: OperatorStore, sidecar: SidecarStore, database: Database, minute: datetime
) -> None:
    await registered(store)
    run = await claimed(store, minute)
    assert await store.release_run(run.id, 2, force=False, asked=asked("Release")) is Released.NOTHING
    assert await store.release_run(run.id, 1, force=False, asked=asked("Release")) is Released.GIVEN_BACK
    answer = sidecar.adopt(run.id, run.owner_token, uuid4(), pod_uid="pod-1", pod_name="pod-1")
    assert answer.verdict == "lost", "nothing runs"
    again = await claimed(store, minute)
    assert again.attempt == 2
    assert again.fencing_token > run.fencing_token


async def test_release_fences_the_holder_and_the_lease_runs_out(
    store: OperatorStore, sidecar: SidecarStore, database: Database, minute: datetime
) -> None:
    await registered(store)
    run, token = await adopted(store, sidecar, minute)
    assert sidecar.heartbeat(run.id, token).held
    before = database.row(run.id)
    assert await store.release_run(run.id, 1, force=False, asked=asked("Release")) is Released.FENCED
    beat = sidecar.heartbeat(run.id, token)
    assert (beat.held, beat.busy) == (False, False)
    assert not sidecar.finish(run.id, token, Outcome.COMPLETE)
    after = database.row(run.id)
    assert (after["status"], after["modified_at"], after["attempt"], after["fencing_token"]) == (
        "RUNNING", before["modified_at"], 1, before["fencing_token"],
    )  # fmt: skip
    assert (await claim(store, request(minute))).verdict is ClaimVerdict.HELD, "the holder may still be at work"
    database.age(run.id, 901)
    again = await claimed(store, minute)
    assert again.attempt == 2


async def test_release_by_force_ends_the_lease_at_once(
    store: OperatorStore, sidecar: SidecarStore, database: Database, minute: datetime
) -> None:
    await registered(store)
    run, token = await adopted(store, sidecar, minute)
    assert await store.release_run(run.id, 1, force=True, asked=asked("Release")) is Released.ENDED
    assert not sidecar.heartbeat(run.id, token).held
    assert database.row(run.id)["interruptions"] == 1
    assert (await claimed(store, minute)).attempt == 2
    assert [(line.run_key, line.attempt, line.did) for line in await store.audit(CODE)] == [
        (run_key_for(minute), 1, "Ended")
    ]


async def test_forget_makes_a_failed_run_claimable_and_lowers_nothing(
    store: OperatorStore, database: Database, minute: datetime
) -> None:
    await registered(store)
    run = await ended(store, minute, backoff_limit=1)
    assert (await claim(store, request(minute))).verdict is ClaimVerdict.EXHAUSTED
    assert await store.forget_run(run.id, asked=asked())
    again = await claimed(store, minute, backoff_limit=1)
    assert (again.id, again.attempt) == (run.id, 2)
    assert again.fencing_token > run.fencing_token
    assert await store.end_attempt(run.id, 2, None, Outcome.FAIL, counts=True, reason="Error")
    row = database.row(run.id)
    assert (row["failures"], row["retry_at"] is not None) == (1, True), "its failures count from zero"


@pytest.mark.parametrize("outcome", [Outcome.COMPLETE, None])
async def test_forget_touches_nothing_but_a_failure(
    store: OperatorStore, database: Database, minute: datetime, outcome: Outcome | None
) -> None:
    await registered(store)
    run = await claimed(store, minute) if outcome is None else await ended(store, minute, outcome)
    before = database.row(run.id)
    assert not await store.forget_run(run.id, asked=asked())
    assert database.row(run.id) == before
    assert await store.audit(CODE) == []


async def test_a_request_that_two_replicas_carry_out_is_one_line(store: OperatorStore, minute: datetime) -> None:
    await registered(store)
    run = await claimed(store, minute)
    for _ in range(2):
        assert await store.cancel_run(run.id, reason="Cancelled", asked=asked("Cancel"))
    assert [line.did for line in await store.audit(CODE)] == ["Cancelled"]
    assert (await claim(store, request(minute))).verdict is ClaimVerdict.EXHAUSTED


async def test_what_is_locked_elsewhere_is_not_waited_for(
    store: OperatorStore, database: Database, minute: datetime
) -> None:
    await registered(store)
    run = await claimed(store, minute)
    failed = await ended(store, minute + MINUTE, on_overlap=OverlapRule.ALLOW)
    holder = database.connect(autocommit=False)
    lock_row(holder, "job_scheduler", "id", run.id)
    lock_row(holder, "job_scheduler", "id", failed.id)
    for call in (
        store.release_run(run.id, 1, force=True, asked=asked("Release")),
        store.forget_run(failed.id, asked=asked()),
    ):
        with pytest.raises(DatabaseUnavailableError):
            await call
    assert not await store.cancel_run(run.id, reason="Cancelled", asked=asked("Cancel"))


# --- backfills -------------------------------------------------------------------------------------------------------


def wanted(tick: datetime, key: str = "", **changes: Any) -> ClaimRequest:
    identity = RunIdentity.of(code=CODE, run_key=key or run_key_for(tick))
    return request(tick, identity=identity, manual=True, on_overlap=OverlapRule.ALLOW, **changes)


async def step(store: OperatorStore, after: datetime, through: datetime, **changes: Any) -> Any:
    values: dict[str, Any] = {"skipped": 0, "limit": 2, "request": wanted(through)}
    return await store.step_backfill(CLUSTER, "b-1", after=after, through=through, **{**values, **changes})


async def test_a_backfill_goes_on_in_order_two_at_a_time(
    store: OperatorStore, database: Database, minute: datetime
) -> None:
    await registered(store)
    await ended(store, minute + 9 * MINUTE, Outcome.COMPLETE)  # all of it lies below the watermark
    assert await store.look_at_backfill("b-1") is None
    for planned in (4, 99):  # the second replica changes nothing
        await store.begin_backfill(CLUSTER, "b-1", CODE, through=minute - MINUTE, ticks=5, planned=planned)
    at = minute - MINUTE
    runs = []
    for n in range(2):
        said, claim_ = await step(store, at, minute + n * MINUTE)
        assert (said, claim_.verdict) == (BackfillStep.ASKED, ClaimVerdict.CLAIMED)
        runs.append(claim_)
        assert await step(store, at, minute + n * MINUTE) == (BackfillStep.MOVED, None), "another replica"
        at = minute + n * MINUTE
    assert await step(store, at, minute + 3 * MINUTE) == (BackfillStep.FULL, None)
    state = await store.look_at_backfill("b-1")
    assert state is not None
    assert (state.through, state.ticks, state.planned, state.skipped) == (at, 5, 4, 0)
    assert [key for _, key in state.active] == [run_key_for(minute), run_key_for(minute + MINUTE)]

    # a failure with a retry left is active still
    assert await store.end_attempt(runs[0].id, 1, None, Outcome.FAIL, counts=True, reason="", retry_ms=0)
    assert await step(store, at, minute + 3 * MINUTE) == (BackfillStep.FULL, None)
    assert await store.end_attempt(runs[1].id, 1, None, Outcome.COMPLETE, counts=False, reason="")
    said, third = await step(store, at, minute + 3 * MINUTE, skipped=1)
    assert (said, third.verdict) == (BackfillStep.ASKED, ClaimVerdict.CLAIMED)
    assert await step(store, minute + 3 * MINUTE, minute + 4 * MINUTE, skipped=1, request=None) == (
        BackfillStep.SKIPPED,
        None,
    )
    assert await store.request_stop([runs[0].id], reason="Cancelled") == {runs[0].id}
    state = await store.look_at_backfill("b-1")
    assert state is not None
    assert (state.skipped, state.succeeded, state.failed, len(state.active)) == (2, 1, 1, 1)
    assert database.watermark() == minute + 9 * MINUTE


async def test_a_claim_that_has_to_wait_leaves_the_backfill_where_it_is(store: OperatorStore, minute: datetime) -> None:
    await registered(store)
    busy = await claimed(store, minute + 9 * MINUTE)
    await store.begin_backfill(CLUSTER, "b-1", CODE, through=minute - MINUTE, ticks=1, planned=1)
    waiting = request(minute, manual=True, on_overlap=OverlapRule.WAIT)
    for _ in range(2):
        said, answer = await step(store, minute - MINUTE, minute, request=waiting)
        assert (said, answer.verdict) == (BackfillStep.ASKED, ClaimVerdict.OVERLAP_WAIT)
    assert await store.end_attempt(busy.id, 1, None, Outcome.COMPLETE, counts=False, reason="")
    said, answer = await step(store, minute - MINUTE, minute, request=waiting)
    assert answer.verdict is ClaimVerdict.CLAIMED


async def test_a_failed_run_that_is_run_again_counts_from_zero(
    store: OperatorStore, database: Database, minute: datetime
) -> None:
    await registered(store)
    failed = await ended(store, minute, backoff_limit=0)
    await store.begin_backfill(CLUSTER, "b-1", CODE, through=minute - MINUTE, ticks=1, planned=1)
    _, answer = await step(store, minute - MINUTE, minute, request=wanted(minute, reopen=True, backoff_limit=1))
    assert (answer.verdict, answer.id, answer.attempt) == (ClaimVerdict.CLAIMED, failed.id, 2)
    row = database.row(failed.id)
    assert (row["failures"], row["interruptions"], row["manual"]) == (0, 0, True)


async def test_a_recorded_success_is_never_touched_and_its_rerun_is_another_run(
    store: OperatorStore, database: Database, minute: datetime
) -> None:
    await registered(store)
    done = await ended(store, minute, Outcome.COMPLETE)
    before = database.row(done.id)
    await store.begin_backfill(CLUSTER, "b-1", CODE, through=minute - MINUTE, ticks=1, planned=1)
    said, answer = await step(store, minute - MINUTE, minute, request=wanted(minute, reopen=True))
    assert (said, answer.verdict) == (BackfillStep.ASKED, ClaimVerdict.COMPLETED)
    key = f"{run_key_for(minute)}#r1"
    said, answer = await step(store, minute - MINUTE, minute, request=wanted(minute, key))
    assert answer.verdict is ClaimVerdict.CLAIMED
    assert database.row(done.id) == before
    rows = await store.runs_by_key(CLUSTER, [RunIdentity.of(code=CODE, run_key=key).lock_key, "no such"])
    (row,) = rows.values()
    assert (row.identity.run_key, row.tick) == (key, minute)
    assert row.identity.idempotency_key != RunIdentity.of(code=CODE, run_key=run_key_for(minute)).idempotency_key


async def test_a_backfill_that_nobody_has_looked_at_is_forgotten(
    store: OperatorStore, database: Database, minute: datetime
) -> None:
    jobs = SyncJobSchedulerService(database.dsn)
    await registered(store)
    await store.begin_backfill(CLUSTER, "b-1", CODE, through=minute - MINUTE, ticks=1, planned=1)
    assert jobs.prune_ledger(timedelta(days=1)) == 0
    assert jobs.prune_ledger(timedelta(microseconds=1)) == 1
    assert await store.look_at_backfill("b-1") is None


async def test_four_replicas_at_one_backfill_run_each_tick_once_and_never_more_than_may_be(
    store: OperatorStore, database: Database, minute: datetime
) -> None:
    await registered(store, created_at=minute)
    start, count, limit = minute - timedelta(days=1), 60, 3
    await store.begin_backfill(CLUSTER, "b-1", CODE, through=start - MINUTE, ticks=count, planned=count)
    most, said = 0, dict.fromkeys(BackfillStep, 0)

    async def replica() -> None:
        nonlocal most
        while True:
            state = await store.look_at_backfill("b-1")
            assert state is not None
            most = max(most, len(state.active))
            following = state.through + MINUTE
            if following >= start + count * MINUTE and not state.active:
                return
            if following < start + count * MINUTE:
                said_now, answer = await step(store, state.through, following, limit=limit)
                said[said_now] += 1
                if answer is not None and answer.verdict is ClaimVerdict.CLAIMED:
                    mine = answer
                    await asyncio.sleep(0.005)
                    await store.end_attempt(mine.id, 1, None, Outcome.COMPLETE, counts=False, reason="")
            await asyncio.sleep(0)

    async with asyncio.timeout(60):
        await asyncio.gather(*(replica() for _ in range(4)))
    rows = database.rows("SELECT run_key, attempt, status FROM leasedjob.job_scheduler ORDER BY tick")
    assert [row["run_key"] for row in rows] == [run_key_for(start + n * MINUTE) for n in range(count)]
    assert {(row["attempt"], row["status"]) for row in rows} == {(1, "SUCCESS")}
    state = await store.look_at_backfill("b-1")
    assert state is not None
    assert (state.succeeded, state.failed, state.skipped) == (count, 0, 0)
    assert most == limit, "four replicas wanted more"
    assert said[BackfillStep.MOVED] + said[BackfillStep.BUSY] + said[BackfillStep.FULL] > 0
