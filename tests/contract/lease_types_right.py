"""What type checkers must know of the library: read by mypy and pyright (tests/contract/test_lease_types.py)."""

from __future__ import annotations

import asyncio
from typing import assert_type
from uuid import UUID

import psycopg_pool

from leasedjob import (
    JobAcquired,
    JobAcquireOptions,
    JobAcquireResult,
    JobExecutionLease,
    JobLease,
    JobNotAcquired,
    JobScheduler,
    JobSchedulerModule,
    JobSchedulerService,
    NotAcquired,
    RunExclusiveResult,
    SyncJobSchedulerModule,
    SyncJobSchedulerService,
)
from leasedjob.testing import InMemoryJobSchedulerService, InMemorySyncJobSchedulerService

OPTIONS = JobAcquireOptions(code="sync", run_key="k")


def options_of(key: str) -> JobAcquireOptions:
    return JobAcquireOptions(code="sync", run_key=key)


def blocking(jobs: SyncJobSchedulerService) -> None:
    result = jobs.acquire(OPTIONS)
    assert_type(result, JobAcquireResult)
    if result.acquired:
        assert_type(result.row, JobScheduler)
        assert_type(result.id, UUID)
        assert_type(result.owner_token, UUID)
        assert_type(result.idempotency_key, str)
        assert_type(result.attempt, int)
        assert_type(result.fencing_token, int)
        assert_type(result.lease, JobLease)
        assert_type(jobs.complete(result.lease, {"rows": 1}), bool)
    else:
        assert_type(result.reason, NotAcquired)

    def work(lease: JobExecutionLease) -> int:
        return lease.attempt

    assert_type(jobs.run_exclusive(OPTIONS, work), RunExclusiveResult[int])

    @jobs.run_exclusive(options_of)
    def named(lease: JobExecutionLease, key: str) -> str:
        return key

    assert_type(named("k"), RunExclusiveResult[str])

    @jobs.run_exclusive(OPTIONS)
    def always(lease: JobExecutionLease) -> None: ...

    assert_type(always(), RunExclusiveResult[None])


def exactly(result: JobAcquireResult) -> None:
    if result.acquired is True:
        assert_type(result, JobAcquired)
    else:
        assert_type(result, JobNotAcquired)


async def awaiting(jobs: JobSchedulerService) -> None:
    result = await jobs.acquire(OPTIONS)
    assert_type(result, JobAcquireResult)
    if not result.acquired:
        assert_type(result.reason, NotAcquired)
        return
    assert_type(result.fencing_token, int)
    assert_type(await jobs.heartbeat(result.lease), bool)
    assert_type(await jobs.release(result.lease), bool)

    async def work(lease: JobExecutionLease) -> int:
        await asyncio.sleep(0)
        await lease.lost
        return lease.attempt

    assert_type(await jobs.run_exclusive(OPTIONS, work), RunExclusiveResult[int])

    @jobs.run_exclusive(options_of, cancel_on_loss=False)
    async def named(lease: JobExecutionLease, key: str) -> str:
        return key

    assert_type(await named("k"), RunExclusiveResult[str])


async def modules() -> None:
    async with JobSchedulerModule("postgresql://db", global_=False) as module:
        assert_type(module.service, JobSchedulerService)
    with SyncJobSchedulerModule("postgresql://db") as other:
        assert_type(other.service, SyncJobSchedulerService)
    await awaiting(InMemoryJobSchedulerService())
    blocking(InMemorySyncJobSchedulerService())


def pools(
    blocking_pool: psycopg_pool.ConnectionPool, awaiting_pool: psycopg_pool.AsyncConnectionPool
) -> tuple[object, ...]:
    return (
        SyncJobSchedulerModule(blocking_pool),
        JobSchedulerModule(awaiting_pool),
        SyncJobSchedulerService(blocking_pool.connection),
        JobSchedulerService(awaiting_pool.connection),
    )
