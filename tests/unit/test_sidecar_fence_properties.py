"""The fence under random lives: whatever comes in whatever order, it never says "leased" past trust."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from leasedjob import protocol
from leasedjob.lease.rows import Outcome
from leasedjob.lease.trust import Timing
from leasedjob.protocol import Seen
from leasedjob.sidecar import fence
from leasedjob.sidecar.fence import State, step

TIMINGS = st.sampled_from(
    [
        Timing(duration=900, heartbeat=60, grace=60, pre_stop=10),
        Timing(duration=60, heartbeat=5, grace=20, pre_stop=5),
        Timing(duration=20, heartbeat=2, grace=5, pre_stop=0),
    ]
)
CONTAINERS = st.sampled_from(["a", "b"])
# Pauses: mostly short, now and then a freeze.
PAUSES = st.one_of(st.floats(0, 2), st.floats(0, 30), st.floats(0, 1200))


@dataclass(frozen=True)
class Move:
    kind: str
    pause: float
    container: str
    flag: bool
    number: float


MOVES = st.lists(
    st.builds(
        Move,
        kind=st.sampled_from(
            ["tick"] * 4
            + ["ask"] * 6
            + ["held"] * 5
            + ["failed", "busy", "drain", "unhealthy", "stop", "lost", "report", "recorded", "refused", "restart"]
        ),
        pause=PAUSES,
        container=CONTAINERS,
        flag=st.booleans(),
        number=st.floats(0, 1, exclude_max=True),
    ),
    min_size=1,
    max_size=60,
)


class Model:
    """Beside the machine: what a reader of the rule would allow."""

    def __init__(self, lease: fence.Lease) -> None:
        self.lease = lease
        self.newest_sent = 0.0
        self.over = False  # lost, asked to stop, or past trust while the same process ran
        self.final_yes = 0

    def may_say_yes(self, at: float) -> bool:
        return not self.over and at < self.newest_sent + self.lease.trust


@settings(max_examples=400, deadline=None)
@given(timing=TIMINGS, moves=MOVES)
def test_never_leased_past_trust_and_never_again_after_a_fence(timing: Timing, moves: list[Move]) -> None:
    lease = fence.Lease("id", 1, 1, "v2:k", timing.duration * 1000, timing)
    at, sent_at = 0.0, 0.0
    state, actions = step(State(), fence.HandedOver(at, lease, at, at + lease.trust))
    model = Model(lease)
    fenced = False
    for move in moves:
        at += move.pause
        event: fence.Event
        restarted = False
        match move.kind:
            case "tick":
                event = fence.Tick(at)
            case "ask":
                event = fence.Asked(at, "id", 1, move.container, gone=move.flag and move.number < 0.3)
            case "held":
                event = fence.BeatAnswered(at, sent_at, True, jitter=move.number)
            case "busy":
                event = fence.BeatAnswered(at, sent_at, False, busy=True, jitter=move.number)
            case "stop":
                event = fence.BeatAnswered(at, sent_at, True, stop_requested=True)
            case "lost":
                event = fence.BeatAnswered(at, sent_at, False)
            case "failed":
                event = fence.CallFailed(at, "down", jitter=move.number)
            case "drain":
                event = fence.Drain(at)
            case "unhealthy":
                event = fence.Unhealthy(at, move.container, "500")
            case "report":
                event = fence.Reported(at, Outcome.COMPLETE if move.flag else Outcome.RELEASE)
            case "recorded":
                event = fence.RecordAnswered(at, move.flag)
            case "refused":
                event = fence.RecordRefused(at, "too large")
            case _:
                restarted = True
                handed = 0.0 if move.flag else -1e9
                event = fence.HandedOver(at, lease, handed, handed + lease.trust, before=state)
        before = state
        state, actions = step(State() if restarted else state, event)

        # what the rule allows now
        ended_before = before.report is not None and before.report.recorded
        if not restarted and at >= model.newest_sent + lease.trust and not before.unconfirmed and not ended_before:
            model.over = True
        if isinstance(event, fence.BeatAnswered) and event.held:
            model.newest_sent = max(model.newest_sent, event.sent)
        said_yes = [a.yes for a in actions if isinstance(a, fence.Answer)]
        if any(said_yes) or state.leased(at):
            assert model.may_say_yes(at), (move, state)
        if isinstance(event, fence.BeatAnswered) and event.stop_requested:
            model.over = True
        if state.lost:
            model.over = True

        # sticky, also over restarts
        fenced = fenced or state.fenced is not None
        if fenced:
            assert state.fenced is not None
            assert not state.leased(at)

        # at most one call; no heartbeat by a lost holder or after a recorded report
        calls = [a for a in actions if isinstance(a, fence.Beat | fence.Record)]
        assert len(calls) <= 1
        if state.lost:
            assert fence.Beat() not in actions
        if state.report and state.report.recorded:
            assert fence.Beat() not in actions
        if calls:
            sent_at = at + move.number / 100

        # the testimony never claims more than the state, and can be read back
        testimony = state.testimony(at, 1e9 + at, lease_id="id")
        assert protocol.Testimony.from_json(testimony.to_json()) == testimony
        if testimony.seen is Seen.LEASED:
            assert state.leased(at)
            assert not state.suspicions
        if state.leased(at):
            assert abs(testimony.until - (1e9 + model.newest_sent + lease.trust)) < 1e-3


@settings(max_examples=300, deadline=None)
@given(
    timing=TIMINGS,
    life=st.floats(0, 30),
    phase=st.floats(0, 1, exclude_max=True),
    gap=st.floats(0.6, 60),
    refused=st.booleans(),
    after=st.floats(0, 60),
)
def test_a_workload_that_the_kubelet_has_stopped_is_never_testified_as_leased_to_the_end(
    timing: Timing, life: float, phase: float, gap: float, refused: bool, after: float
) -> None:
    """Against a model of the kubelet: a probe each period, `threshold` failures in a row stop the container.

    The holder is frozen (the probe fails after its timeout) or dead and restarted (it fails at once) for `gap`.
    """
    probe = timing.probe
    lease = fence.Lease("id", 1, 1, "v2:k", timing.duration * 1000, timing)
    state, _ = step(State(), fence.HandedOver(0.0, lease, 0.0, lease.trust))
    gap_begins, gap_ends = life, life + gap
    end = gap_ends + after
    probes = [phase * probe.period + n * probe.period for n in range(int(end / probe.period) + 2)]
    failures, stopped_at = 0, None
    events: list[tuple[float, fence.Event]] = []
    for begun in probes:
        if begun >= end or stopped_at is not None:
            break
        if gap_begins <= begun < gap_ends:
            fails = refused or begun + probe.timeout < gap_ends
            if not refused:  # it lies in the queue and is read after the thaw
                events.append((gap_ends + 0.001, fence.Asked(gap_ends + 0.001, "id", 1, "main")))
        else:
            fails = False
            events.append((begun, fence.Asked(begun, "id", 1, "main")))
        failures = failures + 1 if fails else 0
        if failures >= probe.threshold:
            stopped_at = begun if refused else begun + probe.timeout
    ticks = [n * 0.5 for n in range(int(end * 2) + 1) if not gap_begins <= n * 0.5 < gap_ends]
    events += [(t, fence.BeatAnswered(t, t, True)) for t in [*ticks, gap_ends]]
    was_dead = False
    for at, event in sorted(events, key=lambda e: e[0]):
        if refused and at >= gap_ends and not was_dead:
            was_dead = True
            state, _ = step(State(), fence.HandedOver(at, lease, 0.0, lease.trust, before=state))
        state, _ = step(state, event)
    state, _ = step(state, fence.Term(end))
    if stopped_at is not None and stopped_at < end:
        assert state.testimony(end, end, lease_id="id").seen is Seen.FENCED
