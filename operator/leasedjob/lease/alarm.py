"""One thread that acts when a time has come: what a synchronous program needs where an asynchronous one has timeouts.

It sleeps while nothing is due, ends with the process, and is started by the first use (also anew after a fork).
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, Final

import psycopg

_log: Final = logging.getLogger(__name__)
# While statements come and go, the thread looks this often instead of being woken by each of them.
_TICK_SECONDS: Final = 1.0


class Entry:
    """Something that is due at a time: `act` is called then, in the alarm's thread, and must be short."""

    __slots__ = ("at",)

    def __init__(self, seconds: float) -> None:
        self.at = time.monotonic() + seconds

    def act(self) -> None:
        raise NotImplementedError


class Call(Entry):
    """Calls a function."""

    __slots__ = ("_function",)

    def __init__(self, seconds: float, function: Callable[[], object]) -> None:
        super().__init__(seconds)
        self._function = function

    def act(self) -> None:
        self._function()


class Alarm:
    """A thread of its own that lets entries act at their time.

    Adding and removing take no lock: they happen for each statement, and single operations on a set are atomic.
    """

    def __init__(self) -> None:
        self._reset()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        """No thread is there: at the beginning, and in a child process, where a lock may have been held by it."""
        self._starting = threading.Lock()
        self._changed = threading.Condition()
        self._entries: set[Entry] = set()
        self._next = float("inf")  # when the thread looks by itself
        self._used = False
        self._started = False

    def add(self, entry: Entry) -> None:
        """It acts at its time, unless it is removed before."""
        if not self._started:
            self._start()
        self._entries.add(entry)
        self._used = True
        if entry.at < self._next:
            with self._changed:
                self._changed.notify()

    def remove(self, entry: Entry) -> None:
        """It won't act any more, unless it has begun to."""
        self._entries.discard(entry)

    def _start(self) -> None:
        with self._starting:
            if not self._started:
                threading.Thread(target=self._run, name="leasedjob-alarm", daemon=True).start()
                self._started = True

    def _run(self) -> None:
        changed, entries = self._changed, self._entries
        while True:
            with changed:
                now = time.monotonic()
                self._next = float(
                    "inf"
                )  # whoever adds something from here on waits for the lock and wakes this thread
                waiting = list(entries)
                due = [entry for entry in waiting if entry.at <= now]
                entries.difference_update(due)
                if not due:
                    soonest = min((entry.at for entry in waiting), default=float("inf"))
                    self._next = min(soonest, now + _TICK_SECONDS) if self._used else soonest
                    self._used = False
                    changed.wait(None if self._next == float("inf") else self._next - now)
            for entry in due:
                try:
                    entry.act()
                except Exception:
                    _log.exception("what was due has failed")


ALARM: Final = Alarm()


class cut_after(Entry):
    """Within the block the connection is cut off after so many seconds; TimeoutError if that happened."""

    __slots__ = ("_connection", "_cut", "_lock")

    def __init__(self, connection: psycopg.Connection[Any], seconds: float) -> None:
        super().__init__(seconds)
        self._lock = threading.Lock()
        self._connection: psycopg.Connection[Any] | None = connection
        self._cut = False

    def __enter__(self) -> None:
        ALARM.add(self)

    def act(self) -> None:
        """The statement fails at once, wherever it waits."""
        with self._lock:
            if self._connection is None or self._connection.closed:
                return
            self._cut = True
            # The descriptor is shut down, not closed: it can't be somebody else's meanwhile.
            with socket.socket(fileno=os.dup(self._connection.fileno())) as twin, contextlib.suppress(OSError):
                twin.shutdown(socket.SHUT_RDWR)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        ALARM.remove(self)
        with self._lock:
            self._connection = None
        if self._cut and isinstance(error, psycopg.Error):
            raise TimeoutError from error
