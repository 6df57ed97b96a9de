"""JobSchedulerService on PostgreSQL under faults and competition; the rest is in test_lease_contract.py."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from uuid import UUID

import psycopg
import pytest

from leasedjob.errors import DatabaseUnavailableError, LostJobLeaseError, SchemaMissingError
from leasedjob.lease import (
    JobAcquired,
    JobExecutionLease,
    JobNotAcquired,
    JobSchedulerService,
    NotAcquired,
    SyncJobSchedulerService,
    core,
)
from leasedjob.lease.alarm import cut_after
from leasedjob.lease.database import connect_sync, connections, operator_pool
from leasedjob.lease.lost import boottime

from .conftest import Database, lock_row, warm
from .lease_backends import Jobs, options

pytestmark = pytest.mark.integration


@pytest.fixture(params=["async", "sync"])
async def jobs(request: pytest.FixtureRequest, database: Database) -> Jobs:
    if request.param == "async":
        return Jobs(JobSchedulerService(connections(database.credentials)))
    return Jobs(SyncJobSchedulerService(lambda: connect_sync(database.credentials)))


# --- locks of strangers ----------------------------------------------------------------------------------------------


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


async def test_a_row_that_is_locked_for_two_lease_lengths(jobs: Jobs, database: Database) -> None:
    """The holder is told within its trust, nobody gets in meanwhile, and afterwards the run goes on with attempt 2."""
    lock = threading.Event()
    rivals: list[object] = []

    def work(lease: JobExecutionLease) -> None:
        stranger = psycopg.connect(database.dsn)
        lock_row(stranger, "job_scheduler", "id", lease.id)
        locked = time.monotonic()
        assert lease.lost.wait(60)
        stranger.execute("SELECT pg_sleep(%s)", (max(0.0, 4.1 - (time.monotonic() - locked)),))
        rivals.append(SyncJobSchedulerService(database.dsn).acquire(options()))
        stranger.close()
        lock.set()
        lease.raise_if_lost()

    with pytest.raises(LostJobLeaseError, match="in time"):
        await jobs.run_exclusive(options(lease_ms=2_000, heartbeat_ms=100), work)
    assert await asyncio.to_thread(lock.wait, 60)
    assert rivals == [JobNotAcquired(reason=NotAcquired.HELD)]
    assert (await jobs.acquire(options())).attempt == 2


async def test_work_that_is_done_waits_for_a_locked_row_as_long_as_it_is_trusted(
    jobs: Jobs, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core, "TRIES", 1)
    ids: list[UUID] = []

    def work(lease: JobExecutionLease) -> None:
        ids.append(lease.id)
        stranger = psycopg.connect(database.dsn)
        lock_row(stranger, "job_scheduler", "id", lease.id)
        threading.Timer(1.0, stranger.close).start()

    assert (await jobs.run_exclusive(options(), work)).acquired
    assert database.row(ids[0])["status"] == "SUCCESS"


async def test_a_success_that_can_not_be_recorded_is_a_clear_error_and_leaves_nothing_for_ever(
    jobs: Jobs, database: Database
) -> None:
    strangers = []

    def work(lease: JobExecutionLease) -> None:
        stranger = database.connect(autocommit=False)
        lock_row(stranger, "job_scheduler", "id", lease.id)
        strangers.append(stranger)

    with pytest.raises(DatabaseUnavailableError, match=r"has ended.* may be repeated.*locked elsewhere"):
        await jobs.run_exclusive(options(lease_ms=2_000, heartbeat_ms=100), work)
    strangers[0].rollback()
    assert (await jobs.acquire(options())).attempt == 2


async def test_a_failure_that_can_not_be_recorded_is_still_the_works_own(jobs: Jobs, database: Database) -> None:
    def work(lease: JobExecutionLease) -> None:
        lock_row(database.connect(autocommit=False), "job_scheduler", "id", lease.id)
        raise ValueError("no stock")

    with pytest.raises(ValueError, match="no stock") as caught:
        await jobs.run_exclusive(options(), work)
    assert "could not be recorded" in caught.value.__notes__[0]


# --- clocks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("minutes", [-10, 10])
async def test_the_clients_clock_decides_nothing(
    jobs: Jobs, database: Database, monkeypatch: pytest.MonkeyPatch, minutes: int
) -> None:
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + minutes * 60)
    jobs.service._clock = lambda: boottime() + minutes * 60  # type: ignore[method-assign]
    result = await jobs.acquired(lease_ms=60_000)
    assert not (await jobs.acquire(options(lease_ms=3))).acquired
    assert await jobs.call("heartbeat", result.lease)
    assert await jobs.call("fail", result.lease)
    outcome = await jobs.run_exclusive(options(), lambda lease: lease.lost.is_set())
    assert outcome.result is False


# --- connections of the caller ---------------------------------------------------------------------------------------


async def test_what_was_decided_is_committed_on_a_connection_without_autocommit(database: Database) -> None:
    with psycopg.connect(database.dsn) as blocking:
        mine = SyncJobSchedulerService(lambda: contextlib.nullcontext(blocking))  # type: ignore[arg-type]
        result = mine.acquire(options())
        assert isinstance(result, JobAcquired)
        assert database.row(result.id)["status"] == "RUNNING"
        assert mine.fail(result.lease)
        assert database.row(result.id)["status"] == "FAIL"

    async def work(lease: JobExecutionLease) -> int:
        return lease.attempt

    async with await psycopg.AsyncConnection.connect(database.dsn) as awaiting:
        other = JobSchedulerService(lambda: contextlib.nullcontext(awaiting))  # type: ignore[arg-type]
        assert (await other.run_exclusive(options(), work)).result == 2
        assert database.row(result.id)["status"] == "SUCCESS"


async def test_heartbeats_that_fail_for_any_reason_are_tried_again_until_trust_is_over(
    jobs: Jobs, database: Database
) -> None:
    def work(lease: JobExecutionLease) -> None:
        database.rows("ALTER FUNCTION leasedjob.heartbeat RENAME TO heartbeat_no_more")
        assert lease.lost.wait(60)
        database.rows("ALTER FUNCTION leasedjob.heartbeat_no_more RENAME TO heartbeat")
        lease.raise_if_lost()

    with pytest.raises(LostJobLeaseError, match=r"in time"):
        await jobs.run_exclusive(options(lease_ms=2_000, heartbeat_ms=100), work)


# --- lost answers ----------------------------------------------------------------------------------------------------


class Breaking:
    """Connections whose answer to the n-th statement is lost after the server has carried it out."""

    def __init__(self, database: Database, *lost: int) -> None:
        self._database = database
        self._lost = set(lost)
        self.statements = 0

    def __call__(self) -> AbstractContextManager[Any]:
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


async def test_an_answer_that_comes_after_the_end_of_trust_starts_nothing(jobs: Jobs) -> None:
    times = iter([0.0])
    jobs.service._clock = lambda: next(times, 10_000.0)  # type: ignore[method-assign]

    def never(lease: JobExecutionLease) -> None:
        raise AssertionError("ran")

    with pytest.raises(LostJobLeaseError, match="in time"):
        await jobs.run_exclusive(options(), never)
    assert (await jobs.acquire(options())).attempt == 2  # it was given back


# --- a server that says nothing --------------------------------------------------------------------------------------


def test_a_statement_without_an_answer_ends_at_its_time_limit(database: Database) -> None:
    connection = database.connect()
    began = time.monotonic()
    with pytest.raises(TimeoutError), cut_after(connection, 0.3):
        connection.execute("SELECT pg_sleep(60)")
    assert time.monotonic() - began < 30
    assert connection.closed
    with cut_after(database.connect(), 0.3) as _:
        pass  # what was in time is left alone


async def test_a_statement_that_hangs_is_a_passing_fault(
    jobs: Jobs, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core, "TRIES", 1)
    jobs.service._timeout = 0.3
    stranger = database.connect(autocommit=False)
    stranger.execute("LOCK TABLE leasedjob.job_scheduler IN ACCESS EXCLUSIVE MODE")  # as a migration might
    with pytest.raises(DatabaseUnavailableError, match=r"did not answer acquire within 0.3 s"):
        await jobs.acquire(options())


async def test_a_database_without_the_schema_names_the_command(empty_database: Database) -> None:
    service = JobSchedulerService(connections(empty_database.credentials))
    with pytest.raises(SchemaMissingError, match="leasedjob migrate"):
        await service.acquire(options())


# --- competition -----------------------------------------------------------------------------------------------------


@pytest.fixture
async def service(database: Database) -> AsyncIterator[JobSchedulerService]:
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
