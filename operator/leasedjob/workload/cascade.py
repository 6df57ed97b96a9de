"""Cascade: a long piece of work, item by item, that goes on in the next Pod where this one has stopped.

    cascade = Cascade(run, state)
    with run, psycopg.connect(...) as connection:
        for item in cascade.items(connection, products):   # from the first one that was not processed
            with item as product:                          # one transaction: what is begun in it is finished
                upsert(connection, product)
        run.complete()

`with item` is the critical section. It ends with the checkpoint, in the same transaction as the item's own changes, and
nothing that comes meanwhile interrupts it. Between two of them the abort signal is looked at: once it is set, the next
item is not begun and `DrainingError` ends the loop, which `with run` reports as "not done, to be gone on with". An
attempt whose fencing token is too old saves nothing: StaleFencingTokenError rolls its item's transaction back.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import AsyncIterable, AsyncIterator, Callable, Generator, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from leasedjob.errors import DrainingError
from leasedjob.workload.checkpoint import AsyncCheckpoints, Checkpoints
from leasedjob.workload.draining import ShutdownState
from leasedjob.workload.phases import Phase

if TYPE_CHECKING:
    from psycopg import AsyncConnection, Connection

    from leasedjob.workload.run import Run

T = TypeVar("T")
Key = Callable[[T], Any]
NAME: Final = "cascade"
_END: Final = object()


@dataclass(frozen=True, slots=True)
class Position:
    """How far a cascade is: the checkpoint.

    Args:
        done: items processed, by all attempts together.
        after: the key of the last one; None where no key is used, or before the first.
    """

    done: int = 0
    after: Any = None

    @classmethod
    def from_json(cls, data: Any) -> Position:
        """Raises ValueError for what no cascade has saved."""
        if data is None:
            return cls()
        if not isinstance(data, dict) or not isinstance(data.get("done"), int):
            raise ValueError(f"not the checkpoint of a cascade: {data!r}")
        return cls(data["done"], data.get("after"))

    def to_json(self) -> dict[str, Any]:
        return {"done": self.done} if self.after is None else {"done": self.done, "after": self.after}


class _Item(Generic[T]):
    """What is begun, and how far the cascade is once it is finished."""

    def __init__(self, cascade: _Cascade, value: T, then: Position) -> None:
        self._cascade, self.value, self.then = cascade, value, then
        self.begun = self.finished = False

    def __str__(self) -> str:
        return f"item {self.then.done} of {self._cascade.name}"

    @contextlib.contextmanager
    def _in_hand(self) -> Generator[None]:
        """The critical section: no stop comes between, and `stop` waits for its end."""
        cascade = self._cascade
        with cascade.idle:
            cascade.check()
            cascade.hand[self] = None
        try:
            yield
        finally:
            with cascade.idle:
                del cascade.hand[self]
                cascade.idle.notify_all()

    def _once(self) -> None:
        if self.begun:
            raise RuntimeError(f"{self} was begun before: an item is processed in one `with`")
        self.begun = True

    def _saved(self) -> None:
        self.finished = True
        self._cascade.position = self.then


class Item(_Item[T]):
    """One item, as the context manager in which it is processed; gives its value."""

    def __init__(self, cascade: Cascade, connection: Connection[Any], value: T, then: Position) -> None:
        super().__init__(cascade, value, then)
        self._step = self._transaction(cascade.checkpoints, connection)

    @contextlib.contextmanager
    def _transaction(self, checkpoints: Checkpoints, connection: Connection[Any]) -> Generator[T]:
        with self._in_hand():
            saved = False
            with connection.transaction():
                yield self.value
                checkpoints.save(connection, self.then.to_json())
                saved = True
            if not connection.autocommit:
                connection.commit()  # where something was read before, that one was no transaction but a savepoint
            if saved:
                self._saved()

    def __enter__(self) -> T:
        self._once()
        return self._step.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._step.__exit__(kind, error, trace)


class AsyncItem(_Item[T]):
    """The same for an asynchronous connection."""

    def __init__(self, cascade: AsyncCascade, connection: AsyncConnection[Any], value: T, then: Position) -> None:
        super().__init__(cascade, value, then)
        self._step = self._transaction(cascade.checkpoints, connection)

    @contextlib.asynccontextmanager
    async def _transaction(self, checkpoints: AsyncCheckpoints, connection: AsyncConnection[Any]) -> AsyncIterator[T]:
        with self._in_hand():
            saved = False
            async with connection.transaction():
                yield self.value
                await checkpoints.save(connection, self.then.to_json())
                saved = True
            if not connection.autocommit:
                await connection.commit()
            if saved:
                self._saved()

    async def __aenter__(self) -> T:
        self._once()
        return await self._step.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return await self._step.__aexit__(kind, error, trace)


class _Cascade:
    phase: Final = Phase.BACKGROUND

    def __init__(self, run: Run, state: ShutdownState, *, name: str = NAME) -> None:
        if not name:
            raise ValueError("name must not be empty")
        self.name = name
        self.position = Position()
        self.idle = threading.Condition()
        self.hand: dict[_Item[Any], None] = {}
        self._run, self._state = run, state
        self._stopped = False

    @property
    def done(self) -> int:
        """Items processed, by all attempts together."""
        return self.position.done

    def stop(self) -> None:
        """Begins no further item, and waits until the one in hand is finished."""
        with self.idle:
            self._stopped = True
            self.idle.wait_for(lambda: not self.hand)

    def in_hand(self) -> Sequence[str]:
        """The item that is being processed."""
        return [str(item) for item in list(self.hand)]

    def check(self) -> None:
        """Before an item is begun: DrainingError, or LostJobLeaseError."""
        self._run.raise_if_lost()
        if self._stopped or self._state.is_draining():
            raise DrainingError(f"{self.name}: {self._state.reason or 'stopped'}, after {self.done} items")

    # --- what both kinds of iteration share ---

    def _before(self, source: object) -> bool:
        """Whether a next item is to be asked for. A source that has a length, and has ended, ends the loop also while
        draining; any other one isn't asked, since it might have to fetch a page of items for that."""
        if isinstance(source, Sized) and self.done >= len(source):
            return False
        self.check()
        return True

    def _checked(self, source: object, key: object) -> None:
        if callable(source) != (key is not None):
            raise ValueError("key goes with a function that gives the items after a key, and with nothing else")
        if isinstance(source, Sized) and len(source) < self.done:
            raise self._shorter(len(source))

    def _shorter(self, length: int) -> ValueError:
        return ValueError(f"{self.name}: {self.done} items were processed, but the source has only {length}")

    def _then(self, value: T, key: Key[T] | None) -> Position:
        after = None if key is None else key(value)
        if key is not None and after is None:
            raise ValueError(f"{self.name}: the key of {value!r} is None, which means: before the first item")
        return Position(self.done + 1, after)

    @staticmethod
    def _after(item: _Item[Any]) -> None:
        if not item.finished:
            raise RuntimeError(f"{item} was not finished: process it within `with item`, and let what it raises pass")


class Cascade(_Cascade):
    """A cascade on a synchronous psycopg connection. It can be added to a GracefulShutdown, whose later phases (the
    pools) then wait for the item in hand.

    Args:
        run: whose attempts go on from each other.
        state: whose draining is the abort signal.
        name: which of a run's cascades; for the checkpoint and for log lines.
    """

    def __init__(self, run: Run, state: ShutdownState, *, name: str = NAME) -> None:
        super().__init__(run, state, name=name)
        self.checkpoints = Checkpoints(run, name)

    install = staticmethod(Checkpoints.install)

    def items(
        self,
        connection: Connection[Any],
        source: Iterable[T] | Callable[[Any], Iterable[T]],
        *,
        key: Key[T] | None = None,
    ) -> Iterator[Item[T]]:
        """The items that no attempt has processed, each to be processed within `with item`.

        Args:
            connection: the one whose transactions the items are; in no transaction block of the caller's.
            source: the items, in an order that is the same in each attempt; as many are passed over as are done. Or a
                function that gives those after a key, in the key's order; None is before the first.
            key: with a function: an item's key, JSON.

        Raises:
            DrainingError: items are left, and a stop has begun.
            LostJobLeaseError: somebody else has the run, or will have it.
            StaleFencingTokenError: the same, seen by the database.
            ValueError: `key` and `source` don't fit, or the source has become shorter than what is done.
        """
        _no_block(connection)
        with connection.transaction():
            self.position = Position.from_json(self.checkpoints.take(connection))
        if not connection.autocommit:
            with _in_no_block():
                connection.commit()
        self._checked(source, key)
        rest = iter(source(self.position.after) if callable(source) else source)
        for passed in range(0 if callable(source) else self.done):
            if next(rest, _END) is _END:
                raise self._shorter(passed)
        while self._before(source):
            try:
                value = next(rest)
            except StopIteration:
                return
            _no_block(connection)
            item = Item(self, connection, value, self._then(value, key))
            yield item
            self._after(item)


class AsyncCascade(_Cascade):
    """The same for asynchronous psycopg connections."""

    def __init__(self, run: Run, state: ShutdownState, *, name: str = NAME) -> None:
        super().__init__(run, state, name=name)
        self.checkpoints = AsyncCheckpoints(run, name)

    install = staticmethod(AsyncCheckpoints.install)

    async def items(
        self,
        connection: AsyncConnection[Any],
        source: Iterable[T] | AsyncIterable[T] | Callable[[Any], Iterable[T] | AsyncIterable[T]],
        *,
        key: Key[T] | None = None,
    ) -> AsyncIterator[AsyncItem[T]]:
        """As Cascade.items, for `async for`; each item is processed within `async with item`. The source may be
        asynchronous as well."""
        _no_block(connection)
        async with connection.transaction():
            self.position = Position.from_json(await self.checkpoints.take(connection))
        if not connection.autocommit:
            with _in_no_block():
                await connection.commit()
        self._checked(source, key)
        rest = aiter(_both(source(self.position.after) if callable(source) else source))
        for passed in range(0 if callable(source) else self.done):
            if await anext(rest, _END) is _END:
                raise self._shorter(passed)
        while self._before(source):
            try:
                value = await anext(rest)
            except StopAsyncIteration:
                return
            _no_block(connection)
            item = AsyncItem(self, connection, value, self._then(value, key))
            yield item
            self._after(item)


async def _both(source: Iterable[T] | AsyncIterable[T]) -> AsyncIterator[T]:
    if isinstance(source, AsyncIterable):
        async for value in source:
            yield value
    else:
        for value in source:
            yield value


_BLOCK: Final = "the connection is within a transaction block; each item is a transaction of its own"


@contextlib.contextmanager
def _in_no_block() -> Generator[None]:
    """The same where the connection isn't in autocommit: there only psycopg itself knows, and says so at a commit."""
    from psycopg import ProgrammingError

    try:
        yield
    except ProgrammingError as error:
        if error.sqlstate is not None:
            raise
        raise ValueError(_BLOCK) from error


def _no_block(connection: Connection[Any] | AsyncConnection[Any]) -> None:
    """An item's transaction within another one would be a savepoint: nothing of it would be committed with it."""
    from psycopg.pq import TransactionStatus

    if connection.autocommit and connection.info.transaction_status is not TransactionStatus.IDLE:
        raise ValueError(_BLOCK)
