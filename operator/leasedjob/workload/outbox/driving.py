"""One implementation for every kind of connection: an operation is a conversation, which yields statements and gets
rows; how it is carried out follows from the connection that it is given.

    psycopg.Connection, and SQLAlchemy's Session, scoped_session and Connection       the result
    psycopg.AsyncConnection, and SQLAlchemy's AsyncSession, AsyncConnection, …        a coroutine that gives it

Nothing here commits or rolls back: the transaction is the caller's.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable, Coroutine, Generator
from typing import TYPE_CHECKING, Any, Final, LiteralString, ParamSpec, Protocol, TypeVar, cast, overload

if TYPE_CHECKING:
    from psycopg import AsyncConnection, Connection
    from sqlalchemy import Connection as SqlConnection
    from sqlalchemy.ext.asyncio import AsyncConnection as AsyncSqlConnection
    from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session
    from sqlalchemy.orm import Session, scoped_session

P = ParamSpec("P")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Rows = list[tuple[Any, ...]]
Talk = Generator[tuple[LiteralString, dict[str, Any]], Rows, T]

_PARAMETER: Final = re.compile(r"%\((\w+)\)s")


class Operation(Protocol[P, T_co]):
    """What `operation` makes of a conversation."""

    @overload
    def __call__(
        self, connection: AsyncConnection[Any], /, *args: P.args, **kwargs: P.kwargs
    ) -> Coroutine[Any, Any, T_co]: ...
    @overload
    def __call__(self, connection: Connection[Any], /, *args: P.args, **kwargs: P.kwargs) -> T_co: ...
    @overload
    def __call__(
        self,
        connection: AsyncSession | AsyncSqlConnection | async_scoped_session[Any],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Coroutine[Any, Any, T_co]: ...
    @overload
    def __call__(
        self, connection: Session | SqlConnection | scoped_session[Any], /, *args: P.args, **kwargs: P.kwargs
    ) -> T_co: ...


def operation(talk: Callable[P, Talk[T]]) -> Operation[P, T]:
    """The conversation as a function whose first argument is the connection."""

    @functools.wraps(talk)
    def call(connection: Any, *args: P.args, **kwargs: P.kwargs) -> Any:
        execute, asynchronous = _executing(connection)
        conversation = talk(*args, **kwargs)
        return _awaiting(execute, conversation) if asynchronous else _blocking(execute, conversation)

    signature = inspect.signature(talk)
    first = inspect.Parameter("connection", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    call.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[first, *signature.parameters.values()], return_annotation=inspect.Signature.empty
    )
    return cast("Operation[P, T]", call)


def _blocking(execute: Callable[[LiteralString, dict[str, Any]], Rows], conversation: Talk[T]) -> T:
    rows: Any = None
    try:
        while True:
            statement, parameters = conversation.send(rows)
            rows = execute(statement, parameters)
    except StopIteration as stop:
        return cast(T, stop.value)


async def _awaiting(
    execute: Callable[[LiteralString, dict[str, Any]], Coroutine[Any, Any, Rows]], conversation: Talk[T]
) -> T:
    rows: Any = None
    while True:
        try:
            statement, parameters = conversation.send(rows)
        except StopIteration as stop:
            return cast(T, stop.value)
        rows = await execute(statement, parameters)


# --- each kind of connection -----------------------------------------------------------------------------------------


def _executing(connection: Any) -> tuple[Callable[..., Any], bool]:
    """How a statement is executed, and whether that is to be awaited."""
    import psycopg

    if isinstance(connection, psycopg.AsyncConnection):
        return functools.partial(_psycopg_awaiting, connection), True
    if isinstance(connection, psycopg.Connection):
        return functools.partial(_psycopg, connection), False
    if "sqlalchemy" in sys.modules:  # else it can't be one of its connections
        from sqlalchemy import Connection as SqlConnection
        from sqlalchemy.orm import Session, scoped_session

        if isinstance(connection, Session | scoped_session | SqlConnection):
            return functools.partial(_sqlalchemy, connection), False
        if "sqlalchemy.ext.asyncio" in sys.modules:
            from sqlalchemy.ext.asyncio import AsyncConnection as AsyncSqlConnection
            from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session

            if isinstance(connection, AsyncSession | async_scoped_session | AsyncSqlConnection):
                return functools.partial(_sqlalchemy_awaiting, connection), True
    raise TypeError(
        "connection must be a connection of psycopg 3 (Connection, AsyncConnection) or a session or connection of "
        f"SQLAlchemy 2, not {type(connection).__module__}.{type(connection).__qualname__}"
    )


# Never prepared: behind a pooler in transaction mode the next statement may reach another server connection.
def _psycopg(connection: Connection[Any], statement: LiteralString, parameters: dict[str, Any]) -> Rows:
    from psycopg import Cursor, ProgrammingError
    from psycopg.rows import tuple_row

    # Not connection.cursor(): the application's cursor_factory may want parameters of another form.
    with Cursor(connection, row_factory=tuple_row) as cursor:
        cursor.execute(statement, parameters or None, prepare=False)
        try:
            return cursor.fetchall()  # in a pipeline only this waits for the result
        except ProgrammingError as error:
            if error.sqlstate is not None:
                raise
            return []  # no statement with rows


async def _psycopg_awaiting(
    connection: AsyncConnection[Any], statement: LiteralString, parameters: dict[str, Any]
) -> Rows:
    from psycopg import AsyncCursor, ProgrammingError
    from psycopg.rows import tuple_row

    async with AsyncCursor(connection, row_factory=tuple_row) as cursor:
        await cursor.execute(statement, parameters or None, prepare=False)
        try:
            return await cursor.fetchall()
        except ProgrammingError as error:
            if error.sqlstate is not None:
                raise
            return []


def _sqlalchemy(
    connection: Session | SqlConnection | scoped_session[Any], statement: LiteralString, parameters: dict[str, Any]
) -> Rows:
    result = connection.execute(_text(statement), parameters or None)
    return [tuple(row) for row in result] if result.returns_rows else []  # type: ignore[attr-defined]


async def _sqlalchemy_awaiting(
    connection: AsyncSession | AsyncSqlConnection | async_scoped_session[Any],
    statement: LiteralString,
    parameters: dict[str, Any],
) -> Rows:
    result = await connection.execute(_text(statement), parameters or None)
    return [tuple(row) for row in result] if result.returns_rows else []  # type: ignore[attr-defined]


@functools.cache
def _text(statement: str) -> Any:
    """The statement in SQLAlchemy's own form, whose parameters suit every driver."""
    from sqlalchemy import text

    return text(_PARAMETER.sub(r":\1", statement))
