"""claim_runs: every verdict, and what each writes."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from leasedjob.identity import JobSchedulerType, RunIdentity
from leasedjob.lease.rows import ClaimVerdict, JobSchedulerStatus, Outcome, OverlapRule
from leasedjob.lease.store import OperatorStore, SidecarStore
from leasedjob.schedule.due import TickRange, TickReason

from .conftest import (
    CLUSTER,
    CODE,
    Database,
    claim,
    claimed,
    lock_row,
    registered,
    request,
)

pytestmark = pytest.mark.integration
MINUTE = timedelta(minutes=1)


async def adopted(sidecar: SidecarStore, result: Any, *, pod: str = "pod-1") -> Any:
    """The new token of a Pod that has adopted this claim."""
    from uuid import uuid4

    token = uuid4()
    answer = sidecar.adopt(result.id, result.owner_token, token, pod_uid=pod, pod_name=pod)
    assert answer.verdict == "adopted", answer
    return token


# --- a fresh tick ----------------------------------------------------------------------------------------------------


async def test_a_due_tick_is_claimed_for_sixty_seconds(
    store: OperatorStore, database: Database, minute: datetime
) -> None:
    await registered(store)
    result = await claim(store, request(minute))

    assert result.verdict is ClaimVerdict.CLAIMED
    assert result.attempt == 1
    assert result.watermark == minute == database.watermark()
    assert result.expires_at is not None
    assert timedelta(seconds=59) < result.expires_at - result.db_now <= timedelta(seconds=60)
    row = database.row(result.id)
    assert row["owner_token"] == result.owner_token
    assert row["fencing_token"] == result.fencing_token
    assert (row["status"], row["pod_uid"], row["holder"], row["cluster"]) == ("RUNNING", None, "", CLUSTER)
    assert row["lock_key"] == RunIdentity.of(code=CODE, run_key=row["run_key"]).lock_key
    assert (row["lease_ms"], row["run_lease_ms"]) == (60_000, 900_000)


async def test_an_initial_run_is_claimed_once_and_has_no_tick(store: OperatorStore, database: Database) -> None:
    await registered(store)
    wanted = request(None, identity=RunIdentity.of(type=JobSchedulerType.INITIAL, code=CODE))
    before = database.watermark()
    first = await claim(store, wanted)
    assert first.verdict is ClaimVerdict.CLAIMED
    assert database.watermark() == before
    assert (await claim(store, wanted)).verdict is ClaimVerdict.HELD
    assert await store.end_attempt(first.id, 1, None, Outcome.COMPLETE, counts=False, reason="")
    assert (await claim(store, wanted)).verdict is ClaimVerdict.COMPLETED


async def test_held_says_until_when_and_hides_the_token(store: OperatorStore, minute: datetime) -> None:
    await registered(store)
    first = await claimed(store, minute)
    second = await claim(store, request(minute))
    assert second.verdict is ClaimVerdict.HELD
    assert (second.id, second.owner_token, second.expires_at) == (first.id, None, first.expires_at)


async def test_a_future_tick_is_refused_by_the_databases_clock(store: OperatorStore, database: Database) -> None:
    await registered(store)
    before = database.watermark()
    tick = datetime.now(UTC).replace(microsecond=0) + timedelta(hours=1)
    assert (await claim(store, request(tick))).verdict is ClaimVerdict.FUTURE
    assert (await claim(store, request(tick, manual=True))).verdict is ClaimVerdict.FUTURE
    assert database.watermark() == before
    assert database.rows("SELECT id FROM leasedjob.job_scheduler") == []


async def test_a_tick_at_or_before_the_watermark_is_past(store: OperatorStore, minute: datetime) -> None:
    await registered(store)
    await claimed(store, minute)
    assert (await claim(store, request(minute - MINUTE))).verdict is ClaimVerdict.PAST
    assert (
        await claim(store, request(minute - MINUTE, manual=True, on_overlap=OverlapRule.ALLOW))
    ).verdict is ClaimVerdict.CLAIMED  # a person may ask for an old tick


async def test_a_tick_past_its_starting_deadline_is_missed_once(
    store: OperatorStore, database: Database, minute: datetime
) -> None:
    await registered(store)
    wanted = request(minute, starting_deadline_ms=60_000)
    assert (await claim(store, wanted)).verdict is ClaimVerdict.MISSED
    assert database.ledger() == [("missed", "StartingDeadline", minute, minute, 1)]
    assert database.watermark() == minute
    assert (await claim(store, wanted)).verdict is ClaimVerdict.PAST
    assert len(database.ledger()) == 1


async def test_the_starting_deadline_judges_only_the_first_claim(
    store: OperatorStore, database: Database, minute: datetime
) -> None:
    await registered(store)
    first = await claimed(store, minute)
    database.age(first.id, 61)
    again = await claim(store, request(minute, starting_deadline_ms=10_000))
    assert (again.verdict, again.attempt) == (ClaimVerdict.CLAIMED, 2)


async def test_a_manual_run_neither_judges_the_deadline_nor_moves_the_watermark(
    store: OperatorStore, database: Database, minute: datetime
) -> None:
    await registered(store)
    before = database.watermark()
    identity = RunIdentity.of(code=CODE, run_key="manual/shop/again/uid-1")
    await claimed(store, None, identity=identity, manual=True, starting_deadline_ms=1)
    await claimed(store, minute, manual=True, starting_deadline_ms=1, on_overlap=OverlapRule.ALLOW)
    assert database.watermark() == before
    assert database.ledger() == []


async def test_an_unregistered_or_replaced_object_claims_nothing(
    store: OperatorStore, database: Database, minute: datetime
) -> None:
    assert (await claim(store, request(minute))).verdict is ClaimVerdict.UNREGISTERED
    await registered(store)
    assert (await claim(store, request(minute, job_uid="another"))).verdict is ClaimVerdict.UNREGISTERED
    assert (await claim(store, request(minute), cluster="west")).verdict is ClaimVerdict.UNREGISTERED
    assert database.rows("SELECT id FROM leasedjob.job_scheduler") == []


async def test_no_requests_is_no_statement(store: OperatorStore) -> None:
    assert await store.claim_runs(CLUSTER, []) == []


# --- ranges that a claim passes --------------------------------------------------------------------------------------


def dropped(first: datetime, last: datetime, count: int) -> TickRange:
    return TickRange(first, last, count, True, TickReason.MissedRunPolicy)


async def test_a_claim_records_what_its_watermark_passes_once(
    store: OperatorStore, database: Database, minute: datetime
) -> None:
    await registered(store)
    ranges = (dropped(minute - 3 * MINUTE, minute - MINUTE, 3),)
    await claimed(store, minute, dropped=ranges)
    assert database.ledger() == [("missed", "MissedRunPolicy", minute - 3 * MINUTE, minute - MINUTE, 3)]
    assert (await claim(store, request(minute, dropped=ranges))).verdict is ClaimVerdict.HELD
    assert len(database.ledger()) == 1


async def test_a_skipped_tick_records_what_it_passes_too(
    store: OperatorStore, database: Database, minute: datetime
) -> None:
    await registered(store)
    await claimed(store, minute)
    tick = minute + 3 * MINUTE
    ranges = (dropped(minute + MINUTE, minute + 2 * MINUTE, 2),)
    assert (await claim(store, request(tick, dropped=ranges))).verdict is ClaimVerdict.OVERLAP_SKIPPED
    assert database.ledger() == [
        ("missed", "MissedRunPolicy", minute + MINUTE, minute + 2 * MINUTE, 2),
        ("skipped", "Overlap", tick, tick, 1),
    ]


async def test_ranges_that_somebody_else_recorded_are_not_written_again(
    store: OperatorStore, database: Database, minute: datetime
) -> None:
    await registered(store)
    await claimed(store, minute, on_overlap=OverlapRule.ALLOW)
    ranges = (dropped(minute - 3 * MINUTE, minute - MINUTE, 3),)
    await claimed(store, minute + MINUTE, on_overlap=OverlapRule.ALLOW, dropped=ranges)
    assert database.ledger() == []


async def test_a_range_with_the_watermark_inside_is_asked_again(
    store: OperatorStore, database: Database, minute: datetime
) -> None:
    await registered(store)
    await claimed(store, minute, on_overlap=OverlapRule.ALLOW)
    stale = (dropped(minute - MINUTE, minute + MINUTE, 3),)
    result = await claim(store, request(minute + 2 * MINUTE, on_overlap=OverlapRule.ALLOW, dropped=stale))
    assert (result.verdict, result.reason) == (ClaimVerdict.BUSY, "the watermark moved")
    assert result.watermark == minute
    assert database.ledger() == []


# --- overlap ---------------------------------------------------------------------------------------------------------


async def test_skip_records_the_tick_and_moves_on(store: OperatorStore, database: Database, minute: datetime) -> None:
    await registered(store)
    await claimed(store, minute)
    assert (await claim(store, request(minute + MINUTE))).verdict is ClaimVerdict.OVERLAP_SKIPPED
    assert database.ledger() == [("skipped", "Overlap", minute + MINUTE, minute + MINUTE, 1)]
    assert database.watermark() == minute + MINUTE
    assert (await claim(store, request(minute + MINUTE))).verdict is ClaimVerdict.PAST


async def test_wait_writes_nothing(store: OperatorStore, database: Database, minute: datetime) -> None:
    await registered(store)
    first = await claimed(store, minute)
    wanted = request(minute + MINUTE, on_overlap=OverlapRule.WAIT)
    assert (await claim(store, wanted)).verdict is ClaimVerdict.OVERLAP_WAIT
    assert (database.ledger(), database.watermark()) == ([], minute)
    assert await store.end_attempt(first.id, 1, None, Outcome.COMPLETE, counts=False, reason="")
    assert (await claim(store, wanted)).verdict is ClaimVerdict.CLAIMED


async def test_a_waiting_tick_is_not_passed_by_a_later_one_of_the_batch(
    store: OperatorStore, database: Database, minute: datetime
) -> None:
    await registered(store)
    await claimed(store, minute)
    results = await store.claim_runs(
        CLUSTER,
        [
            request(minute + MINUTE, on_overlap=OverlapRule.WAIT),
            request(minute + 2 * MINUTE, on_overlap=OverlapRule.ALLOW),
        ],
    )
    assert [result.verdict for result in results] == [ClaimVerdict.OVERLAP_WAIT] * 2
    assert database.watermark() == minute


async def test_allow_runs_side_by_side(store: OperatorStore, minute: datetime) -> None:
    await registered(store)
    results = await store.claim_runs(
        CLUSTER, [request(minute + n * MINUTE, on_overlap=OverlapRule.ALLOW) for n in range(3)]
    )
    assert [result.verdict for result in results] == [ClaimVerdict.CLAIMED] * 3
    tokens = [result.fencing_token for result in results]
    assert tokens == sorted(set(tokens))  # type: ignore[type-var]


async def test_skip_is_decided_within_one_batch(store: OperatorStore, database: Database, minute: datetime) -> None:
    await registered(store)
    results = await store.claim_runs(CLUSTER, [request(minute + n * MINUTE) for n in range(3)])
    assert [result.verdict for result in results] == [
        ClaimVerdict.CLAIMED,
        ClaimVerdict.OVERLAP_SKIPPED,
        ClaimVerdict.OVERLAP_SKIPPED,
    ]
    assert database.ledger() == [("skipped", "Overlap", minute + MINUTE, minute + 2 * MINUTE, 2)]


async def test_a_failed_run_with_a_retry_left_is_active(
    store: OperatorStore, database: Database, minute: datetime
) -> None:
    await registered(store)
    first = await claimed(store, minute, backoff_limit=1)
    assert await store.end_attempt(first.id, 1, None, Outcome.FAIL, counts=True, reason="Error")
    wanted = request(minute + MINUTE, on_overlap=OverlapRule.WAIT)
    assert (await claim(store, wanted)).verdict is ClaimVerdict.OVERLAP_WAIT
    database.due(first.id)
    assert (await claim(store, request(minute))).attempt == 2
    assert await store.end_attempt(first.id, 2, None, Outcome.FAIL, counts=True, reason="Error", retry_ms=None)
    assert (await claim(store, wanted)).verdict is ClaimVerdict.CLAIMED


async def test_two_runs_that_wait_for_their_retry_do_not_wait_for_each_other(
    store: OperatorStore, database: Database, minute: datetime
) -> None:
    await registered(store)
    results = await store.claim_runs(
        CLUSTER, [request(minute + n * MINUTE, on_overlap=OverlapRule.ALLOW, backoff_limit=3) for n in range(2)]
    )
    for result in results:
        assert await store.end_attempt(result.id, 1, None, Outcome.FAIL, counts=True, reason="Error", retry_ms=0)
    again = await store.claim_runs(CLUSTER, [request(minute), request(minute + MINUTE)])
    assert [result.verdict for result in again] == [ClaimVerdict.CLAIMED, ClaimVerdict.OVERLAP_WAIT]


async def test_an_expired_run_is_not_active(store: OperatorStore, database: Database, minute: datetime) -> None:
    await registered(store)
    first = await claimed(store, minute)
    database.age(first.id, 61)
    later = await claimed(store, minute + MINUTE)
    # Nor does it join what has begun in its place: its next attempt waits for that one's end.
    again = request(minute, on_overlap=OverlapRule.WAIT)
    assert (await claim(store, again)).verdict is ClaimVerdict.OVERLAP_WAIT
    assert await store.end_attempt(later.id, 1, None, Outcome.COMPLETE, counts=False, reason="Completed", retry_ms=None)
    assert (await claim(store, again)).attempt == 2


async def test_replace_asks_the_holder_to_stop_and_waits_for_its_end(
    store: OperatorStore, sidecar: SidecarStore, database: Database, minute: datetime
) -> None:
    await registered(store)
    first = await claimed(store, minute)
    token = await adopted(sidecar, first)
    wanted = request(minute + MINUTE, on_overlap=OverlapRule.REPLACE)
    assert (await claim(store, wanted)).verdict is ClaimVerdict.OVERLAP_WAIT
    requested = database.row(first.id)["stop_requested_at"]
    assert requested is not None
    assert (await claim(store, wanted)).verdict is ClaimVerdict.OVERLAP_WAIT
    assert database.row(first.id)["stop_requested_at"] == requested
    assert sidecar.heartbeat(first.id, token).stop_requested  # type: ignore[arg-type]

    assert await store.end_attempt(first.id, 1, "pod-1", Outcome.RELEASE, counts=False, reason="Fenced")
    row = database.row(first.id)
    assert (row["status"], row["retry_at"], row["reason"]) == ("FAIL", None, "Replaced")
    assert (await claim(store, wanted)).verdict is ClaimVerdict.CLAIMED
    assert (await claim(store, request(minute))).verdict is ClaimVerdict.EXHAUSTED


async def test_replace_ends_at_once_what_has_no_pod(store: OperatorStore, database: Database, minute: datetime) -> None:
    await registered(store)
    unadopted = await claimed(store, minute)
    result = await claim(store, request(minute + MINUTE, on_overlap=OverlapRule.REPLACE, backoff_limit=1))
    assert result.verdict is ClaimVerdict.CLAIMED
    row = database.row(unadopted.id)
    assert (row["status"], row["outcome"], row["retry_at"], row["reason"]) == ("FAIL", "release", None, "Replaced")

    assert await store.end_attempt(result.id, 1, None, Outcome.FAIL, counts=True, reason="Error")
    await claimed(store, minute + 2 * MINUTE, on_overlap=OverlapRule.REPLACE)
    row = database.row(result.id)
    assert (row["status"], row["retry_at"], row["reason"]) == ("FAIL", None, "Replaced")


async def test_a_stopped_run_that_expires_is_not_tried_again(
    store: OperatorStore, sidecar: SidecarStore, database: Database, minute: datetime
) -> None:
    await registered(store)
    first = await claimed(store, minute)
    await adopted(sidecar, first)
    assert await store.request_stop([first.id], reason="Cancelled") == {first.id}  # type: ignore[list-item]
    database.age(first.id, 901)
    result = await claim(store, request(minute))
    assert (result.verdict, result.reason) == (ClaimVerdict.EXHAUSTED, "Cancelled")
    assert database.row(first.id)["status"] == "FAIL"


@pytest.mark.parametrize(
    ("other_policy", "own_rule", "verdict"),
    [
        pytest.param("Forbid", OverlapRule.ALLOW, ClaimVerdict.OVERLAP_SKIPPED, id="Forbid binds Allow"),
        pytest.param("Forbid", OverlapRule.REPLACE, ClaimVerdict.OVERLAP_SKIPPED, id="Forbid binds Replace"),
        pytest.param("Replace", OverlapRule.ALLOW, ClaimVerdict.CLAIMED, id="Replace binds Allow"),
        pytest.param("Allow", OverlapRule.ALLOW, ClaimVerdict.CLAIMED, id="both Allow"),
        pytest.param("Allow", OverlapRule.SKIP, ClaimVerdict.OVERLAP_SKIPPED, id="own Forbid holds"),
    ],
)
async def test_the_strictest_policy_of_all_clusters_wins(
    store: OperatorStore,
    database: Database,
    minute: datetime,
    other_policy: str,
    own_rule: OverlapRule,
    verdict: ClaimVerdict,
) -> None:
    await registered(store, policy="Allow")
    await registered(store, cluster="west", policy=other_policy)
    first = await claimed(store, minute, on_overlap=own_rule)
    assert (await claim(store, request(minute + MINUTE, on_overlap=own_rule))).verdict is verdict
    assert (database.row(first.id)["reason"] == "Replaced") == (other_policy == "Replace")


async def test_a_suspended_clusters_policy_does_not_bind(store: OperatorStore, minute: datetime) -> None:
    await registered(store, policy="Allow")
    await registered(store, cluster="west", policy="Forbid", suspended=True)
    await claimed(store, minute, on_overlap=OverlapRule.ALLOW)
    await claimed(store, minute + MINUTE, on_overlap=OverlapRule.ALLOW)


# --- the next attempt ------------------------------------------------------------------------------------------------


async def test_an_expired_claim_is_claimed_again_with_new_tokens(
    store: OperatorStore, database: Database, minute: datetime
) -> None:
    await registered(store)
    first = await claimed(store, minute)
    database.age(first.id, 61)
    second = await claim(store, request(minute, run_lease_ms=120_000))
    assert (second.verdict, second.id, second.attempt) == (ClaimVerdict.CLAIMED, first.id, 2)
    assert second.owner_token != first.owner_token
    assert second.fencing_token > first.fencing_token  # type: ignore[operator]
    row = database.row(first.id)
    assert (row["interruptions"], row["failures"], row["run_lease_ms"]) == (0, 0, 120_000)


async def test_an_expired_attempt_counts_as_an_interruption_and_leaves_nothing_behind(
    store: OperatorStore, sidecar: SidecarStore, database: Database, minute: datetime
) -> None:
    await registered(store)
    await registered(store, cluster="west")
    first = await claimed(store, minute)
    await adopted(sidecar, first)
    database.age(first.id, 901)
    second = await claim(store, request(minute, tenant="west/shop"), cluster="west")
    assert (second.verdict, second.attempt) == (ClaimVerdict.CLAIMED, 2)
    row = database.row(first.id)
    assert (row["interruptions"], row["cluster"], row["tenant"], row["lease_ms"]) == (1, "west", "west/shop", 60_000)
    assert all(
        row[column] is None
        for column in ("pod_uid", "pod_name", "adopted_at", "finished_at", "stop_requested_at", "data", "outcome")
    )
    assert (row["holder"], row["reason"]) == ("", "")


async def test_the_interruption_limit_ends_the_run(
    store: OperatorStore, sidecar: SidecarStore, database: Database, minute: datetime
) -> None:
    await registered(store)
    result = await claimed(store, minute, interruption_limit=2)
    for attempt in (1, 2):
        assert result.attempt == attempt
        await adopted(sidecar, result, pod=f"pod-{attempt}")
        database.age(result.id, 901)
        result = await claimed(store, minute, interruption_limit=2)
    await adopted(sidecar, result, pod="pod-3")
    database.age(result.id, 901)
    ended = await claim(store, request(minute, interruption_limit=2))
    assert (ended.verdict, ended.reason) == (ClaimVerdict.EXHAUSTED, "InterruptionLimit")
    row = database.row(result.id)
    assert (row["status"], row["retry_at"], row["interruptions"]) == ("FAIL", None, 3)
    assert (await claim(store, request(minute))).verdict is ClaimVerdict.EXHAUSTED


async def test_claims_that_nobody_adopted_never_reach_the_interruption_limit(
    store: OperatorStore, database: Database, minute: datetime
) -> None:
    await registered(store)
    for attempt in range(1, 5):
        result = await claimed(store, minute, interruption_limit=1)
        assert result.attempt == attempt
        database.age(result.id, 61)


async def test_backoff_says_from_when(store: OperatorStore, database: Database, minute: datetime) -> None:
    await registered(store)
    first = await claimed(store, minute, backoff_limit=1)
    assert await store.end_attempt(first.id, 1, None, Outcome.FAIL, counts=True, reason="Error")
    result = await claim(store, request(minute))
    assert result.verdict is ClaimVerdict.BACKOFF
    assert result.retry_at == database.row(first.id)["retry_at"]
    database.due(first.id)
    assert (await claim(store, request(minute))).verdict is ClaimVerdict.CLAIMED


async def test_a_person_may_reopen_an_exhausted_run_but_never_a_success(
    store: OperatorStore, database: Database, minute: datetime
) -> None:
    await registered(store)
    first = await claimed(store, minute)
    assert await store.end_attempt(first.id, 1, None, Outcome.FAIL, counts=True, reason="Error")
    assert (await claim(store, request(minute))).verdict is ClaimVerdict.EXHAUSTED
    assert (await claim(store, request(minute, manual=True))).verdict is ClaimVerdict.EXHAUSTED
    again = await claimed(store, minute, manual=True, reopen=True)
    assert again.attempt == 2
    assert await store.end_attempt(first.id, 2, None, Outcome.COMPLETE, counts=False, reason="")
    assert (await claim(store, request(minute, manual=True, reopen=True))).verdict is ClaimVerdict.COMPLETED


# --- locks and batches -----------------------------------------------------------------------------------------------


async def test_a_locked_code_is_busy_and_others_go_on(
    store: OperatorStore, database: Database, minute: datetime
) -> None:
    await registered(store, CODE, "shop/other")
    stranger = database.connect(autocommit=False)
    lock_row(stranger, "job_code", "code", CODE)
    locked, free = await store.claim_runs(CLUSTER, [request(minute), request(minute, "shop/other")])
    assert (locked.verdict, locked.reason) == (ClaimVerdict.BUSY, "the code is locked")
    assert free.verdict is ClaimVerdict.CLAIMED
    stranger.rollback()
    assert (await claim(store, request(minute))).verdict is ClaimVerdict.CLAIMED


async def test_a_locked_lease_row_is_busy(store: OperatorStore, database: Database, minute: datetime) -> None:
    await registered(store)
    first = await claimed(store, minute)
    database.age(first.id, 61)
    stranger = database.connect(autocommit=False)
    lock_row(stranger, "job_scheduler", "id", first.id)
    result = await claim(store, request(minute))
    assert (result.verdict, result.reason) == (ClaimVerdict.BUSY, "the lease row is locked")
    stranger.rollback()
    assert (await claim(store, request(minute))).attempt == 2


async def test_a_run_that_is_held_is_answered_without_a_lock(
    store: OperatorStore, database: Database, minute: datetime
) -> None:
    await registered(store)
    first = await claimed(store, minute)
    stranger = database.connect(autocommit=False)
    lock_row(stranger, "job_code", "code", CODE)
    lock_row(stranger, "job_scheduler", "id", first.id)
    assert (await claim(store, request(minute))).verdict is ClaimVerdict.HELD


async def test_a_batch_is_answered_in_its_order(store: OperatorStore, minute: datetime) -> None:
    codes = [f"shop/job-{n:03d}" for n in range(50)]
    await registered(store, *codes)
    await claimed(store, minute, code=codes[7])
    order = codes[::-1]
    results = await store.claim_runs(CLUSTER, [request(minute, code) for code in order])
    verdicts = dict(zip(order, [result.verdict for result in results], strict=True))
    assert verdicts.pop(codes[7]) is ClaimVerdict.HELD
    assert set(verdicts.values()) == {ClaimVerdict.CLAIMED}
    rows = await store.runs_by_id(CLUSTER, [result.id for result in results if result.id])
    for code, result in zip(order, results, strict=True):
        assert result.id is not None
        assert rows[result.id].identity.code == code
        assert rows[result.id].status is JobSchedulerStatus.RUNNING


async def test_the_same_run_twice_in_a_batch_is_claimed_once(store: OperatorStore, minute: datetime) -> None:
    await registered(store)
    results = await store.claim_runs(CLUSTER, [request(minute), request(minute)])
    assert [result.verdict for result in results] == [ClaimVerdict.CLAIMED, ClaimVerdict.HELD]


async def test_the_operators_functions_refuse_a_snapshot(database: Database) -> None:
    import psycopg

    for level in ("repeatable read", "serializable"):
        connection = database.connect()
        connection.execute(f"SET default_transaction_isolation = '{level}'".encode())
        for call in (
            "claim_batch('c', '[]')",
            "claim_runs('c', '[]')",
            "register_jobs('c', '[]')",
            "unregister_jobs('c', '{}')",
            "unregister_objects('c', '{}', '{}')",
            "record_ticks('c', 'x', now(), '[]')",
            "renew_claims('c', '{}')",
            "release_claim(gen_random_uuid(), gen_random_uuid(), '', 0)",
            "end_attempt(gen_random_uuid(), 1, NULL, 'fail', true, 0, '', NULL)",
            "request_stop('{}', '')",
            "adopt(gen_random_uuid(), gen_random_uuid(), gen_random_uuid(), 'p', 'p')",
            "heartbeat(gen_random_uuid(), gen_random_uuid())",
            "finish(gen_random_uuid(), gen_random_uuid(), 'fail', NULL)",
        ):
            with pytest.raises(psycopg.errors.FeatureNotSupported, match="read committed"):
                connection.execute(f"SELECT leasedjob.{call}".encode())
