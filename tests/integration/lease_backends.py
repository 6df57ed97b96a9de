"""What the contract suite and the state machine run on: the lease in memory, and PostgreSQL of two versions.

`Jobs` gives the asynchronous and the synchronous service one face, so that each behaviour is written once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar
from uuid import UUID

import psycopg
from psycopg.rows import dict_row

from leasedjob.lease import (
    JobAcquired,
    JobAcquireOptions,
    JobExecutionLease,
    JobSchedulerService,
    JobSchedulerType,
    RunExclusiveResult,
    SyncJobSchedulerService,
)
from leasedjob.testing import InMemoryJobSchedulerService, InMemoryLeases, InMemorySyncJobSchedulerService

Work = Callable[[JobExecutionLease], Any]
Service = JobSchedulerService | SyncJobSchedulerService
S = TypeVar("S", JobSchedulerService, SyncJobSchedulerService)


class Backend(Protocol):
    """A place where rows are; each service that it makes stands for another process."""

    def asynchronous(self) -> JobSchedulerService: ...

    def synchronous(self) -> SyncJobSchedulerService: ...

    def advance(self, seconds: float) -> None:
        """Time goes by for every row, and nobody has sent a heartbeat meanwhile."""

    def row(self, id: UUID) -> dict[str, Any]: ...

    def request_stop(self, id: UUID) -> None: ...


def eager(service: S) -> S:
    """It prunes without the wait for transactions that can't be seen: there are none."""
    service._settle_seconds = 0.0
    return service


class Memory:
    """The in-memory store."""

    def __init__(self) -> None:
        self.leases = InMemoryLeases()

    def asynchronous(self) -> InMemoryJobSchedulerService:
        return InMemoryJobSchedulerService(self.leases)

    def synchronous(self) -> InMemorySyncJobSchedulerService:
        return InMemorySyncJobSchedulerService(self.leases)

    def advance(self, seconds: float) -> None:
        self.leases.age(seconds)

    def row(self, id: UUID) -> dict[str, Any]:
        (job,) = [job for job in self.leases.rows if job.id == id]
        return {name: getattr(job, name) for name in job.__dataclass_fields__}

    def request_stop(self, id: UUID) -> None:
        self.leases.request_stop(id)


class Postgres:
    """A database, and one connection that looks into it and for each face one that the services share."""

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self.connection = psycopg.connect(dsn, autocommit=True, row_factory=dict_row)

    def clear(self) -> None:
        self.connection.execute("TRUNCATE leasedjob.job_scheduler, leasedjob.shutdown_report, leasedjob.pruned_through")

    def close(self) -> None:
        self.connection.close()

    def asynchronous(self) -> JobSchedulerService:
        return eager(JobSchedulerService(self.dsn))

    def synchronous(self) -> SyncJobSchedulerService:
        return eager(SyncJobSchedulerService(self.dsn))

    def advance(self, seconds: float) -> None:
        self.connection.execute(
            "UPDATE leasedjob.job_scheduler SET modified_at = modified_at - %s * interval '1 second'", (seconds,)
        )

    def row(self, id: UUID) -> dict[str, Any]:
        row = self.connection.execute("SELECT * FROM leasedjob.job_scheduler WHERE id = %s", (id,)).fetchone()
        assert row is not None
        return row

    def request_stop(self, id: UUID) -> None:
        # An adopted run of an operator is asked to stop like this.
        self.connection.execute(
            "UPDATE leasedjob.job_scheduler SET stop_requested_at = clock_timestamp() WHERE id = %s", (id,)
        )


class Jobs:
    """One face for both services: every method is awaited."""

    def __init__(self, service: Service, backend: Backend | None = None) -> None:
        self.service = service
        self._backend = backend

    @property
    def backend(self) -> Backend:
        assert self._backend is not None
        return self._backend

    @property
    def blocking(self) -> bool:
        return isinstance(self.service, SyncJobSchedulerService)

    def another(self) -> Jobs:
        """Another process's service."""
        backend = self.backend
        return Jobs(backend.synchronous() if self.blocking else backend.asynchronous(), backend)

    def stealing(self) -> Callable[[], JobAcquired]:
        """A function for work in a thread: time goes by, and somebody else takes the run."""

        def steal() -> JobAcquired:
            self.backend.advance(901)
            rival = self.backend.synchronous()
            for _ in range(1_000):  # "held", while a heartbeat that comes too late has the row's lock
                taken = rival.acquire(options())
                if taken.acquired:
                    return taken
            raise AssertionError(taken)

        return steal

    async def call(self, name: str, *arguments: Any, **named: Any) -> Any:
        method = getattr(self.service, name)
        if isinstance(self.service, JobSchedulerService):
            return await method(*arguments, **named)
        return await asyncio.to_thread(method, *arguments, **named)

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


def options(**changes: Any) -> JobAcquireOptions:
    """The run that the specification's examples are about."""
    return JobAcquireOptions(**{"code": "sync-orders", "run_key": "2026-07-20T03:00:00Z", **changes})


def initial(code: str = "seed") -> JobAcquireOptions:
    return JobAcquireOptions(code=code, type=JobSchedulerType.INITIAL)


@contextmanager
def closing(backend: Postgres) -> Iterator[Postgres]:
    try:
        yield backend
    finally:
        backend.close()
