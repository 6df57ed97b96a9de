"""One thread that acts when a time has come: what a synchronous program needs where an asynchronous one has timeouts.

It sleeps while nothing is due, ends with the process, and is started by the first use (also anew after a fork).
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import psycopg

_log: Final = logging.getLogger(__name__)
# While statements come and go, the thread looks this often instead of being woken by each of them.
_TICK_SECONDS: Final = 1.0


class _Entry:
    __slots__ = ("act", "at")

    def __init__(self, at: float, act: Callable[[], None]) -> None:
        self.at = at
        self.act = act


class Alarm:
    """Calls functions at their time, in a thread of its own. They must be short."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._entries: set[_Entry] = set()
        self._next = float("inf")  # when the thread looks by itself
        self._used = False
        self._pid = 0

    def at(self, seconds: float, act: Callable[[], None]) -> _Entry:
        """Calls `act` in so many seconds, unless it is cancelled before."""
        entry = _Entry(time.monotonic() + seconds, act)
        if self._pid != os.getpid():
            self._start()
        with self._changed:
            self._entries.add(entry)
            self._used = True
            if entry.at < self._next:
                self._changed.notify()
        return entry

    def cancel(self, entry: _Entry) -> None:
        """`act` won't be called any more, unless its call has begun."""
        with self._changed:
            self._entries.discard(entry)

    def _start(self) -> None:
        # After a fork the thread is gone, and the lock may have been held by it.
        self._changed = threading.Condition()
        self._entries = set()
        self._next = float("inf")
        self._pid = os.getpid()
        threading.Thread(target=self._run, name="leasedjob-alarm", daemon=True).start()

    def _run(self) -> None:
        changed = self._changed
        while True:
            with changed:
                now = time.monotonic()
                due = [entry for entry in self._entries if entry.at <= now]
                self._entries.difference_update(due)
                if not due:
                    self._next = min((entry.at for entry in self._entries), default=float("inf"))
                    if self._used:
                        self._next = min(self._next, now + _TICK_SECONDS)
                    self._used = False
                    changed.wait(None if self._next == float("inf") else self._next - now)
            for entry in due:
                try:
                    entry.act()
                except Exception:
                    _log.exception("a call that was due has failed")


ALARM: Final = Alarm()


class _Cutter:
    """Ends a connection's conversation from another thread: its statement fails at once, wherever it waits."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self._lock = threading.Lock()
        self._connection: psycopg.Connection[Any] | None = connection
        self.cut = False

    def act(self) -> None:
        with self._lock:
            if self._connection is None or self._connection.closed:
                return
            self.cut = True
            # The descriptor is shut down, not closed: it can't be somebody else's meanwhile.
            with socket.socket(fileno=os.dup(self._connection.fileno())) as twin:
                try:
                    twin.shutdown(socket.SHUT_RDWR)
                except OSError:
                    return  # the peer was faster

    def done(self) -> None:
        with self._lock:
            self._connection = None


@contextmanager
def cut_after(connection: psycopg.Connection[Any], seconds: float) -> Iterator[None]:
    """Within the block the connection is cut off after so many seconds; TimeoutError if that happened."""
    cutter = _Cutter(connection)
    entry = ALARM.at(seconds, cutter.act)
    try:
        yield
    except psycopg.Error as error:
        if cutter.cut:
            raise TimeoutError from error
        raise
    finally:
        cutter.done()
        ALARM.cancel(entry)
