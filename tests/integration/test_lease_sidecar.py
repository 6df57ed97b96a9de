"""adopt, heartbeat and finish: what a Pod may do with its lease."""

from __future__ import annotations

from datetime import datetime, timedelta
from uuid import UUID, uuid4

import pytest

from leasedjob.errors import DatabaseUnavailableError
from leasedjob.lease.jsonsafe import MAX_BYTES
from leasedjob.lease.rows import Adoption, AdoptVerdict, Beat, ClaimVerdict, Outcome
from leasedjob.lease.store import OperatorStore, SidecarStore

from .conftest import CLUSTER, CODE, Database, claim, claimed, lock_row, registered, request

pytestmark = pytest.mark.integration

HELD = Beat(held=True, stop_requested=False, busy=False)
LOST = Beat(held=False, stop_requested=False, busy=False)
BUSY = Beat(held=False, stop_requested=False, busy=True)
POD = "6f1c0000-0000-4000-8000-00000000000a"


class Claimed:
    """A claim in the database, and a Pod that may adopt it."""

    def __init__(self, id: UUID, claim_token: UUID, sidecar: SidecarStore) -> None:
        self.id = id
        self.claim_token = claim_token
        self.token = uuid4()
        self._sidecar = sidecar

    def adopt(self, *, token: UUID | None = None, pod: str = POD) -> Adoption:
        return self._sidecar.adopt(self.id, self.claim_token, token or self.token, pod_uid=pod, pod_name=f"pod-{pod}")


@pytest.fixture
async def run(store: OperatorStore, sidecar: SidecarStore, minute: datetime) -> Claimed:
    await registered(store)
    result = await claimed(store, minute, backoff_limit=2, interruption_limit=1)
    assert result.id is not None
    assert result.owner_token is not None
    return Claimed(result.id, result.owner_token, sidecar)


@pytest.fixture
def adopted(run: Claimed) -> Claimed:
    assert run.adopt().verdict is AdoptVerdict.ADOPTED
    return run


# --- adopt -----------------------------------------------------------------------------------------------------------


def test_adopt_rotates_the_token_and_sets_the_runs_own_lease(run: Claimed, database: Database) -> None:
    answer = run.adopt()
    row = database.row(run.id)
    assert answer == Adoption(
        verdict=AdoptVerdict.ADOPTED,
        lease_ms=900_000,
        attempt=1,
        fencing_token=row["fencing_token"],
        lock_key=row["lock_key"],
    )
    assert (row["owner_token"], row["pod_uid"], row["lease_ms"]) == (run.token, POD, 900_000)
    assert row["holder"] == f"{CLUSTER}/shop/pod-{POD}"
    assert row["adopted_at"] <= row["modified_at"]


def test_adopt_again_is_the_same_adoption_and_extends_it(adopted: Claimed, database: Database) -> None:
    before = database.row(adopted.id)
    database.age(adopted.id, 300)
    assert adopted.adopt().verdict is AdoptVerdict.ADOPTED
    after = database.row(adopted.id)
    assert after["modified_at"] > before["modified_at"]
    assert {k: v for k, v in after.items() if k != "modified_at"} == {
        k: v for k, v in before.items() if k != "modified_at"
    }


def test_adopt_never_revives_an_expired_claim(run: Claimed, database: Database) -> None:
    database.age(run.id, 60.5)
    before = database.row(run.id)
    assert run.adopt().verdict is AdoptVerdict.EXPIRED
    assert database.row(run.id) == before


def test_adopt_again_never_revives_an_expired_lease(adopted: Claimed, database: Database) -> None:
    database.age(adopted.id, 901)
    assert adopted.adopt().verdict is AdoptVerdict.EXPIRED


def test_a_second_pod_finds_the_claim_taken(adopted: Claimed, database: Database) -> None:
    before = database.row(adopted.id)
    answer = adopted.adopt(token=uuid4(), pod="another")
    assert answer.verdict is AdoptVerdict.TAKEN
    assert POD in answer.reason
    assert database.row(adopted.id) == before


def test_the_same_pod_with_another_token_is_not_the_holder(adopted: Claimed) -> None:
    assert adopted.adopt(token=uuid4()).verdict is AdoptVerdict.LOST


def test_a_wrong_token_adopts_nothing(run: Claimed) -> None:
    run.claim_token = uuid4()
    answer = run.adopt()
    assert (answer.verdict, answer.reason) == (AdoptVerdict.LOST, "the claim token is not the one of attempt 1")


def test_an_unknown_lease_is_lost(run: Claimed) -> None:
    run.id = uuid4()
    assert run.adopt().verdict is AdoptVerdict.LOST


async def test_the_claim_token_of_an_earlier_attempt_is_lost(
    run: Claimed, store: OperatorStore, database: Database, minute: datetime
) -> None:
    database.age(run.id, 61)
    assert (await claim(store, request(minute))).verdict is ClaimVerdict.CLAIMED
    answer = run.adopt()
    assert (answer.verdict, answer.reason) == (AdoptVerdict.LOST, "the claim token is not the one of attempt 2")


async def test_a_released_claim_is_lost_with_its_reason(run: Claimed, store: OperatorStore) -> None:
    assert await store.release_claim(run.id, run.claim_token, reason="QuotaExceeded")
    answer = run.adopt()
    assert (answer.verdict, answer.reason) == (AdoptVerdict.LOST, "attempt 1 has ended as FAIL (QuotaExceeded)")


def test_a_claim_that_was_asked_to_stop_is_not_adopted(run: Claimed, database: Database) -> None:
    database.rows("UPDATE leasedjob.job_scheduler SET stop_requested_at = clock_timestamp(), stop_reason = 'Cancelled'")
    answer = run.adopt()
    assert (answer.verdict, answer.reason) == (AdoptVerdict.LOST, "the run was asked to stop (Cancelled)")


def test_adopt_does_not_wait_for_a_lock(run: Claimed, database: Database) -> None:
    stranger = database.connect(autocommit=False)
    lock_row(stranger, "job_scheduler", "id", run.id)
    assert run.adopt().verdict is AdoptVerdict.BUSY
    stranger.rollback()
    assert run.adopt().verdict is AdoptVerdict.ADOPTED


def test_a_claim_that_expires_behind_a_lock_is_not_adopted(run: Claimed, database: Database) -> None:
    """The claim is alive when the lock is taken, and dead when it is given back: the clock is read after the lock."""
    stranger = database.connect(autocommit=False)
    stranger.execute("UPDATE leasedjob.job_scheduler SET lease_ms = 300")
    database_clock = database.connect()
    assert run.adopt().verdict is AdoptVerdict.BUSY
    stranger.commit()
    database_clock.execute("SELECT pg_sleep(0.35)")  # the database's own clock passes the end of the claim
    assert run.adopt().verdict is AdoptVerdict.EXPIRED


# --- heartbeat -------------------------------------------------------------------------------------------------------


def test_a_heartbeat_extends_the_lease_and_changes_nothing_else(
    adopted: Claimed, sidecar: SidecarStore, database: Database
) -> None:
    database.age(adopted.id, 300)
    before = database.row(adopted.id)
    assert sidecar.heartbeat(adopted.id, adopted.token) == HELD
    after = database.row(adopted.id)
    assert after.pop("modified_at") - before.pop("modified_at") > timedelta(seconds=299)
    assert after == before


def test_a_heartbeat_after_expiry_is_refused_though_nobody_reclaimed(
    adopted: Claimed, sidecar: SidecarStore, database: Database
) -> None:
    database.age(adopted.id, 900.5)
    before = database.row(adopted.id)
    assert sidecar.heartbeat(adopted.id, adopted.token) == LOST
    assert database.row(adopted.id) == before


async def test_an_old_owner_changes_no_row(
    adopted: Claimed, sidecar: SidecarStore, store: OperatorStore, database: Database, minute: datetime
) -> None:
    database.age(adopted.id, 901)
    assert (await claim(store, request(minute))).verdict is ClaimVerdict.CLAIMED
    before = database.row(adopted.id)
    assert sidecar.heartbeat(adopted.id, adopted.token) == LOST
    for outcome in Outcome:
        assert sidecar.finish(adopted.id, adopted.token, outcome) is False
    assert adopted.adopt().verdict is AdoptVerdict.LOST
    assert not await store.release_claim(adopted.id, adopted.claim_token, reason="late")
    assert not await store.end_attempt(adopted.id, 1, POD, Outcome.COMPLETE, counts=False, reason="late")
    assert database.row(adopted.id) == before


def test_a_heartbeat_needs_the_token(run: Claimed, sidecar: SidecarStore) -> None:
    assert sidecar.heartbeat(run.id, uuid4()) == LOST
    assert sidecar.heartbeat(uuid4(), run.claim_token) == LOST
    run.adopt()
    assert sidecar.heartbeat(run.id, run.claim_token) == LOST


def test_a_heartbeat_does_not_wait_for_a_lock(adopted: Claimed, sidecar: SidecarStore, database: Database) -> None:
    stranger = database.connect(autocommit=False)
    lock_row(stranger, "job_scheduler", "id", adopted.id)
    assert sidecar.heartbeat(adopted.id, adopted.token) == BUSY
    assert sidecar.heartbeat(adopted.id, uuid4()) == LOST
    stranger.rollback()
    assert sidecar.heartbeat(adopted.id, adopted.token) == HELD


def test_a_lease_that_expires_behind_a_lock_is_lost(
    adopted: Claimed, sidecar: SidecarStore, database: Database
) -> None:
    stranger = database.connect(autocommit=False)
    lock_row(stranger, "job_scheduler", "id", adopted.id)
    assert sidecar.heartbeat(adopted.id, adopted.token) == BUSY
    stranger.execute("UPDATE leasedjob.job_scheduler SET lease_ms = 200")
    stranger.execute("SELECT pg_sleep(0.25)")
    stranger.commit()
    assert sidecar.heartbeat(adopted.id, adopted.token) == LOST


async def test_a_stop_request_is_seen_and_the_lease_still_held(
    adopted: Claimed, sidecar: SidecarStore, store: OperatorStore
) -> None:
    assert await store.request_stop([adopted.id], reason="Cancelled") == {adopted.id}
    assert sidecar.heartbeat(adopted.id, adopted.token) == Beat(held=True, stop_requested=True, busy=False)


def test_heartbeats_are_hot_updates(adopted: Claimed, sidecar: SidecarStore, database: Database) -> None:
    def counters() -> tuple[int, int]:
        (row,) = database.rows(
            "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE relid = 'leasedjob.job_scheduler'::regclass"
        )
        return row["n_tup_upd"], row["n_tup_hot_upd"]

    # Only this connection's own counters are certain to be flushed, so it reads and beats alike.
    connection = database.connect()
    beats = 200
    connection.execute("SELECT pg_stat_force_next_flush()")
    before = counters()
    holder = SidecarStore(connection)
    for _ in range(beats):
        assert holder.heartbeat(adopted.id, adopted.token) == HELD
    connection.execute("SELECT pg_stat_force_next_flush()")
    updates, hot = (after - earlier for after, earlier in zip(counters(), before, strict=True))
    assert updates >= beats
    # A first update may find its page full; with a fill factor of 70 the rest stay on theirs.
    assert hot >= updates - 2


def test_nothing_that_a_heartbeat_writes_is_indexed(database: Database) -> None:
    indexed = database.rows(
        """
        SELECT pg_get_indexdef(i.indexrelid) AS definition
          FROM pg_index i WHERE i.indrelid = 'leasedjob.job_scheduler'::regclass
        """
    )
    assert indexed
    assert not [row for row in indexed if "modified_at" in row["definition"]]


# --- finish ----------------------------------------------------------------------------------------------------------


def test_complete_is_final_and_keeps_its_data(adopted: Claimed, sidecar: SidecarStore, database: Database) -> None:
    assert sidecar.finish(adopted.id, adopted.token, Outcome.COMPLETE, {"rows": 42})
    row = database.row(adopted.id)
    assert (row["status"], row["outcome"], row["data"], row["retry_at"]) == ("SUCCESS", "complete", {"rows": 42}, None)
    assert row["finished_at"] is not None
    assert sidecar.heartbeat(adopted.id, adopted.token) == LOST


@pytest.mark.parametrize("outcome", list(Outcome))
def test_finish_again_is_true_and_writes_nothing(
    adopted: Claimed, sidecar: SidecarStore, database: Database, outcome: Outcome
) -> None:
    assert sidecar.finish(adopted.id, adopted.token, outcome, {"n": 1})
    before = database.row(adopted.id)
    assert sidecar.finish(adopted.id, adopted.token, outcome, {"n": 2})
    for other in set(Outcome) - {outcome}:
        assert sidecar.finish(adopted.id, adopted.token, other) is False
    assert database.row(adopted.id) == before


def test_fail_counts_and_backs_off_by_the_runs_own_rule(
    adopted: Claimed, sidecar: SidecarStore, database: Database
) -> None:
    assert sidecar.finish(adopted.id, adopted.token, Outcome.FAIL, {"error": "no"})
    row = database.row(adopted.id)
    assert (row["status"], row["failures"], row["interruptions"]) == ("FAIL", 1, 0)
    assert row["retry_at"] - row["finished_at"] == timedelta(seconds=10)


async def test_fail_past_the_backoff_limit_is_the_end(
    adopted: Claimed, sidecar: SidecarStore, store: OperatorStore, database: Database, minute: datetime
) -> None:
    assert sidecar.finish(adopted.id, adopted.token, Outcome.FAIL)
    database.due(adopted.id)
    second = await claimed(store, minute, backoff_limit=1)
    token = uuid4()
    assert second.owner_token is not None
    answer = sidecar.adopt(adopted.id, second.owner_token, token, pod_uid="2", pod_name="2")
    assert answer.attempt == 2
    assert sidecar.finish(adopted.id, token, Outcome.FAIL)
    row = database.row(adopted.id)
    assert (row["failures"], row["retry_at"]) == (2, None)


def test_release_is_claimable_at_once_and_counts_as_an_interruption(
    adopted: Claimed, sidecar: SidecarStore, database: Database
) -> None:
    assert sidecar.finish(adopted.id, adopted.token, Outcome.RELEASE)
    row = database.row(adopted.id)
    assert (row["status"], row["data"], row["failures"], row["interruptions"]) == ("FAIL", {"released": True}, 0, 1)
    assert row["retry_at"] == row["finished_at"]


async def test_release_past_the_interruption_limit_is_the_end(
    adopted: Claimed, sidecar: SidecarStore, store: OperatorStore, database: Database, minute: datetime
) -> None:
    assert sidecar.finish(adopted.id, adopted.token, Outcome.RELEASE)
    second = await claimed(store, minute, interruption_limit=1)
    token = uuid4()
    assert second.owner_token is not None
    assert sidecar.adopt(adopted.id, second.owner_token, token, pod_uid="2", pod_name="2").attempt == 2
    assert sidecar.finish(adopted.id, token, Outcome.RELEASE)
    row = database.row(adopted.id)
    assert (row["interruptions"], row["retry_at"], row["reason"]) == (2, None, "InterruptionLimit")


@pytest.mark.parametrize("outcome", [Outcome.FAIL, Outcome.RELEASE])
async def test_no_attempt_follows_a_stop_request(
    adopted: Claimed, sidecar: SidecarStore, store: OperatorStore, database: Database, outcome: Outcome
) -> None:
    await store.request_stop([adopted.id], reason="Cancelled")
    assert sidecar.finish(adopted.id, adopted.token, outcome)
    row = database.row(adopted.id)
    assert (row["retry_at"], row["reason"]) == (None, "Cancelled")


async def test_a_completed_run_is_a_success_though_a_stop_was_requested(
    adopted: Claimed, sidecar: SidecarStore, store: OperatorStore, database: Database
) -> None:
    await store.request_stop([adopted.id], reason="Cancelled")
    assert sidecar.finish(adopted.id, adopted.token, Outcome.COMPLETE)
    assert database.row(adopted.id)["status"] == "SUCCESS"


@pytest.mark.parametrize("outcome", list(Outcome))
def test_finished_work_is_recorded_after_expiry(
    adopted: Claimed, sidecar: SidecarStore, database: Database, outcome: Outcome
) -> None:
    database.age(adopted.id, 10_000)
    assert sidecar.finish(adopted.id, adopted.token, outcome)


def test_finish_says_busy_rather_than_wait(adopted: Claimed, sidecar: SidecarStore, database: Database) -> None:
    stranger = database.connect(autocommit=False)
    lock_row(stranger, "job_scheduler", "id", adopted.id)
    with pytest.raises(DatabaseUnavailableError) as caught:
        sidecar.finish(adopted.id, adopted.token, Outcome.COMPLETE)
    assert caught.value.kind == "busy"
    stranger.rollback()
    assert sidecar.finish(adopted.id, adopted.token, Outcome.COMPLETE)


def test_any_data_is_stored_at_the_first_try(adopted: Claimed, sidecar: SidecarStore, database: Database) -> None:
    nested: object = "deep"
    for _ in range(10_000):
        nested = [nested]
    poison = {"nul": "a\0b", "lone": "\ud800", "bytes": b"\xff", "nan": float("nan"), "deep": nested}
    assert sidecar.finish(adopted.id, adopted.token, Outcome.FAIL, poison)
    data = database.row(adopted.id)["data"]
    assert (data["nul"], data["lone"], data["bytes"], data["nan"]) == ("a\ufffdb", "\ufffd", "\ufffd", "NaN")


def test_huge_data_is_cut(adopted: Claimed, sidecar: SidecarStore, database: Database) -> None:
    assert sidecar.finish(adopted.id, adopted.token, Outcome.COMPLETE, {"text": "x" * (40 * 1024 * 1024)})
    data = database.row(adopted.id)["data"]
    assert data["truncated"] is True
    assert data["bytes"] > 40 * 1024 * 1024


def test_the_database_itself_refuses_data_past_the_limit(
    adopted: Claimed, sidecar: SidecarStore, database: Database
) -> None:
    import psycopg

    connection = database.connect()
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="at most 262144"):
        connection.execute(
            "SELECT leasedjob.finish(%s, %s, 'complete', to_jsonb(repeat('x', %s)))",
            (adopted.id, adopted.token, MAX_BYTES),
        )
    assert sidecar.heartbeat(adopted.id, adopted.token) == HELD


def test_data_at_the_limit_is_kept_whole(adopted: Claimed, sidecar: SidecarStore, database: Database) -> None:
    value = "é" * ((MAX_BYTES - 2) // 2)
    assert sidecar.finish(adopted.id, adopted.token, Outcome.COMPLETE, value)
    assert database.row(adopted.id)["data"] == value


async def test_the_operator_and_the_sidecar_agree_on_one_end(
    adopted: Claimed, sidecar: SidecarStore, store: OperatorStore, database: Database
) -> None:
    assert sidecar.finish(adopted.id, adopted.token, Outcome.COMPLETE)
    assert not await store.end_attempt(adopted.id, 1, POD, Outcome.FAIL, counts=True, reason="Error")
    assert database.row(adopted.id)["status"] == "SUCCESS"
    assert database.row(adopted.id)["code"] == CODE
