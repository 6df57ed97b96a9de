"""The one thread that talks to the database, so that a call that hangs holds up nothing else.

One call at a time. A call that is cut off is given up at once: its socket is shut down and its thread is left to end by
itself (it may be stuck in name resolution, which nothing can interrupt); whatever it still learns is dropped, which is
always the safe reading. The next call gets a new thread.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from leasedjob.errors import LeasedJobError
from leasedjob.sidecar.clock import boottime
from leasedjob.sidecar.fence import (
    Beat,
    BeatAnswered,
    CallFailed,
    Event,
    Note,
    NoteAnswered,
    Record,
    RecordAnswered,
    RecordRefused,
)

if TYPE_CHECKING:
    from psycopg import Connection

KEEP_BELOW_SECONDS: Final = 5  # heartbeats at most this far apart share one connection
STUCK_MOST: Final = 4  # threads that may be stuck at once; further calls wait for one of them

Make = Callable[[float, float], Event]  # (at, jitter) -> event: stamped by whoever handles it
Connect = Callable[[float], "Connection[Any]"]  # opens a connection within the seconds given


def connector(directory: str) -> Connect:
    """Opens connections from mounted credentials, which are read anew each time: they may have been rotated."""

    def connect(seconds: float) -> Connection[Any]:
        from leasedjob.lease.database import Credentials, connect_sync

        return connect_sync(Credentials.from_directory(directory), timeout=seconds)

    return connect


class Link:
    """Sends heartbeats, outcomes and notes of one lease.

    Args:
        connect: opens a connection, credentials read anew each time; it gets the seconds that it may take.
        seconds: how long connecting may take.
        keep: whether a connection is kept between calls.
        done: called from another thread when a call has ended, with the call's number; must only hand over and wake.
            The end of a call whose number is no longer `current` is to be dropped.
    """

    def __init__(
        self,
        lease_id: str,
        token: str,
        connect: Connect,
        *,
        seconds: float,
        keep: bool,
        done: Callable[[int, Make], None],
    ) -> None:
        self._lease_id, self._token = UUID(lease_id), UUID(token)
        self._connect, self._seconds, self._keep, self._done = connect, seconds, keep, done
        self._worker: _Worker | None = None
        self._stuck: list[_Worker] = []
        self.current = 0

    def send(self, call: Beat | Record | Note) -> None:
        """Starts a call. Its end comes through `done`, exactly once unless it is cut off."""
        if self._worker is None:
            self._worker = _Worker(self)
            self._worker.start()
        self.current += 1
        self._worker.calls.put((self.current, call))

    def cut(self) -> bool:
        """Gives the running call up. False if too many are stuck already: then it goes on."""
        self._stuck = [w for w in self._stuck if w.is_alive()]
        worker = self._worker
        if worker is None or len(self._stuck) >= STUCK_MOST:
            return False
        self._worker = None
        self.current += 1
        self._stuck.append(worker)
        worker.abandon()
        return True

    def close(self) -> None:
        """No more calls; doesn't wait."""
        if self._worker is not None:
            self._worker.calls.put(None)

    def perform(self, worker: _Worker, call: Beat | Record | Note) -> Make:
        from leasedjob.lease.holder import SidecarStore

        connection = worker.connection
        if connection is None:
            connection = self._connect(self._seconds)
            worker.connection = connection
            if worker.abandoned:
                raise ConnectionAbortedError("given up while connecting")
        store = SidecarStore(connection)
        if isinstance(call, Beat):
            sent = boottime()  # before the statement leaves: a slow answer can't stretch the lease
            beat = store.heartbeat(self._lease_id, self._token)
            return lambda at, jitter: BeatAnswered(at, sent, beat.held, beat.stop_requested, beat.busy, jitter)
        if isinstance(call, Note):
            store.report_shutdown(self._lease_id, self._token, UUID(call.id), call.phases)
            return lambda at, _jitter: NoteAnswered(at)
        try:
            recorded = store.finish(self._lease_id, self._token, call.outcome, call.data)
        except Exception as error:
            # A value that can't be stored stays so, however often it is sent.
            if not (isinstance(error, ValueError | TypeError) or _is_data_error(error)):
                raise
            problem = describe(error)
            return lambda at, _jitter: RecordRefused(at, problem)
        return lambda at, _jitter: RecordAnswered(at, recorded)

    @property
    def keeps(self) -> bool:
        return self._keep

    def report(self, number: int, result: Make) -> None:
        self._done(number, result)


class _Worker(threading.Thread):
    def __init__(self, link: Link) -> None:
        super().__init__(name="database", daemon=True)
        self._link = link
        self.calls: queue.SimpleQueue[tuple[int, Beat | Record | Note] | None] = queue.SimpleQueue()
        self.connection: Connection[Any] | None = None
        self.abandoned = False

    def run(self) -> None:
        while not self.abandoned and (item := self.calls.get()) is not None:
            number, call = item
            try:
                result = self._link.perform(self, call)
                fine = True
            except Exception as error:  # every fault is an answer here: "nothing is known"
                result = _failure(describe(error))
                fine = False
            if not (fine and self._link.keeps):
                self._drop()
            self._link.report(number, result)
        self._drop()

    def abandon(self) -> None:
        self.abandoned = True
        self.calls.put(None)
        connection = self.connection
        if connection is not None:
            with contextlib.suppress(Exception), socket.socket(fileno=os.dup(connection.fileno())) as copy:
                copy.shutdown(socket.SHUT_RDWR)

    def _drop(self) -> None:
        connection, self.connection = self.connection, None
        if connection is not None:
            with contextlib.suppress(Exception):
                connection.close()


def _failure(problem: str) -> Make:
    return lambda at, jitter: CallFailed(at, problem, jitter)


def _is_data_error(error: Exception) -> bool:
    state = getattr(error, "sqlstate", None) or ""
    return isinstance(state, str) and state[:2] in ("22", "54")


def describe(error: Exception) -> str:
    """One line for people."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if isinstance(error, LeasedJobError) else f"{type(error).__name__}: {text}"
