"""The creation of Pods: how many at a time, how many a second, and in whose turn.

Pods come first. While any is to be created, what can wait (statuses, Events) does: at a tick that a thousand objects
share, the API server and this process have a thousand Pods to make before anybody reads what is said of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Hashable, Iterator
from typing import Final, Generic, TypeVar

from leasedjob.controller.turns import Turns

Key = TypeVar("Key", bound=Hashable)
STALLED: Final = 1.0  # seconds without a Pod created, after which nobody waits for the others any longer
CALM_MOST: Final = 60.0  # seconds that a status or an Event waits at most


class Launches(Generic[Key]):
    """Admits creations.

    Args:
        concurrency: creations under way at the same time.
        per_second: creations begun in a second, on average; one second's worth may come at once. 0: no limit.
        clock: seconds that only grow.
    """

    def __init__(self, concurrency: int, per_second: int = 0, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._free = concurrency
        self._rate = float(per_second)
        self._clock = clock
        self._tokens, self._filled_at = self._rate, clock()
        self._waiting: Turns[Key, asyncio.Future[None]] = Turns()
        self._timer: asyncio.TimerHandle | None = None
        self._expected = 0
        self._made = 0
        self._calm = asyncio.Event()
        self._calm.set()

    # --- who may create ----------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def turn(self, key: Key) -> AsyncIterator[None]:
        """Waits until it is the turn of `key`, whose creation is the block."""
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(key, mine)
        self._admit()
        try:
            await mine
        except asyncio.CancelledError:
            if mine.done() and not mine.cancelled():  # admitted, and given up in the same moment
                self._free += 1
                self._admit()
            raise
        try:
            yield
        finally:
            self._made += 1
            self._free += 1
            self._admit()

    def _admit(self) -> None:
        while self._free and len(self._waiting) and self._token():
            future = self._waiting.take()
            if future.done():
                self._tokens += 1  # whoever waited has given up
                continue
            self._free -= 1
            future.set_result(None)

    def _token(self) -> bool:
        if not self._rate:
            return True
        now = self._clock()
        self._tokens = min(self._rate, self._tokens + (now - self._filled_at) * self._rate)
        self._filled_at = now
        if self._tokens >= 1:
            self._tokens -= 1
            return True
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later((1 - self._tokens) / self._rate, self._rung)
        return False

    def _rung(self) -> None:
        self._timer = None
        self._admit()

    # --- who has to wait for them ------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def expected(self) -> Iterator[None]:
        """A Pod may come of the block."""
        self._expected += 1
        self._calm.clear()
        try:
            yield
        finally:
            self._expected -= 1
            if not self._expected:
                self._calm.set()

    async def calm(self) -> None:
        """Waits until no Pod is to be created, as long as Pods are being created."""
        until = time.monotonic() + CALM_MOST
        while not self._calm.is_set() and time.monotonic() < until:
            made = self._made
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STALLED):
                    await self._calm.wait()
            if self._made == made:
                return
