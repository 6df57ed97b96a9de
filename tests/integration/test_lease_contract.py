"""The specification of the job scheduler, in the order of its text, each row of its tables; then what goes beyond it.

One suite: on the in-memory store and on PostgreSQL 15 and 18, through the asynchronous and the synchronous service.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import FrozenInstanceError, fields, is_dataclass
from datetime import UTC, datetime, timedelta
from enum import Enum
from typing import Any, get_args
from uuid import UUID, uuid4

import psycopg
import pytest

import leasedjob
from leasedjob import lease as library
from leasedjob.lease import (
    DEFAULT_HEARTBEAT_MS,
    DEFAULT_LEASE_MS,
    DatabaseUnavailableError,
    InvalidJobIdentityOptionsError,
    InvalidJobLeaseOptionsError,
    JobAcquired,
    JobAcquireOptions,
    JobAcquireResult,
    JobExecutionLease,
    JobLease,
    JobNotAcquired,
    JobScheduler,
    JobSchedulerModule,
    JobSchedulerModuleOptions,
    JobSchedulerService,
    JobSchedulerStatus,
    JobSchedulerType,
    LeasedJobError,
    LostJobLeaseError,
    NotAcquired,
    RunExclusiveResult,
    SyncJobSchedulerService,
    bullmq_job_id,
)
from leasedjob.lease.options import resolve
from leasedjob.testing import Clock, InMemoryJobSchedulerService, InMemoryLeases
from leasedjob.testing.postgres import PostgresServer

from .conftest import OWNER, OWNER_PASSWORD
from .lease_backends import Backend, Jobs, Memory, Postgres, closing, initial, options

pytestmark = pytest.mark.integration
DATABASE = "leasedjob_contract"


def _database(server: PostgresServer, template: str) -> Iterator[Postgres]:
    server.create_database(DATABASE, template=template, owner=OWNER)
    with closing(Postgres(server.conninfo(DATABASE, OWNER, OWNER_PASSWORD))) as backend:
        yield backend
    server.drop_database(DATABASE)


@pytest.fixture(scope="module")
def postgres_18(server: PostgresServer, template: str) -> Iterator[Postgres]:
    yield from _database(server, template)


@pytest.fixture(scope="module")
def postgres_15(server_15: PostgresServer, template_15: str) -> Iterator[Postgres]:
    yield from _database(server_15, template_15)


@pytest.fixture(params=["memory", "postgres_15", "postgres_18"])
def backend(request: pytest.FixtureRequest) -> Backend:
    if request.param == "memory":
        return Memory()
    postgres: Postgres = request.getfixturevalue(request.param)
    postgres.clear()
    return postgres


@pytest.fixture(params=["async", "sync"])
def jobs(request: pytest.FixtureRequest, backend: Backend) -> Jobs:
    return Jobs(backend.asynchronous() if request.param == "async" else backend.synchronous(), backend)


@pytest.fixture(params=["async", "sync"])
def refusing(request: pytest.FixtureRequest) -> Jobs:
    """For what happens before or without the database: where doesn't matter."""
    backend = Memory()
    return Jobs(backend.asynchronous() if request.param == "async" else backend.synchronous(), backend)


# --- exports ---------------------------------------------------------------------------------------------------------

EXPORTS = {  # the specification's kind
    "JobScheduler": "class",
    "JobSchedulerStatus": "enum",
    "JobSchedulerType": "enum",
    "JobAcquireOptions": "class",
    "JobAcquireResult": "union",
    "JobLease": "class",
    "JobExecutionLease": "class",
    "RunExclusiveResult": "class",
    "DEFAULT_LEASE_MS": "value",
    "DEFAULT_HEARTBEAT_MS": "value",
    "LostJobLeaseError": "error",
    "InvalidJobLeaseOptionsError": "error",
    "InvalidJobIdentityOptionsError": "error",
    "JobSchedulerService": "class",
    "JobSchedulerModule": "class",
    "JobSchedulerModuleOptions": "class",
}


@pytest.mark.parametrize(("name", "kind"), EXPORTS.items())
def test_exports(name: str, kind: str) -> None:
    found = getattr(library, name)
    assert getattr(leasedjob, name) is found
    assert name in library.__all__
    assert name in leasedjob.__all__
    match kind:
        case "class":
            assert isinstance(found, type)
        case "enum":
            assert issubclass(found, Enum)
        case "error":
            assert issubclass(found, LeasedJobError)
        case "value":
            assert isinstance(found, int)
        case "union":
            assert get_args(found) == (JobAcquired, JobNotAcquired)


def test_the_values_of_the_exports() -> None:
    assert [status.value for status in JobSchedulerStatus] == ["RUNNING", "SUCCESS", "FAIL"]
    assert {kind.value for kind in JobSchedulerType} == {"INITIAL", "SCHEDULE"}
    assert DEFAULT_LEASE_MS == 15 * 60 * 1000
    assert DEFAULT_HEARTBEAT_MS == 60 * 1000
    assert [field.name for field in fields(JobLease)] == ["id", "owner_token"]
    assert issubclass(JobExecutionLease, JobLease)
    assert "idempotency_key" in {field.name for field in fields(JobExecutionLease)}
    assert [field.name for field in fields(RunExclusiveResult)] == ["acquired", "result"]
    assert {field.name for field in fields(JobAcquireOptions)} == {
        "code",
        "run_key",
        "name",
        "type",
        "lease_ms",
        "heartbeat_ms",
    }


async def test_acquired_has_every_field_and_not_acquired_only_a_reason(jobs: Jobs) -> None:
    result: JobAcquireResult = await jobs.acquire(options())
    assert result.acquired is True
    assert isinstance(result.row, JobScheduler)
    assert isinstance(result.id, UUID)
    assert isinstance(result.owner_token, UUID)
    assert result.idempotency_key.startswith("v2:")
    assert (result.attempt, result.fencing_token > 0) == (1, True)
    assert result.lease == JobLease(result.id, result.owner_token)
    other = await jobs.another().acquire(options())
    assert other == JobNotAcquired(reason=NotAcquired.HELD)
    assert {field.name for field in fields(other)} == {"acquired", "reason"}


def test_values_can_not_be_changed() -> None:
    for kind in (JobScheduler, JobLease, JobExecutionLease, JobAcquireOptions, JobAcquired, JobNotAcquired):
        assert is_dataclass(kind)
    lease = JobLease(uuid4(), uuid4())
    with pytest.raises(FrozenInstanceError):
        lease.id = uuid4()  # type: ignore[misc]


# --- entity and module setup -----------------------------------------------------------------------------------------


def test_the_lock_key_is_unique(postgres_18: Postgres) -> None:
    postgres_18.clear()
    acquired = postgres_18.synchronous().acquire(options())
    assert isinstance(acquired, JobAcquired)
    with pytest.raises(psycopg.errors.UniqueViolation):
        postgres_18.connection.execute(
            "INSERT INTO leasedjob.job_scheduler (lock_key, type, code, run_key, lease_ms, run_lease_ms) "
            "VALUES (%s, 'SCHEDULE', 'other', 'k', 1, 1)",
            (acquired.row.lock_key,),
        )


async def test_the_module_is_global_by_default(postgres_18: Postgres) -> None:
    assert JobSchedulerModuleOptions().global_ is True
    async with JobSchedulerModule(postgres_18.dsn) as module:
        assert JobSchedulerModule.current() is module.service
    async with JobSchedulerModule(postgres_18.dsn, global_=False):
        with pytest.raises(LeasedJobError, match="no global"):
            JobSchedulerModule.current()


# --- logical job identity --------------------------------------------------------------------------------------------


async def test_the_row_says_what_was_asked(jobs: Jobs) -> None:
    result = await jobs.acquired(name="Sync orders from ERP", code=" sync-orders ", lease_ms=60_000)
    row = result.row
    assert result.idempotency_key == row.lock_key == "v2:aV_0WdnjWG686cnhQIIg7xFYkUVv2kIMT-wOCbiWakI"
    assert (row.type, row.code, row.run_key) == (JobSchedulerType.SCHEDULE, "sync-orders", "2026-07-20T03:00:00Z")
    assert (row.name, row.status, row.lease_ms) == ("Sync orders from ERP", JobSchedulerStatus.RUNNING, 60_000)
    assert (row.attempt, row.data, row.owner_token, row.finished_at) == (1, None, result.owner_token, None)
    assert "sync-orders" not in row.lock_key  # raw components are not stored in the unique key


@pytest.mark.parametrize("code", ["x", "x" * 64, "\u00e9" * 64, "\U0001f600" * 32, "\ufeff x \u3000"])
async def test_a_code_has_1_to_64_characters_after_trimming(jobs: Jobs, code: str) -> None:
    assert (await jobs.acquire(options(code=code))).acquired


@pytest.mark.parametrize("code", ["", " \t\n", "x" * 65, "\U0001f600" * 33, "a\0b", "\ud83d", 7, None, b"x", True])
async def test_other_codes_are_refused(refusing: Jobs, code: Any) -> None:
    with pytest.raises(InvalidJobIdentityOptionsError):
        await refusing.acquire(options(code=code))


@pytest.mark.parametrize("run_key", ["k", "k" * 1024, "\U0001f600" * 512])
async def test_schedule_is_the_default_and_needs_a_run_key(jobs: Jobs, run_key: str) -> None:
    assert (await jobs.acquired(run_key=run_key)).row.type is JobSchedulerType.SCHEDULE


@pytest.mark.parametrize("run_key", ["", " \u00a0", "k" * 1025, "\U0001f600" * 513, "a\0b", "\udc00", 7, None, 1.5, []])
async def test_other_run_keys_are_refused(refusing: Jobs, run_key: Any) -> None:
    with pytest.raises(InvalidJobIdentityOptionsError):
        await refusing.acquire(options(run_key=run_key))


async def test_a_schedule_without_a_run_key_is_refused(refusing: Jobs) -> None:
    with pytest.raises(InvalidJobIdentityOptionsError, match="required"):
        await refusing.acquire(JobAcquireOptions(code="sync-orders"))


async def test_initial_forbids_a_run_key_and_runs_once(jobs: Jobs) -> None:
    for run_key in ("k", "", None):
        with pytest.raises(InvalidJobIdentityOptionsError):
            await jobs.acquire(options(type=JobSchedulerType.INITIAL, run_key=run_key))
    first = await jobs.acquire(initial())
    assert first.idempotency_key == "v2:1A44RnwtS96WYiB2BzM7F5aF0N-Grgh1jW5XF7c-0dc"
    assert (await jobs.another().acquire(initial())).reason is NotAcquired.HELD
    assert await jobs.call("complete", first.lease)
    assert await jobs.acquire(initial()) == JobNotAcquired(reason=NotAcquired.COMPLETED)


@pytest.mark.parametrize("kind", ["OTHER", "schedule", None, 1, True])
async def test_unknown_types_are_refused(refusing: Jobs, kind: Any) -> None:
    with pytest.raises(InvalidJobIdentityOptionsError):
        await refusing.acquire(options(type=kind))


@pytest.mark.parametrize("name", ["lease_ms", "heartbeat_ms"])
@pytest.mark.parametrize("value", [None, True, 1.0, "900", 2**53, -1, float("nan"), []], ids=repr)
async def test_timing_that_is_no_safe_integer_is_refused(refusing: Jobs, name: str, value: Any) -> None:
    with pytest.raises(InvalidJobLeaseOptionsError):
        await refusing.acquire(options(**{name: value}))


async def test_options_that_are_missing_or_null_are_an_identity_error(refusing: Jobs) -> None:
    for missing in ((), (None,), (7,), ("sync",), ({},)):
        with pytest.raises(InvalidJobIdentityOptionsError):
            await refusing.call("acquire", *missing)
        with pytest.raises(InvalidJobIdentityOptionsError):
            await refusing.call("run_exclusive", *missing)
    with pytest.raises(InvalidJobIdentityOptionsError):
        await refusing.run_exclusive(None, lambda lease: None)


async def test_options_of_untyped_callers_may_be_a_mapping(jobs: Jobs) -> None:
    assert (await jobs.acquire({"code": "sync-orders", "run_key": "k", "type": "SCHEDULE"})).acquired


@pytest.mark.parametrize("bad", [None, {"code": 7, "run_key": "k"}, {"code": "x", "run_key": "k", "lease_ms": None}])
async def test_bad_options_raise_before_any_sql(bad: Any) -> None:
    def no_connection() -> AbstractContextManager[Any]:
        raise AssertionError("a connection was asked for")

    for service in (JobSchedulerService(no_connection), SyncJobSchedulerService(no_connection)):  # type: ignore[arg-type]
        for jobs in (Jobs(service),):
            with pytest.raises((InvalidJobIdentityOptionsError, InvalidJobLeaseOptionsError)):
                await jobs.acquire(bad)
            with pytest.raises((InvalidJobIdentityOptionsError, InvalidJobLeaseOptionsError)):
                await jobs.run_exclusive(bad, lambda lease: None)


# --- runExclusive ----------------------------------------------------------------------------------------------------


async def test_the_winner_runs_and_the_row_is_a_success(jobs: Jobs) -> None:
    seen: list[JobExecutionLease] = []

    def work(lease: JobExecutionLease) -> str:
        seen.append(lease)
        lease.raise_if_lost()
        return "done"

    outcome = await jobs.run_exclusive(options(name="Sync orders from ERP", lease_ms=15 * 60_000), work)
    assert outcome == RunExclusiveResult(acquired=True, result="done")
    (lease,) = seen
    assert lease.idempotency_key.startswith("v2:")
    assert (lease.attempt, lease.lost.is_set()) == (1, False)
    row = jobs.backend.row(lease.id)
    assert (row["status"], row["data"], row["owner_token"]) == ("SUCCESS", None, lease.owner_token)


async def test_a_run_that_another_node_owns_or_has_completed_is_not_run(jobs: Jobs) -> None:
    def never(lease: JobExecutionLease) -> None:
        raise AssertionError("ran")

    first = await jobs.another().acquired()
    assert await jobs.run_exclusive(options(), never) == RunExclusiveResult(acquired=False)
    assert await jobs.another().call("complete", first.lease)
    assert await jobs.run_exclusive(options(), never) == RunExclusiveResult(acquired=False)


async def test_owner_tokens_are_unpredictable_and_rotate_while_the_key_stays(jobs: Jobs) -> None:
    first = await jobs.acquired()
    assert first.owner_token.version == 4
    assert await jobs.call("fail", first.lease, {"error": "x"})
    second = await jobs.acquired()
    assert (second.id, second.attempt, second.idempotency_key) == (first.id, 2, first.idempotency_key)
    assert second.owner_token != first.owner_token
    assert second.fencing_token > first.fencing_token
    assert second.row.data is None  # reclaiming clears data


async def test_fencing_tokens_grow_over_runs(jobs: Jobs) -> None:
    tokens = [(await jobs.acquired(run_key=key)).fencing_token for key in ("b", "a", "c")]
    assert tokens == sorted(set(tokens))


def test_a_bullmq_job_id_is_deterministic_and_free_of_colons() -> None:
    key = "v2:aV_0WdnjWG686cnhQIIg7xFYkUVv2kIMT-wOCbiWakI"
    assert bullmq_job_id(key) == bullmq_job_id(key)
    assert ":" not in bullmq_job_id(key)
    assert bullmq_job_id(key) != bullmq_job_id(key + "x")
    assert not bullmq_job_id(key).isdecimal()  # BullMQ refuses ids that are integers, too


async def test_a_failure_is_recorded_and_raised_again(jobs: Jobs) -> None:
    ids = []

    def work(lease: JobExecutionLease) -> None:
        ids.append(lease.id)
        raise ValueError("no stock \0")

    with pytest.raises(ValueError, match="no stock"):
        await jobs.run_exclusive(options(), work)
    row = jobs.backend.row(ids[0])
    assert (row["status"], row["data"]) == ("FAIL", {"error": "no stock \ufffd", "type": "ValueError"})
    assert (await jobs.run_exclusive(options(), lambda lease: lease.attempt)).result == 2


async def test_ownership_that_was_reclaimed_before_finalization_is_an_error(jobs: Jobs) -> None:
    steal = jobs.stealing()

    def work(lease: JobExecutionLease) -> str:
        steal()
        return "too late"

    with pytest.raises(LostJobLeaseError) as caught:
        await jobs.run_exclusive(options(), work)
    assert isinstance(caught.value.id, UUID)
    row = jobs.backend.row(caught.value.id)
    assert (row["status"], row["attempt"]) == ("RUNNING", 2)


async def test_a_failure_after_the_loss_is_the_loss(jobs: Jobs) -> None:
    steal = jobs.stealing()

    def work(lease: JobExecutionLease) -> None:
        steal()
        raise ValueError("because of it")

    with pytest.raises(LostJobLeaseError) as caught:
        await jobs.run_exclusive(options(), work)
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize("method", ["heartbeat", "complete", "fail", "release"])
async def test_a_former_owner_changes_nothing(jobs: Jobs, method: str) -> None:
    first = await jobs.acquired()
    jobs.backend.advance(901)
    second = await jobs.another().acquired()
    before = jobs.backend.row(first.id)
    assert await jobs.call(method, first.lease) is False
    assert jobs.backend.row(first.id) == before
    assert await jobs.call("complete", second.lease)


# --- external side effects -------------------------------------------------------------------------------------------


async def test_an_effect_may_happen_twice_and_its_key_tells(jobs: Jobs) -> None:
    mails: list[str] = []
    outbox: dict[str, str] = {}
    steal = jobs.stealing()

    def work(lease: JobExecutionLease) -> None:
        mails.append("sent")
        outbox.setdefault(lease.idempotency_key, "sent")
        if lease.attempt == 1:
            taken = steal()  # the worker loses its lease before it has recorded success
            jobs.backend.synchronous().release(taken.lease)

    with pytest.raises(LostJobLeaseError):
        await jobs.run_exclusive(options(), work)
    assert (await jobs.run_exclusive(options(), work)).acquired
    assert (len(mails), len(outbox)) == (2, 1)


# --- manual lease API ------------------------------------------------------------------------------------------------


async def test_acquire_inserts_reclaims_fail_reclaims_expired_and_leaves_success(jobs: Jobs) -> None:
    first = await jobs.acquired()
    assert await jobs.another().acquire(options()) == JobNotAcquired(reason=NotAcquired.HELD)
    assert await jobs.call("fail", first.lease)
    second = await jobs.another().acquired()
    jobs.backend.advance(901)
    third = await jobs.acquired()
    assert [r.attempt for r in (first, second, third)] == [1, 2, 3]
    assert await jobs.call("complete", third.lease)
    jobs.backend.advance(10**6)
    assert await jobs.acquire(options()) == JobNotAcquired(reason=NotAcquired.COMPLETED)


async def test_heartbeat_bumps_modified_at_for_the_running_owner_only(jobs: Jobs) -> None:
    result = await jobs.acquired()
    jobs.backend.advance(100)
    before = jobs.backend.row(result.id)["modified_at"]
    assert await jobs.call("heartbeat", result.lease)
    assert jobs.backend.row(result.id)["modified_at"] > before
    for stranger in (JobLease(result.id, uuid4()), JobLease(uuid4(), result.owner_token)):
        assert not await jobs.call("heartbeat", stranger)
    assert await jobs.call("complete", result.lease)
    assert not await jobs.call("heartbeat", result.lease)


@pytest.mark.parametrize(
    ("method", "given", "status", "kept"),
    [
        ("complete", ({"rows": 42},), "SUCCESS", {"rows": 42}),
        ("complete", ([1, "x", None],), "SUCCESS", [1, "x", None]),
        ("complete", (), "SUCCESS", None),
        ("complete", (None,), "SUCCESS", None),
        ("fail", ({"error": "x"},), "FAIL", {"error": "x"}),
        ("fail", (), "FAIL", None),
        ("release", (), "FAIL", {"released": True}),
        ("release", ({"item": 7},), "FAIL", {"item": 7}),
    ],
)
async def test_ends(jobs: Jobs, method: str, given: Any, status: str, kept: Any) -> None:
    result = await jobs.acquired()
    assert await jobs.call(method, result.lease, *given)
    row = jobs.backend.row(result.id)
    assert (row["status"], row["data"]) == (status, kept)
    assert (row["finished_at"] is not None, row["owner_token"]) == (True, result.owner_token)
    assert (await jobs.acquire(options())).acquired == (status == "FAIL")


async def test_an_end_can_be_repeated_but_not_changed(jobs: Jobs) -> None:
    result = await jobs.acquired()
    assert await jobs.call("complete", result.lease, {"rows": 1})
    assert await jobs.call("complete", result.lease, {"rows": 2})
    assert not await jobs.call("fail", result.lease)
    assert not await jobs.call("release", result.lease)
    assert jobs.backend.row(result.id)["data"] == {"rows": 1}


async def test_the_manual_example(jobs: Jobs) -> None:
    lock: JobAcquireResult = await jobs.acquire(options())
    assert lock.acquired
    lease = JobLease(id=lock.id, owner_token=lock.owner_token)
    jobs.stealing()()
    completed = await jobs.call("complete", lease, {"rows": 42})
    assert not completed
    assert LostJobLeaseError(lock.id).id == lock.id
    assert not await jobs.call("fail", lease, {"error": "too late"})


# --- lease timing ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lease_ms", [3, 4, 2**53 - 1])
async def test_positive_safe_leases_above_two_are_accepted(jobs: Jobs, lease_ms: int) -> None:
    result = await jobs.acquired(lease_ms=lease_ms)
    assert result.row.lease_ms == lease_ms
    if lease_ms > 1000:
        assert await jobs.call("heartbeat", result.lease)
        assert not (await jobs.acquire(options())).acquired


@pytest.mark.parametrize("lease_ms", [2, 1, 0, -5])
async def test_shorter_leases_are_refused(refusing: Jobs, lease_ms: int) -> None:
    with pytest.raises(InvalidJobLeaseOptionsError):
        await refusing.acquire(options(lease_ms=lease_ms))


@pytest.mark.parametrize(
    ("lease_ms", "heartbeat_ms"), [(3, 1), (5, 1), (6, 2), (179_999, 59_999), (180_000, 60_000), (900_000, 60_000)]
)
def test_the_default_heartbeat_is_sixty_seconds_or_a_third(lease_ms: int, heartbeat_ms: int) -> None:
    assert resolve(options(lease_ms=lease_ms)).heartbeat_ms == heartbeat_ms


@pytest.mark.parametrize(("lease_ms", "heartbeat_ms"), [(100, 49), (101, 50), (900_000, 449_999), (3, 0), (3, 1)])
def test_a_heartbeat_below_half_the_lease_or_zero(lease_ms: int, heartbeat_ms: int) -> None:
    assert resolve(options(lease_ms=lease_ms, heartbeat_ms=heartbeat_ms)).heartbeat_ms == heartbeat_ms


@pytest.mark.parametrize(("lease_ms", "heartbeat_ms"), [(100, 50), (101, 51), (900_000, 450_000), (3, 2), (100, -1)])
async def test_other_heartbeats_are_refused(refusing: Jobs, lease_ms: int, heartbeat_ms: int) -> None:
    with pytest.raises(InvalidJobLeaseOptionsError):
        await refusing.acquire(options(lease_ms=lease_ms, heartbeat_ms=heartbeat_ms))


async def test_heartbeats_start_and_stop_by_themselves(jobs: Jobs) -> None:
    beaten: list[Any] = []

    def work(lease: JobExecutionLease) -> int:
        first = jobs.backend.row(lease.id)["modified_at"]
        for _ in range(3_000):
            if jobs.backend.row(lease.id)["modified_at"] > first:
                break
            assert not lease.lost.wait(0.01)
        beaten.append(jobs.backend.row(lease.id)["modified_at"] > first)
        return lease.attempt

    assert (await jobs.run_exclusive(options(lease_ms=60_000, heartbeat_ms=50), work)).result == 1
    assert beaten == [True]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("lease-")]


async def test_without_heartbeats_a_lease_is_not_extended(jobs: Jobs) -> None:
    def work(lease: JobExecutionLease) -> None:
        before = jobs.backend.row(lease.id)["modified_at"]
        assert not lease.lost.wait(0.3)
        assert jobs.backend.row(lease.id)["modified_at"] == before

    assert (await jobs.run_exclusive(options(heartbeat_ms=0), work)).acquired


# --- failure and retry semantics -------------------------------------------------------------------------------------


async def test_fail_is_reclaimable_at_once_and_running_only_after_its_lease(jobs: Jobs) -> None:
    first = await jobs.acquired(lease_ms=60_000)
    jobs.backend.advance(59)
    assert (await jobs.another().acquire(options())).acquired is False
    assert await jobs.call("release", first.lease)
    assert (await jobs.another().acquired(lease_ms=60_000)).attempt == 2
    jobs.backend.advance(60.5)
    assert (await jobs.acquired()).attempt == 3


async def test_each_occurrence_has_a_run_key_of_its_own(jobs: Jobs) -> None:
    for key in ("2026-07-20T03:00:00Z", "2026-07-21T03:00:00Z"):
        result = await jobs.acquired(run_key=key)
        assert result.attempt == 1
        assert await jobs.call("complete", result.lease)
        assert (await jobs.acquire(options(run_key=key))).reason is NotAcquired.COMPLETED


# --- the two deliberate differences ----------------------------------------------------------------------------------


async def test_expiry_is_judged_by_the_holders_duration(jobs: Jobs) -> None:
    await jobs.acquired(lease_ms=60_000)
    jobs.backend.advance(59)
    assert not (await jobs.acquire(options(lease_ms=3))).acquired
    jobs.backend.advance(2)
    assert (await jobs.acquire(options(lease_ms=10**9))).attempt == 2


async def test_a_heartbeat_after_expiry_is_refused_and_an_end_accepted(jobs: Jobs) -> None:
    result = await jobs.acquired()
    jobs.backend.advance(901)
    assert not await jobs.call("heartbeat", result.lease)
    assert await jobs.call("complete", result.lease)


# --- beyond the text: the loss is told at once -----------------------------------------------------------------------


async def test_the_work_is_told_when_the_run_was_reclaimed(jobs: Jobs) -> None:
    told: list[str] = []
    steal = jobs.stealing()

    def work(lease: JobExecutionLease) -> None:
        lease.lost.call(lambda: told.append("called"))
        steal()
        assert lease.lost.wait(60)
        told.append("waited")
        lease.raise_if_lost()

    with pytest.raises(LostJobLeaseError, match=r"reclaimed|in time"):
        await jobs.run_exclusive(options(heartbeat_ms=50), work)
    for _ in range(6_000):  # the asynchronous caller doesn't wait for a thread
        if len(told) == 2:
            break
        await asyncio.sleep(0.01)
    assert sorted(told) == ["called", "waited"]


async def test_a_stop_request_is_a_loss_and_gives_the_run_back(jobs: Jobs) -> None:
    ids: list[UUID] = []

    def work(lease: JobExecutionLease) -> None:
        ids.append(lease.id)
        jobs.backend.request_stop(lease.id)
        assert lease.lost.wait(60)
        lease.raise_if_lost()

    with pytest.raises(LostJobLeaseError, match="asked to stop"):
        await jobs.run_exclusive(options(heartbeat_ms=20), work)
    row = jobs.backend.row(ids[0])
    assert (row["status"], row["data"]) == ("FAIL", {"released": True})


async def test_asynchronous_work_is_cancelled_at_the_loss(backend: Backend) -> None:
    service = backend.asynchronous()
    stopped = asyncio.Event()

    async def work(lease: JobExecutionLease) -> None:
        await asyncio.to_thread(backend.request_stop, lease.id)
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()

    with pytest.raises(LostJobLeaseError, match="asked to stop") as caught:
        await service.run_exclusive(options(heartbeat_ms=20), work)
    assert stopped.is_set()
    assert isinstance(caught.value.__cause__, asyncio.CancelledError)


async def test_what_its_cleaning_up_raises_is_behind_the_loss(backend: Backend) -> None:
    async def work(lease: JobExecutionLease) -> None:
        await asyncio.to_thread(backend.request_stop, lease.id)
        try:
            await asyncio.Event().wait()
        finally:
            raise ValueError("while cleaning up")

    with pytest.raises(LostJobLeaseError) as caught:
        await backend.asynchronous().run_exclusive(options(heartbeat_ms=20), work)
    assert isinstance(caught.value.__cause__, ValueError)


async def test_asynchronous_work_that_is_not_cancelled_awaits_the_signal_and_may_still_succeed(
    backend: Backend,
) -> None:
    async def work(lease: JobExecutionLease) -> str:
        await asyncio.to_thread(backend.request_stop, lease.id)
        await lease.lost
        return lease.lost.reason

    outcome = await backend.asynchronous().run_exclusive(options(heartbeat_ms=20), work, cancel_on_loss=False)
    assert outcome.result == "the run was asked to stop"


async def test_a_cancellation_from_outside_gives_the_run_back(backend: Backend) -> None:
    started: asyncio.Future[UUID] = asyncio.get_running_loop().create_future()

    async def work(lease: JobExecutionLease) -> None:
        started.set_result(lease.id)
        await asyncio.Event().wait()

    task = asyncio.create_task(backend.asynchronous().run_exclusive(options(), work))
    id = await started
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    row = backend.row(id)
    assert (row["status"], row["data"]) == ("FAIL", {"released": True})


async def test_a_time_limit_of_the_caller_is_not_swallowed_by_the_loss(backend: Backend) -> None:
    """Both happen at once: whoever set the limit sees it."""

    async def work(lease: JobExecutionLease) -> None:
        await asyncio.to_thread(backend.request_stop, lease.id)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            outer.cancel()
            raise

    outer = asyncio.create_task(backend.asynchronous().run_exclusive(options(heartbeat_ms=20), work))
    with pytest.raises(asyncio.CancelledError):
        await outer


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_gives_the_run_back(backend: Backend, interrupt: type[BaseException]) -> None:
    ids = []

    def work(lease: JobExecutionLease) -> None:
        ids.append(lease.id)
        raise interrupt

    with pytest.raises(interrupt):
        backend.synchronous().run_exclusive(options(), work)
    row = backend.row(ids[0])
    assert (row["status"], row["data"]) == ("FAIL", {"released": True})


async def test_trust_ends_before_the_lease_does() -> None:
    """Without heartbeats, the work is told while the lease is still its own: nobody can have taken the run yet."""
    leases = InMemoryLeases(Clock(running=False))
    service = InMemoryJobSchedulerService(leases)
    told = asyncio.Event()

    async def work(lease: JobExecutionLease) -> None:
        leases.clock.advance(979)
        assert not lease.lost.is_set()
        leases.clock.advance(2)
        assert lease.lost.is_set()
        assert await service.heartbeat(lease)
        told.set()
        await asyncio.Event().wait()

    with pytest.raises(LostJobLeaseError, match="in time"):
        await service.run_exclusive(options(lease_ms=1_000_000, heartbeat_ms=0), work)
    assert told.is_set()


async def test_without_a_database_trust_ends_by_itself(refusing: Jobs) -> None:
    """Every heartbeat fails."""
    jobs = refusing
    told: list[bool] = []

    def work(lease: JobExecutionLease) -> None:
        jobs.service._ask = failing  # type: ignore[method-assign, assignment]
        told.append(lease.lost.wait(60))
        lease.raise_if_lost()

    def failing(ask: Any) -> Any:
        raise DatabaseUnavailableError("cut off")

    with pytest.raises(LostJobLeaseError, match="in time") as caught:
        await jobs.run_exclusive(options(lease_ms=500, heartbeat_ms=20), work)
    assert "could not be recorded" in caught.value.__notes__[0]


# --- beyond the text: decorators -------------------------------------------------------------------------------------


async def test_run_exclusive_is_a_decorator(backend: Backend) -> None:
    asynchronous, synchronous = backend.asynchronous(), backend.synchronous()

    @asynchronous.run_exclusive(lambda key, *, rows=0: options(run_key=key))
    async def first(lease: JobExecutionLease, key: str, *, rows: int = 0) -> tuple[str, int, int]:
        """Its text."""
        return key, rows, lease.attempt

    @synchronous.run_exclusive(options(run_key="b"))
    def second(lease: JobExecutionLease) -> int:
        return lease.attempt

    assert await first("a", rows=7) == RunExclusiveResult(acquired=True, result=("a", 7, 1))
    assert second() == RunExclusiveResult(acquired=True, result=1)
    assert await first("b") == RunExclusiveResult(acquired=False)
    assert (first.__name__, first.__doc__) == ("first", "Its text.")
    with pytest.raises(InvalidJobLeaseOptionsError):  # where it is written, not where it is called
        synchronous.run_exclusive(options(lease_ms=1))


async def test_work_of_the_wrong_colour_is_refused(backend: Backend) -> None:
    async def coroutine(lease: JobExecutionLease) -> None: ...

    def plain(lease: JobExecutionLease) -> None: ...

    with pytest.raises(TypeError, match="plain function"):
        backend.synchronous().run_exclusive(options(), coroutine)
    with pytest.raises(TypeError, match="coroutine function"):
        await backend.asynchronous().run_exclusive(options(), plain)  # type: ignore[arg-type, func-returns-value]
    assert (await backend.asynchronous().acquire(options())).acquired  # it was not recorded as done


# --- beyond the text: odd data ---------------------------------------------------------------------------------------


def _deep(levels: int) -> Any:
    value: Any = "bottom"
    for _ in range(levels):
        value = {"down": value}
    return value


def _doubling() -> Any:
    value: Any = "x"
    for _ in range(60):
        value = [value, value]
    return value


class Unprintable:
    def __str__(self) -> str:
        raise RuntimeError("no")


ODD: dict[str, Any] = {
    "NUL": {"a\0": "b\0"},
    "lone surrogate": ["\ud83d", {"\udc00": 1}],
    "40 MiB": "x" * (40 * 1024 * 1024),
    "40 MiB of bytes": b"\xff" * (40 * 1024 * 1024),
    "deep": _deep(100_000),
    "as many values as grains of rice": _doubling(),
    "numbers that are written out": [1e300] * 2_000,
    "a long number": 10**5_000,
    "not numbers": [float("nan"), float("inf"), -0.0, 5e-324],
    "unprintable": {"x": Unprintable()},
    "an exception": ValueError("x\0"),
}


@pytest.mark.parametrize(
    ("method", "data"),
    [("complete", data) for data in ODD.values()] + [(method, ODD["NUL"]) for method in ("fail", "release")],
    ids=[*ODD, "NUL-fail", "NUL-release"],
)
def test_any_data_is_recorded_at_the_first_try(backend: Backend, method: str, data: Any) -> None:
    service = backend.synchronous()
    result = service.acquire(options())
    assert isinstance(result, JobAcquired)
    assert getattr(service, method)(result.lease, data)
    row = backend.row(result.id)
    assert row["status"] == ("SUCCESS" if method == "complete" else "FAIL")
    assert row["data"] is not None


async def test_any_error_is_recorded(jobs: Jobs) -> None:
    class Odd(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no")

    ids = []

    def work(lease: JobExecutionLease) -> None:
        ids.append(lease.id)
        raise Odd

    with pytest.raises(Odd):
        await jobs.run_exclusive(options(), work)
    assert jobs.backend.row(ids[0])["data"] == {"error": "<Odd that can't be printed>", "type": "Odd"}


async def test_names_are_made_storable(jobs: Jobs) -> None:
    assert (await jobs.acquired(name="a\0\ud83d")).row.name == "a\ufffd\ufffd"


# --- beyond the text: retention --------------------------------------------------------------------------------------

AT_ONCE = timedelta(microseconds=1)


async def _ended(jobs: Jobs, run_key: str, how: str = "complete") -> JobAcquired:
    result = await jobs.acquired(run_key=run_key)
    assert await jobs.call(how, result.lease)
    return result


async def test_what_was_pruned_never_runs_again(jobs: Jobs) -> None:
    for day, how in ((1, "complete"), (2, "fail"), (3, "release"), (4, "complete")):
        await _ended(jobs, f"2020-01-0{day}T00:00:00Z", how)
    (dry,) = await jobs.call("prune", AT_ONCE, keep_last=1, dry_run=True)
    assert (dry.code, dry.rows, dry.through) == ("sync-orders", 3, datetime(2020, 1, 3, tzinfo=UTC))
    assert await jobs.call("prune", AT_ONCE, keep_last=1) == [dry]
    pruned = JobNotAcquired(reason=NotAcquired.PRUNED)
    # With a row or without one, on the tick or beside it, reprocessed or not: at or below the mark nothing begins.
    for key in ("2020-01-03T00:00:00Z", "2020-01-01T00:00:00Z", "2019-05-05T05:05:05Z", "2020-01-02T00:00:00Z#r1"):
        assert await jobs.acquire(options(run_key=key)) == pruned
        assert await jobs.run_exclusive(options(run_key=key), lambda lease: 1) == RunExclusiveResult(acquired=False)
    assert (await jobs.acquire(options(run_key="2020-01-04T00:00:00Z"))).reason is NotAcquired.COMPLETED
    assert (await jobs.acquire(options(run_key="2020-01-03T00:00:01Z"))).acquired
    assert (await jobs.acquire(options(code="other", run_key="2020-01-01T00:00:00Z"))).acquired


async def test_what_no_mark_can_stand_for_stays(jobs: Jobs) -> None:
    kept = [
        "2020-01-01",
        "2020-01-01T00:00:00.000Z",
        "2020-01-01T00:00:00+00:00",
        "2020-02-30T00:00:00Z",
        "0000-01-01T00:00:00Z",
        "2020-01-01T24:00:00Z",
        "2020-01-01T00:00:00Z#r0",
        "9999-12-31T23:59:59Z",
        "tick 7",
    ]
    for key in kept:
        await _ended(jobs, key)
    first = await jobs.acquire(initial())
    assert await jobs.call("complete", first.lease)
    running = await jobs.acquired(run_key="2020-01-01T00:00:00Z")
    assert await jobs.call("prune", AT_ONCE, keep_last=0) == []
    for key in kept:
        assert (await jobs.acquire(options(run_key=key))).reason is NotAcquired.COMPLETED
    assert (await jobs.acquire(initial())).reason is NotAcquired.COMPLETED
    assert await jobs.call("heartbeat", running.lease)


async def test_a_run_that_goes_on_below_the_mark_may_be_reclaimed_until_it_ends(jobs: Jobs) -> None:
    running = await jobs.acquired(run_key="2020-01-01T00:00:00Z")
    await _ended(jobs, "2020-01-02T00:00:00Z")
    (pruned,) = await jobs.call("prune", AT_ONCE, keep_last=0)
    assert pruned.rows == 1
    jobs.backend.advance(901)
    again = await jobs.acquired(run_key="2020-01-01T00:00:00Z")
    assert (again.id, again.attempt) == (running.id, 2)
    assert await jobs.call("fail", again.lease)
    assert (await jobs.acquire(options(run_key="2020-01-01T00:00:00Z"))).reason is NotAcquired.PRUNED


async def test_the_newest_runs_and_young_ones_stay(jobs: Jobs) -> None:
    for day in range(1, 6):
        await _ended(jobs, f"2020-01-0{day}T00:00:00Z")
    assert await jobs.call("prune", timedelta(days=1), keep_last=0) == []
    assert await jobs.call("prune", AT_ONCE) == []  # the last ten
    (pruned,) = await jobs.call("prune", AT_ONCE, keep_last=2)
    assert (pruned.rows, pruned.through) == (3, datetime(2020, 1, 3, tzinfo=UTC))


@pytest.mark.parametrize("bad", [{"older_than": timedelta(0)}, {"older_than": AT_ONCE, "keep_last": -1}])
async def test_pruning_everything_at_once_is_refused(refusing: Jobs, bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must"):
        await refusing.call("prune", **bad)
