"""JobSchedulerService on PostgreSQL, asynchronous and synchronous: the specification's text, in its order.

`Jobs` gives both services one face, so that each behaviour is written once and holds for both.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from leasedjob.errors import (
    DatabaseUnavailableError,
    InvalidJobIdentityOptionsError,
    InvalidJobLeaseOptionsError,
    LostJobLeaseError,
    SchemaMissingError,
)
from leasedjob.lease import (
    JobAcquired,
    JobAcquireOptions,
    JobExecutionLease,
    JobLease,
    JobNotAcquired,
    JobSchedulerService,
    JobSchedulerStatus,
    JobSchedulerType,
    NotAcquired,
    RunExclusiveResult,
    SyncJobSchedulerService,
)
from leasedjob.lease.database import connect_sync, connections

from .conftest import Database, lock_row, warm

pytestmark = pytest.mark.integration

Work = Callable[[JobExecutionLease], Any]


class Jobs:
    """One face for both services: every method is awaited."""

    def __init__(self, service: JobSchedulerService | SyncJobSchedulerService) -> None:
        self.service = service

    async def call(self, name: str, *arguments: Any) -> Any:
        method = getattr(self.service, name)
        if isinstance(self.service, JobSchedulerService):
            return await method(*arguments)
        return await asyncio.to_thread(method, *arguments)

    async def acquire(self, options: Any) -> Any:
        return await self.call("acquire", options)

    async def acquired(self, **changes: Any) -> JobAcquired:
        result = await self.acquire(options(**changes))
        assert isinstance(result, JobAcquired)
        return result

    async def run_exclusive(self, options: Any, work: Work) -> RunExclusiveResult[Any]:
        """`work` is a plain function; the asynchronous service gets it as a coroutine function."""
        if isinstance(self.service, SyncJobSchedulerService):
            return await self.call("run_exclusive", options, work)  # type: ignore[no-any-return]

        async def coroutine(lease: JobExecutionLease) -> Any:
            return await asyncio.to_thread(work, lease)

        return await self.service.run_exclusive(options, coroutine)


@pytest.fixture(params=["async", "sync"])
async def jobs(request: pytest.FixtureRequest, database: Database) -> Jobs:
    if request.param == "async":
        return Jobs(JobSchedulerService(connections(database.credentials)))
    return Jobs(SyncJobSchedulerService(lambda: connect_sync(database.credentials)))


def options(**changes: Any) -> JobAcquireOptions:
    return JobAcquireOptions(**{"code": "sync-orders", "run_key": "2026-07-20T03:00:00Z", **changes})


# --- identity --------------------------------------------------------------------------------------------------------


async def test_the_row_says_what_was_asked(jobs: Jobs, database: Database) -> None:
    result = await jobs.acquired(name="Sync orders from ERP", code=" sync-orders ", lease_ms=60_000)
    assert result.acquired
    assert result.idempotency_key == result.row.lock_key == "v2:aV_0WdnjWG686cnhQIIg7xFYkUVv2kIMT-wOCbiWakI"
    assert (result.row.type, result.row.code, result.row.run_key) == (
        JobSchedulerType.SCHEDULE,
        "sync-orders",
        "2026-07-20T03:00:00Z",
    )
    assert (result.row.name, result.row.status, result.row.lease_ms) == (
        "Sync orders from ERP",
        JobSchedulerStatus.RUNNING,
        60_000,
    )
    assert (result.attempt, result.row.data, result.row.owner_token) == (1, None, result.owner_token)
    assert "sync-orders" not in database.row(result.id)["lock_key"]


async def test_initial_is_one_canonical_run_per_code(jobs: Jobs) -> None:
    initial = JobAcquireOptions(code="seed", type=JobSchedulerType.INITIAL)
    first = await jobs.acquire(initial)
    assert first.idempotency_key == "v2:1A44RnwtS96WYiB2BzM7F5aF0N-Grgh1jW5XF7c-0dc"
    assert await jobs.call("complete", first.lease)
    assert await jobs.acquire(initial) == JobNotAcquired(reason=NotAcquired.COMPLETED)


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        (None, InvalidJobIdentityOptionsError),
        ({"code": 7, "run_key": "k"}, InvalidJobIdentityOptionsError),
        ({"code": "x", "run_key": 7}, InvalidJobIdentityOptionsError),
        ({"code": "x", "run_key": "k", "type": "X"}, InvalidJobIdentityOptionsError),
        ({"code": "x", "run_key": "k", "lease_ms": None}, InvalidJobLeaseOptionsError),
        ({"code": "x", "run_key": "k", "heartbeat_ms": True}, InvalidJobLeaseOptionsError),
    ],
    ids=str,
)
async def test_bad_options_raise_before_any_sql(bad: Any, error: type[Exception]) -> None:
    def no_connection() -> AbstractContextManager[Any]:
        raise AssertionError("a connection was asked for")

    for service in (
        Jobs(JobSchedulerService(no_connection)),  # type: ignore[arg-type]
        Jobs(SyncJobSchedulerService(no_connection)),
    ):
        with pytest.raises(error):
            await service.acquire(bad)
        with pytest.raises(error):
            await service.run_exclusive(bad, lambda lease: None)


# --- run_exclusive ---------------------------------------------------------------------------------------------------


async def test_the_winner_runs_and_the_row_is_a_success(jobs: Jobs, database: Database) -> None:
    seen: list[JobExecutionLease] = []

    def work(lease: JobExecutionLease) -> str:
        seen.append(lease)
        lease.raise_if_lost()
        return "done"

    assert await jobs.run_exclusive(options(), work) == RunExclusiveResult(acquired=True, result="done")
    (lease,) = seen
    assert lease.idempotency_key.startswith("v2:")
    assert (lease.attempt, lease.lost.is_set()) == (1, False)
    row = database.row(lease.id)
    assert (row["status"], row["data"], row["owner_token"]) == ("SUCCESS", None, lease.owner_token)


async def test_a_run_that_is_held_or_done_is_not_run(jobs: Jobs) -> None:
    def never(lease: JobExecutionLease) -> None:
        raise AssertionError("ran")

    first = await jobs.acquired()
    assert await jobs.run_exclusive(options(), never) == RunExclusiveResult(acquired=False)
    assert await jobs.acquire(options()) == JobNotAcquired(reason=NotAcquired.HELD)
    assert await jobs.call("complete", first.lease)
    assert await jobs.run_exclusive(options(), never) == RunExclusiveResult(acquired=False)


async def test_a_failure_is_recorded_and_raised_again(jobs: Jobs, database: Database) -> None:
    ids = []

    def work(lease: JobExecutionLease) -> None:
        ids.append(lease.id)
        raise ValueError("no stock \0")

    with pytest.raises(ValueError, match="no stock"):
        await jobs.run_exclusive(options(), work)
    row = database.row(ids[0])
    assert (row["status"], row["data"]) == ("FAIL", {"error": "no stock \ufffd", "type": "ValueError"})


async def test_a_failure_that_can_not_be_recorded_is_still_the_works_own(jobs: Jobs, database: Database) -> None:
    strangers = []

    def work(lease: JobExecutionLease) -> None:
        stranger = database.connect(autocommit=False)
        lock_row(stranger, "job_scheduler", "id", lease.id)
        strangers.append(stranger)
        raise ValueError("no stock")

    with pytest.raises(ValueError, match="no stock") as caught:
        await jobs.run_exclusive(options(), work)
    assert "could not be recorded" in caught.value.__notes__[0]


async def test_reclaiming_rotates_the_token_and_keeps_the_key(jobs: Jobs) -> None:
    first = await jobs.acquired()
    assert await jobs.call("fail", first.lease, {"error": "x"})
    second = await jobs.acquired()
    assert (second.id, second.attempt, second.idempotency_key) == (first.id, 2, first.idempotency_key)
    assert second.owner_token != first.owner_token
    assert second.fencing_token > first.fencing_token
    assert second.row.data is None


async def test_ownership_lost_before_the_end_is_an_error(jobs: Jobs, database: Database) -> None:
    other = Jobs(SyncJobSchedulerService(lambda: connect_sync(database.credentials)))

    def work(lease: JobExecutionLease) -> str:
        database.age(lease.id, 901)
        other.service.acquire(options())  # type: ignore[unused-coroutine]
        return "too late"

    with pytest.raises(LostJobLeaseError) as caught:
        await jobs.run_exclusive(options(), work)
    row = database.row(caught.value.id)  # type: ignore[arg-type]
    assert (row["status"], row["attempt"]) == ("RUNNING", 2)


async def test_a_failure_after_the_loss_is_the_loss(jobs: Jobs, database: Database) -> None:
    def work(lease: JobExecutionLease) -> None:
        database.rows("UPDATE leasedjob.job_scheduler SET owner_token = %s", uuid4())
        raise ValueError("because of it")

    with pytest.raises(LostJobLeaseError) as caught:
        await jobs.run_exclusive(options(), work)
    assert isinstance(caught.value.__cause__, ValueError)


async def test_the_work_is_told_at_once_when_the_lease_is_lost(jobs: Jobs, database: Database) -> None:
    told = threading.Event()

    def work(lease: JobExecutionLease) -> None:
        database.rows("UPDATE leasedjob.job_scheduler SET owner_token = %s", uuid4())
        if lease.lost.wait(10):
            told.set()
        lease.raise_if_lost()

    with pytest.raises(LostJobLeaseError, match="reclaimed"):
        await jobs.run_exclusive(options(lease_ms=3_000, heartbeat_ms=50), work)
    assert await asyncio.to_thread(told.wait, 10)


async def test_heartbeats_keep_a_short_lease_alive(jobs: Jobs, database: Database) -> None:
    def work(lease: JobExecutionLease) -> int:
        with database.connect() as connection:
            connection.execute("SELECT pg_sleep(1.5)")  # three lease lengths, by the database's clock
        assert not lease.lost.is_set()
        return lease.attempt

    assert (await jobs.run_exclusive(options(lease_ms=500, heartbeat_ms=100), work)).result == 1


async def test_without_heartbeats_trust_ends_before_the_lease_does(jobs: Jobs, database: Database) -> None:
    ends: list[bool] = []

    def work(lease: JobExecutionLease) -> None:
        connection = database.connect()
        assert lease.lost.wait(10)
        row = connection.execute(
            "SELECT leasedjob.is_expired(modified_at, lease_ms) AS expired FROM leasedjob.job_scheduler"
        ).fetchone()
        assert row
        ends.append(row["expired"])
        lease.raise_if_lost()

    with pytest.raises(LostJobLeaseError):
        await jobs.run_exclusive(options(lease_ms=5_000, heartbeat_ms=0), work)
    for _ in range(1000):
        if ends:
            break
        await asyncio.sleep(0.01)
    assert ends == [False]


async def test_cancelled_work_stops_at_the_loss_and_the_run_is_given_back(database: Database) -> None:
    service = JobSchedulerService(connections(database.credentials))
    stopped = asyncio.Event()

    async def work(lease: JobExecutionLease) -> None:
        database.rows("UPDATE leasedjob.job_scheduler SET stop_requested_at = clock_timestamp()")
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()

    with pytest.raises(LostJobLeaseError, match="asked to stop"):
        await service.run_exclusive(options(lease_ms=3_000, heartbeat_ms=20), work)
    assert stopped.is_set()
    (row,) = database.rows("SELECT status, data FROM leasedjob.job_scheduler")
    assert row == {"status": "FAIL", "data": {"released": True}}


async def test_work_that_is_not_cancelled_may_still_succeed(database: Database) -> None:
    service = JobSchedulerService(connections(database.credentials))

    async def work(lease: JobExecutionLease) -> str:
        database.rows("UPDATE leasedjob.job_scheduler SET stop_requested_at = clock_timestamp()")
        assert await asyncio.to_thread(lease.lost.wait, 10)
        return "finished all the same"

    outcome = await service.run_exclusive(options(lease_ms=3_000, heartbeat_ms=20), work, cancel_on_loss=False)
    assert outcome.result == "finished all the same"
    (row,) = database.rows("SELECT status FROM leasedjob.job_scheduler")
    assert row["status"] == "SUCCESS"


async def test_a_cancellation_from_outside_releases_the_run(database: Database) -> None:
    service = JobSchedulerService(connections(database.credentials))
    started = asyncio.Event()

    async def work(lease: JobExecutionLease) -> None:
        started.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(service.run_exclusive(options(), work))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    (row,) = database.rows("SELECT status, data FROM leasedjob.job_scheduler")
    assert row == {"status": "FAIL", "data": {"released": True}}


async def test_an_interrupt_releases_the_run(database: Database) -> None:
    service = SyncJobSchedulerService(lambda: connect_sync(database.credentials))

    def work(lease: JobExecutionLease) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        service.run_exclusive(options(), work)
    (row,) = database.rows("SELECT status, data FROM leasedjob.job_scheduler")
    assert row == {"status": "FAIL", "data": {"released": True}}


async def test_as_a_decorator(database: Database) -> None:
    asynchronous = JobSchedulerService(connections(database.credentials))
    synchronous = SyncJobSchedulerService(lambda: connect_sync(database.credentials))
    keys = iter("abc")

    @asynchronous.exclusive(lambda: options(run_key=next(keys)))
    async def first(lease: JobExecutionLease) -> int:
        return lease.attempt

    @synchronous.exclusive(options(run_key="b"))
    def second(lease: JobExecutionLease) -> int:
        return lease.attempt

    assert await first() == RunExclusiveResult(acquired=True, result=1)
    assert second() == RunExclusiveResult(acquired=True, result=1)
    assert await first() == RunExclusiveResult(acquired=False)
    assert first.__name__ == "first"


# --- the manual lease API --------------------------------------------------------------------------------------------


async def test_heartbeat_bumps_modified_at_for_the_running_owner_only(jobs: Jobs, database: Database) -> None:
    result = await jobs.acquired()
    database.age(result.id, 100)
    before = database.row(result.id)["modified_at"]
    assert await jobs.call("heartbeat", result.lease)
    assert database.row(result.id)["modified_at"] > before
    assert not await jobs.call("heartbeat", JobLease(result.id, uuid4()))
    assert not await jobs.call("heartbeat", JobLease(uuid4(), result.owner_token))
    assert await jobs.call("complete", result.lease)
    assert not await jobs.call("heartbeat", result.lease)


@pytest.mark.parametrize(
    ("method", "given", "status", "kept"),
    [
        ("complete", ({"rows": 42},), "SUCCESS", {"rows": 42}),
        ("complete", (), "SUCCESS", None),
        ("complete", (None,), "SUCCESS", None),
        ("fail", ({"error": "x"},), "FAIL", {"error": "x"}),
        ("fail", (), "FAIL", None),
        ("release", (), "FAIL", {"released": True}),
        ("release", ({"item": 7},), "FAIL", {"item": 7}),
    ],
)
async def test_ends(jobs: Jobs, database: Database, method: str, given: Any, status: str, kept: Any) -> None:
    result = await jobs.acquired()
    assert await jobs.call(method, result.lease, *given)
    row = database.row(result.id)
    assert (row["status"], row["data"]) == (status, kept)
    again = await jobs.acquire(options())
    assert again.acquired == (status == "FAIL")


@pytest.mark.parametrize("method", ["heartbeat", "complete", "fail", "release"])
async def test_a_former_owner_changes_nothing(jobs: Jobs, database: Database, method: str) -> None:
    first = await jobs.acquired()
    database.age(first.id, 901)
    second = await jobs.acquired()
    before = database.row(first.id)
    assert await jobs.call(method, first.lease) is False
    assert database.row(first.id) == before
    assert await jobs.call("complete", second.lease)


# --- lease timing ----------------------------------------------------------------------------------------------------


async def test_expiry_is_judged_by_the_holders_duration(jobs: Jobs, database: Database) -> None:
    first = await jobs.acquired(lease_ms=60_000)
    database.age(first.id, 59)
    assert not (await jobs.acquire(options(lease_ms=3))).acquired
    database.age(first.id, 2)
    assert (await jobs.acquire(options(lease_ms=10**9))).attempt == 2


async def test_a_heartbeat_after_expiry_is_refused_and_an_end_accepted(jobs: Jobs, database: Database) -> None:
    result = await jobs.acquired()
    database.age(result.id, 901)
    assert not await jobs.call("heartbeat", result.lease)
    assert await jobs.call("complete", result.lease)


async def test_the_longest_lease_is_stored(jobs: Jobs) -> None:
    result = await jobs.acquired(lease_ms=2**53 - 1)
    assert await jobs.call("heartbeat", result.lease)
    assert not (await jobs.acquire(options())).acquired


# --- faults ----------------------------------------------------------------------------------------------------------


async def test_a_locked_row_is_held_for_others_and_unknown_for_its_owner(jobs: Jobs, database: Database) -> None:
    result = await jobs.acquired()
    database.age(result.id, 901)
    stranger = database.connect(autocommit=False)
    lock_row(stranger, "job_scheduler", "id", result.id)
    assert await jobs.acquire(options()) == JobNotAcquired(reason=NotAcquired.HELD)
    database_row_is_alive = database.connect(autocommit=False)
    stranger.rollback()
    database.age(result.id, -900)
    lock_row(database_row_is_alive, "job_scheduler", "id", result.id)
    with pytest.raises(DatabaseUnavailableError, match="locked elsewhere"):
        await jobs.call("heartbeat", result.lease)
    with pytest.raises(DatabaseUnavailableError, match="locked elsewhere"):
        await jobs.call("complete", result.lease)
    database_row_is_alive.rollback()
    assert await jobs.call("complete", result.lease)


class Breaking:
    """Connections whose answer to the n-th statement is lost after the server has carried it out."""

    def __init__(self, database: Database, *lost: int) -> None:
        self._database = database
        self._lost = set(lost)
        self.statements = 0

    def __call__(self) -> AbstractContextManager[Any]:
        from contextlib import contextmanager

        @contextmanager
        def connection() -> Iterator[psycopg.Connection[Any]]:
            self.statements += 1
            with connect_sync(self._database.credentials) as opened:
                yield opened
            if self.statements in self._lost:
                raise psycopg.OperationalError("server closed the connection unexpectedly")

        return connection()


async def test_a_lost_answer_is_read_back_not_guessed(database: Database) -> None:
    service = SyncJobSchedulerService(Breaking(database, 1, 3, 4))
    result = service.acquire(options())
    assert isinstance(result, JobAcquired)
    assert result.attempt == 1
    assert service.complete(result.lease, {"rows": 1})
    row = database.row(result.id)
    assert (row["status"], row["attempt"], row["data"]) == ("SUCCESS", 1, {"rows": 1})


async def test_a_database_without_the_schema_names_the_command(empty_database: Database) -> None:
    service = JobSchedulerService(connections(empty_database.credentials))
    with pytest.raises(SchemaMissingError, match="leasedjob migrate"):
        await service.acquire(options())


# --- competition -----------------------------------------------------------------------------------------------------


@pytest.fixture
async def service(database: Database) -> AsyncIterator[JobSchedulerService]:
    from leasedjob.lease.database import operator_pool

    async with operator_pool(database.credentials, max_size=8) as pool:
        await warm(pool, 8)
        yield JobSchedulerService(pool.connection)


async def test_of_many_exactly_one_runs(service: JobSchedulerService) -> None:
    ran: list[str] = []

    def work(key: str) -> Callable[[JobExecutionLease], Awaitable[None]]:
        async def run(lease: JobExecutionLease) -> None:
            ran.append(key)

        return run

    keys = [f"key-{n}" for n in range(40)]
    outcomes = await asyncio.gather(
        *(service.run_exclusive(options(run_key=key), work(key)) for key in keys for _ in range(8))
    )
    assert sorted(ran) == sorted(keys)
    assert sum(outcome.acquired for outcome in outcomes) == len(keys)


async def test_of_many_exactly_one_reclaims(service: JobSchedulerService, database: Database) -> None:
    result = await service.acquire(options())
    assert isinstance(result, JobAcquired)
    for attempt in range(2, 12):
        database.age(result.id, 901)
        answers = await asyncio.gather(*(service.acquire(options()) for _ in range(8)))
        assert [answer.attempt for answer in answers if answer.acquired] == [attempt]
