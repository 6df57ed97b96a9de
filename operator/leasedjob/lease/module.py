"""JobSchedulerModule: the service with its connections, from start to end of a program.

async with JobSchedulerModule("postgresql://…") as jobs:
    await jobs.service.run_exclusive(options, work)
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import ClassVar, Protocol, Self

from leasedjob.errors import LeasedJobError
from leasedjob.lease.database import Connections, Credentials, Pool, translated
from leasedjob.lease.migrate import check_async
from leasedjob.lease.service import JobSchedulerService


class HasConnection(Protocol):
    """A pool that somebody else opens and closes: `leasedjob`'s, or psycopg_pool's AsyncConnectionPool."""

    @property
    def connection(self) -> Connections: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSchedulerModuleOptions:
    """Settings of a module.

    Args:
        global_: `JobSchedulerModule.current()` gives its service while it is open; default True.
        max_size: how many connections its own pool may open; default 4.
        timeout: seconds that one statement may take, connecting included; default 30.
    """

    global_: bool = True
    max_size: int = 4
    timeout: float = 30.0


class JobSchedulerModule:
    """An asynchronous context manager that checks the schema, provides the service, and closes its pool last.

    Args:
        database: a connection string, Credentials, or a pool, which is then not closed here. A pool's connections must
            be in autocommit and prepare no statements.
        options: see JobSchedulerModuleOptions; `global_` wins over the same field of the options.

    Raises:
        SchemaMissingError: on entering, if the schema is absent or too old; it names `leasedjob migrate`.
        DatabaseUnavailableError, DatabaseRefusedError: on entering.
    """

    _open: ClassVar[list[JobSchedulerModule]] = []

    def __init__(
        self,
        database: str | Credentials | HasConnection,
        options: JobSchedulerModuleOptions | None = None,
        *,
        global_: bool | None = None,
    ) -> None:
        self._database = database
        self.options = options or JobSchedulerModuleOptions()
        self._global = self.options.global_ if global_ is None else global_
        self._stack = AsyncExitStack()
        self._service: JobSchedulerService | None = None

    @property
    def service(self) -> JobSchedulerService:
        """The service, while the module is open; LeasedJobError before and after."""
        if self._service is None:
            raise LeasedJobError("the JobSchedulerModule is not open")
        return self._service

    @classmethod
    def current(cls) -> JobSchedulerService:
        """The service of the global module that was opened last; LeasedJobError if none is open."""
        if not cls._open:
            raise LeasedJobError("no global JobSchedulerModule is open")
        return cls._open[-1].service

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as opening:
            connection = await self._connection(opening)
            with translated():
                async with connection() as opened:
                    await check_async(opened)
            self._stack = opening.pop_all()
        self._service = JobSchedulerService(connection, timeout=self.options.timeout)
        if self._global:
            self._open.append(self)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self in self._open:
            self._open.remove(self)
        self._service = None
        await self._stack.aclose()

    async def _connection(self, opening: AsyncExitStack) -> Connections:
        database = self._database
        if isinstance(database, str):
            database = Credentials.from_conninfo(database)
        if isinstance(database, Credentials):
            return (await opening.enter_async_context(Pool(database, max_size=self.options.max_size))).connection
        return database.connection
