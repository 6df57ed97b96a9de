"""Checkpoints: what an attempt leaves to the next one, in the database that its work changes.

    checkpoints = Checkpoints(run)
    with psycopg.connect(...) as connection:
        begin = checkpoints.take(connection) or 0     # what the attempt before has left
    for item in items[begin:]:
        with psycopg.connect(...) as connection:      # one transaction: the item and how far we are
            work(connection, item)
            checkpoints.save(connection, item.number + 1)

A checkpoint is therefore never ahead of the work, nor behind it. `take` writes this attempt's fencing token down, so an
attempt of before, which may not know yet that it has lost its lease, can't save any more: its whole transaction fails.
"""

from __future__ import annotations

import json
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, Final, LiteralString

from leasedjob.errors import StaleFencingTokenError

if TYPE_CHECKING:
    from datetime import timedelta

    from psycopg import AsyncConnection, Connection

    from leasedjob.workload.run import Run

TABLE: Final[LiteralString] = """
CREATE TABLE IF NOT EXISTS leasedjob_checkpoint (
    idempotency_key text PRIMARY KEY,
    fencing_token   bigint NOT NULL,
    attempt         integer,
    data            jsonb,
    saved_at        timestamptz
)"""
# Whoever waits here for the row of an attempt whose last transaction still runs sees what that one commits.
TAKE: Final[LiteralString] = """
INSERT INTO leasedjob_checkpoint AS c (idempotency_key, fencing_token, saved_at)
VALUES (%(key)s, %(token)s, clock_timestamp())
    ON CONFLICT (idempotency_key) DO UPDATE SET fencing_token = excluded.fencing_token
       WHERE c.fencing_token <= excluded.fencing_token
RETURNING c.data::text"""
SAVE: Final[LiteralString] = """
INSERT INTO leasedjob_checkpoint AS c (idempotency_key, fencing_token, attempt, data, saved_at)
VALUES (%(key)s, %(token)s, %(attempt)s, %(data)s::jsonb, clock_timestamp())
    ON CONFLICT (idempotency_key) DO UPDATE
       SET fencing_token = excluded.fencing_token, attempt = excluded.attempt, data = excluded.data,
           saved_at = excluded.saved_at
       WHERE c.fencing_token <= excluded.fencing_token
RETURNING c.data::text"""

PRESENT: Final[LiteralString] = "SELECT to_regclass('leasedjob_checkpoint') IS NOT NULL"
LEFT: Final[LiteralString] = """
SELECT EXISTS (
    SELECT FROM leasedjob_checkpoint
     WHERE (idempotency_key = %(key)s OR starts_with(idempotency_key, %(key)s || '/')) AND data IS NOT NULL)"""
PRUNE: Final[LiteralString] = """
WITH gone AS (DELETE FROM leasedjob_checkpoint WHERE saved_at < clock_timestamp() - %(age)s RETURNING 1)
SELECT count(*) FROM gone"""

Talk = Generator[tuple[LiteralString, dict[str, Any]], tuple[Any, ...] | None, Any]


class _Checkpoints:
    """
    Args:
        run: whose attempts go on from each other.
        name: which of a run's checkpoints; "" for a run that has one.
    """

    def __init__(self, run: Run, name: str = "") -> None:
        self._run = run
        self._key = f"{run.idempotency_key}/{name}" if name else run.idempotency_key

    def _talk(self, statement: LiteralString, **more: Any) -> Talk:
        run = self._run
        row = yield statement, {"key": self._key, "token": run.fencing_token, **more}
        if row is None:
            raise StaleFencingTokenError(
                f"a later attempt of {run.code} {run.run_key} has the checkpoint: token {run.fencing_token} is too old"
            )
        (text,) = row
        return None if text is None else json.loads(text)

    def _save(self, data: Any) -> Talk:
        return self._talk(SAVE, attempt=self._run.attempt, data=json.dumps(data, allow_nan=False))

    def _left(self) -> Talk:
        present = yield PRESENT, {}
        if present != (True,):
            return False
        return (yield LEFT, {"key": self._run.idempotency_key}) == (True,)


def _prune(age: timedelta) -> Talk:
    gone = yield PRUNE, {"age": age}
    return gone[0] if gone else 0


class Checkpoints(_Checkpoints):
    """For synchronous psycopg connections. Every method works in the caller's transaction and commits nothing."""

    @staticmethod
    def install(connection: Connection[Any]) -> None:
        """Makes the table `leasedjob_checkpoint`, in the first schema of the search path, if it isn't there."""
        connection.execute(TABLE)

    def take(self, connection: Connection[Any]) -> Any:
        """What the attempts before have left, as it was saved; None if nothing. Commit before the work begins.

        Raises:
            StaleFencingTokenError: a later attempt has taken it already.
        """
        return self._drive(connection, self._talk(TAKE))

    def save(self, connection: Connection[Any], data: Any) -> None:
        """Saves `data` (JSON, not None) with what else is done in this transaction.

        Raises:
            StaleFencingTokenError: a later attempt has taken it; roll back.
        """
        self._drive(connection, self._save(data))

    def left(self, connection: Connection[Any]) -> bool:
        """Whether an attempt has left a checkpoint of this run, of whatever name. Changes nothing."""
        left: bool = self._drive(connection, self._left())
        return left

    @classmethod
    def prune(cls, connection: Connection[Any], age: timedelta) -> int:
        """Deletes what was saved longer ago than `age`, of all runs, and says how many: none is gone on with."""
        pruned: int = cls._drive(connection, _prune(age))
        return pruned

    @staticmethod
    def _drive(connection: Connection[Any], talk: Talk) -> Any:
        row: tuple[Any, ...] | None = None
        from psycopg import Cursor

        with Cursor(connection, row_factory=_tuples()) as cursor:  # whatever the application's cursor_factory is
            while True:
                try:
                    statement, parameters = talk.send(row)
                except StopIteration as stop:
                    return stop.value
                row = cursor.execute(statement, parameters).fetchone()


class AsyncCheckpoints(_Checkpoints):
    """The same for asynchronous psycopg connections."""

    @staticmethod
    async def install(connection: AsyncConnection[Any]) -> None:
        """As Checkpoints.install."""
        await connection.execute(TABLE)

    async def take(self, connection: AsyncConnection[Any]) -> Any:
        """As Checkpoints.take."""
        return await self._drive(connection, self._talk(TAKE))

    async def save(self, connection: AsyncConnection[Any], data: Any) -> None:
        """As Checkpoints.save."""
        await self._drive(connection, self._save(data))

    async def left(self, connection: AsyncConnection[Any]) -> bool:
        """As Checkpoints.left."""
        left: bool = await self._drive(connection, self._left())
        return left

    @classmethod
    async def prune(cls, connection: AsyncConnection[Any], age: timedelta) -> int:
        """As Checkpoints.prune."""
        pruned: int = await cls._drive(connection, _prune(age))
        return pruned

    @staticmethod
    async def _drive(connection: AsyncConnection[Any], talk: Talk) -> Any:
        row: tuple[Any, ...] | None = None
        from psycopg import AsyncCursor

        async with AsyncCursor(connection, row_factory=_tuples()) as cursor:
            while True:
                try:
                    statement, parameters = talk.send(row)
                except StopIteration as stop:
                    return stop.value
                await cursor.execute(statement, parameters)
                row = await cursor.fetchone()


def _tuples() -> Any:
    from psycopg.rows import tuple_row

    return tuple_row
