"""register_jobs and unregister_objects: what they do to the watermark, to retries and to claims."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest

from leasedjob.lease.rows import ClaimVerdict, Outcome
from leasedjob.lease.store import OperatorStore, SidecarStore

from .conftest import CLUSTER, CODE, UID, Database, claim, claimed, lock_row, registered, registration, request

pytestmark = pytest.mark.integration
HOUR = timedelta(hours=1)
WEST = "west"


async def register(store: OperatorStore, cluster: str = CLUSTER, **changes: Any) -> datetime:
    """The watermark after registering CODE."""
    (answer,) = await store.register_jobs(cluster, [registration(**changes)])
    assert not answer.busy
    assert answer.watermark is not None
    return answer.watermark


@pytest.fixture
def created() -> datetime:
    return datetime.now(UTC) - 5 * HOUR


async def test_a_new_code_counts_from_its_objects_creation(
    store: OperatorStore, database: Database, created: datetime
) -> None:
    assert await register(store, created_at=created) == created == database.watermark()


async def test_a_creation_time_ahead_of_the_databases_clock_is_now(store: OperatorStore) -> None:
    watermark = await register(store, created_at=datetime.now(UTC) + HOUR)
    assert abs(watermark - datetime.now(UTC)) < timedelta(minutes=1)


async def test_registering_again_changes_nothing(store: OperatorStore, created: datetime, minute: datetime) -> None:
    await register(store, created_at=created)
    await claimed(store, minute)
    for _ in range(2):
        assert await register(store, created_at=created) == minute
    assert (await claim(store, request(minute))).verdict is ClaimVerdict.HELD


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"schedule_hash": "schedule-2"}, id="an edit of the schedule"),
        pytest.param({"suspended": False}, id="a resume"),
    ],
)
async def test_the_watermark_moves_to_now_at(
    store: OperatorStore, database: Database, created: datetime, changes: dict[str, Any]
) -> None:
    await register(store, created_at=created, suspended="suspended" in changes)
    assert database.watermark() == created
    watermark = await register(store, created_at=created, **changes)
    assert abs(watermark - datetime.now(UTC)) < timedelta(minutes=1)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"spec_hash": "spec-2"}, id="an edit of the rest"),
        pytest.param({"policy": "Allow"}, id="an edit of the policy"),
        pytest.param({"suspended": True}, id="suspend"),
        pytest.param({"name": "renamed"}, id="another name"),
    ],
)
async def test_the_watermark_stays_at(
    store: OperatorStore, created: datetime, minute: datetime, changes: dict[str, Any]
) -> None:
    await register(store, created_at=created)
    await claimed(store, minute)
    assert await register(store, created_at=created, **changes) == minute


async def test_an_object_created_anew_counts_from_its_creation(
    store: OperatorStore, database: Database, created: datetime, minute: datetime
) -> None:
    await register(store, created_at=created)
    first = await claimed(store, minute, backoff_limit=1)
    await store.end_attempt(first.id, 1, None, Outcome.FAIL, counts=True, reason="Error")  # type: ignore[arg-type]
    anew = minute + timedelta(seconds=30)
    assert await register(store, uid="another", created_at=anew) == anew
    row = database.row(first.id)
    assert (row["retry_at"], row["reason"]) == (None, "JobDeleted")


async def test_an_object_created_anew_after_its_deletion_counts_from_its_creation(
    store: OperatorStore, created: datetime, minute: datetime
) -> None:
    await register(store, created_at=created)
    await store.unregister_objects(CLUSTER, dict.fromkeys([CODE], UID))
    assert await register(store, uid="another", created_at=minute) == minute


class TestWithAnotherClusterActive:
    """Its view of the watermark stands: moving it could drop a tick that it is about to claim."""

    async def test_joining(self, store: OperatorStore, created: datetime, minute: datetime) -> None:
        await register(store, WEST, created_at=created)
        assert await register(store, created_at=minute) == created

    async def test_resuming(self, store: OperatorStore, created: datetime) -> None:
        await register(store, WEST, created_at=created)
        await register(store, created_at=created, suspended=True)
        assert await register(store, created_at=created) == created

    async def test_creating_anew(
        self, store: OperatorStore, database: Database, created: datetime, minute: datetime
    ) -> None:
        await register(store, WEST, created_at=created)
        await register(store, created_at=created)
        first = await claimed(store, minute, backoff_limit=1)
        await store.end_attempt(first.id, 1, None, Outcome.FAIL, counts=True, reason="Error")  # type: ignore[arg-type]
        assert await register(store, uid="another", created_at=minute + timedelta(seconds=30)) == minute
        assert database.row(first.id)["retry_at"] is not None

    async def test_the_first_edit_moves_and_the_second_follows(
        self, store: OperatorStore, database: Database, created: datetime
    ) -> None:
        await register(store, created_at=created)
        await register(store, WEST, created_at=created)
        moved = await register(store, created_at=created, schedule_hash="schedule-2")
        assert moved > created
        assert await register(store, WEST, created_at=created, schedule_hash="schedule-2") == moved

    async def test_a_suspended_one_is_not_active(self, store: OperatorStore, created: datetime) -> None:
        await register(store, WEST, created_at=created, suspended=True)
        await register(store, created_at=created, suspended=True)
        assert await register(store, created_at=created) > created


async def test_differing_specs_are_reported_to_both(store: OperatorStore, created: datetime) -> None:
    async def differs(cluster: str, **changes: Any) -> bool:
        (answer,) = await store.register_jobs(cluster, [registration(created_at=created, **changes)])
        return answer.spec_differs

    assert not await differs(CLUSTER)
    assert not await differs(WEST)
    assert await differs(WEST, spec_hash="spec-2")
    assert await differs(CLUSTER)
    assert await differs(CLUSTER, policy="Allow", spec_hash="spec-2")
    assert not await differs(CLUSTER, spec_hash="spec-2")
    assert not await differs(WEST, spec_hash="spec-2")


async def test_answers_come_in_the_order_asked_and_the_first_of_a_code_counts(
    store: OperatorStore, created: datetime
) -> None:
    jobs = [
        registration("shop/b", created_at=created),
        registration("shop/a", created_at=created + HOUR),
        registration("shop/b", created_at=created + HOUR, uid="younger"),
    ]
    answers = await store.register_jobs(CLUSTER, jobs)
    assert [(answer.code, answer.watermark) for answer in answers] == [
        ("shop/b", created),
        ("shop/a", created + HOUR),
        ("shop/b", created),
    ]
    assert await store.register_jobs(CLUSTER, []) == []


async def test_a_locked_code_is_busy_and_others_are_registered(
    store: OperatorStore, database: Database, created: datetime
) -> None:
    await registered(store)
    lock_row(database.connect(autocommit=False), "job_code", "code", CODE)
    busy, fine = await store.register_jobs(CLUSTER, [registration(spec_hash="spec-2"), registration("shop/other")])
    assert (busy.busy, busy.watermark) == (True, None)
    assert not fine.busy
    (row,) = database.rows("SELECT spec_hash FROM leasedjob.job_registration WHERE code = %s", CODE)
    assert row["spec_hash"] == "spec-1"


# --- unregister ------------------------------------------------------------------------------------------------------


async def test_unregister_gives_claims_back_and_ends_retries(
    store: OperatorStore, sidecar: SidecarStore, database: Database, minute: datetime
) -> None:
    codes = ["shop/claim", "shop/held", "shop/retry"]
    await registered(store, *codes)
    results = {code: await claimed(store, minute, code=code, backoff_limit=1) for code in codes}
    held = results["shop/held"]
    assert held.owner_token is not None
    sidecar.adopt(held.id, held.owner_token, uuid4(), pod_uid="p", pod_name="p")  # type: ignore[arg-type]
    await store.end_attempt(
        results["shop/retry"].id,  # type: ignore[arg-type]
        1,
        None,
        Outcome.FAIL,
        counts=True,
        reason="Error",
    )

    assert await store.unregister_objects(CLUSTER, dict.fromkeys(codes, UID)) == set(codes)
    for code in ("shop/claim", "shop/retry"):
        row = database.row(results[code].id)
        assert (row["status"], row["retry_at"], row["reason"]) == ("FAIL", None, "JobDeleted")
    assert database.row(held.id)["status"] == "RUNNING"
    assert await store.active_rows(CLUSTER) == []
    # The Pod goes on and ends by itself; nobody will try again.
    assert await store.end_attempt(held.id, 1, "p", Outcome.FAIL, counts=True, reason="Error")  # type: ignore[arg-type]
    assert database.row(held.id)["retry_at"] is None
    more = [*codes, "shop/unknown"]
    assert await store.unregister_objects(CLUSTER, dict.fromkeys(more, UID)) == set(more)


async def test_unregister_leaves_the_run_to_other_clusters(
    store: OperatorStore, database: Database, minute: datetime
) -> None:
    await registered(store)
    await registered(store, cluster=WEST)
    first = await claimed(store, minute, backoff_limit=1)
    assert await store.unregister_objects(CLUSTER, dict.fromkeys([CODE], UID)) == {CODE}
    row = database.row(first.id)
    assert (row["status"], row["reason"]) == ("FAIL", "JobDeleted")
    again = await claim(store, request(minute), cluster=WEST)
    assert (again.verdict, again.attempt) == (ClaimVerdict.CLAIMED, 2)
    assert await store.unregister_objects(CLUSTER, dict.fromkeys([CODE], UID)) == {CODE}
    assert database.row(first.id)["status"] == "RUNNING"


async def test_what_an_object_has_started_outlives_the_news_of_its_predecessors_end(
    store: OperatorStore, database: Database, minute: datetime
) -> None:
    """Deleted and created anew; a replica that has heard of the deletion only comes last."""
    await registered(store)
    first = await claimed(store, minute)
    uid = (await store.registrations(CLUSTER))[CODE][1]
    assert await store.unregister_objects(CLUSTER, {CODE: "another", "shop/unknown": "x"}) == {CODE, "shop/unknown"}
    assert database.row(first.id)["status"] == "RUNNING"
    stranger = database.connect(autocommit=False)
    lock_row(stranger, "job_code", "code", CODE)
    assert await store.unregister_objects(CLUSTER, {CODE: uid}) == set()
    stranger.rollback()
    assert await store.unregister_objects(CLUSTER, {CODE: uid}) == {CODE}
    assert database.row(first.id)["reason"] == "JobDeleted"
    assert await store.registrations(CLUSTER) == {}


@pytest.mark.parametrize(("table", "column"), [("job_code", "code"), ("job_scheduler", "code")])
async def test_unregister_leaves_a_locked_code_whole(
    store: OperatorStore, database: Database, minute: datetime, table: str, column: str
) -> None:
    await registered(store, CODE, "shop/other")
    first = await claimed(store, minute)
    stranger = database.connect(autocommit=False)
    lock_row(stranger, table, column, CODE)
    assert await store.unregister_objects(CLUSTER, dict.fromkeys([CODE, "shop/other"], UID)) == {"shop/other"}
    assert database.row(first.id)["status"] == "RUNNING"
    assert len(await store.active_rows(CLUSTER)) == 1
    stranger.rollback()
    assert await store.unregister_objects(CLUSTER, dict.fromkeys([CODE], UID)) == {CODE}
    assert database.row(first.id)["status"] == "FAIL"
