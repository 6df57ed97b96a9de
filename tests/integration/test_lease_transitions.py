"""What has become of runs, told to one operator of their cluster, once: what counters and monitors are fed from."""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest

from leasedjob.lease import SyncJobSchedulerService
from leasedjob.lease.rows import Outcome, Transition, TransitionKind
from leasedjob.lease.store import OperatorStore, SidecarStore

from .conftest import CLUSTER, CODE, NAMESPACE, UID, Database, claim, claimed, lock_row, registered, request

pytestmark = pytest.mark.integration
MINUTE = timedelta(minutes=1)
AT_ONCE = timedelta(0)
WEST = "west"


async def taken(store: OperatorStore, cluster: str = CLUSTER, **more: Any) -> list[Transition]:
    return await store.take_transitions(cluster, **{"apart": AT_ONCE, **more})


async def adopted(store: OperatorStore, sidecar: SidecarStore, tick: datetime, **changes: Any) -> tuple[Any, Any]:
    """A run that a Pod holds: its id and token."""
    run, token = await claimed(store, tick, **changes), uuid4()
    assert run.id is not None
    assert run.owner_token is not None
    assert sidecar.adopt(run.id, run.owner_token, token, pod_uid="pod-1", pod_name="p").verdict == "adopted"
    return run.id, token


async def test_a_run_from_its_start_to_its_reported_end(
    store: OperatorStore, sidecar: SidecarStore, minute: datetime
) -> None:
    await registered(store)
    id, token = await adopted(store, sidecar, minute)
    assert sidecar.heartbeat(id, token).held
    assert sidecar.finish(id, token, Outcome.COMPLETE)
    start, end = await taken(store)
    assert (start.kind, start.final, start.outcome) == (TransitionKind.STARTED, False, None)
    assert (end.kind, end.final, end.outcome, end.reason) == (TransitionKind.ENDED, True, Outcome.COMPLETE, "")
    assert end.succeeded
    for one in (start, end):
        assert (one.run_id, one.attempt, one.tick) == (id, 1, minute)
        assert (one.cluster, one.namespace, one.job_uid) == (CLUSTER, NAMESPACE, UID)
        assert not one.expired
    assert start.happened_at <= end.happened_at
    assert await taken(store) == []  # once


async def test_failures_say_whether_they_count_and_whether_they_are_the_last(
    store: OperatorStore, sidecar: SidecarStore, database: Database, minute: datetime
) -> None:
    await registered(store)
    id, _ = await adopted(store, sidecar, minute, backoff_limit=1)
    assert await store.end_attempt(id, 1, "pod-1", Outcome.FAIL, counts=True, reason="OOMKilled: container main")
    database.due(id)
    again = await claim(store, request(minute, backoff_limit=1))
    assert again.attempt == 2
    assert await store.release_claim(id, again.owner_token, reason="PodNotCreated: quota", retry_ms=None)  # type: ignore[arg-type]
    _, first, second = await taken(store)
    assert (first.kind, first.counted, first.final, first.adopted) == (TransitionKind.ENDED, True, False, True)
    assert first.reason == "OOMKilled: container main"
    assert (second.kind, second.counted, second.final, second.adopted) == (TransitionKind.ENDED, False, True, False)
    assert second.outcome is Outcome.RELEASE


async def test_a_lease_that_ran_out_is_taken_over(
    store: OperatorStore, sidecar: SidecarStore, database: Database, minute: datetime
) -> None:
    await registered(store)
    await registered(store, cluster=WEST)
    id, _ = await adopted(store, sidecar, minute)
    assert [t.kind for t in await taken(store)] == [TransitionKind.STARTED]
    database.age(id, 100_000)
    assert (await claimed(store, minute, cluster=WEST)).attempt == 2
    assert await taken(store) == []
    (over,) = await taken(store, WEST)
    assert (over.kind, over.expired, over.adopted, over.final) == (TransitionKind.TAKEN_OVER, True, True, False)
    assert (over.from_cluster, over.cluster, over.attempt) == (CLUSTER, WEST, 2)


async def test_an_end_after_the_lease_ran_out_says_so(
    store: OperatorStore, sidecar: SidecarStore, database: Database, minute: datetime
) -> None:
    await registered(store)
    id, token = await adopted(store, sidecar, minute)
    database.age(id, 100_000)
    assert sidecar.finish(id, token, Outcome.COMPLETE)
    assert [t.expired for t in await taken(store)] == [False, True]


async def test_what_waits_for_its_next_attempt_and_gets_none(store: OperatorStore, minute: datetime) -> None:
    await registered(store)
    run = await claimed(store, minute)
    assert run.id is not None
    assert await store.release_claim(run.id, run.owner_token, reason="QuotaExceeded", retry_ms=60_000)  # type: ignore[arg-type]
    assert await store.request_stop([run.id], reason="Cancelled: by hand")
    released, given_up = await taken(store)
    assert (released.kind, released.final) == (TransitionKind.ENDED, False)
    assert (given_up.kind, given_up.final, given_up.reason) == (TransitionKind.GIVEN_UP, True, "Cancelled: by hand")


async def test_each_is_given_to_one_of_several_replicas(store: OperatorStore, minute: datetime) -> None:
    codes = [f"shop/job-{n}" for n in range(20)]
    await registered(store, *codes)
    for code in codes:
        run = await claimed(store, minute, code=code)
        assert await store.release_claim(run.id, run.owner_token, reason="QuotaExceeded", retry_ms=None)  # type: ignore[arg-type]
    answers = await asyncio.gather(*(taken(store, limit=5) for _ in range(8)))
    while more := await taken(store):
        answers.append(more)
    found = [t.run_id for answer in answers for t in answer]
    assert len(found) == len(set(found)) == len(codes)


async def test_what_another_replica_is_taking_is_left_to_it(
    store: OperatorStore, sidecar: SidecarStore, database: Database, minute: datetime
) -> None:
    await registered(store)
    id, token = await adopted(store, sidecar, minute)
    assert sidecar.finish(id, token, Outcome.COMPLETE)
    first = database.rows("SELECT min(id) AS id FROM leasedjob.run_transition")[0]["id"]
    other = database.connect(autocommit=False)
    lock_row(other, "run_transition", "id", first)
    assert [t.kind for t in await taken(store)] == [TransitionKind.ENDED]
    other.rollback()
    assert [t.kind for t in await taken(store)] == [TransitionKind.STARTED]


async def test_what_follows_a_start_waits_for_whoever_took_the_start(
    store: OperatorStore, sidecar: SidecarStore, database: Database, minute: datetime
) -> None:
    await registered(store)
    id, token = await adopted(store, sidecar, minute)
    hour = timedelta(hours=1)
    assert [t.kind for t in await taken(store, apart=hour)] == [TransitionKind.STARTED]
    assert sidecar.finish(id, token, Outcome.COMPLETE)
    assert await taken(store, apart=hour) == []
    database.rows("UPDATE leasedjob.run_transition SET taken_at = taken_at - interval '2 hours' WHERE kind = 'started'")
    assert [t.kind for t in await taken(store, apart=hour)] == [TransitionKind.ENDED]


async def test_what_nobody_takes_does_not_stay_for_ever(
    store: OperatorStore, sidecar: SidecarStore, database: Database, minute: datetime
) -> None:
    await registered(store)
    id, token = await adopted(store, sidecar, minute)
    assert len(await taken(store)) == 1
    assert sidecar.finish(id, token, Outcome.COMPLETE)
    database.rows("UPDATE leasedjob.run_transition SET taken_at = taken_at - interval '2 minutes'")
    database.rows("UPDATE leasedjob.run_transition SET happened_at = happened_at - interval '25 hours'")
    assert await taken(store) == []
    assert database.rows("SELECT id FROM leasedjob.run_transition") == []


def test_the_library_alone_leaves_nothing_behind(database: Database) -> None:
    jobs = SyncJobSchedulerService(database.dsn)
    jobs.run_exclusive({"type": "SCHEDULE", "code": CODE, "run_key": "one", "name": "one"}, lambda lease: None)
    assert database.rows("SELECT status FROM leasedjob.job_scheduler") == [{"status": "SUCCESS"}]
    assert database.rows("SELECT id FROM leasedjob.run_transition") == []
