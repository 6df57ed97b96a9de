# ruff: noqa
"""What type checkers must refuse, by the comment at the end of the line: "both", or "mypy" alone where pyright can't know
(it doesn't narrow a union by the truth of a member, so it is told that every member has every field).
"""

from __future__ import annotations

from leasedjob import JobAcquireOptions, JobExecutionLease, JobSchedulerService, SyncJobSchedulerService

OPTIONS = JobAcquireOptions(code="sync", run_key="k")


async def wrong(jobs: JobSchedulerService, blocking: SyncJobSchedulerService) -> None:
    result = await jobs.acquire(OPTIONS)
    result.id  # refused: mypy
    if result.acquired:
        result.reason  # refused: mypy
    else:
        result.owner_token  # refused: mypy
    if result.acquired is True:
        result.rows  # refused: both
    jobs.acquire(OPTIONS).acquired  # refused: both
    blocking.acquire(OPTIONS).fencing_token  # refused: mypy
    JobAcquireOptions(code="x", lease_ms=None)  # refused: both
    JobAcquireOptions(code="x", lease_ms="900")  # refused: both
    JobAcquireOptions(run_key="x")  # refused: both
    await jobs.heartbeat(result)  # refused: both
    await blocking.acquire(OPTIONS)  # refused: both
    await jobs.run_exclusive(OPTIONS, plain)  # refused: both


def plain(lease: JobExecutionLease) -> int:
    return 1
