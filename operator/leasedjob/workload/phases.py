"""Stopping in phases: the core of GracefulShutdown. Pure: no clock, no I/O; events in, a new state and actions out.

    notice      readiness 503, nothing new is begun; at most `pre_stop` until the stop
    stage 1     http <= 25 s | intervals <= 25 s | background <= 20 s      side by side
    stage 2     consumers <= 15 s
    stage 3     pools <= 5 s
    the rest    of 60 s, 5 s at least, belongs to the sidecar's last statement

A stage begins when everything of the former one has ended or was cut off at its phase's limit. What is cut off is
named, and the rest still runs. Past `total - sidecar` the process ends by itself, whatever it is doing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Final, Self, assert_never

from leasedjob.errors import InvalidShutdownBudgetError
from leasedjob.workload.supervise import SIDECAR_SECONDS, sidecar_share

FOREVER: Final = float("inf")
TOTAL_SECONDS: Final = 60.0
LATE_SECONDS: Final = 2.0  # the stop is this late after its notice: it won't come


class Phase(StrEnum):
    """What a part of a program belongs to, when it is stopped."""

    HTTP = "http"
    INTERVALS = "intervals"
    BACKGROUND = "background"  # queue workers, relays, cascades
    CONSUMERS = "consumers"
    POOLS = "pools"  # last: everything before may need them


LIMITS: Final[Mapping[Phase, float]] = {
    Phase.HTTP: 25.0,
    Phase.INTERVALS: 25.0,
    Phase.BACKGROUND: 20.0,
    Phase.CONSUMERS: 15.0,
    Phase.POOLS: 5.0,
}
STAGES: Final = ((Phase.HTTP, Phase.INTERVALS, Phase.BACKGROUND), (Phase.CONSUMERS,), (Phase.POOLS,))


@dataclass(frozen=True, slots=True, kw_only=True)
class ShutdownBudget:
    """How long each phase of a stop may take, in seconds. The defaults fill 60 s.

    Args:
        total: the Pod's terminationGracePeriodSeconds.
        pre_stop: of it, until SIGTERM comes.
        sidecar: of it, what belongs to the sidecar at the end.

    Raises:
        InvalidShutdownBudgetError: a phase is longer than the rule allows, or all together don't fit into the total.
    """

    total: float = TOTAL_SECONDS
    pre_stop: float = 10.0
    http: float = LIMITS[Phase.HTTP]
    intervals: float = LIMITS[Phase.INTERVALS]
    background: float = LIMITS[Phase.BACKGROUND]
    consumers: float = LIMITS[Phase.CONSUMERS]
    pools: float = LIMITS[Phase.POOLS]
    sidecar: float = SIDECAR_SECONDS

    def __post_init__(self) -> None:
        for name in (f.name for f in fields(self)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
                raise InvalidShutdownBudgetError(f"{name} must be a number of seconds, 0 or more, not {value!r}")
        if self.total > TOTAL_SECONDS:
            raise InvalidShutdownBudgetError(f"total must be at most {TOTAL_SECONDS:g} s, not {self.total:g}")
        for phase, most in LIMITS.items():
            if self.limit(phase) > most:
                raise InvalidShutdownBudgetError(f"{phase} must be at most {most:g} s, not {self.limit(phase):g}")
        if self.sidecar < (least := sidecar_share(self.total)):
            raise InvalidShutdownBudgetError(f"sidecar must be at least {least:g} s, not {self.sidecar:g}")
        stages = [max(self.limit(phase) for phase in stage) for stage in STAGES]
        needed = self.pre_stop + sum(stages) + self.sidecar
        if needed > self.total + 1e-9:
            parts = " + ".join(f"{seconds:g}" for seconds in (self.pre_stop, *stages, self.sidecar))
            raise InvalidShutdownBudgetError(
                f"pre_stop, the three stages and sidecar need {parts} = {needed:g} s, but total is {self.total:g}"
            )

    @classmethod
    def within(cls, total: float, pre_stop: float) -> Self:
        """The default phases, shortened alike until they fit into another grace period.

        Raises:
            InvalidShutdownBudgetError: nothing is left beside pre_stop and the sidecar's share.
        """
        sidecar = sidecar_share(total)
        left = total - pre_stop - sidecar
        if left <= 0:
            raise InvalidShutdownBudgetError(f"{total:g} s leave no time to stop in: {pre_stop:g} pass before SIGTERM")
        share = min(1.0, left / sum(max(LIMITS[phase] for phase in stage) for stage in STAGES))
        limits = {phase.value: LIMITS[phase] * share for phase in Phase}
        return cls(total=total, pre_stop=pre_stop, sidecar=sidecar, **limits)

    def limit(self, phase: Phase) -> float:
        """Seconds of a phase, counted from the beginning of its stage."""
        limit: float = getattr(self, phase.value)
        return limit


class Outcome(StrEnum):
    """How a part, or a phase, ended."""

    DONE = "done"
    FAILED = "failed"  # it raised; its work may be unfinished
    CUT = "cut"  # it was cut off at its limit
    SKIPPED = "skipped"  # the process ended before it could begin


@dataclass(frozen=True, slots=True)
class Part:
    """Something that is to be stopped; the name is unique."""

    phase: Phase
    name: str


@dataclass(frozen=True, slots=True)
class Track:
    """A part that was begun."""

    part: Part
    began: float
    ended: float | None = None
    outcome: Outcome | None = None  # None: it is being stopped
    error: str = ""


@dataclass(frozen=True, slots=True)
class State:
    budget: ShutdownBudget = field(default_factory=ShutdownBudget)
    parts: tuple[Part, ...] = ()
    notice_at: float | None = None
    stop_at: float | None = None
    stage: int = -1  # -1: none has begun; len(STAGES): all have ended
    stage_at: float = FOREVER
    tracks: Mapping[str, Track] = field(default_factory=dict)
    forced: bool = False

    @property
    def begun(self) -> bool:
        return self.notice_at is not None or self.stop_at is not None

    @property
    def finished(self) -> bool:
        return self.stage >= len(STAGES)

    @property
    def force_at(self) -> float:
        """When the process ends by itself."""
        if self.notice_at is not None:
            return self.notice_at + self.budget.total - self.budget.sidecar
        if self.stop_at is not None:
            return self.stop_at + self.budget.total - self.budget.pre_stop - self.budget.sidecar
        return FOREVER

    @property
    def running(self) -> list[Track]:
        return [track for track in self.tracks.values() if track.outcome is None]

    def limit_at(self, phase: Phase) -> float:
        """When a phase of the present stage is cut off."""
        return min(self.stage_at + self.budget.limit(phase), self.force_at)

    @property
    def due_at(self) -> float:
        """When a Tick is to come if nothing else does."""
        if not self.begun or self.forced:
            return FOREVER
        if self.stage < 0:
            return self.force_at if self.notice_at is None else self.notice_at + self.budget.pre_stop + LATE_SECONDS
        return min([self.force_at, *(self.limit_at(track.part.phase) for track in self.running)])


# --- events ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Added:
    """One more part. Where its stage has begun it is stopped at once."""

    at: float
    part: Part


@dataclass(frozen=True, slots=True)
class Noticed:
    at: float


@dataclass(frozen=True, slots=True)
class Stopped:
    at: float


@dataclass(frozen=True, slots=True)
class Ended:
    """A part has stopped; `error` is what it raised, "" if nothing."""

    at: float
    name: str
    error: str = ""


@dataclass(frozen=True, slots=True)
class Tick:
    at: float


Event = Added | Noticed | Stopped | Ended | Tick

# --- actions ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Begin:
    """Stop this part; it is cut off at `limit_at`."""

    part: Part
    limit_at: float


@dataclass(frozen=True, slots=True)
class Cut:
    """Give this part up."""

    part: Part
    seconds: float  # how long it had


@dataclass(frozen=True, slots=True)
class Finish:
    """Everything has ended or was cut off."""


@dataclass(frozen=True, slots=True)
class Force:
    """End the process. `names`: what was still being stopped; `skipped`: what had not even begun."""

    names: tuple[str, ...]
    skipped: tuple[str, ...]


Action = Begin | Cut | Finish | Force


# --- the machine -----------------------------------------------------------------------------------------------------


def step(state: State, event: Event) -> tuple[State, tuple[Action, ...]]:
    """One event. A second notice or stop changes nothing."""
    match event:
        case Added():
            return _added(state, event)
        case Noticed():
            if state.begun:
                return state, ()
            state = replace(state, notice_at=event.at)
            # Only servers have use for the time between notice and SIGTERM.
            if any(part.phase is Phase.HTTP for part in state.parts):
                return state, ()
            return _begin_stage(state, event.at)
        case Stopped():
            if state.stop_at is not None:
                return state, ()
            state = replace(state, stop_at=event.at)
            return (state, ()) if state.stage >= 0 else _begin_stage(state, event.at)
        case Ended():
            return _ended(state, event)
        case Tick():
            return _tick(state, event.at)
        case never:
            assert_never(never)


def _added(state: State, event: Added) -> tuple[State, tuple[Action, ...]]:
    part = event.part
    if state.finished or any(part.name == known.name for known in state.parts):
        return state, ()
    state = replace(state, parts=(*state.parts, part))
    if state.stage < next(n for n, stage in enumerate(STAGES) if part.phase in stage):
        return state, ()
    return _with(state, Track(part, event.at)), (Begin(part, state.limit_at(part.phase)),)


def _begin_stage(state: State, at: float) -> tuple[State, tuple[Action, ...]]:
    """The next stage that has parts; at the end, Finish."""
    while True:
        state = replace(state, stage=state.stage + 1, stage_at=at)
        if state.finished:
            return state, (Finish(),)
        parts = [part for part in state.parts if part.phase in STAGES[state.stage]]
        if parts:
            tracks = {part.name: Track(part, at) for part in parts}
            actions = tuple(Begin(part, state.limit_at(part.phase)) for part in parts)
            return replace(state, tracks={**state.tracks, **tracks}), actions


def _ended(state: State, event: Ended) -> tuple[State, tuple[Action, ...]]:
    track = state.tracks.get(event.name)
    if track is None or track.outcome is not None or state.forced:
        return state, ()
    outcome = Outcome.FAILED if event.error else Outcome.DONE
    state = _with(state, replace(track, ended=event.at, outcome=outcome, error=event.error))
    return (state, ()) if state.running else _begin_stage(state, event.at)


def _tick(state: State, at: float) -> tuple[State, tuple[Action, ...]]:
    if not state.begun or state.forced:
        return state, ()
    if state.stage < 0 and state.notice_at is not None and at >= state.due_at:
        return _begin_stage(state, at)
    actions: tuple[Action, ...] = ()
    for track in state.running if not state.finished else ():
        if at >= state.limit_at(track.part.phase):
            state = _with(state, replace(track, ended=at, outcome=Outcome.CUT))
            actions += (Cut(track.part, at - track.began),)
    if at >= state.force_at:
        cut = tuple(track.part.name for track in state.tracks.values() if track.outcome is Outcome.CUT)
        skipped = tuple(part.name for part in state.parts if part.name not in state.tracks)
        return replace(state, forced=True), (*actions, Force(cut, skipped))
    if actions and not state.running:
        state, more = _begin_stage(state, at)
        return state, actions + more
    return state, actions


def _with(state: State, track: Track) -> State:
    return replace(state, tracks={**state.tracks, track.part.name: track})


# --- what came of it -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PhaseReport:
    """One phase that had parts: from the beginning of its stage to its last part's end, in seconds."""

    phase: Phase
    outcome: Outcome
    seconds: float
    parts: tuple[str, ...]


def report(state: State) -> tuple[PhaseReport, ...]:
    """Every phase that had parts, in the order of the stages; the worst outcome of its parts is its own."""
    found = []
    for phase in (phase for stage in STAGES for phase in stage):
        parts = [part for part in state.parts if part.phase is phase]
        if not parts:
            continue
        tracks = [state.tracks[part.name] for part in parts if part.name in state.tracks]
        outcomes = {track.outcome for track in tracks}
        worst = next((o for o in (Outcome.CUT, Outcome.FAILED, Outcome.DONE) if o in outcomes), Outcome.SKIPPED)
        began = min((track.began for track in tracks), default=0.0)
        ended = max((track.ended for track in tracks if track.ended is not None), default=began)
        found.append(PhaseReport(phase, worst, ended - began, tuple(part.name for part in parts)))
    return tuple(found)
