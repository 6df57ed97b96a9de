"""A command as a process group of its own: starting it, its signals, its children and its standard error.

The thin edge around `supervise`. It works as the first process of a container too: signals that come from the moment at
which a Supervision exists are kept, orphans are reaped.
"""

from __future__ import annotations

import collections
import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Final

from leasedjob.workload import supervise
from leasedjob.workload.supervise import Alone, Ended, Event, Leave, Result, Seen, Send, Signalled, State, Stop, Tick

TAIL_BYTES: Final = 3072  # so that a report is one that lists show whole
STDERR_SECONDS: Final = 1.0  # for the last of standard error, which a process that escaped may hold open
GROUP_SECONDS: Final = 0.2  # how often it is looked whether a group has ended whose members are others' children
NOT_FOUND: Final = 127
NOT_STARTED: Final = 126
_PR_SET_CHILD_SUBREAPER: Final = 36


class Tail:
    """Passes a pipe on to standard error, byte for byte, and keeps the end of it."""

    def __init__(self, source: int, sink: int = 2) -> None:
        self._source, self._sink = source, sink
        self._kept = bytearray()
        self._thread = threading.Thread(target=self._run, name="stderr", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while data := os.read(self._source, 65536):
            self._kept = (self._kept + data)[-TAIL_BYTES:]
            with contextlib.suppress(OSError):  # nobody reads our standard error: the command need not know
                while data:
                    data = data[os.write(self._sink, data) :]

    def text(self) -> str:
        """The end of what was written; waits a moment for the last of it."""
        self._thread.join(STDERR_SECONDS)
        return bytes(self._kept).decode("utf-8", "replace").strip()


class Supervision:
    """One command, from before its start to its end. To be made in the main thread, as early as possible.

    Args:
        grace, pre_stop: seconds; the budget of a stop until the sidecar says another one.
        early: signals that came before.
    """

    def __init__(self, *, grace: float = 60.0, pre_stop: float = 10.0, early: Sequence[int] = ()) -> None:
        self._state = State(grace=grace, pre_stop=pre_stop)
        self._events: collections.deque[Event] = collections.deque()
        self._wake_in, self._wake_out = os.pipe()
        for end in (self._wake_in, self._wake_out):
            os.set_blocking(end, False)
        self._pid = 0  # of the command; and its group
        self._left = False
        # What was ignored when we began (nohup, a shell's background) stays so, for the command too.
        self._handled = tuple(n for n in supervise.PASSED_ON if signal.getsignal(n) is not signal.SIG_IGN)
        # The handlers do nothing: the C part of Python writes each signal's number here, whatever Python is doing. It
        # is set before them, so that no signal falls in between; one that is noted twice joins itself.
        signal.set_wakeup_fd(self._wake_out, warn_on_full_buffer=False)
        for number in (*self._handled, signal.SIGCHLD):
            signal.signal(number, _nothing)
        self._events.extend(Signalled(time.monotonic(), number) for number in early)

    def tell(self, event: Event) -> None:
        """From any thread: something happened."""
        self._events.append(event)
        with contextlib.suppress(OSError):  # full: the loop is awake anyway
            os.write(self._wake_out, b"\0")

    def stopped(self) -> Stop | None:
        """What has come by now to stop a command that isn't started yet."""
        self._turn()
        return self._state.stop

    def run(self, command: Sequence[str], env: Mapping[str, str]) -> Result:
        """Runs the command to its end. It isn't started any more if a stop, or its notice, has come before."""
        self._turn()
        stop = self._state.stop
        if stop is not None or self._state.notice_at is not None:
            return Result(128 + (stop.number if stop else signal.SIGTERM), False, stop, False, "")
        source, sink = os.pipe()
        _become_subreaper()
        terminal = _Terminal()
        try:
            self._pid = os.posix_spawnp(
                command[0],
                list(command),
                env,
                file_actions=[(os.POSIX_SPAWN_DUP2, sink, 2)],
                setpgroup=0,
                setsigmask=(),
                setsigdef=(*self._handled, signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ, signal.SIGTTOU),
            )
        except OSError as error:
            code = NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_STARTED
            return Result(code, False, None, False, f"{command[0]}: {error.strerror}")
        finally:
            os.close(sink)
        terminal.give(self._pid)
        tail = Tail(source)
        while not self._left:
            self._wait()
            self._turn()
        terminal.take_back()
        assert self._state.code is not None
        state = self._state
        noticed = state.notice_at is not None
        return Result(self._state.code, True, state.stop, state.killed_at is not None, tail.text(), noticed)

    # --- the loop's parts ---

    def _wait(self) -> None:
        pause = self._state.due_at - time.monotonic()
        if self._state.code is not None:  # nobody tells us of the end of others' children
            pause = min(pause, GROUP_SECONDS)
        poll = select.poll()
        poll.register(self._wake_in, select.POLLIN)
        poll.poll(None if pause == supervise.FOREVER else max(0.0, pause) * 1000)

    def _turn(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while numbers := os.read(self._wake_in, 4096):
                now = time.monotonic()
                self._events.extend(Signalled(now, n) for n in numbers if n in self._handled)
        while self._events:
            self._feed(self._events.popleft())
        if self._pid:
            self._reap()
        self._feed(Tick(time.monotonic()))

    def _reap(self) -> None:
        """Everything that has ended, as the first process of a container has to."""
        ended: int | None = None
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                if found[0] == self._pid:
                    code = os.waitstatus_to_exitcode(found[1])
                    ended = code if code >= 0 else 128 - code
        if ended is not None:
            self._feed(Ended(time.monotonic(), ended, self._alone()))
        elif self._state.code is not None and self._alone():
            self._feed(Alone(time.monotonic()))

    def _alone(self) -> bool:
        try:
            os.killpg(self._pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            return False
        return False

    def _feed(self, event: Event) -> None:
        self._state, actions = supervise.step(self._state, event)
        for action in actions:
            match action:
                case Send():
                    if self._pid:
                        with contextlib.suppress(ProcessLookupError, PermissionError):
                            os.killpg(self._pid, action.number)
                case Leave():
                    self._left = True


def lost(reason: str, grace: float) -> Seen:
    """The event that the lease is lost. `grace`: seconds in which the command has to end."""
    return Seen(time.monotonic(), lost=True, reason=reason, grace=grace, pre_stop=0.0)


def _nothing(_number: int, _frame: object) -> None:
    """A handler, so that the signal is neither ignored nor deadly, and reaches the wakeup descriptor."""


def _become_subreaper() -> None:
    """Orphans of the command become our children also where we are not the first process. Linux only."""
    if os.getpid() == 1:
        return
    with contextlib.suppress(Exception):
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


class _Terminal:
    """The terminal belongs to the command while it runs, so that it may read from it and gets Ctrl-C itself."""

    def __init__(self) -> None:
        self._mine = False
        with contextlib.suppress(OSError):
            self._mine = os.isatty(0) and os.tcgetpgrp(0) == os.getpgrp()
        if self._mine:
            signal.signal(signal.SIGTTOU, signal.SIG_IGN)

    def give(self, group: int) -> None:
        if self._mine:
            with contextlib.suppress(OSError):
                os.tcsetpgrp(0, group)

    def take_back(self) -> None:
        self.give(os.getpgrp())
