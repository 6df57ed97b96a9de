"""Until when a holder believes in its lease, and how its work learns that it is lost.

The local clock only shortens trust: a holder believes in its lease until `request sent + 0.98 * lease`, on a clock that
counts suspend.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Final

from leasedjob.lease.alarm import ALARM, Call
from leasedjob.lease.trust import CLOCK_RATE

_log: Final = logging.getLogger(__name__)
RETRY_SECONDS: Final = 0.2  # before the second try; doubles, with jitter
SILENT: Final = "no heartbeat reached the database in time"

Clock = Callable[[], float]


def boottime() -> float:
    """Seconds on a clock that goes on while the machine sleeps, where there is one."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if clock is None else time.clock_gettime(clock)


@dataclass(slots=True)
class Trust:
    """Until when a holder believes in its lease, and when it beats next. Seconds, on the holder's own clock."""

    lease: float
    interval: float  # 0: no heartbeats
    sent: float  # when the request was sent that extended the lease last
    retry_at: float | None = None  # a beat has failed: when to try again
    failed: int = 0
    early: float = 0.0  # by how much the next beat comes before it is due
    stopping: float = 0.0  # kept at the end, for work that takes its time to stop

    @property
    def end(self) -> float:
        """Past this the lease may be somebody else's, whatever the database would say."""
        return self.sent + CLOCK_RATE * self.lease

    @property
    def until(self) -> float:
        """Past this the lease counts as lost: what is to stop by its end has to begin."""
        return self.end - min(self.stopping, CLOCK_RATE * self.lease / 3)

    def over(self, now: float) -> bool:
        return now >= self.until

    def wait(self, now: float) -> float:
        """Seconds until the next beat, or until trust is over."""
        due = self.until if self.interval == 0 else self.sent + self.interval - self.early
        if self.retry_at is not None:
            due = self.retry_at
        return max(0.0, min(due, self.until) - now)

    def patience(self, now: float) -> float:
        """Seconds that a beat may take: half of what is left, so that one that hangs leaves time for another one over a
        new connection; but a second, as long as there is one, for a slow network is no hanging one."""
        left = max(0.001, self.until - now)
        return max(left / 2, min(left, 1.0))

    def beaten(self, sent: float, jitter: float) -> None:
        """The database has extended the lease by a request that was sent then. The next beat comes up to a tenth of the
        interval early, so that leases of one tick don't beat together for ever."""
        self.sent, self.retry_at, self.failed, self.early = sent, None, 0, self.interval * 0.1 * jitter

    def missed(self, now: float, jitter: float) -> None:
        """A beat has failed: the next one comes soon, and not in step with others'."""
        self.failed += 1
        pause = min(self.interval, RETRY_SECONDS * 2 ** min(self.failed - 1, 5))
        self.retry_at = now + pause * (0.5 + jitter / 2)


class LostSignal:
    """Set once the lease is lost, or not to be trusted any more. Safe to use from any thread.

    Everything here also judges the clock, so it tells of the end of trust even while a heartbeat hangs.
    `await lease.lost` waits for it in a coroutine, `wait()` in a thread.
    """

    def __init__(self, trust: Trust, clock: Clock = boottime) -> None:
        self._trust = trust
        self._clock = clock
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._calls: list[Callable[[], object]] = []
        self._watched = False
        self.reason = ""

    def seconds_left(self) -> float:
        """Until the lease may be somebody else's, where that isn't so already."""
        return max(0.0, self._trust.end - self._clock())

    def is_set(self) -> bool:
        """The work should stop now."""
        if not self._event.is_set() and self._trust.over(self._clock()):
            self.set(SILENT)
        return self._event.is_set()

    def set(self, reason: str) -> None:
        """Tells the work to stop; the first reason stays."""
        with self._lock:
            if self._event.is_set():
                return
            self.reason = reason
            self._event.set()
            calls, self._calls = self._calls, []
        for call in calls:
            try:
                call()
            except Exception:
                _log.exception("a call that tells of the lost lease has failed")

    def wait(self, timeout: float | None = None) -> bool:
        """Blocks a thread until the signal is set; False after `timeout` seconds."""
        end = None if timeout is None else time.monotonic() + timeout
        while not self.is_set():
            seconds = max(0.001, self._trust.until - self._clock())
            if end is not None:
                if (left := end - time.monotonic()) <= 0:
                    return False
                seconds = min(seconds, left)
            self._event.wait(min(seconds, threading.TIMEOUT_MAX))
        return True

    def call(self, function: Callable[[], object]) -> None:
        """Calls `function` once, when the signal is set; at once if it is. It must be short.

        It is called in whatever thread notices the loss: to end what the work waits for, such as a process or a
        connection.
        """
        if not self.is_set():
            with self._lock:
                if not self._event.is_set():
                    self._calls.append(function)
                    watch, self._watched = not self._watched, True
                    if watch:
                        ALARM.add(Call(self._left(), self._watch))
                    return
        function()

    def _left(self) -> float:
        return min(max(0.001, self._trust.until - self._clock()), threading.TIMEOUT_MAX)

    def _watch(self) -> None:
        """At the end of trust as it was known: it has ended, or a heartbeat has moved it."""
        if self._calls and not self.is_set():
            ALARM.add(Call(self._left(), self._watch))

    def forget(self) -> None:
        """The work has ended: nobody needs to be told any more."""
        with self._lock:
            self._calls.clear()

    def __await__(self) -> Generator[Any, None, None]:
        loop = asyncio.get_running_loop()
        told = loop.create_future()

        def tell() -> None:
            if not told.done():
                told.set_result(None)

        def call() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(tell)

        self.call(call)
        yield from told
