"""The agenda: when each LeasedJob has to be looked at again. One heap for all objects, no timer per object.

Watch events only feed it; a due tick never waits for one. It runs on the database's clock as this process knows it.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Hashable
from datetime import datetime
from typing import Final, Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
LONGEST_SLEEP: Final = 5.0  # seconds; bounds what a step of the clock can do


class Agenda(Generic[Key]):
    """Calls `due(key)` once for each key whose time has come.

    Args:
        now: the clock that the times refer to.
        due: called on the event loop; must not block.
    """

    def __init__(self, now: Callable[[], datetime], due: Callable[[Key], None]) -> None:
        self._now = now
        self._due = due
        self._heap: list[tuple[datetime, int, Key]] = []
        self._times: dict[Key, datetime] = {}
        self._changed = asyncio.Event()
        self._serial = 0

    def set(self, key: Key, at: datetime | None) -> None:
        """Look at `key` at this time, instead of any time set before; None: not by itself."""
        if at is None:
            self._times.pop(key, None)
            return
        if self._times.get(key) == at:
            return
        self._times[key] = at
        self._serial += 1
        heapq.heappush(self._heap, (at, self._serial, key))
        if self._heap[0][2] == key:
            self._changed.set()
        if len(self._heap) > 64 + 4 * len(self._times):
            self._compact()

    def sooner(self, key: Key, at: datetime) -> None:
        """Look at `key` at this time at the latest."""
        if key not in self._times or at < self._times[key]:
            self.set(key, at)

    def _compact(self) -> None:
        """Times that were set anew leave their old entries behind; drop them when they outnumber the live ones."""
        self._heap = [entry for entry in self._heap if self._times.get(entry[2]) == entry[0]]
        heapq.heapify(self._heap)

    def pop_due(self) -> None:
        """Hand over everything whose time has come, earliest first."""
        now = self._now()
        while self._heap and self._heap[0][0] <= now:
            at, _, key = heapq.heappop(self._heap)
            if self._times.get(key) == at:
                del self._times[key]
                self._due(key)

    def next_in(self) -> float:
        """Seconds until the next entry, at most LONGEST_SLEEP."""
        if not self._heap:
            return LONGEST_SLEEP
        return min(LONGEST_SLEEP, max(0.0, (self._heap[0][0] - self._now()).total_seconds()))

    async def run(self) -> None:
        """Runs until it is cancelled."""
        while True:
            self._changed.clear()
            self.pop_due()
            try:
                async with asyncio.timeout(self.next_in()):
                    await self._changed.wait()
            except TimeoutError:
                continue
