"""IntervalRegistry: work that is repeated at an interval, never overlaps itself, and is never dropped halfway.

SyncIntervalRegistry has the same rules for programs without an event loop: a thread for each interval.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import threading
import time
from collections.abc import Awaitable, Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import Final

from leasedjob.workload.draining import ShutdownState
from leasedjob.workload.phases import Phase

_log: Final = logging.getLogger("leasedjob.workload")
Work = Callable[[], Awaitable[object] | object]


def next_due(first: float, seconds: float, now: float) -> float:
    """The next tick after `now` on the grid that begins at `first`: what fell into a long iteration is dropped."""
    if now < first:
        return first
    return first + (math.floor((now - first) / seconds) + 1) * seconds


@dataclass(slots=True)
class _Interval:
    name: str
    seconds: float
    work: Work
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    timer: asyncio.Task[None] | None = None


def _check(name: str, seconds: float, known: Container[str]) -> None:
    if name in known:
        raise ValueError(f"there is an interval {name!r}")
    if (
        isinstance(seconds, bool)
        or not isinstance(seconds, int | float)
        or not (math.isfinite(seconds) and seconds > 0)
    ):
        raise ValueError(f"seconds must be positive, not {seconds!r}")


class IntervalRegistry:
    """Intervals by name, on the running event loop.

        intervals = IntervalRegistry(state)
        intervals.add("sync", 60, sync_orders)
        shutdown.add(intervals)

    A coroutine function runs on the loop, a plain function in a thread. An iteration that raises is logged, and the
    next tick comes as usual. Nothing begins once the state drains.

    Args:
        state: whose draining ends the ticks.
    """

    phase: Final = Phase.INTERVALS
    name: Final = "intervals"

    def __init__(self, state: ShutdownState) -> None:
        self._state = state
        self._intervals: dict[str, _Interval] = {}
        self._running: dict[str, asyncio.Future[None]] = {}

    def add(self, name: str, seconds: float, work: Work) -> None:
        """Begins an interval; its first tick is `seconds` from now.

        Raises:
            ValueError: the name is taken, or `seconds` is not positive.
            RuntimeError: no event loop is running.
        """
        _check(name, seconds, self._intervals)
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise RuntimeError("no event loop is running here; SyncIntervalRegistry needs none") from None
        interval = _Interval(name, seconds, work)
        interval.timer = loop.create_task(self._ticks(interval), name=f"interval-{name}")
        self._intervals[name] = interval

    def exists(self, name: str) -> bool:
        """Whether ticks are to come."""
        return name in self._intervals and not self._state.is_draining()

    def delete(self, name: str) -> None:
        """No further tick comes. An iteration that runs goes on to its end, and `stop` waits for it.

        Raises:
            KeyError: there is no such interval.
        """
        self._intervals.pop(name).ended.set()

    async def stop(self) -> None:
        """Ends all ticks, and waits until every iteration that runs has ended by itself."""
        for name in list(self._intervals):
            self.delete(name)
        while self._running:
            await asyncio.wait(list(self._running.values()))

    def in_hand(self) -> Sequence[str]:
        """The intervals whose iteration runs."""
        return [f"the running iteration of interval {name}" for name in self._running]

    # --- one interval ---

    async def _ticks(self, interval: _Interval) -> None:
        loop = asyncio.get_running_loop()
        first = due = loop.time() + interval.seconds
        forget = self._state.signal.call(lambda: loop.call_soon_threadsafe(interval.ended.set))
        try:
            while await self._sleep(interval, due - loop.time()):
                if (before := self._running.get(interval.name)) is not None:
                    # Of an interval of this name that was deleted: even then two never run at once.
                    await asyncio.wait([before])
                    due = next_due(first, interval.seconds, loop.time())
                    continue
                if self._state.is_draining():
                    return
                await self._iterate(interval)
                due = next_due(first, interval.seconds, loop.time())
        finally:
            forget()

    async def _sleep(self, interval: _Interval, seconds: float) -> bool:
        """Until the next tick; False if none is to come."""
        try:
            await asyncio.wait_for(interval.ended.wait(), max(0.0, seconds))
        except TimeoutError:
            return not interval.ended.is_set()
        return False

    async def _iterate(self, interval: _Interval) -> None:
        running = asyncio.get_running_loop().create_future()
        self._running[interval.name] = running
        try:
            if inspect.iscoroutinefunction(interval.work):
                await interval.work()
            else:
                given = await asyncio.to_thread(interval.work)
                if inspect.isawaitable(given):
                    await given
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # Nobody has cancelled this task: what the iteration waited for was cancelled.
            _log.exception("interval %s: an iteration was cancelled; the next one comes as usual", interval.name)
        except Exception:
            _log.exception("interval %s: an iteration has failed; the next one comes as usual", interval.name)
        finally:
            # Whatever happened, nobody waits for an iteration that is over.
            del self._running[interval.name]
            running.set_result(None)


class SyncIntervalRegistry:
    """Intervals by name, each in a thread of its own.

        intervals = SyncIntervalRegistry(state)
        intervals.add("sync", 60, sync_orders)
        shutdown.add(intervals)

    An iteration that raises is logged, and the next tick comes as usual. Nothing begins once the state drains.

    Args:
        state: whose draining ends the ticks.
    """

    phase: Final = Phase.INTERVALS
    name: Final = "intervals"

    def __init__(self, state: ShutdownState) -> None:
        self._state = state
        self._changed = threading.Condition()
        self._intervals: dict[str, object] = {}  # the key of the thread whose ticks are to come
        self._running: dict[str, object] = {}

    def add(self, name: str, seconds: float, work: Callable[[], object]) -> None:
        """Begins an interval; its first tick is `seconds` from now.

        Raises:
            ValueError: the name is taken, `seconds` is not positive, or `work` is a coroutine function.
        """
        if inspect.iscoroutinefunction(work):
            raise ValueError(f"{name}: a coroutine function needs an IntervalRegistry, and its event loop")
        key = object()
        with self._changed:
            _check(name, seconds, self._intervals)
            self._intervals[name] = key
        threading.Thread(
            target=self._ticks, args=(name, seconds, work, key), name=f"interval-{name}", daemon=True
        ).start()

    def exists(self, name: str) -> bool:
        """Whether ticks are to come."""
        return name in self._intervals and not self._state.is_draining()

    def delete(self, name: str) -> None:
        """No further tick comes. An iteration that runs goes on to its end, and `stop` waits for it.

        Raises:
            KeyError: there is no such interval.
        """
        with self._changed:
            del self._intervals[name]
            self._changed.notify_all()

    def stop(self) -> None:
        """Ends all ticks, and waits until every iteration that runs has ended by itself."""
        with self._changed:
            self._intervals.clear()
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._running)

    def in_hand(self) -> Sequence[str]:
        """The intervals whose iteration runs."""
        return [f"the running iteration of interval {name}" for name in list(self._running)]

    # --- one interval ---

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _ticks(self, name: str, seconds: float, work: Callable[[], object], key: object) -> None:
        first = time.monotonic() + seconds
        forget = self._state.signal.call(self._wake)
        try:
            while self._begin(name, seconds, first, key):
                try:
                    work()
                except BaseException:  # a thread would end without a word at SystemExit
                    _log.exception("interval %s: an iteration has failed; the next one comes as usual", name)
                finally:
                    with self._changed:
                        del self._running[name]
                        self._changed.notify_all()
        finally:
            forget()

    def _begin(self, name: str, seconds: float, first: float, key: object) -> bool:
        """Waits for the next tick, and takes the name's place; False if no tick is to come."""
        due = next_due(first, seconds, time.monotonic())

        def over() -> bool:
            return self._intervals.get(name) is not key or self._state.is_draining()

        with self._changed:
            while not over():
                if (left := due - time.monotonic()) > 0:
                    self._changed.wait(min(left, threading.TIMEOUT_MAX))
                elif name in self._running:
                    # Of an interval of this name that was deleted: even then two never run at once.
                    self._changed.wait()
                    due = next_due(first, seconds, time.monotonic())
                else:
                    self._running[name] = key
                    return True
            return False
