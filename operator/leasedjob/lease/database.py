"""Connections to PostgreSQL, and what its faults mean.

Credentials are files (a mounted Secret) and are read again for each connection, so a rotated password needs no
restart. Every connection is in autocommit, prepares no named statement and sends no `options`, so it works through
PgBouncer in transaction mode.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import select
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Final, Self
from weakref import WeakKeyDictionary, ref

import psycopg
from psycopg import conninfo
from psycopg.pq import TransactionStatus
from psycopg.rows import DictRow, dict_row

from leasedjob.errors import DatabaseRefusedError, DatabaseUnavailableError, LeasedJobError, SchemaMissingError

CONNECT_TIMEOUT_SECONDS: Final = 10
# A peer that vanished without a reset is noticed within about 25 s, long before the kernel's own 15 minutes.
_TCP: Final = {
    "keepalives": 1,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 20_000,
}

Connections = Callable[[], AbstractAsyncContextManager[psycopg.AsyncConnection[Any]]]  # whatever its rows are


# --- credentials -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Credentials:
    """Where the database is and who we are: either a directory of files, or a fixed connection string.

    Files of the directory, each optional: `uri` or `url` (a libpq connection string, the base), `host`, `port`,
    `dbname`, `user` or `username`, `password`, `sslmode`, `sslrootcert` (a path, "system", or the PEM itself),
    `ca.crt` (PEM), `tls.crt` with `tls.key` (client certificate). A file for one field wins over the uri.

    Args:
        directory: the mounted Secret; read again by each call of `conninfo`.
        fixed: used instead of a directory; for tests and command lines.
        overrides: libpq parameters that win over both.
        advice: what a person may do where the directory can't be read.
    """

    directory: Path | None = None
    fixed: str = ""
    overrides: tuple[tuple[str, str], ...] = ()
    advice: str = ""

    @classmethod
    def from_directory(cls, path: str | Path, **overrides: str) -> Credentials:
        """Credentials that are read from `path` each time they are used."""
        return cls(directory=Path(path), overrides=tuple(overrides.items()))

    @classmethod
    def from_conninfo(cls, text: str, **overrides: str) -> Credentials:
        """Credentials from a libpq connection string or URI."""
        return cls(fixed=text, overrides=tuple(overrides.items()))

    def conninfo(self) -> str:
        """The connection string as of now.

        Raises:
            DatabaseRefusedError: the directory can't be read, or its uri is no connection string.
        """
        try:
            parameters = conninfo.conninfo_to_dict(self.fixed) if self.directory is None else self._read(self.directory)
        except OSError as error:
            raise DatabaseRefusedError(
                f"the database credentials in {self.directory} can't be read: {error.strerror or error}"
                f"{self.advice and f'; {self.advice}'}",
                FaultKind.REFUSED_LOGIN,
            ) from error
        except psycopg.ProgrammingError as error:
            raise DatabaseRefusedError(
                "the database uri is not a PostgreSQL connection string", FaultKind.REFUSED_LOGIN
            ) from error
        parameters.update(self.overrides)
        if "," in str(parameters.get("host") or ""):
            parameters.setdefault("target_session_attrs", "read-write")
        return conninfo.make_conninfo("", **parameters)

    @staticmethod
    def _read(directory: Path) -> dict[str, Any]:
        if not directory.is_dir():
            raise FileNotFoundError(2, "no such directory", str(directory))

        def content(*names: str) -> str | None:
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    # A password may begin or end with a space; only the newline that editors add is cut.
                    if text := (directory / name).read_text().rstrip("\r\n"):
                        return text
            return None

        parameters: dict[str, Any] = dict(conninfo.conninfo_to_dict(content("uri", "url") or ""))
        for parameter, names in {
            "host": ("host",),
            "port": ("port",),
            "dbname": ("dbname",),
            "user": ("user", "username"),
            "password": ("password",),
            "sslmode": ("sslmode",),
        }.items():
            if (value := content(*names)) is not None:
                parameters[parameter] = value
        if root := content("sslrootcert"):
            parameters["sslrootcert"] = str(directory / "sslrootcert") if "-----BEGIN" in root else root
        elif content("ca.crt"):
            parameters["sslrootcert"] = str(directory / "ca.crt")
        if content("tls.crt") and content("tls.key"):
            parameters["sslcert"] = str(directory / "tls.crt")
            parameters["sslkey"] = str(directory / "tls.key")
        if not parameters:
            raise FileNotFoundError(2, "none of the files host, uri, ... is there", str(directory))
        return parameters


# --- faults ----------------------------------------------------------------------------------------------------------


class FaultKind(StrEnum):
    """What kind of fault an exception of the database is."""

    TRANSIENT = "transient"  # passes by itself: try again, with jitter
    BUSY = "busy"  # transient: a lock is held elsewhere
    REFUSED_LOGIN = "refused_login"  # password, role, database or pg_hba: a person has to act, or a Secret to arrive
    TLS = "tls"  # certificate or sslmode: a person has to act
    MISSING_SCHEMA = "missing_schema"  # `leasedjob migrate`
    BUG = "bug"  # anything else


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault and its likely cause in one readable line, without secrets."""

    kind: FaultKind
    message: str

    @property
    def transient(self) -> bool:
        """It passes by itself."""
        return self.kind in (FaultKind.TRANSIENT, FaultKind.BUSY)


# Failures while connecting carry no SQLSTATE, so they are told apart by the text of libpq and of the server.
_CONNECTING: Final[tuple[tuple[str, FaultKind, str], ...]] = (
    (
        r"certificate verify failed|certificate has expired|self.signed certificate",
        FaultKind.TLS,
        "TLS: the server's certificate was not accepted; check sslrootcert / ca.crt and the certificate's dates",
    ),
    (
        r"does not match host name",
        FaultKind.TLS,
        "TLS: the server's certificate is for another host name; check host and sslmode",
    ),
    (
        r"root certificate file .* does not exist|could not read root certificate|weak sslmode",
        FaultKind.TLS,
        "TLS: verification is asked for, but no readable CA file is given (ca.crt or sslrootcert)",
    ),
    (
        r"server does not support SSL|no pg_hba\.conf entry .*no encryption|SSL (?:connection|error|SYSCALL)|"
        r"could not load private key|private key file",
        FaultKind.TLS,
        "TLS: server and client disagree about encryption; check sslmode and the certificate files",
    ),
    (
        r"starting up|shutting down|not yet accepting connections|in recovery mode|is not accepting connections",
        FaultKind.TRANSIENT,
        "the database is starting, stopping or failing over",
    ),
    (
        r"server_login_retry|pgbouncer cannot connect|server conn crashed|query_wait_timeout",
        FaultKind.TRANSIENT,
        "the pooler answers, but the database behind it doesn't",
    ),
    (
        r"too many (?:clients|connections)|remaining connection slots",
        FaultKind.TRANSIENT,
        "the database has no free connection: its max_connections or the role's connection limit is reached",
    ),
    (r"session is read-only|read-only", FaultKind.TRANSIENT, "the database is read-only: a standby, or failing over"),
    (
        r"password authentication failed|no password supplied|authentication failed|SASL|"
        r'role ".*" does not exist|is not permitted to log in|no pg_hba\.conf entry|'
        r'database ".*" does not exist|permission denied for database|no such (?:user|database)|peer authentication',
        FaultKind.REFUSED_LOGIN,
        "the database refused the login: check user, password and database name, and whether a rotated Secret arrived",
    ),
    (
        r"could not translate host name|name or service not known|nodename nor servname|failed to resolve host|"
        r"temporary failure in name resolution|no address associated",
        FaultKind.TRANSIENT,
        "the database's host name does not resolve: DNS not up yet, blocked by a NetworkPolicy, or a wrong name",
    ),
    (
        r"connection refused",
        FaultKind.TRANSIENT,
        "nothing listens at the database's address, or a service mesh's proxy is not up yet",
    ),
    (
        r"timeout|timed out",
        FaultKind.TRANSIENT,
        "the database did not answer in time: is egress to it allowed by the NetworkPolicies, and the mesh's proxy up?",
    ),
    (
        r"unreachable|no route|permission denied",
        FaultKind.TRANSIENT,
        "the network refuses the way to the database: a NetworkPolicy, a firewall, or no route",
    ),
)
_CONNECTING_PATTERNS: Final = tuple((re.compile(p, re.IGNORECASE), kind, text) for p, kind, text in _CONNECTING)

_TRANSIENT_STATES: Final = {
    "25006": "the database is read-only: a standby, or failing over",
    "40001": "the transaction met another one",
    "40P01": "the transaction met another one (deadlock)",
    "57014": "the statement was cancelled or took too long",
    "57P01": "the connection was ended by an administrator",
    "57P02": "the database has crashed and restarts",
    "57P03": "the database is starting, stopping or failing over",
    "57P05": "the idle connection was ended",
    "25P03": "the idle transaction was ended",
    "08P01": "the connection is broken, or a pooler refused it",
}
_MISSING_STATES: Final = frozenset({"3F000", "42P01", "42883", "42704", "42703"})


def classify(error: BaseException) -> Fault:
    """What kind of fault `error` is, and its likely cause.

    Args:
        error: an exception of psycopg, of the socket layer, or one of this package.
    """
    if isinstance(error, DatabaseUnavailableError | DatabaseRefusedError):
        return Fault(FaultKind(error.kind), str(error))
    if isinstance(error, SchemaMissingError):
        return Fault(FaultKind.MISSING_SCHEMA, str(error))
    if isinstance(error, psycopg.Error) and error.sqlstate:
        return _by_state(error.sqlstate, error)
    if isinstance(error, TimeoutError):
        return Fault(FaultKind.TRANSIENT, f"{_CONNECTING[-2][2]}")
    if isinstance(error, psycopg.OperationalError | OSError):
        text = str(error)
        for pattern, kind, message in _CONNECTING_PATTERNS:
            if pattern.search(text):
                return Fault(kind, f"{message} [{_first_line(text)}]")
        return Fault(FaultKind.TRANSIENT, f"the connection to the database failed [{_first_line(text)}]")
    if isinstance(error, psycopg.InterfaceError):
        return Fault(FaultKind.TRANSIENT, f"the connection to the database is closed [{_first_line(str(error))}]")
    return Fault(FaultKind.BUG, f"{type(error).__name__}: {_first_line(str(error))}")


def _by_state(state: str, error: psycopg.Error) -> Fault:
    detail = _first_line(error.diag.message_primary or str(error))
    if state == "55P03":
        return Fault(FaultKind.BUSY, f"the row is locked elsewhere [{detail}]")
    if state in _TRANSIENT_STATES:
        return Fault(FaultKind.TRANSIENT, f"{_TRANSIENT_STATES[state]} [{detail}]")
    if state[:2] in ("08", "53", "58"):  # connection, resources, disk
        return Fault(FaultKind.TRANSIENT, f"the database can't answer now [{detail}]")
    if state in _MISSING_STATES:
        return Fault(FaultKind.MISSING_SCHEMA, detail)
    if state[:2] == "28" or state == "3D000":
        return Fault(FaultKind.REFUSED_LOGIN, f"the database refused the login [{detail}]")
    if state == "42501":
        return Fault(FaultKind.REFUSED_LOGIN, f"the database role lacks a right that LeasedJob needs [{detail}]")
    return Fault(FaultKind.BUG, f"SQLSTATE {state}: {detail}")


def _first_line(text: str) -> str:
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    # libpq tries each address; the last line says how the last attempt ended.
    return (lines[-1] if lines else "no detail")[:300]


def as_error(error: BaseException) -> LeasedJobError | None:
    """The exception of this package that `error` stands for; None for a bug, which is to be raised as it is."""
    if isinstance(error, LeasedJobError):
        return error
    fault = classify(error)
    match fault.kind:
        case FaultKind.TRANSIENT | FaultKind.BUSY:
            return DatabaseUnavailableError(fault.message, fault.kind)
        case FaultKind.REFUSED_LOGIN | FaultKind.TLS:
            return DatabaseRefusedError(fault.message, fault.kind)
        case FaultKind.MISSING_SCHEMA:
            return SchemaMissingError(fault.message)
        case FaultKind.BUG:
            return None


FAULTS: Final = (psycopg.Error, OSError, TimeoutError)  # what may be a fault of the database


class translated(contextlib.ContextDecorator):
    """`with translated():` raises the database's faults as this package's exceptions, chained; bugs as they are."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, FAULTS) and (known := as_error(error)) is not None:
            raise known from error


# --- connections -----------------------------------------------------------------------------------------------------


def _parameters(application_name: str, timeout: float) -> dict[str, Any]:
    return {**_TCP, "connect_timeout": max(2, round(timeout)), "application_name": application_name[:63]}


def connect_sync(
    credentials: Credentials, timeout: float = CONNECT_TIMEOUT_SECONDS, *, application_name: str = "leasedjob"
) -> psycopg.Connection[DictRow]:
    """A new connection.

    Args:
        timeout: seconds for each address of the host; at least 2.

    Raises:
        DatabaseUnavailableError, DatabaseRefusedError: see `classify`.
    """
    with translated():
        return psycopg.connect(
            credentials.conninfo(),
            autocommit=True,
            prepare_threshold=None,
            row_factory=dict_row,
            **_parameters(application_name, timeout),
        )


async def connect_async(
    credentials: Credentials, timeout: float = CONNECT_TIMEOUT_SECONDS, *, application_name: str = "leasedjob"
) -> psycopg.AsyncConnection[DictRow]:
    """As `connect_sync`, asynchronous."""
    with translated():
        return await psycopg.AsyncConnection.connect(
            credentials.conninfo(),
            autocommit=True,
            prepare_threshold=None,
            row_factory=dict_row,
            **_parameters(application_name, timeout),
        )


def connections(credentials: Credentials, *, application_name: str = "leasedjob") -> Connections:
    """A source that opens a connection for each use and closes it: for tools that ask seldom."""

    @contextlib.asynccontextmanager
    async def connection() -> AsyncIterator[psycopg.AsyncConnection[DictRow]]:
        opened = await connect_async(credentials, application_name=application_name)
        try:
            yield opened
        finally:
            await opened.close()

    return connection


class within:  # reads like the word: `async with within(2, pool.connection, "acquire") as connection`
    """A connection of `source` for one statement, which gets so many seconds, connecting included.

    A statement whose time is over ends at once, by its connection's end. Cancelling it would not: psycopg then asks the
    server to cancel it, and waits for the answer, five seconds each, although nobody may be there to answer.

    Raises:
        DatabaseUnavailableError: no answer came in time. `what`: the statement, for its message.
    """

    __slots__ = ("_cancelled", "_connection", "_deadlines", "_opened", "_seconds", "_source", "_task", "_what", "end")

    def __init__(self, seconds: float, source: Connections, what: str) -> None:
        self._seconds, self._source, self._what = seconds, source, what
        self._connection: psycopg.AsyncConnection[Any] | None = None
        self._cancelled = False  # by us, as its time was over before there was a connection

    async def __aenter__(self) -> psycopg.AsyncConnection[DictRow]:
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None
        self._task, cancelling = task, task.cancelling()
        self._deadlines = _Deadlines.of(loop)
        self.end = loop.time() + self._seconds
        self._deadlines.add(self)
        try:
            self._opened = self._source()
            self._connection = connection = await self._opened.__aenter__()
        except BaseException as error:
            self._deadlines.remove(self)
            if self._cancelled and task.uncancel() <= cancelling and isinstance(error, asyncio.CancelledError):
                raise self._silence() from error
            raise
        if self._cancelled:  # whoever opens it has kept that to itself
            task.uncancel()
            _shut(connection)
        return connection

    def late(self) -> None:
        """Its time is over."""
        if self._connection is None:
            self._cancelled = self._task.cancel()
        else:
            _shut(self._connection)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._deadlines.remove(self)
        await self._opened.__aexit__(kind, error, trace)
        if (
            isinstance(error, psycopg.OperationalError | psycopg.InterfaceError | OSError)
            and asyncio.get_running_loop().time() >= self.end
        ):
            raise self._silence() from error

    def _silence(self) -> DatabaseUnavailableError:
        return DatabaseUnavailableError(
            f"the database did not answer {self._what} within {self._seconds:g} s", FaultKind.TRANSIENT
        )


class _Deadlines:
    """The deadlines of an event loop's statements.

    Nearly all statements end in time, so a timer for each would be set only to be taken back. One timer stands for all:
    it is set to the earliest deadline, isn't moved when that statement ends, and looks then who is late.
    """

    _of_loop: ClassVar[WeakKeyDictionary[asyncio.AbstractEventLoop, _Deadlines]] = WeakKeyDictionary()

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = ref(loop)  # the loop is the key under which this is kept
        self._waiting: set[within] = set()
        self._timer: asyncio.TimerHandle | None = None

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop) -> _Deadlines:
        found = cls._of_loop.get(loop)
        if found is None:
            found = cls._of_loop[loop] = cls(loop)
        return found

    def add(self, statement: within) -> None:
        self._waiting.add(statement)
        if self._timer is None or statement.end < self._timer.when():
            self._set(statement.end)

    def remove(self, statement: within) -> None:
        self._waiting.discard(statement)

    def _set(self, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if (loop := self._loop()) is not None:
            self._timer = loop.call_at(at, self._look, loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        now = loop.time()
        for statement in [waiting for waiting in self._waiting if waiting.end <= now]:
            self._waiting.discard(statement)
            statement.late()
        if self._waiting:
            self._set(min(waiting.end for waiting in self._waiting))


def _shut(connection: psycopg.AsyncConnection[Any]) -> None:
    """Ends the conversation for whoever waits for its next word."""
    with contextlib.suppress(psycopg.Error, OSError), socket.socket(fileno=os.dup(connection.fileno())) as copy:
        copy.shutdown(socket.SHUT_RDWR)


class Pool:
    """A few connections for a long-running process, opened when they are needed.

    It differs from general pools in what a fault looks like: whoever asks gets the real cause at once (a refused
    login, a certificate, a name that doesn't resolve), not a timeout of the pool. A connection is replaced after
    `max_lifetime` seconds, so a rotated password is in use by then, and one that the server has ended is noticed before
    it is handed out.

    Args:
        max_size: how many connections may be open; whoever comes later waits.
        max_lifetime, max_idle: seconds.
    """

    def __init__(
        self,
        credentials: Credentials,
        *,
        max_size: int = 4,
        timeout: float = CONNECT_TIMEOUT_SECONDS,
        application_name: str = "leasedjob",
        max_lifetime: float = 600.0,
        max_idle: float = 60.0,
    ) -> None:
        self._credentials = credentials
        self._timeout = timeout
        self._name = application_name
        self._max_lifetime = max_lifetime
        self._max_idle = max_idle
        self._free = asyncio.Semaphore(max_size)
        self._idle: list[_Pooled] = []
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes what is idle, and what is in use once it comes back. Idempotent."""
        self._closed = True
        await self._drop(self._idle)

    @contextlib.asynccontextmanager
    async def connection(self) -> AsyncIterator[psycopg.AsyncConnection[DictRow]]:
        """A connection in autocommit, for the length of the block.

        Raises:
            DatabaseUnavailableError, DatabaseRefusedError: no connection could be opened, and why.
        """
        async with self._free:
            pooled = await self._take()
            try:
                yield pooled.connection
            finally:
                if self._closed or pooled.connection.info.transaction_status != TransactionStatus.IDLE:
                    # It has ended, or its statement was cut short and has left it in the middle of an answer. What
                    # broke this one, or made it silent, has probably done the same to those that are idle.
                    await pooled.connection.close()
                    await self._drop(self._idle)
                else:
                    pooled.since = time.monotonic()
                    self._idle.append(pooled)

    async def _take(self) -> _Pooled:
        while self._idle:
            pooled = self._idle.pop()  # the one used last: the others may grow old and be closed
            now = time.monotonic()
            if now - pooled.opened < self._max_lifetime and now - pooled.since < self._max_idle and pooled.silent():
                return pooled
            await pooled.connection.close()
        opened = await connect_async(self._credentials, self._timeout, application_name=self._name)
        now = time.monotonic()
        return _Pooled(opened, now, now)

    @staticmethod
    async def _drop(idle: list[_Pooled]) -> None:
        while idle:
            await idle.pop().connection.close()


@dataclass(slots=True)
class _Pooled:
    connection: psycopg.AsyncConnection[DictRow]
    opened: float
    since: float  # idle since

    def silent(self) -> bool:
        """An idle connection has nothing to say; one that is readable has been ended by the server."""
        if self.connection.closed:
            return False
        poll = select.poll()
        poll.register(self.connection.fileno(), select.POLLIN | select.POLLHUP | select.POLLERR)
        return not poll.poll(0)


def operator_pool(
    credentials: Credentials,
    *,
    max_size: int = 4,
    timeout: float = CONNECT_TIMEOUT_SECONDS,
    application_name: str = "leasedjob-operator",
) -> Pool:
    """The operator's pool: an asynchronous context manager whose `connection` a store takes. Close it last."""
    return Pool(credentials, max_size=max_size, timeout=timeout, application_name=application_name)
