"""JobSchedulerModule: the service with its connections, from start to end of a program.

async with JobSchedulerModule("postgresql://…") as jobs:
    await jobs.service.run_exclusive(options, work)

with SyncJobSchedulerModule("postgresql://…") as jobs:
    jobs.service.run_exclusive(options, work)
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

from leasedjob.errors import LeasedJobError
from leasedjob.lease.database import Connections, Credentials, Pool, connect_sync, translated
from leasedjob.lease.migrate import check, check_async
from leasedjob.lease.service import JobSchedulerService, SyncConnections, SyncJobSchedulerService

S = TypeVar("S", JobSchedulerService, SyncJobSchedulerService)


class HasConnection(Protocol):
    """A pool that somebody else opens and closes: `leasedjob`'s, or psycopg_pool's AsyncConnectionPool."""

    @property
    def connection(self) -> Connections: ...


class HasSyncConnection(Protocol):
    """A pool that somebody else opens and closes: psycopg_pool's ConnectionPool."""

    @property
    def connection(self) -> SyncConnections: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSchedulerModuleOptions:
    """Settings of a module.

    Args:
        global_: `current()` of its class gives its service while it is open; default True.
        max_size: how many connections its own pool may open; default 4. Without meaning for SyncJobSchedulerModule,
            which opens a connection for each statement.
        timeout: seconds that one statement may take, connecting included; default 30.
    """

    global_: bool = True
    max_size: int = 4
    timeout: float = 30.0


class _Module(Generic[S]):
    """What is open, and which service is the global one."""

    _open: ClassVar[list[Any]]

    def __init_subclass__(cls) -> None:
        cls._open = []

    def __init__(
        self,
        database: Any,
        options: JobSchedulerModuleOptions | None = None,
        *,
        global_: bool | None = None,
    ) -> None:
        if isinstance(database, str):
            database = Credentials.from_conninfo(database)
        self._database = database
        self.options = options or JobSchedulerModuleOptions()
        self._global = self.options.global_ if global_ is None else global_
        self._service: S | None = None

    @property
    def service(self) -> S:
        """The service, while the module is open; LeasedJobError before and after."""
        if self._service is None:
            raise LeasedJobError(f"the {type(self).__name__} is not open")
        return self._service

    @classmethod
    def current(cls) -> S:
        """The service of the global module that was opened last; LeasedJobError if none is open."""
        if not cls._open:
            raise LeasedJobError(f"no global {cls.__name__} is open")
        service: S = cls._open[-1].service
        return service

    def _begin(self, service: S) -> None:
        self._service = service
        if self._global:
            self._open.append(self)

    def _end(self) -> None:
        if self in self._open:
            self._open.remove(self)
        self._service = None


class JobSchedulerModule(_Module[JobSchedulerService]):
    """An asynchronous context manager that checks the schema, provides the service, and closes its pool last.

    Args:
        database: a connection string, Credentials, or a pool, which is then not closed here. A pool's connections must
            be in autocommit and prepare no statements.
        options: see JobSchedulerModuleOptions; `global_` wins over the same field of the options.

    Raises:
        SchemaMissingError: on entering, if the schema is absent or too old; it names `leasedjob migrate`.
        DatabaseUnavailableError, DatabaseRefusedError: on entering.
    """

    def __init__(
        self,
        database: str | Credentials | HasConnection,
        options: JobSchedulerModuleOptions | None = None,
        *,
        global_: bool | None = None,
    ) -> None:
        super().__init__(database, options, global_=global_)
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as opening:
            database = self._database
            if isinstance(database, Credentials):
                database = await opening.enter_async_context(Pool(database, max_size=self.options.max_size))
            with translated():
                async with database.connection() as opened:
                    await check_async(opened)
            self._stack = opening.pop_all()
        self._begin(JobSchedulerService(database.connection, timeout=self.options.timeout))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._end()
        await self._stack.aclose()


class SyncJobSchedulerModule(_Module[SyncJobSchedulerService]):
    """As JobSchedulerModule, for programs without an event loop: a context manager that checks the schema.

    Args:
        database: a connection string or Credentials, for a connection for each statement; or a pool, which is not
            closed here.
    """

    def __init__(
        self,
        database: str | Credentials | HasSyncConnection,
        options: JobSchedulerModuleOptions | None = None,
        *,
        global_: bool | None = None,
    ) -> None:
        super().__init__(database, options, global_=global_)

    def __enter__(self) -> Self:
        database = self._database
        if isinstance(database, Credentials):
            with connect_sync(database) as opened:
                check(opened)
        else:
            database = database.connection
            with translated(), database() as opened:
                check(opened)
        self._begin(SyncJobSchedulerService(database, timeout=self.options.timeout))
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
