"""What `leasedjob exec` does with its command: the core. Pure: no clock, no processes; events in, actions out.

    RUNNING --SIGTERM or SIGINT | lease lost | notice and no SIGTERM--> STOPPING --budget ends--> KILLED
       \\--------------------- the command and its group have ended ----------/-----------------/--> left

- The first SIGTERM or SIGINT begins the stop and is passed on. Later ones join it: a second signal makes many programs
  drop what they are finishing. Every other signal is passed on each time.
- A drain notice alone stops nothing: it comes `pre_stop` seconds before SIGTERM. If SIGTERM doesn't come in time (it
  can be lost while PID 1 starts), the core sends it itself.
- Signals go to the whole process group, so that a shell in between keeps nothing back.
- Where the command has ended and others of its group live on, a stop lets them finish within its budget. Without a stop
  they are told to end, and are killed after five seconds: nothing of a run outlives it.
"""

from __future__ import annotations

import contextlib
import signal
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, assert_never

STOPPING: Final = frozenset({signal.SIGTERM, signal.SIGINT})
PASSED_ON: Final = (
    *sorted(STOPPING),
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGWINCH,
)
LATE_SECONDS: Final = 2.0  # SIGTERM is this late after a notice: it won't come
LEFTOVER_SECONDS: Final = 5.0  # for what outlives the command
GONE_SECONDS: Final = 1.0  # after SIGKILL, until the group is given up
LINE_LIMIT: Final = 300
FOREVER: Final = float("inf")
SIDECAR_SECONDS: Final = 5.0  # of the grace period, at most: for the sidecar's last statement


def sidecar_share(grace: float) -> float:
    """The end of a grace period that belongs to the sidecar: 5 s, of a short one a sixth."""
    return min(SIDECAR_SECONDS, grace / 6)


class Why(StrEnum):
    """What began a stop."""

    SIGNAL = "signal"
    NOTICE = "drain notice"
    LOST = "lease lost"


@dataclass(frozen=True, slots=True)
class Stop:
    at: float
    why: Why
    number: int  # the signal that the command got first
    until: float  # what lives then is killed
    reason: str = ""


@dataclass(frozen=True, slots=True)
class State:
    """`grace` and `pre_stop` are seconds of the one budget; times are those of the events."""

    grace: float = 60.0
    pre_stop: float = 10.0
    notice_at: float | None = None
    stop: Stop | None = None
    code: int | None = None  # of the command, once it has ended; 128+n for a signal
    leftover_until: float | None = None
    killed_at: float | None = None

    @property
    def due_at(self) -> float:
        """When a Tick is to come if nothing else does."""
        if self.killed_at is not None:  # the command's own end is waited for without a limit
            return FOREVER if self.code is None else self.killed_at + GONE_SECONDS
        if self.leftover_until is not None:
            return self.leftover_until
        if self.stop is not None:
            return self.stop.until
        return FOREVER if self.notice_at is None else self.notice_at + self.pre_stop + LATE_SECONDS


# --- events ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Signalled:
    at: float
    number: int


@dataclass(frozen=True, slots=True)
class Seen:
    """The sidecar's state; also the loss of a lease that no sidecar holds."""

    at: float
    draining: bool = False
    lost: bool = False
    reason: str = ""
    grace: float | None = None
    pre_stop: float | None = None


@dataclass(frozen=True, slots=True)
class Ended:
    """The command has ended. `alone`: nobody else of its group lives."""

    at: float
    code: int
    alone: bool


@dataclass(frozen=True, slots=True)
class Alone:
    """The last of the command's group has ended."""

    at: float


@dataclass(frozen=True, slots=True)
class Tick:
    at: float


Event = Signalled | Seen | Ended | Alone | Tick

# --- actions ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    """A signal to the command's group."""

    number: int


@dataclass(frozen=True, slots=True)
class Leave:
    """Nothing of the command is left, or what is can't be ended."""


Action = Send | Leave


# --- the machine -----------------------------------------------------------------------------------------------------


def step(state: State, event: Event) -> tuple[State, tuple[Action, ...]]:
    """One event."""
    match event:
        case Signalled():
            return _signalled(state, event)
        case Seen():
            return _seen(state, event)
        case Ended():
            return _ended(state, event)
        case Alone():
            return state, (Leave(),) if state.code is not None else ()
        case Tick():
            return _tick(state, event.at)
        case never:
            assert_never(never)


def _signalled(state: State, event: Signalled) -> tuple[State, tuple[Action, ...]]:
    if event.number not in STOPPING:
        return state, (Send(event.number),)
    if state.stop is not None or state.leftover_until is not None:
        return state, ()
    return _stop(state, event.at, Why.SIGNAL, event.number)


def _seen(state: State, event: Seen) -> tuple[State, tuple[Action, ...]]:
    state = replace(
        state,
        grace=state.grace if event.grace is None else event.grace,
        pre_stop=state.pre_stop if event.pre_stop is None else event.pre_stop,
    )
    if event.draining and state.notice_at is None and state.stop is None:
        state = replace(state, notice_at=event.at)
    if event.lost and state.stop is None and state.code is None:
        return _stop(state, event.at, Why.LOST, signal.SIGTERM, event.reason)
    return state, ()


def _stop(state: State, at: float, why: Why, number: int, reason: str = "") -> tuple[State, tuple[Action, ...]]:
    end = at + state.grace - state.pre_stop if state.notice_at is None else state.notice_at + state.grace
    until = max(at, end - sidecar_share(state.grace))
    return replace(state, stop=Stop(at, why, number, until, reason)), (Send(number),)


def _ended(state: State, event: Ended) -> tuple[State, tuple[Action, ...]]:
    state = replace(state, code=event.code)
    if event.alone:
        return state, (Leave(),)
    if state.stop is not None:
        return state, ()
    return replace(state, leftover_until=event.at + LEFTOVER_SECONDS), (Send(signal.SIGTERM),)


def _tick(state: State, at: float) -> tuple[State, tuple[Action, ...]]:
    if at < state.due_at:
        return state, ()
    if state.killed_at is not None:
        return state, (Leave(),)  # what SIGKILL doesn't end at once sleeps in the kernel
    if state.stop is not None or state.leftover_until is not None:
        return replace(state, killed_at=at), (Send(signal.SIGKILL),)
    return _stop(state, at, Why.NOTICE, signal.SIGTERM)


# --- what comes of it ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Result:
    """How a command ended.

    Args:
        code: its exit code; 128+n where a signal ended it; 126 and 127 where it could not be started.
        started: False: it never ran.
        stop: what stopped it, or None.
        killed: it, or a process that it left behind, had to be killed.
        stderr: the end of its standard error.
        noticed: the drain notice came before its end.
    """

    code: int
    started: bool
    stop: Stop | None
    killed: bool
    stderr: str
    noticed: bool = False

    @property
    def error(self) -> str:
        """One line for people."""
        last = self.stderr.rstrip().rpartition("\n")[2].strip()[:LINE_LIMIT]
        if not self.started:
            return last or "the command was not started"
        how = f"the command exited with {self.code}"
        if self.code > 128:
            with contextlib.suppress(ValueError):
                how += f" ({signal.Signals(self.code - 128).name})"
        return f"{how}: {last}" if last else how
