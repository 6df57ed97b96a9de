"""Cascades on a real PostgreSQL: what is begun is finished, the next is not begun, the next attempt goes on there."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from leasedjob.workload import (
    AsyncCascade,
    AsyncCheckpoints,
    Cascade,
    Checkpoints,
    DrainingError,
    Phase,
    Run,
    ShutdownState,
    StaleFencingTokenError,
    find_run,
)

from .conftest import Database
from .workload_parts import LONG

pytestmark = pytest.mark.integration


def attempt(number: int, run_key: str = "2026-07-20T03:00:00Z") -> Run:
    """An attempt of one run, each with a larger token."""
    return replace(find_run({}, code="a", run_key=run_key), attempt=number, fencing_token=100 + number)


@pytest.fixture(params=[True, False], ids=["autocommit", "transactions"])
def connection(empty_database: Database, request: pytest.FixtureRequest) -> psycopg.Connection[Any]:
    connection = empty_database.connect(autocommit=request.param)
    Cascade.install(connection)
    connection.execute("CREATE TABLE done (item integer PRIMARY KEY, attempt integer)")
    connection.commit()
    return connection


def work(connection: psycopg.Connection[Any], item: int, run: Run) -> None:
    connection.execute("INSERT INTO done VALUES (%s, %s)", (item, run.attempt))


def through(
    cascade: Cascade, connection: psycopg.Connection[Any], source: Any, do: Callable[[Any], object], **more: Any
) -> None:
    for item in cascade.items(connection, source, **more):
        with item as value:
            do(value)


async def athrough(cascade: AsyncCascade, connection: psycopg.AsyncConnection[Any], source: Any, do: Any) -> None:
    async for item in cascade.items(connection, source):
        async with item as value:
            await do(value)


def done(database: Database) -> list[tuple[int, int]]:
    return [(row["item"], row["attempt"]) for row in database.rows("SELECT item, attempt FROM done ORDER BY item")]


def test_on_abort_the_item_in_hand_is_finished_and_the_next_attempt_begins_with_the_next_one(
    connection: psycopg.Connection[Any], empty_database: Database
) -> None:
    first, state = attempt(1), ShutdownState()
    assert not first.has_checkpoint(connection)
    connection.commit()
    cascade = Cascade(first, state)

    def stop_at_two(number: int) -> None:
        if number == 2:
            state.begin("SIGTERM")
        work(connection, number, first)

    with pytest.raises(DrainingError, match="cascade: SIGTERM, after 3 items"):
        through(cascade, connection, range(10), stop_at_two)
    assert cascade.done == 3
    second = attempt(2)
    assert second.has_checkpoint(connection)
    connection.commit()
    through(Cascade(second, ShutdownState()), connection, range(10), lambda number: work(connection, number, second))
    assert done(empty_database) == [(n, 1 if n < 3 else 2) for n in range(10)]
    assert list(Cascade(attempt(3), ShutdownState()).items(connection, range(10))) == []


def test_an_item_that_fails_is_rolled_back_with_its_checkpoint(
    connection: psycopg.Connection[Any], empty_database: Database
) -> None:
    run = attempt(1)
    cascade = Cascade(run, ShutdownState())

    def fail_at_two(number: int) -> None:
        work(connection, number, run)
        if number == 2:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        through(cascade, connection, range(5), fail_at_two)
    assert done(empty_database) == [(0, 1), (1, 1)]
    assert cascade.done == 2
    assert next(cascade.items(connection, range(5))).value == 2


def test_an_attempt_of_before_is_refused_and_its_item_rolled_back(
    connection: psycopg.Connection[Any], empty_database: Database
) -> None:
    old, new = attempt(1), attempt(2)
    other = empty_database.connect(autocommit=True)
    items = Cascade(old, ShutdownState()).items(connection, range(5))
    item = next(items)
    assert next(Cascade(new, ShutdownState()).items(other, range(5))).value == 0
    with pytest.raises(StaleFencingTokenError, match="token 101 is too old"), item as number:
        work(connection, number, old)
    assert done(empty_database) == []


def test_what_was_skipped_or_swallowed_is_no_item_that_was_processed(connection: psycopg.Connection[Any]) -> None:
    def skip(item: Any) -> None:
        pass

    def swallow(item: Any) -> None:
        with pytest.raises(ZeroDivisionError), item:
            _ = 1 / 0

    def roll_back(item: Any) -> None:
        with item:
            raise psycopg.Rollback

    for wrong in (skip, swallow, roll_back):
        cascade = Cascade(attempt(1), ShutdownState())
        items = cascade.items(connection, range(5))
        wrong(next(items))
        with pytest.raises(RuntimeError, match="item 1 of cascade was not finished"):
            next(items)
        assert cascade.done == 0


def test_an_item_can_not_be_committed_by_halves(connection: psycopg.Connection[Any], empty_database: Database) -> None:
    def halve(number: int) -> None:
        work(connection, number, attempt(1))
        connection.commit()

    with pytest.raises(psycopg.ProgrammingError, match="commit"):
        through(Cascade(attempt(1), ShutdownState()), connection, range(5), halve)
    assert done(empty_database) == []


def test_a_transaction_of_the_caller_s_is_refused(empty_database: Database) -> None:
    connection = empty_database.connect(autocommit=True)
    Cascade.install(connection)
    with (
        connection.transaction(),
        pytest.raises(ValueError, match="within a transaction block"),
    ):
        next(Cascade(attempt(1), ShutdownState()).items(connection, range(5)))


def test_a_source_by_key_is_asked_for_what_comes_after_it(
    connection: psycopg.Connection[Any], empty_database: Database
) -> None:
    with connection.transaction():
        connection.execute("CREATE TABLE product (sku text PRIMARY KEY)")
        connection.execute("INSERT INTO product SELECT 'p' || n FROM generate_series(1, 9) AS n")
    connection.commit()
    asked: list[Any] = []

    def products(after: str | None) -> Iterator[str]:
        asked.append(after)
        # On the same connection, and so in a transaction that the items end.
        for row in connection.execute("SELECT sku FROM product WHERE sku > %s ORDER BY sku", (after or "",)).fetchall():
            yield row["sku"]

    state = ShutdownState()
    seen: list[str] = []

    def stop_at_four(sku: str) -> None:
        seen.append(sku)
        if sku == "p4":
            state.notice("preStop")

    with pytest.raises(DrainingError):
        through(Cascade(attempt(1), state), connection, products, stop_at_four, key=str)
    # Positions would be off by one now, keys are not.
    empty_database.connect().execute("DELETE FROM product WHERE sku = 'p1'")
    through(Cascade(attempt(2), ShutdownState()), connection, products, seen.append, key=str)
    assert seen == [f"p{n}" for n in range(1, 10)]
    assert asked == [None, "p4"]


def test_sources_that_do_not_fit(connection: psycopg.Connection[Any]) -> None:
    cascade = Cascade(attempt(1), ShutdownState())
    through(cascade, connection, range(5), bool)
    with pytest.raises(ValueError, match="5 items were processed, but the source has only 3"):
        next(cascade.items(connection, range(3)))
    with pytest.raises(ValueError, match="key goes with a function"):
        next(cascade.items(connection, range(9), key=str))
    with pytest.raises(ValueError, match="key goes with a function"):
        next(cascade.items(connection, lambda after: range(9)))
    Checkpoints(attempt(1), "other").save(connection, ["a"])
    connection.commit()
    with pytest.raises(ValueError, match="not the checkpoint of a cascade"):
        next(Cascade(attempt(1), ShutdownState(), name="other").items(connection, range(9)))
    with pytest.raises(ValueError, match="name"):
        Cascade(attempt(1), ShutdownState(), name="")


def test_a_source_without_a_length_that_has_become_shorter(connection: psycopg.Connection[Any]) -> None:
    through(Cascade(attempt(1), ShutdownState()), connection, iter(range(3)), lambda _: None)
    with pytest.raises(ValueError, match="3 items were processed, but the source has only 2"):
        through(Cascade(attempt(2), ShutdownState()), connection, iter(range(2)), lambda _: None)
    through(Cascade(attempt(3), ShutdownState()), connection, iter(range(3)), lambda _: pytest.fail("none is left"))


def test_a_key_that_is_none_would_begin_anew(connection: psycopg.Connection[Any]) -> None:
    with pytest.raises(ValueError, match="the key of 1 is None"):
        through(Cascade(attempt(1), ShutdownState()), connection, lambda _: [1], lambda _: None, key=lambda value: None)


def test_an_item_is_begun_once(connection: psycopg.Connection[Any]) -> None:
    for item in Cascade(attempt(1), ShutdownState()).items(connection, range(2)):
        with item:
            pass
        with pytest.raises(RuntimeError, match="item 1 of cascade was begun before"), item:
            pass
        break


def test_cascades_within_each_other_need_two_connections(
    connection: psycopg.Connection[Any], empty_database: Database
) -> None:
    run, state = attempt(1), ShutdownState()

    def outer(within: psycopg.Connection[Any]) -> None:
        for item in Cascade(run, state, name="outer").items(connection, range(1)):
            with item:
                through(Cascade(run, state, name="inner"), within, range(2), lambda n: work(within, n, run))

    with pytest.raises(ValueError, match="within a transaction block"):
        outer(connection)
    assert done(empty_database) == []
    outer(empty_database.connect())
    assert done(empty_database) == [(0, 1), (1, 1)]


def test_while_draining_a_source_that_has_ended_ends_the_loop(connection: psycopg.Connection[Any]) -> None:
    """So that work that is done is not given back to be done."""
    state = ShutdownState()
    through(Cascade(attempt(1), state), connection, [1, 2], lambda n: state.begin("SIGTERM") if n == 2 else None)


def test_a_source_without_a_length_is_not_asked_while_draining(connection: psycopg.Connection[Any]) -> None:
    state = ShutdownState()

    def pages() -> Iterator[int]:
        yield 1
        raise AssertionError("a page was fetched")

    with pytest.raises(DrainingError):
        through(Cascade(attempt(1), state), connection, pages(), lambda _: state.begin("SIGTERM"))


def test_cascades_of_one_run_have_checkpoints_of_their_own(connection: psycopg.Connection[Any]) -> None:
    for name in ("a", "b"):
        seen: list[int] = []
        through(Cascade(attempt(1), ShutdownState(), name=name), connection, range(3), seen.append)
        assert seen == [0, 1, 2]
    assert not attempt(1, "another").has_checkpoint(connection)


def test_stop_waits_for_the_item_in_hand_and_lets_no_other_begin(connection: psycopg.Connection[Any]) -> None:
    cascade = Cascade(attempt(1), ShutdownState())
    assert cascade.phase is Phase.BACKGROUND
    items = cascade.items(connection, range(5))
    item = next(items)
    with item:
        stopping = threading.Thread(target=cascade.stop)
        stopping.start()
        stopping.join(0.2)
        assert stopping.is_alive()
        assert cascade.in_hand() == ["item 1 of cascade"]
    stopping.join(LONG)
    assert not stopping.is_alive()
    assert cascade.in_hand() == []
    with pytest.raises(DrainingError):
        next(items)


def test_an_item_that_was_fetched_before_the_stop_is_not_begun_after_it(connection: psycopg.Connection[Any]) -> None:
    state = ShutdownState()
    item = next(Cascade(attempt(1), state).items(connection, range(5)))
    state.begin("SIGTERM")
    with pytest.raises(DrainingError), item:
        raise AssertionError("begun")


def test_old_checkpoints_are_pruned(connection: psycopg.Connection[Any]) -> None:
    for key in ("a", "b"):
        Checkpoints(attempt(1, key)).save(connection, 1)
    connection.execute(
        "UPDATE leasedjob_checkpoint SET saved_at = saved_at - interval '40 days' WHERE idempotency_key = %s",
        (attempt(1, "a").idempotency_key,),
    )
    assert Checkpoints.prune(connection, timedelta(days=30)) == 1
    assert not attempt(1, "a").has_checkpoint(connection)
    assert attempt(1, "b").has_checkpoint(connection)


def test_without_the_table_there_is_no_checkpoint(empty_database: Database) -> None:
    assert attempt(1).has_checkpoint(empty_database.connect()) is False


@pytest.mark.parametrize("autocommit", [True, False])
async def test_asynchronous_connections(empty_database: Database, autocommit: bool) -> None:
    async with await psycopg.AsyncConnection.connect(empty_database.dsn, autocommit=autocommit) as connection:
        await AsyncCascade.install(connection)
        await connection.execute("CREATE TABLE done (item integer PRIMARY KEY, attempt integer)")
        await connection.commit()
        state = ShutdownState()
        assert not await attempt(1).has_checkpoint(connection)
        await connection.commit()

        async def stop_at_two(number: int) -> None:
            await connection.execute("INSERT INTO done VALUES (%s, 1)", (number,))
            if number == 2:
                state.begin("SIGTERM")

        with pytest.raises(DrainingError):
            await athrough(AsyncCascade(attempt(1), state), connection, range(6), stop_at_two)
        assert await attempt(2).has_checkpoint(connection)
        await connection.commit()

        async def source() -> AsyncIterator[int]:
            for number in range(6):
                yield number

        async def fail_at_four(number: int) -> None:
            await connection.execute("INSERT INTO done VALUES (%s, 2)", (number,))
            if number == 4:
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await athrough(AsyncCascade(attempt(2), ShutdownState()), connection, source(), fail_at_four)
        assert done(empty_database) == [(0, 1), (1, 1), (2, 1), (3, 2)]
        with pytest.raises(StaleFencingTokenError):
            await anext(AsyncCascade(attempt(1), ShutdownState()).items(connection, source()))
        await connection.rollback()
        items = AsyncCascade(attempt(2), ShutdownState()).items(connection, source())
        assert (await anext(items)).value == 4
        with pytest.raises(RuntimeError, match="item 5 of cascade was not finished"):
            await anext(items)
        assert await AsyncCheckpoints.prune(connection, timedelta(0)) == 1
