"""The fence as tables: when the holder says "leased", and what it testifies."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from leasedjob.lease.rows import Outcome
from leasedjob.lease.trust import Probe, Timing
from leasedjob.protocol import PhaseEnd, Seen
from leasedjob.sidecar import fence
from leasedjob.sidecar.fence import (
    Asked,
    Beat,
    BeatAnswered,
    CallFailed,
    Cut,
    Drain,
    HandedOver,
    Lease,
    Leave,
    Note,
    NoteAnswered,
    Noted,
    Phase,
    Record,
    RecordAnswered,
    RecordRefused,
    Reported,
    State,
    Term,
    Tick,
    Unhealthy,
    report_status,
    step,
    stops_after,
)

# trust 797 s, probe 5 s x 3 + 5 s, a freeze of 15 s and a refusal of 10 s may have stopped the workload
LEASE = Lease("lease-1", 3, 77, "v2:key", 900_000, Timing(duration=900, heartbeat=60, grace=60, pre_stop=10))
TRUST = LEASE.trust


@dataclass
class Holder:
    """Drives the machine: each method is one event; the clock is moved by hand."""

    at: float = 1000.0
    state: State = field(default_factory=State)
    actions: list[fence.Action] = field(default_factory=list)

    def feed(self, event: fence.Event) -> list[fence.Action]:
        self.at = event.at
        self.state, actions = step(self.state, event)
        self.actions = list(actions)
        return self.actions

    def start(self, *, before: State | None = None, sent: float | None = None, lease: Lease = LEASE) -> Holder:
        sent = self.at if sent is None else sent
        self.feed(HandedOver(self.at, lease, sent, sent + lease.trust, before))
        return self

    def tick(self, at: float) -> list[fence.Action]:
        return self.feed(Tick(at))

    def run_until(self, at: float, *, ask: str | None = None) -> None:
        """Ticks twice a second and, with `ask`, a probe each period: a life without interruption."""
        asked = -1.0
        while self.at < at:
            self.tick(min(at, self.at + 0.5))
            if ask and self.at - asked >= LEASE.timing.probe.period:
                asked = self.at
                self.ask(ask)

    def ask(self, container: str = "main", **other: Any) -> bool:
        self.feed(replace(Asked(self.at, LEASE.lease_id, LEASE.attempt, container), **other))
        (answer,) = [a for a in self.actions if isinstance(a, fence.Answer)]
        return answer.yes

    def beat(self, sent: float | None = None, **answer: Any) -> None:
        self.feed(BeatAnswered(self.at, self.at if sent is None else sent, **{"held": True, **answer}))

    @property
    def seen(self) -> Seen:
        return self.state.testimony(self.at, 1_800_000_000.0, lease_id="").seen

    @property
    def reason(self) -> str:
        return self.state.testimony(self.at, 1_800_000_000.0, lease_id="").reason


def test_nothing_is_leased_before_the_handoff_was_read() -> None:
    holder = Holder()
    assert not holder.ask()
    assert holder.seen is Seen.FENCED
    assert holder.tick(2000.0) == []


def test_trust_of_the_handoff_lasts_exactly_as_long_as_the_rule_says() -> None:
    holder = Holder().start(sent=990.0)
    holder.at = 990.0 + TRUST - 0.001
    assert holder.ask()
    holder.at = 990.0 + TRUST
    assert not holder.ask()
    assert holder.seen is Seen.FENCED


def test_a_shorter_lease_in_the_database_shortens_the_trust() -> None:
    short = replace(LEASE, lease_ms=300_000)
    assert short.trust == pytest.approx(0.98 * 300 - LEASE.timing.fence_budget)
    assert replace(LEASE, lease_ms=3_000_000).trust == TRUST


def test_a_handoff_that_trusts_longer_than_the_rule_is_not_believed() -> None:
    holder = Holder()
    holder.feed(HandedOver(1000.0, LEASE, 1000.0, 1000.0 + 10 * TRUST))
    assert holder.state.trusted_until == 1000.0 + TRUST


def test_trust_counts_from_when_the_heartbeat_was_sent() -> None:
    holder = Holder().start()
    holder.run_until(1070.0)
    holder.beat(sent=1040.0)
    assert holder.state.trusted_until == 1040.0 + TRUST


def test_an_older_answer_never_shortens_what_a_newer_one_gave() -> None:
    holder = Holder().start()
    holder.at = 1010.0
    holder.beat(sent=1010.0)
    holder.beat(sent=1005.0)
    assert holder.state.trusted_until == 1010.0 + TRUST


@pytest.mark.parametrize(
    ("answer", "phase", "lost"),
    [
        pytest.param({"held": True}, Phase.LEASED, False, id="held"),
        pytest.param({"held": False}, Phase.FENCED, True, id="no row touched"),
        pytest.param({"held": True, "stop_requested": True}, Phase.FENCED, False, id="stop requested"),
        pytest.param({"held": False, "busy": True}, Phase.LEASED, False, id="row locked by a stranger"),
    ],
)
def test_what_an_answered_heartbeat_means(answer: dict[str, bool], phase: Phase, lost: bool) -> None:
    holder = Holder().start()
    holder.at = 1010.0
    holder.beat(**answer)
    assert holder.state.phase(holder.at) is phase
    assert holder.state.lost is lost
    assert holder.ask() is (phase is Phase.LEASED)


def test_a_locked_row_does_not_extend_trust() -> None:
    holder = Holder().start()
    holder.at = 1050.0
    holder.beat(held=False, busy=True)
    assert holder.state.trusted_until == 1000.0 + TRUST
    assert 0 < holder.state.beat_at - 1050.0 <= 1.0


@pytest.mark.parametrize(
    "fencing",
    [
        pytest.param({"held": False}, id="lost"),
        pytest.param({"held": True, "stop_requested": True}, id="stop requested"),
    ],
)
def test_fenced_is_sticky(fencing: dict[str, bool]) -> None:
    holder = Holder().start()
    holder.beat(**fencing)
    holder.at += 1
    holder.beat(held=True)
    assert not holder.ask()
    assert holder.seen is Seen.FENCED


def test_trust_that_has_ended_does_not_come_back_with_a_late_answer() -> None:
    """The process was frozen with an answer on its way: the clock fences before the answer is looked at."""
    holder = Holder().start()
    holder.at = 1000.0 + TRUST + 1
    holder.beat(sent=1000.0 + TRUST - 1)
    assert not holder.ask()
    assert "in time" in holder.reason


def test_a_fenced_holder_goes_on_beating_so_that_the_stop_stays_covered_but_a_lost_one_is_silent() -> None:
    holder = Holder().start()
    assert Beat() in holder.tick(1000.0 + TRUST + 1)
    holder.beat(held=False)
    assert holder.state.lost
    assert holder.tick(holder.at + 500) == []


def test_heartbeats_are_sent_when_due_one_at_a_time() -> None:
    holder = Holder().start()
    assert holder.tick(1059.0) == []
    assert holder.tick(1060.0) == [Beat()]
    assert holder.tick(1061.0) == []
    holder.at = 1062.0
    holder.beat(sent=1060.0)
    assert holder.tick(1119.0) == []
    assert holder.tick(1120.0) == [Beat()]


def test_failed_heartbeats_are_repeated_with_growing_pauses_until_trust_ends() -> None:
    holder = Holder().start()
    holder.tick(1060.0)
    pauses = []
    for _ in range(6):
        holder.feed(CallFailed(holder.at, "connection refused", jitter=0.999999))
        pauses.append(round(holder.state.beat_at - holder.at, 2))
        holder.tick(holder.state.beat_at)
    assert pauses == [1, 2, 4, 5, 5, 5]
    assert holder.ask()
    holder.at = 1000.0 + TRUST
    assert not holder.ask()
    assert "connection refused" in holder.reason


@pytest.mark.parametrize(
    ("events", "due"),
    [
        pytest.param([], 1060.0, id="the next heartbeat"),
        pytest.param([Tick(1060.0)], 1000.0 + TRUST, id="one is on its way: the end of trust"),
        pytest.param([Reported(1001.0, Outcome.COMPLETE)], 1000.0 + TRUST, id="a report is on its way: the same"),
        pytest.param(
            [Reported(1001.0, Outcome.FAIL), RecordAnswered(1002.0, True)], fence.FOREVER, id="it is recorded"
        ),
        pytest.param(
            [Reported(1001.0, Outcome.COMPLETE), CallFailed(1002.0, "down", 0.0)], 1002.5, id="a report again"
        ),
        pytest.param([BeatAnswered(1001.0, 1001.0, False)], fence.FOREVER, id="lost"),
    ],
)
def test_the_loop_sleeps_until_something_is_due(events: list[fence.Event], due: float) -> None:
    holder = Holder().start()
    for event in events:
        holder.feed(event)
    assert holder.state.due_at == due


def test_a_call_that_hangs_is_cut_off_and_cut_again() -> None:
    holder = Holder().start()
    holder.tick(1060.0)
    assert holder.tick(1060.0 + LEASE.call_limit - 0.1) == []
    assert holder.tick(1060.0 + LEASE.call_limit) == [Cut()]
    assert holder.tick(1060.5 + LEASE.call_limit) == []
    assert holder.tick(1061.0 + LEASE.call_limit) == [Cut()]


@pytest.mark.parametrize("duration", [20, 30, 60, 120, 900])
def test_three_calls_fit_into_the_trust_window(duration: int) -> None:
    lease = replace(LEASE, lease_ms=duration * 1000, timing=Timing(duration, 1, 1, 0))
    assert lease.trust > 0
    assert 3 * lease.call_limit <= lease.trust + 1e-9


@pytest.mark.parametrize(
    ("path", "yes"),
    [
        pytest.param({}, True, id="ours"),
        pytest.param({"lease_id": "lease-2"}, False, id="another lease"),
        pytest.param({"attempt": 2}, False, id="an earlier attempt"),
        pytest.param({"attempt": 4}, False, id="a later attempt"),
    ],
)
def test_only_this_lease_and_attempt_is_answered_with_yes(path: dict[str, Any], yes: bool) -> None:
    assert Holder().start().ask(**path) is yes


# --- restarts --------------------------------------------------------------------------------------------------------


def test_a_restarted_holder_goes_on_from_its_predecessors_heartbeat() -> None:
    before = Holder().start()
    before.run_until(1600.0, ask="main")
    before.beat()
    after = Holder(at=1603.0).start(before=before.state, sent=1000.0)
    assert after.ask()
    assert after.state.trusted_until == 1600.0 + TRUST
    assert after.seen is Seen.LEASED


def test_without_memory_it_trusts_the_handoff_alone_and_says_no_until_a_heartbeat_is_answered() -> None:
    holder = Holder(at=5000.0)
    actions = holder.feed(HandedOver(5000.0, LEASE, 1000.0, 1000.0 + TRUST))
    assert actions == [Beat()]
    assert holder.state.phase(5000.0) is Phase.UNCONFIRMED
    assert not holder.ask()
    assert holder.seen is Seen.FENCED
    holder.at = 5001.0
    holder.beat(sent=5000.5)
    assert holder.ask()
    assert holder.seen is Seen.LEASED


def test_a_fence_outlives_the_process() -> None:
    before = Holder().start()
    before.beat(held=True, stop_requested=True)
    after = Holder(at=1002.0).start(before=before.state, sent=1000.0)
    after.at = 1003.0
    after.beat()
    assert not after.ask()


def test_a_recorded_report_outlives_the_process_and_is_not_followed_by_heartbeats() -> None:
    before = Holder().start()
    before.feed(Reported(1001.0, Outcome.COMPLETE))
    before.feed(RecordAnswered(1002.0, True))
    after = Holder(at=1003.0).start(before=before.state, sent=1000.0)
    assert after.tick(2000.0) == []
    assert after.seen is Seen.REPORTED


# --- what the kubelet may have done meanwhile ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("probe", "refused", "seconds"),
    [
        (Probe(period=5, threshold=3, timeout=5), False, 15),
        (Probe(period=5, threshold=3, timeout=5), True, 10),
        (Probe(period=1, threshold=1, timeout=1), False, 1),
        (Probe(period=1, threshold=1, timeout=1), True, 0),
    ],
)
def test_the_shortest_silence_that_may_have_stopped_a_container(probe: Probe, refused: bool, seconds: float) -> None:
    assert stops_after(probe, refused=refused) == seconds
    assert seconds <= probe.detection


@pytest.mark.parametrize(("frozen", "seen"), [(14.9, Seen.LEASED), (15.0, Seen.FENCED), (600.0, Seen.FENCED)])
def test_a_freeze_as_long_as_detection_may_have_stopped_the_workload(frozen: float, seen: Seen) -> None:
    holder = Holder().start()
    holder.run_until(1100.0, ask="main")
    holder.beat()
    holder.feed(Term(1100.0 + frozen))
    assert holder.seen is seen
    if seen is Seen.FENCED:
        assert f"frozen for {frozen:.1f} s" in holder.reason


def test_a_later_probe_that_gets_its_yes_ends_the_suspicion() -> None:
    holder = Holder().start()
    holder.run_until(1100.0, ask="main")
    holder.beat()
    holder.tick(1120.0)
    assert holder.seen is Seen.FENCED
    holder.at = 1120.1
    assert holder.ask(), "the lease itself is held"
    assert holder.seen is Seen.FENCED, "within one timeout of the thaw the asker may have given up long ago"
    holder.run_until(1125.2)
    assert holder.ask()
    assert holder.seen is Seen.LEASED


def test_questions_that_queued_up_in_a_freeze_make_their_container_suspect() -> None:
    """The workload started while the sidecar was frozen: all that is left of its probes are dead connections."""
    holder = Holder().start()
    holder.run_until(1010.0)
    holder.tick(1030.0)
    holder.at = 1030.01
    holder.ask("fresh")
    assert "fresh" in holder.state.suspicions
    holder.run_until(1036.0)
    holder.ask("fresh")
    assert holder.seen is Seen.LEASED


def test_each_container_clears_itself_only() -> None:
    holder = Holder().start()
    for at in (1001.0, 1005.0):
        holder.run_until(at)
        holder.ask("a")
        holder.ask("b")
    holder.tick(1030.0)
    holder.run_until(1036.0)
    holder.ask("a")
    assert holder.seen is Seen.FENCED
    holder.ask("b")
    assert holder.seen is Seen.LEASED


def test_a_container_that_had_ended_before_the_freeze_is_not_waited_for() -> None:
    holder = Holder().start()
    holder.ask("ended")
    holder.run_until(1100.0, ask="main")
    holder.tick(1130.0)
    holder.run_until(1136.0)
    holder.ask("main")
    assert holder.seen is Seen.LEASED


def test_a_restart_shorter_than_three_probes_is_nothing_and_a_longer_one_is_a_suspicion() -> None:
    before = Holder().start()
    before.run_until(1100.0, ask="main")
    before.beat()
    for gone, seen in ((9.0, Seen.LEASED), (10.0, Seen.FENCED)):
        after = Holder(at=1100.0 + gone).start(before=before.state, sent=1000.0)
        assert after.seen is seen
        assert after.ask()


def test_having_said_no_for_long_is_a_suspicion_too() -> None:
    """Killed, restarted without trust, confirmed at last: by then the kubelet has heard "no" three times."""
    before = Holder().start()
    before.run_until(1100.0, ask="main")
    after = Holder(at=1000.0 + TRUST + 1)
    stale = replace(before.state, trusted_until=1000.0 + TRUST, well_at=1000.0 + TRUST - 1)
    after.start(before=stale, sent=1000.0)
    after.run_until(after.at + 12)
    after.beat()
    assert after.state.leased(after.at)
    assert after.seen is Seen.FENCED


def test_probes_that_are_answered_too_late_count_as_missed_without_any_gap() -> None:
    holder = Holder().start()
    holder.run_until(1010.0, ask="main")
    for _ in range(2):
        holder.ask(gone=True)
    assert holder.seen is Seen.LEASED
    holder.ask()
    for _ in range(3):
        holder.ask(gone=True)
    holder.ask()
    assert holder.seen is Seen.FENCED
    holder.run_until(1016.0)
    holder.ask()
    assert holder.seen is Seen.LEASED


# --- the workload's report, drain, own probes, the end ---------------------------------------------------------------


def test_a_report_goes_out_at_once_and_is_recorded_once() -> None:
    holder = Holder().start()
    assert holder.feed(Reported(1001.0, Outcome.COMPLETE, {"rows": 42})) == [Record(Outcome.COMPLETE, {"rows": 42})]
    assert report_status(holder.state, Outcome.COMPLETE) is None
    assert holder.feed(Reported(1001.5, Outcome.COMPLETE)) == []
    holder.feed(RecordAnswered(1002.0, True))
    assert report_status(holder.state, Outcome.COMPLETE) == (200, "")
    assert report_status(holder.state, Outcome.FAIL) == (409, "complete is recorded already")
    assert holder.seen is Seen.REPORTED
    assert holder.ask(), "the workload may still close its pools under the trust that is left"
    holder.at = 1000.0 + TRUST
    assert not holder.ask()
    assert holder.seen is Seen.REPORTED


def test_a_report_whose_answer_was_lost_is_sent_again() -> None:
    holder = Holder().start()
    holder.feed(Reported(1001.0, Outcome.COMPLETE))
    holder.feed(CallFailed(1002.0, "connection reset", jitter=0.5))
    assert report_status(holder.state, Outcome.COMPLETE) is None
    assert holder.seen is Seen.REPORTED
    assert holder.state.testimony(holder.at, 0.0, lease_id="").recorded is False
    assert Record(Outcome.COMPLETE, None) in holder.tick(1003.0)


def test_a_heartbeat_that_finds_no_row_while_a_report_is_on_its_way_proves_nothing() -> None:
    """The report may have been recorded and its answer lost: then the row is no longer RUNNING."""
    holder = Holder().start()
    holder.feed(Reported(1001.0, Outcome.COMPLETE))
    holder.feed(CallFailed(1002.0, "connection reset"))
    holder.at = 1002.1
    holder.beat(held=False)
    assert not holder.state.lost
    assert holder.actions == [Record(Outcome.COMPLETE, None)]
    holder.feed(RecordAnswered(1002.3, True))
    assert holder.seen is Seen.REPORTED


def test_a_report_that_the_database_no_longer_takes_is_a_lost_lease() -> None:
    holder = Holder().start()
    holder.feed(Reported(1001.0, Outcome.COMPLETE))
    holder.feed(RecordAnswered(1002.0, False))
    assert report_status(holder.state, Outcome.COMPLETE) == (409, "the lease is lost; nothing was recorded")
    assert holder.seen is Seen.FENCED
    assert not holder.ask()


def test_a_report_past_trust_is_still_sent_since_finished_work_is_recorded_as_what_it_was() -> None:
    holder = Holder().start()
    holder.tick(1000.0 + TRUST)
    holder.feed(CallFailed(holder.at, "down"))
    assert holder.feed(Reported(holder.at + 0.01, Outcome.COMPLETE)) == [Record(Outcome.COMPLETE, None)]
    holder.feed(RecordAnswered(holder.at + 1, True))
    assert holder.seen is Seen.REPORTED
    assert not holder.ask()


def test_a_report_that_cannot_be_stored_is_refused_and_may_be_made_anew() -> None:
    holder = Holder().start()
    holder.feed(Reported(1001.0, Outcome.COMPLETE, "huge"))
    holder.feed(RecordRefused(1002.0, "data is larger than 256 KiB"))
    assert report_status(holder.state, Outcome.COMPLETE) == (422, "data is larger than 256 KiB")
    assert holder.seen is Seen.LEASED
    assert holder.feed(Reported(1003.0, Outcome.COMPLETE)) == [Record(Outcome.COMPLETE, None)]


@pytest.mark.parametrize("outcome", [Outcome.FAIL, Outcome.RELEASE])
def test_what_makes_a_run_claimable_is_recorded_when_the_workload_has_ended(outcome: Outcome) -> None:
    """A successor must not meet the workload that reported it."""
    holder = Holder().start()
    assert holder.feed(Reported(1001.0, outcome, "why")) == []
    assert report_status(holder.state, outcome) == (202, "to be recorded when the workload has ended")
    assert report_status(holder.state, Outcome.COMPLETE) == (409, f"{outcome} was reported before")
    assert holder.tick(1060.0) == [Beat()], "heartbeats go on"
    assert holder.seen is Seen.REPORTED, "should the sidecar be killed, the operator records it"
    holder.feed(BeatAnswered(1060.5, 1060.0, True))
    assert holder.feed(Term(1070.0)) == [Record(outcome, "why")]
    assert holder.feed(RecordAnswered(1070.2, True)) == [Leave()]


def test_a_lease_that_is_lost_while_a_failure_waits_fences() -> None:
    holder = Holder().start()
    holder.feed(Reported(1001.0, Outcome.FAIL))
    holder.tick(1060.0)
    holder.feed(BeatAnswered(1060.5, 1060.0, False))
    assert not holder.ask()
    assert report_status(holder.state, Outcome.FAIL) == (409, "the lease is lost")


def test_failing_reports_and_heartbeats_take_turns() -> None:
    holder = Holder().start()
    holder.tick(1060.0)
    holder.feed(CallFailed(1061.0, "down"))
    holder.feed(Reported(1061.1, Outcome.COMPLETE))
    kinds: list[type[fence.Action]] = []
    for _ in range(100):
        sent = [type(a) for a in holder.tick(holder.at + 0.5) if isinstance(a, Beat | Record)]
        kinds += sent
        if sent or holder.state.call:
            kinds += [type(a) for a in holder.feed(CallFailed(holder.at, "down"))]
    assert kinds.count(Beat) >= 5
    assert kinds.count(Record) >= 5


def test_the_drain_notice_changes_nothing_but_itself() -> None:
    holder = Holder().start()
    holder.feed(Drain(1001.0))
    assert holder.state.draining
    assert holder.ask()
    assert holder.seen is Seen.LEASED
    assert holder.tick(1060.0) == [Beat()]


def test_a_failed_probe_of_the_workload_stops_its_container_and_not_the_lease() -> None:
    holder = Holder().start()
    holder.feed(Unhealthy(1001.0, "web", "HTTP status 500"))
    assert not holder.ask("web")
    assert holder.ask("other")
    testimony = holder.state.testimony(holder.at, 0.0, lease_id="")
    assert (testimony.seen, testimony.failed_probe) == (Seen.LEASED, "web")
    assert "HTTP status 500" in testimony.reason


def test_sigterm_ends_at_once_and_the_testimony_is_final() -> None:
    holder = Holder().start()
    assert holder.feed(Term(1001.0)) == [Leave()]
    testimony = holder.state.testimony(holder.at, 50.0, lease_id="")
    assert (testimony.seen, testimony.final, testimony.attempt) == (Seen.LEASED, True, 3)
    assert testimony.until == pytest.approx(50.0 + TRUST - 1)


def test_sigterm_waits_shortly_for_a_report_on_its_way_however_often_it_comes() -> None:
    holder = Holder().start()
    holder.feed(Reported(1001.0, Outcome.COMPLETE))
    for at in (1001.1, 1001.5, 1002.0):
        assert holder.feed(Term(at)) == []
    assert holder.tick(1002.5) == []
    assert holder.tick(1002.6) == [Leave()]
    assert holder.state.testimony(holder.at, 0.0, lease_id="").recorded is False
    other = Holder().start()
    other.feed(Reported(1001.0, Outcome.COMPLETE))
    other.feed(Term(1001.1))
    assert other.feed(RecordAnswered(1001.3, True)) == [Leave()]


def test_sigterm_before_the_handoff() -> None:
    holder = Holder()
    assert holder.feed(Term(1001.0)) == [Leave()]
    testimony = holder.state.testimony(holder.at, 50.0, lease_id="from-env")
    assert (testimony.seen, testimony.lease_id, testimony.final) == (Seen.FENCED, "from-env", True)


def test_the_testimony_stays_far_below_the_kubelets_limit() -> None:
    holder = Holder().start()
    holder.tick(1060.0)
    holder.feed(CallFailed(1061.0, "é" * 5000))
    holder.at = 1000.0 + TRUST
    holder.ask()
    assert len(holder.state.testimony(holder.at, 0.0, lease_id="").to_json()) < 2048


def test_a_report_by_a_holder_that_learned_of_its_expiry_is_left_to_the_database() -> None:
    """Expired is not reclaimed: finished work is recorded as what it was as long as the token is still the row's."""
    holder = Holder().start()
    holder.beat(held=False)
    assert holder.state.lost
    assert holder.feed(Reported(holder.at + 1, Outcome.COMPLETE)) == [Record(Outcome.COMPLETE, None)]
    holder.feed(RecordAnswered(holder.at + 1, True))
    assert holder.seen is Seen.REPORTED


# --- how a program has stopped: figures that decide nothing -----------------------------------------------------------

PHASES = (PhaseEnd("http", "done", 1.5),)


def test_a_note_is_sent_when_nothing_else_is_due_and_is_forgotten_once_it_is_answered() -> None:
    holder = Holder().start()
    (note,) = holder.feed(Noted(1060.0, "a", PHASES))
    assert note == Beat(), "a heartbeat that is due comes first"
    holder.at = 1060.1
    holder.beat()
    assert holder.actions == [Note("a", PHASES, next_at=1060.0)]
    assert holder.feed(NoteAnswered(1060.2)) == []
    assert holder.state.notes == ()


def test_a_note_is_sent_after_the_outcome_and_sigterm_waits_for_it() -> None:
    holder = Holder().start()
    holder.feed(Reported(1001.0, Outcome.COMPLETE))
    holder.feed(Noted(1001.1, "a", PHASES))
    holder.feed(RecordAnswered(1001.2, True))
    assert [type(action) for action in holder.actions] == [Note]
    assert holder.feed(Term(1001.3)) == []
    assert holder.feed(NoteAnswered(1001.4)) == [Leave()]


def test_a_note_whose_answer_does_not_come_is_sent_three_times_and_costs_no_trust() -> None:
    holder = Holder().start()
    assert [type(action) for action in holder.feed(Noted(1001.0, "a", PHASES))] == [Note]
    for at in (1002.0, 1004.0):
        assert holder.feed(CallFailed(at, "no such function")) == []
        assert [type(action) for action in holder.tick(at + 1.0)] == [Note]
    assert holder.feed(CallFailed(1006.0, "no such function")) == []
    assert holder.state.notes == ()
    assert (holder.state.failures, holder.state.counts.failed) == (0, 3)
    assert holder.ask()
    assert holder.state.beat_at == Holder().start().state.beat_at, "heartbeats come when they would have come"


def test_sigterm_does_not_wait_longer_for_a_note_than_for_an_outcome() -> None:
    holder = Holder().start()
    holder.feed(Noted(1001.0, "a", PHASES))
    holder.feed(Term(1001.1))
    assert holder.tick(1002.5) == []
    assert holder.tick(1002.7) == [Leave()]


def test_who_has_lost_the_lease_is_not_heard_and_nobody_can_fill_the_memory() -> None:
    holder = Holder().start()
    for number in range(100):
        holder.feed(Noted(1001.0, str(number), PHASES))
    assert len(holder.state.notes) == fence.NOTES_MOST
    holder.beat(held=False)
    assert holder.state.notes == ()
    assert holder.feed(Noted(1002.0, "late", PHASES)) == []
