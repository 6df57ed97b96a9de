"""The core of `hold`: when a holder may say "leased". Pure: no clock, no I/O; events in, a new state and actions out.

Every `at` is seconds of CLOCK_BOOTTIME, the local clock that goes on while a machine is suspended. It is used only to
shorten trust; ownership itself is judged by the database's clock alone (docs/decisions/0003-fence.md).

    WAITING --handed over--> UNCONFIRMED --beat answered--> LEASED --> FENCED (sticky)
                        \\--trust left------------------------^

- LEASED ends at `sent + trust` of the latest answered heartbeat, at a heartbeat that touched no row and at a stop
  request. Nothing leads back from FENCED, not even a restart of the process (the state is kept in the handoff volume).
- UNCONFIRMED is a holder that starts with no trust left (its predecessor was killed): it answers "no", and the first
  answered heartbeat makes it LEASED.
- A report of the workload stands beside the phase, because finished work is recorded as what it was as long as nobody
  reclaimed. "complete" is sent at once, until the database has answered: nobody runs it again. "fail" and "release"
  make the run claimable, so they are sent when the workload has ended (SIGTERM): its successor must not meet it.
- Suspicion: after a silence that was long enough for the kubelet to have decided to stop a container, the holder does
  not testify "leased to the end" until a later probe of that container was answered with yes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Final, assert_never

from leasedjob.lease.held import Outcome
from leasedjob.lease.trust import CLOCK_RATE, Probe, Timing
from leasedjob.protocol import PhaseEnd, Seen, Testimony

CALL_LIMIT_SECONDS: Final = 30.0  # a database call that takes longer is cut off and tried again
RETRY_FIRST_SECONDS: Final = 1.0
RETRY_MOST_SECONDS: Final = 5.0
NOTES_MOST: Final = 16  # reports of a stop that are kept to be sent
NOTE_TRIES: Final = 3
NOTE_RETRY_SECONDS: Final = 1.0
LEAVE_SECONDS: Final = 1.5  # after SIGTERM a report on its way may take this long; a sidecar has two seconds at least
ANY_CONTAINER: Final = "*"  # a suspicion where no container had asked yet
REASON_LIMIT: Final = 240  # the kubelet shares 12 KiB between the termination messages of all containers of a Pod
NEVER: Final = float("-inf")
FOREVER: Final = float("inf")


class Phase(StrEnum):
    """What the holder believes at one instant."""

    WAITING = "waiting"
    UNCONFIRMED = "unconfirmed"
    LEASED = "leased"
    FENCED = "fenced"


@dataclass(frozen=True, slots=True)
class Lease:
    """What adopt handed over, as far as the fence needs it."""

    lease_id: str
    attempt: int
    fencing_token: int
    lock_key: str
    lease_ms: int  # the duration that the database recorded
    timing: Timing

    @property
    def trust(self) -> float:
        """Seconds of trust per heartbeat: by the shorter of the planned duration and the recorded one."""
        return CLOCK_RATE * min(float(self.timing.duration), self.lease_ms / 1000) - self.timing.fence_budget

    @property
    def call_limit(self) -> float:
        """Seconds for one database call, so that at least three fit into the trust window."""
        return max(0.5, min(CALL_LIMIT_SECONDS, self.trust / 3))


def stops_after(probe: Probe, *, refused: bool) -> float:
    """The shortest silence, in seconds, after which the kubelet may have decided to stop a container.

    The first probe may fall on the silence's first instant and the last needed one (threshold - 1) periods later. A
    closed port or a "no" fails at once (`refused`); a frozen process fails each probe only after its timeout.
    """
    return (probe.threshold - 1) * probe.period + (0 if refused else probe.timeout)


@dataclass(frozen=True, slots=True)
class Fenced:
    at: float  # from when on the answer is no
    reason: str
    lost: bool = False  # the database said so: no more heartbeats


@dataclass(frozen=True, slots=True)
class Report:
    """The workload's own outcome. `recorded` once the database has answered yes."""

    outcome: Outcome
    data: Any = None
    recorded: bool = False
    next_at: float = NEVER
    refused: str = ""  # why the database or the library would not take it (too large, ...): a new one may be made
    rejected: bool = False  # the database said that the lease is somebody else's


@dataclass(frozen=True, slots=True)
class Suspicion:
    ended: float  # when the holder ran again
    reason: str


@dataclass(frozen=True, slots=True)
class Note:
    """How a program of the Pod has stopped: figures for a metric, which decide nothing and may be lost.

    Args:
        id: a UUID, so that sending it twice counts once.
    """

    id: str
    phases: tuple[PhaseEnd, ...]
    next_at: float = NEVER
    tries: int = 0


class CallKind(StrEnum):
    BEAT = "beat"
    RECORD = "record"
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class Call:
    """The one database call on its way."""

    kind: CallKind
    since: float
    cut_at: float = NEVER


@dataclass(frozen=True, slots=True)
class Counts:
    """For people and metrics only; decides nothing."""

    beats: int = 0
    failed: int = 0
    latest_seconds: float = 0.0  # how long the latest answered heartbeat took
    late_seconds: float = 0.0  # the most that a heartbeat was sent after it was due
    last_problem: str = ""


@dataclass(frozen=True, slots=True)
class State:
    lease: Lease | None = None
    trusted_until: float = NEVER
    unconfirmed: bool = False
    fenced: Fenced | None = None
    report: Report | None = None
    notes: tuple[Note, ...] = ()
    draining: bool = False
    leaving: float | None = None  # when SIGTERM came
    call: Call | None = None
    beat_at: float = NEVER
    failures: int = 0
    last_kind: CallKind | None = None
    counts: Counts = field(default_factory=Counts)
    # what the kubelet may have seen
    well_at: float | None = None  # the last instant at which this holder ran and would have said yes
    broken: bool = False  # since then it has been restarted or has said no
    asked: Mapping[str, float] = field(default_factory=dict)
    missed: Mapping[str, int] = field(default_factory=dict)
    suspicions: Mapping[str, Suspicion] = field(default_factory=dict)
    gap: Suspicion | None = None
    unhealthy: Mapping[str, str] = field(default_factory=dict)  # container -> why its own liveness probe failed

    def phase(self, at: float) -> Phase:
        if self.lease is None:
            return Phase.WAITING
        if self.fenced is not None:
            return Phase.FENCED
        if self.unconfirmed:
            return Phase.UNCONFIRMED
        return Phase.LEASED if at < self.trusted_until else Phase.FENCED

    def leased(self, at: float) -> bool:
        """The one answer that everything asks for."""
        return self.phase(at) is Phase.LEASED

    @property
    def lost(self) -> bool:
        return self.fenced is not None and self.fenced.lost

    @property
    def pending(self) -> Report | None:
        """A report that is still to be recorded, also past expiry: only the database knows whether nobody reclaimed."""
        report = self.report
        return report if report and not (report.recorded or report.refused or report.rejected) else None

    @property
    def sendable(self) -> Report | None:
        """A pending report that may be sent by now."""
        report = self.pending
        return report if report and (report.outcome is Outcome.COMPLETE or self.leaving is not None) else None

    @property
    def due_at(self) -> float:
        """When trust ends or the next call is to be sent, if nothing else happens; infinite if neither is to come."""
        due = FOREVER
        if self.lease is not None and self.beating and self.fenced is None and not self.unconfirmed:
            due = self.trusted_until
        if self.lease is None or self.call is not None:
            return due
        if self.sendable is not None:
            due = min(due, self.sendable.next_at)
        if self.beating:
            due = min(due, self.beat_at)
        if self.notes:
            due = min(due, self.notes[0].next_at)
        return due

    @property
    def beating(self) -> bool:
        """Whether heartbeats go on. A fenced holder that is not lost does: the extended lease covers the workload
        while it is being stopped."""
        reported = self.report is not None and self.report.recorded
        return not self.lost and not reported and self.leaving is None

    def why(self, at: float) -> str:
        """The reason for anything but "leased", for people."""
        match self.phase(at):
            case Phase.WAITING:
                return "nothing was handed over by adopt"
            case Phase.UNCONFIRMED:
                return "no heartbeat was answered since the sidecar was restarted"
            case Phase.FENCED:
                return self.fenced.reason if self.fenced else "the trust window has ended"
            case Phase.LEASED:
                return ""
            case never:
                assert_never(never)

    def testimony(self, at: float, wall: float, *, lease_id: str) -> Testimony:
        """What to write into the termination message at boottime `at`, which is `wall` by the node's wall clock."""
        phase = self.phase(at)
        report = self.report
        suspicion = next(iter(self.suspicions.values()), None)
        seen, reason = Seen.LEASED, ""
        if report is not None and (report.recorded or self.pending):
            seen = Seen.REPORTED
            reason = "" if report.recorded else self.counts.last_problem
        elif phase is not Phase.LEASED:
            seen, reason = Seen.FENCED, self.why(at)
        elif suspicion is not None:
            seen, reason = Seen.FENCED, suspicion.reason
        elif self.unhealthy:
            container, why = next(iter(self.unhealthy.items()))
            reason = f"the liveness probe of {container} failed: {why}"
        return Testimony(
            lease_id=self.lease.lease_id if self.lease else lease_id,
            attempt=self.lease.attempt if self.lease else 0,
            seen=seen,
            beat=wall,
            until=wall + (self.trusted_until - at) if self.trusted_until > NEVER else 0.0,
            final=self.leaving is not None,
            fenced_at=wall - (at - self.fenced.at) if self.fenced else (wall if seen is Seen.FENCED else None),
            reason=reason[:REASON_LIMIT],
            outcome=report.outcome.value if report and seen is Seen.REPORTED else None,
            recorded=report.recorded if report and seen is Seen.REPORTED else None,
            failed_probe=next(iter(self.unhealthy), None),
        )


# --- events ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tick:
    at: float


@dataclass(frozen=True, slots=True)
class HandedOver:
    """The handoff was read. `before` is the state that a predecessor in this container left behind, if any."""

    at: float
    lease: Lease
    sent: float
    trusted_until: float
    before: State | None = None
    jitter: float = 0.0


@dataclass(frozen=True, slots=True)
class BeatAnswered:
    """The database answered a heartbeat. `sent` was read before the statement left; jitter is in [0, 1)."""

    at: float
    sent: float
    held: bool
    stop_requested: bool = False
    busy: bool = False  # a stranger holds the row lock: neither yes nor no
    jitter: float = 0.0


@dataclass(frozen=True, slots=True)
class CallFailed:
    """A call ended without an answer; nothing is known."""

    at: float
    problem: str
    jitter: float = 0.0


@dataclass(frozen=True, slots=True)
class Asked:
    """A liveness probe for a container. `gone`: the asker had given up before it could be answered."""

    at: float
    lease_id: str
    attempt: int
    container: str
    gone: bool = False


@dataclass(frozen=True, slots=True)
class Reported:
    at: float
    outcome: Outcome
    data: Any = None


@dataclass(frozen=True, slots=True)
class RecordAnswered:
    at: float
    recorded: bool


@dataclass(frozen=True, slots=True)
class RecordRefused:
    """The report itself is at fault (too large, not storable); repeating it would not help."""

    at: float
    problem: str


@dataclass(frozen=True, slots=True)
class Noted:
    """A program of the Pod says how it has stopped."""

    at: float
    id: str
    phases: tuple[PhaseEnd, ...]


@dataclass(frozen=True, slots=True)
class NoteAnswered:
    """The database has it, or will never take it."""

    at: float


@dataclass(frozen=True, slots=True)
class Drain:
    at: float


@dataclass(frozen=True, slots=True)
class Unhealthy:
    at: float
    container: str
    reason: str


@dataclass(frozen=True, slots=True)
class Term:
    at: float


Event = (
    Tick
    | HandedOver
    | BeatAnswered
    | CallFailed
    | Asked
    | Reported
    | RecordAnswered
    | RecordRefused
    | Noted
    | NoteAnswered
    | Drain
    | Unhealthy
    | Term
)

# --- actions ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Beat:
    """Send a heartbeat."""


@dataclass(frozen=True, slots=True)
class Record:
    """Send the workload's outcome."""

    outcome: Outcome
    data: Any


@dataclass(frozen=True, slots=True)
class Cut:
    """Cut off the call on its way: it has taken too long."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer the probe that asked."""

    yes: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Leave:
    """End the process; the final testimony is in the state."""


Action = Beat | Record | Note | Cut | Answer | Leave


# --- the machine -----------------------------------------------------------------------------------------------------


def step(state: State, event: Event) -> tuple[State, tuple[Action, ...]]:
    """One event. Time is applied first, so that no event, however late it is handled, is answered by stale trust."""
    actions: tuple[Action, ...] = ()
    if not isinstance(event, HandedOver):
        state = _pass_time(state, event.at)
    match event:
        case Tick():
            pass
        case HandedOver():
            state = _pass_time(_hand_over(state, event), event.at)
        case BeatAnswered():
            state = _pass_time(_beat_answered(state, event), event.at)
        case CallFailed():
            state = _call_failed(state, event)
        case Asked():
            state, answer = _asked(state, event)
            actions = (answer,)
        case Reported():
            state = _reported(state, event)
        case RecordAnswered():
            state = _record_answered(state, event)
        case RecordRefused():
            report = state.report
            state = replace(state, call=None, report=replace(report, refused=event.problem) if report else None)
        case Noted():
            if len(state.notes) < NOTES_MOST and not state.lost:
                state = replace(state, notes=(*state.notes, Note(event.id, event.phases, next_at=event.at)))
        case NoteAnswered():
            state = replace(state, call=None, notes=state.notes[1:])
        case Drain():
            state = replace(state, draining=True)
        case Unhealthy():
            if event.container not in state.unhealthy:
                state = replace(state, unhealthy={**state.unhealthy, event.container: event.reason})
        case Term():
            # A second signal joins the first: it neither shortens nor prolongs the wait.
            state = replace(state, leaving=event.at if state.leaving is None else state.leaving)
        case never:
            assert_never(never)
    state, due = _due(state, event.at)
    return state, actions + due


def _pass_time(state: State, at: float) -> State:
    """Trust that has run out becomes a fence; a silence that was long enough becomes a suspicion."""
    lease = state.lease
    if lease is None:
        return state
    reported = state.report is not None and state.report.recorded
    if state.fenced is None and not state.unconfirmed and at >= state.trusted_until and not reported:
        state = replace(state, fenced=Fenced(state.trusted_until, _trust_ended(state)))
    if not state.leased(at):
        return replace(state, broken=True) if state.well_at is not None and not state.broken else state
    if state.well_at is not None:
        silence = at - state.well_at
        if silence >= stops_after(lease.timing.probe, refused=state.broken):
            state = _suspect(state, at, silence)
    return replace(state, well_at=at, broken=False)


def _trust_ended(state: State) -> str:
    problem = state.counts.last_problem
    return "no heartbeat was answered in time" + (f"; last: {problem}" if problem else "")


def _suspect(state: State, at: float, silence: float) -> State:
    assert state.lease is not None
    assert state.well_at is not None
    verb = "was not answering" if state.broken else "was frozen"
    suspicion = Suspicion(at, f"the sidecar {verb} for {silence:.1f} s; the kubelet may have stopped the workload")
    probe = state.lease.timing.probe
    # A container that had not asked for more than two periods had ended before. If all were silent, nothing is known.
    recent = state.well_at - (2 * probe.period + probe.timeout)
    names = [c for c, asked in state.asked.items() if asked >= recent] or list(state.asked) or [ANY_CONTAINER]
    return replace(state, gap=suspicion, suspicions={**state.suspicions, **dict.fromkeys(names, suspicion)})


def _hand_over(state: State, event: HandedOver) -> State:
    if state.lease is not None:
        return state
    lease, before = event.lease, event.before
    trusted_until = min(event.trusted_until, event.sent + lease.trust)
    state = replace(
        state,
        lease=lease,
        trusted_until=trusted_until,
        beat_at=event.sent + _interval(lease, event.jitter),
    )
    if before is not None:
        state = replace(
            state,
            # The predecessor's last answered heartbeat is as good as if this process had sent it.
            trusted_until=max(trusted_until, before.trusted_until),
            fenced=before.fenced,
            report=before.report,
            draining=before.draining or state.draining,
            beat_at=event.at,
            well_at=before.well_at,
            broken=True,
            asked=before.asked,
            suspicions=before.suspicions,
            gap=before.gap,
            unhealthy=before.unhealthy,
        )
    if state.fenced is None and event.at >= state.trusted_until:
        state = replace(state, unconfirmed=True, beat_at=event.at)
    return state


def _beat_answered(state: State, event: BeatAnswered) -> State:
    lease = state.lease
    counts = state.counts
    if lease is None:
        return state
    late = event.sent - state.beat_at if state.beat_at > NEVER and not state.failures else 0.0
    state = replace(state, call=None)
    if event.busy:
        return _retry_beat(state, event.at, event.jitter, "the lease row is locked by another session")
    counts = replace(
        counts,
        beats=counts.beats + 1,
        latest_seconds=event.at - event.sent,
        late_seconds=max(counts.late_seconds, late),
    )
    if not event.held:
        if state.sendable is not None:
            # Our own report may have been recorded and its answer lost; only sending it again tells.
            return replace(
                state, counts=counts, report=replace(state.sendable, next_at=event.at), last_kind=CallKind.BEAT
            )
        if state.report is not None and state.report.recorded:
            return replace(state, counts=counts)
        return _lose(replace(state, counts=counts), event.at, "the database no longer knows this holder")
    state = replace(
        state,
        counts=counts,
        failures=0,
        beat_at=max(event.sent + _interval(lease, event.jitter), event.at + 0.1),
        trusted_until=max(state.trusted_until, event.sent + lease.trust),
    )
    if state.unconfirmed and event.at < state.trusted_until:
        state = replace(state, unconfirmed=False)
    if event.stop_requested and state.fenced is None:
        state = replace(
            state, fenced=Fenced(event.at, "a stop was requested: the run was cancelled, replaced or given up")
        )
    return state


def _lose(state: State, at: float, reason: str) -> State:
    fenced, state = state.fenced, replace(state, notes=())  # what this token says is heard by nobody
    if fenced is None:
        return replace(state, fenced=Fenced(at, reason, lost=True))
    return replace(state, fenced=replace(fenced, lost=True))


def _call_failed(state: State, event: CallFailed) -> State:
    kind = state.call.kind if state.call else CallKind.BEAT
    state = replace(state, call=None, counts=replace(state.counts, failed=state.counts.failed + 1))
    if kind is CallKind.RECORD:
        state = replace(state, counts=replace(state.counts, last_problem=event.problem), failures=state.failures + 1)
        if state.pending is not None:
            delay = _retry_delay(state, event.jitter)
            state = replace(state, report=replace(state.pending, next_at=event.at + delay))
        return state
    if kind is CallKind.NOTE:
        note, *more = state.notes or (None,)
        if note is not None and note.tries + 1 < NOTE_TRIES:
            more = [replace(note, tries=note.tries + 1, next_at=event.at + NOTE_RETRY_SECONDS), *more]
        return replace(state, notes=tuple(more))
    return _retry_beat(state, event.at, event.jitter, event.problem)


def _retry_beat(state: State, at: float, jitter: float, problem: str) -> State:
    state = replace(state, failures=state.failures + 1, counts=replace(state.counts, last_problem=problem))
    return replace(state, beat_at=at + _retry_delay(state, jitter))


def _asked(state: State, event: Asked) -> tuple[State, Answer]:
    lease = state.lease
    if lease is None:
        return state, Answer(False, state.why(event.at))
    if (event.lease_id, event.attempt) != (lease.lease_id, lease.attempt):
        return state, Answer(False, "another lease or attempt is held here")
    name, probe = event.container, lease.timing.probe
    suspicions, missed = dict(state.suspicions), dict(state.missed)
    healthy = state.leased(event.at)
    if event.gone:
        missed[name] = missed.get(name, 0) + 1
        if missed[name] >= probe.threshold:
            suspicions[name] = Suspicion(event.at, f"{missed[name]} probes of {name} were answered too late")
    else:
        missed.pop(name, None)
        # For one timeout after a gap the asker may be a probe from before: it has given up, and its answer proves
        # nothing. If its container is not yet known, its having asked during the gap is all there is to know.
        for key in (name, ANY_CONTAINER):
            if healthy and key in suspicions and event.at >= suspicions[key].ended + probe.timeout:
                del suspicions[key]
        gap = state.gap
        if gap is not None and event.at < gap.ended + probe.timeout and name not in suspicions:
            suspicions[name] = gap
    state = replace(state, asked={**state.asked, name: event.at}, suspicions=suspicions, missed=missed)
    if not healthy:
        return state, Answer(False, state.why(event.at))
    if name in state.unhealthy:
        return state, Answer(False, f"liveness probe of {name} failed: {state.unhealthy[name]}")
    return state, Answer(True)


def _reported(state: State, event: Reported) -> State:
    report = state.report
    if state.lease is None or (report is not None and not report.refused):
        return state  # `report_status` tells the asker how this one stands
    return replace(state, report=Report(event.outcome, event.data, next_at=event.at))


def report_status(state: State, outcome: Outcome) -> tuple[int, str] | None:
    """The HTTP status for somebody who reports `outcome`, and why; None while it is on its way."""
    report = state.report
    if state.lease is None:
        return 503, "no lease is held yet"
    if report is not None and report.recorded:
        return (200, "") if report.outcome is outcome else (409, f"{report.outcome} is recorded already")
    if report is not None and report.rejected:
        return 409, "the lease is lost; nothing was recorded"
    if report is None:
        return 503, "try again"
    if report.refused:
        return 422, report.refused
    if report.outcome is not outcome:
        return 409, f"{report.outcome} was reported before"
    if state.sendable is not None:
        return None
    return (409, "the lease is lost") if state.lost else (202, "to be recorded when the workload has ended")


def _record_answered(state: State, event: RecordAnswered) -> State:
    state = replace(state, call=None, failures=0)
    report = state.report
    if report is None:
        return state
    if event.recorded:
        return replace(state, report=replace(report, recorded=True, data=None))
    state = replace(state, report=replace(report, rejected=True, data=None))
    return _lose(state, event.at, "the lease was taken over before the outcome could be recorded")


def _due(state: State, at: float) -> tuple[State, tuple[Action, ...]]:
    """What is to be done now that the event is in: at most one call on its way, reports before heartbeats."""
    lease = state.lease
    unsaid = state.pending is not None or state.notes
    if state.leaving is not None and (not unsaid or at >= state.leaving + LEAVE_SECONDS):
        return state, (Leave(),)
    if lease is None:
        return state, ()
    if state.call is not None:
        overdue = at - state.call.since >= lease.call_limit and at - state.call.cut_at >= 1.0
        return (replace(state, call=replace(state.call, cut_at=at)), (Cut(),)) if overdue else (state, ())
    wanted = []
    if state.sendable is not None and at >= state.sendable.next_at:
        wanted.append(CallKind.RECORD)
    if state.beating and at >= state.beat_at:
        wanted.append(CallKind.BEAT)
    if state.notes and at >= state.notes[0].next_at and not wanted:
        return replace(state, call=Call(CallKind.NOTE, at)), (state.notes[0],)
    if not wanted:
        return state, ()
    # Both due and failing: take turns, so that neither starves the other.
    kind = wanted[0] if len(wanted) == 1 or state.last_kind is not CallKind.RECORD else CallKind.BEAT
    state = replace(state, call=Call(kind, at), last_kind=kind)
    if kind is CallKind.RECORD and state.sendable is not None:
        return state, (Record(state.sendable.outcome, state.sendable.data),)
    return state, (Beat(),)


def _interval(lease: Lease, jitter: float) -> float:
    """Up to a tenth earlier than due, so that Pods of one tick don't beat together for ever."""
    return lease.timing.heartbeat * (1 - 0.1 * jitter)


def _retry_delay(state: State, jitter: float) -> float:
    """Doubling from 1 s to 5 s, half of it jitter; for a short trust window at most a tenth of it."""
    assert state.lease is not None
    exponent = min(state.failures - 1, 10)
    delay: float = min(RETRY_FIRST_SECONDS * 2**exponent, RETRY_MOST_SECONDS, max(0.1, state.lease.trust / 10))
    return delay * (0.5 + 0.5 * jitter)
