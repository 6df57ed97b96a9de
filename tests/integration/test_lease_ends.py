"""renew_claims, release_claim, end_attempt, request_stop and the operator's queries."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from uuid import UUID, uuid4

import pytest

from leasedjob.errors import DatabaseUnavailableError
from leasedjob.identity import RunIdentity
from leasedjob.lease.rows import ClaimVerdict, JobSchedulerStatus, Outcome, OverlapRule, Recorded
from leasedjob.lease.store import OperatorStore, SidecarStore
from leasedjob.schedule.due import TickRange, TickReason

from .conftest import CLUSTER, CODE, UID, Database, claim, claimed, lock_row, registered, request

pytestmark = pytest.mark.integration
MINUTE = timedelta(minutes=1)
POD = "pod-uid-1"


async def adopted(store: OperatorStore, sidecar: SidecarStore, tick: datetime, **changes: object) -> tuple[UUID, UUID]:
    """A run that a Pod holds: its id and token."""
    result = await claimed(store, tick, **changes)
    token = uuid4()
    assert result.id is not None
    assert result.owner_token is not None
    assert sidecar.adopt(result.id, result.owner_token, token, pod_uid=POD, pod_name="pod-1").verdict == "adopted"
    return result.id, token


# --- renew and release -----------------------------------------------------------------------------------------------


async def test_renew_extends_only_live_unadopted_claims_of_this_cluster(
    store: OperatorStore, sidecar: SidecarStore, database: Database, minute: datetime
) -> None:
    codes = ["shop/live", "shop/expired", "shop/adopted", "shop/ended"]
    await registered(store, *codes)
    await registered(store, "shop/west", cluster="west")
    ids = {}
    for code in codes:
        result = await claimed(store, minute, code=code)
        ids[code] = result.id
        if code == "shop/adopted":
            assert result.owner_token is not None
            sidecar.adopt(result.id, result.owner_token, uuid4(), pod_uid=POD, pod_name="p")  # type: ignore[arg-type]
    ids["shop/west"] = (await claimed(store, minute, code="shop/west", cluster="west")).id
    database.age(ids["shop/live"], 50)
    database.age(ids["shop/expired"], 61)
    assert await store.end_attempt(ids["shop/ended"], 1, None, Outcome.COMPLETE, counts=False, reason="")  # type: ignore[arg-type]
    before = {code: database.row(id) for code, id in ids.items()}

    assert await store.renew_claims(CLUSTER, [id for id in ids.values() if id]) == {ids["shop/live"]}
    for code, id in ids.items():
        after = database.row(id)
        if code == "shop/live":
            assert after.pop("modified_at") - before[code].pop("modified_at") > timedelta(seconds=49)
        assert after == before[code]


async def test_renew_skips_what_is_locked(store: OperatorStore, database: Database, minute: datetime) -> None:
    await registered(store, "shop/a", "shop/b")
    first, second = await claimed(store, minute, code="shop/a"), await claimed(store, minute, code="shop/b")
    lock_row(database.connect(autocommit=False), "job_scheduler", "id", first.id)
    assert await store.renew_claims(CLUSTER, [first.id, second.id]) == {second.id}  # type: ignore[list-item]


async def test_release_gives_a_claim_back_with_its_reason(
    store: OperatorStore, database: Database, minute: datetime
) -> None:
    await registered(store)
    result = await claimed(store, minute)
    assert result.id is not None
    assert result.owner_token is not None
    assert not await store.release_claim(result.id, uuid4(), reason="wrong token")
    assert await store.release_claim(result.id, result.owner_token, reason="QuotaExceeded", retry_ms=30_000)
    row = database.row(result.id)
    assert (row["status"], row["outcome"], row["data"], row["reason"]) == (
        "FAIL",
        "release",
        {"released": True},
        "QuotaExceeded",
    )
    assert (row["failures"], row["interruptions"]) == (0, 0)
    assert row["retry_at"] - row["finished_at"] == timedelta(seconds=30)
    assert (await claim(store, request(minute))).verdict is ClaimVerdict.BACKOFF
    assert not await store.release_claim(result.id, result.owner_token, reason="again")


async def test_an_adopted_claim_is_not_released(
    store: OperatorStore, sidecar: SidecarStore, database: Database, minute: datetime
) -> None:
    await registered(store)
    result = await claimed(store, minute)
    assert result.id is not None
    assert result.owner_token is not None
    sidecar.adopt(result.id, result.owner_token, result.owner_token, pod_uid=POD, pod_name="p")
    assert not await store.release_claim(result.id, result.owner_token, reason="late")
    assert database.row(result.id)["status"] == "RUNNING"


# --- end_attempt -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class End:
    """One way to end an attempt, and what the row then says."""

    outcome: Outcome
    counts: bool
    retry_ms: int | None
    status: str
    failures: int
    interruptions: int
    retry_seconds: float | None
    adopted: bool = True
    failed_before: int = 0
    interrupted_before: int = 0
    reason: str = "Seen"


ENDS = {
    "complete": End(Outcome.COMPLETE, False, -1, "SUCCESS", 0, 0, None),
    "complete ignores a retry": End(Outcome.COMPLETE, False, 5_000, "SUCCESS", 0, 0, None),
    "fail by the run's rule": End(Outcome.FAIL, True, -1, "FAIL", 1, 0, 10),
    "second failure": End(Outcome.FAIL, True, -1, "FAIL", 2, 0, 20, failed_before=1),
    "seventh failure is capped": End(Outcome.FAIL, True, -1, "FAIL", 7, 0, 360, failed_before=6),
    "far past the cap": End(Outcome.FAIL, True, -1, "FAIL", 90, 0, 360, failed_before=89),
    "last failure": End(Outcome.FAIL, True, -1, "FAIL", 101, 0, None, failed_before=100),
    "fail with the caller's delay": End(Outcome.FAIL, True, 1_500, "FAIL", 1, 0, 1.5),
    "fail without another attempt": End(Outcome.FAIL, True, None, "FAIL", 1, 0, None),
    "fail that does not count": End(Outcome.FAIL, False, -1, "FAIL", 0, 1, 0),
    "release by the run's rule": End(Outcome.RELEASE, False, -1, "FAIL", 0, 1, 0),
    "last interruption allowed": End(Outcome.RELEASE, False, -1, "FAIL", 0, 20, 0, interrupted_before=19),
    "interruption limit": End(
        Outcome.RELEASE, False, -1, "FAIL", 0, 21, None, interrupted_before=20, reason="InterruptionLimit"
    ),
    "release with the caller's delay": End(Outcome.RELEASE, False, 0, "FAIL", 0, 21, 0, interrupted_before=20),
    "release for good": End(Outcome.RELEASE, False, None, "FAIL", 0, 1, None),
    "unadopted release": End(Outcome.RELEASE, False, -1, "FAIL", 0, 0, 0, adopted=False),
    "unadopted release past the limit": End(
        Outcome.RELEASE, False, -1, "FAIL", 0, 30, 0, adopted=False, interrupted_before=30
    ),
    "unadopted failure": End(Outcome.FAIL, True, -1, "FAIL", 1, 0, 10, adopted=False),
}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS.keys())
async def test_end_attempt(
    store: OperatorStore, sidecar: SidecarStore, database: Database, minute: datetime, end: End
) -> None:
    await registered(store)
    if end.adopted:
        id, _ = await adopted(store, sidecar, minute, backoff_limit=100)
    else:
        id = (await claimed(store, minute, backoff_limit=100)).id  # type: ignore[assignment]
    database.rows(
        "UPDATE leasedjob.job_scheduler SET failures = %s, interruptions = %s",
        end.failed_before,
        end.interrupted_before,
    )
    assert await store.end_attempt(
        id,
        1,
        POD if end.adopted else None,
        end.outcome,
        counts=end.counts,
        reason="Seen",
        retry_ms=end.retry_ms,
        data={"exitCode": 1},
    )
    row = database.row(id)
    assert (row["status"], row["outcome"], row["failures"], row["interruptions"], row["reason"]) == (
        end.status,
        end.outcome,
        end.failures,
        end.interruptions,
        end.reason,
    )
    assert row["data"] == {"exitCode": 1}
    if end.retry_seconds is None:
        assert row["retry_at"] is None
    else:
        assert (row["retry_at"] - row["finished_at"]).total_seconds() == end.retry_seconds


@pytest.mark.parametrize(
    ("attempt", "pod"),
    [
        pytest.param(2, POD, id="another attempt"),
        pytest.param(1, "another", id="another Pod"),
        pytest.param(1, None, id="as if unadopted"),
    ],
)
async def test_end_attempt_needs_the_attempt_and_the_pod(
    store: OperatorStore,
    sidecar: SidecarStore,
    database: Database,
    minute: datetime,
    attempt: int,
    pod: str | None,
) -> None:
    await registered(store)
    id, _ = await adopted(store, sidecar, minute)
    before = database.row(id)
    assert not await store.end_attempt(id, attempt, pod, Outcome.COMPLETE, counts=False, reason="")
    assert database.row(id) == before


async def test_end_attempt_counts_after_expiry_but_not_after_a_reclaim(
    store: OperatorStore, sidecar: SidecarStore, database: Database, minute: datetime
) -> None:
    await registered(store, CODE, "shop/b")
    late, _ = await adopted(store, sidecar, minute)
    lost, _ = await adopted(store, sidecar, minute, code="shop/b")
    database.age(late, 5_000)
    database.age(lost, 5_000)
    assert await store.end_attempt(late, 1, POD, Outcome.COMPLETE, counts=False, reason="")
    assert database.row(late)["status"] == "SUCCESS"
    await claimed(store, minute, code="shop/b")
    assert not await store.end_attempt(lost, 1, POD, Outcome.COMPLETE, counts=False, reason="")
    assert database.row(lost)["status"] == "RUNNING"


async def test_end_attempt_changes_a_row_once(
    store: OperatorStore, sidecar: SidecarStore, database: Database, minute: datetime
) -> None:
    await registered(store)
    id, _ = await adopted(store, sidecar, minute)
    assert await store.end_attempt(id, 1, POD, Outcome.FAIL, counts=True, reason="Error")
    before = database.row(id)
    assert not await store.end_attempt(id, 1, POD, Outcome.FAIL, counts=True, reason="Error")
    assert not await store.end_attempt(id, 1, POD, Outcome.COMPLETE, counts=False, reason="")
    assert database.row(id) == before


async def test_end_attempt_and_release_say_busy_rather_than_wait(
    store: OperatorStore, database: Database, minute: datetime
) -> None:
    await registered(store)
    result = await claimed(store, minute)
    assert result.id is not None
    assert result.owner_token is not None
    lock_row(database.connect(autocommit=False), "job_scheduler", "id", result.id)
    with pytest.raises(DatabaseUnavailableError, match="locked elsewhere"):
        await store.end_attempt(result.id, 1, None, Outcome.COMPLETE, counts=False, reason="")
    with pytest.raises(DatabaseUnavailableError, match="locked elsewhere"):
        await store.release_claim(result.id, result.owner_token, reason="")


async def test_a_reason_that_cannot_be_stored_is_made_storable(
    store: OperatorStore, database: Database, minute: datetime
) -> None:
    await registered(store)
    result = await claimed(store, minute)
    assert result.id is not None
    assert await store.end_attempt(result.id, 1, None, Outcome.FAIL, counts=True, reason="a\0b\ud800")
    assert database.row(result.id)["reason"] == "a\ufffdb\ufffd"


# --- request_stop ----------------------------------------------------------------------------------------------------


async def test_request_stop_by_state(
    store: OperatorStore, sidecar: SidecarStore, database: Database, minute: datetime
) -> None:
    await registered(store, "shop/a", "shop/b", "shop/c", "shop/d")
    held, _ = await adopted(store, sidecar, minute, code="shop/a")
    unadopted = (await claimed(store, minute, code="shop/b")).id
    retrying = (await claimed(store, minute, code="shop/c", backoff_limit=1)).id
    done = (await claimed(store, minute, code="shop/d")).id
    assert unadopted
    assert retrying
    assert done
    await store.end_attempt(retrying, 1, None, Outcome.FAIL, counts=True, reason="Error")
    await store.end_attempt(done, 1, None, Outcome.COMPLETE, counts=False, reason="Fine")

    everyone = {held, unadopted, retrying, done}
    assert await store.request_stop([*everyone, uuid4()], reason="Cancelled") == everyone
    rows = {id: database.row(id) for id in everyone}
    assert (rows[held]["status"], rows[held]["stop_reason"]) == ("RUNNING", "Cancelled")
    assert rows[held]["stop_requested_at"] is not None
    for id in (unadopted, retrying):
        assert (rows[id]["status"], rows[id]["retry_at"], rows[id]["reason"]) == ("FAIL", None, "Cancelled")
    assert (rows[done]["status"], rows[done]["reason"]) == ("SUCCESS", "Fine")


async def test_request_stop_leaves_out_what_is_locked(
    store: OperatorStore, sidecar: SidecarStore, database: Database, minute: datetime
) -> None:
    await registered(store)
    id, _ = await adopted(store, sidecar, minute)
    stranger = database.connect(autocommit=False)
    lock_row(stranger, "job_scheduler", "id", id)
    assert await store.request_stop([id], reason="Cancelled") == set()
    stranger.rollback()
    assert await store.request_stop([id], reason="Cancelled") == {id}


# --- record_ticks ----------------------------------------------------------------------------------------------------


async def test_record_ticks_writes_once_and_moves_the_watermark(
    store: OperatorStore, database: Database, minute: datetime
) -> None:
    await registered(store)
    ranges = [TickRange(minute - 5 * MINUTE, minute, 6, False, TickReason.MissedRunLimit)]
    for _ in range(2):
        assert await store.record_ticks(CLUSTER, CODE, minute, ranges) == Recorded(recorded=True, watermark=minute)
        assert database.ledger() == [("missed", "MissedRunLimit", minute - 5 * MINUTE, minute, 6)]
    (entry,) = await store.ledger(CODE)
    assert (entry.count_is_exact, entry.decided_by, entry.count) == (False, CLUSTER, 6)


@pytest.mark.parametrize("why", ["stale", "unregistered", "future", "locked"])
async def test_record_ticks_records_nothing_that_it_cannot_judge(
    store: OperatorStore, database: Database, minute: datetime, why: str
) -> None:
    if why != "unregistered":
        await registered(store)
    else:
        await registered(store, cluster="west")
    through = minute
    if why == "stale":
        database.rows("UPDATE leasedjob.job_code SET watermark = %s", minute - 2 * MINUTE)
    if why == "future":
        through = datetime.now(UTC) + MINUTE
    if why == "locked":
        lock_row(database.connect(autocommit=False), "job_code", "code", CODE)
    before = database.watermark()
    ranges = [TickRange(minute - 5 * MINUTE, minute, 6, True, TickReason.StartingDeadline)]
    assert await store.record_ticks(CLUSTER, CODE, through, ranges) == Recorded(recorded=False, watermark=before)
    assert (database.ledger(), database.watermark()) == ([], before)


async def test_the_watermark_never_moves_back(store: OperatorStore, database: Database, minute: datetime) -> None:
    await registered(store)
    await store.record_ticks(CLUSTER, CODE, minute, [])
    assert await store.record_ticks(CLUSTER, CODE, minute - MINUTE, []) == Recorded(recorded=True, watermark=minute)
    assert database.watermark() == minute


# --- queries ---------------------------------------------------------------------------------------------------------


async def test_active_rows_are_what_may_still_change(
    store: OperatorStore, sidecar: SidecarStore, database: Database, minute: datetime
) -> None:
    codes = ["shop/a", "shop/b", "shop/c", "shop/d"]
    await registered(store, *codes)
    await registered(store, "shop/a", "shop/west-only", cluster="west")
    held, _ = await adopted(store, sidecar, minute, code="shop/a")
    unadopted = await claimed(store, minute, code="shop/b")
    retrying = (await claimed(store, minute, code="shop/c", backoff_limit=1)).id
    done = (await claimed(store, minute, code="shop/d")).id
    await claimed(store, minute, code="shop/west-only", cluster="west")
    await store.end_attempt(retrying, 1, None, Outcome.FAIL, counts=True, reason="Error")  # type: ignore[arg-type]
    await store.end_attempt(done, 1, None, Outcome.COMPLETE, counts=False, reason="")  # type: ignore[arg-type]
    database.age(unadopted.id, 61)

    rows = {run.id: run for run in await store.active_rows(CLUSTER)}
    assert set(rows) == {held, unadopted.id, retrying}
    assert rows[held].held_here
    assert rows[held].claim_token is None
    assert rows[held].pod_uid == POD
    assert not rows[held].expired
    claim_row = rows[unadopted.id]  # type: ignore[index]
    assert (claim_row.claim_token, claim_row.held_here, claim_row.expired) == (unadopted.owner_token, False, True)
    waiting = rows[retrying]  # type: ignore[index]
    assert waiting.status is JobSchedulerStatus.FAIL
    assert (waiting.claim_token, waiting.held_here, waiting.expired, waiting.terminal) == (None, False, False, False)
    assert waiting.retry_at is not None

    from_west = {run.id: run for run in await store.active_rows("west")}
    assert held in from_west
    assert not from_west[held].held_here


async def test_changed_since_sees_transitions_but_not_heartbeats(
    store: OperatorStore, sidecar: SidecarStore, minute: datetime
) -> None:
    await registered(store)
    id, token = await adopted(store, sidecar, minute)
    (run,) = await store.changed_since(CLUSTER, minute)
    after = run.changed_at + timedelta(microseconds=1)
    sidecar.heartbeat(id, token)
    assert await store.changed_since(CLUSTER, after) == []
    sidecar.finish(id, token, Outcome.COMPLETE)
    (run,) = await store.changed_since(CLUSTER, after)
    assert (run.id, run.status, run.terminal) == (id, JobSchedulerStatus.SUCCESS, True)
    assert await store.changed_since("west", minute) == []


async def test_lists_leave_huge_data_out_and_a_single_row_has_it(
    store: OperatorStore, sidecar: SidecarStore, minute: datetime
) -> None:
    await registered(store)
    id, token = await adopted(store, sidecar, minute)
    data = {"text": "".join(uuid4().hex for _ in range(1000))}
    sidecar.finish(id, token, Outcome.COMPLETE, data)
    (run,) = await store.changed_since(CLUSTER, minute)
    assert run.data == {"truncated": True}
    assert (await store.recent_runs(CLUSTER, [CODE], 1))[CODE][0].data == {"truncated": True}
    assert (await store.runs_by_id(CLUSTER, [id]))[id].data == data


async def test_recent_runs_are_the_last_ones_of_each_code(store: OperatorStore, minute: datetime) -> None:
    await registered(store, "shop/a", "shop/b")
    for n in range(4):
        for code in ("shop/a", "shop/b"):
            await claimed(store, minute + n * MINUTE, code=code, on_overlap=OverlapRule.ALLOW)
    runs = await store.recent_runs(CLUSTER, ["shop/a", "shop/b", "shop/none"], 2)
    newest = [minute + 3 * MINUTE, minute + 2 * MINUTE]
    assert {code: [run.tick for run in found] for code, found in runs.items()} == {
        "shop/a": newest,
        "shop/b": newest,
        "shop/none": [],
    }


async def test_a_run_carries_everything_that_launching_and_finalizing_need(
    store: OperatorStore, minute: datetime
) -> None:
    await registered(store)
    result = await claimed(store, minute, backoff_limit=3, manual=False)
    assert result.id is not None
    run = (await store.runs_by_id(CLUSTER, [result.id]))[result.id]
    assert run.identity == RunIdentity.of(code=CODE, run_key=request(minute).identity.run_key)
    assert run.lock_key == run.identity.lock_key
    assert (run.claim_token, run.attempt, run.fencing_token) == (result.owner_token, 1, result.fencing_token)
    assert (run.namespace, run.job_name, run.job_uid, run.tick) == ("shop", "sync-orders", UID, minute)
    assert (run.backoff_limit, run.interruption_limit, run.run_lease_ms) == (3, 20, 900_000)
    assert run.held_here
    assert run.expires_at == result.expires_at
