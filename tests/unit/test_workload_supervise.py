"""What `leasedjob exec` does with its command, by the core alone: exact times, no processes."""

from __future__ import annotations

import signal
from collections.abc import Iterable

import pytest

from leasedjob.workload import supervise
from leasedjob.workload.supervise import (
    Action,
    Alone,
    Ended,
    Event,
    Leave,
    Result,
    Seen,
    Send,
    Signalled,
    State,
    Tick,
    Why,
    step,
)

TERM, INT, HUP, KILL = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL


def play(state: State, events: Iterable[Event]) -> tuple[State, list[tuple[float, Action]]]:
    """Feeds events in their order; a Tick at each time that the state asks for in between."""
    done: list[tuple[float, Action]] = []

    def feed(event: Event) -> None:
        nonlocal state
        state, actions = step(state, event)
        done.extend((event.at, action) for action in actions)

    def left() -> bool:
        return any(isinstance(action, Leave) for _, action in done)

    for event in events:
        while state.due_at < event.at and not left():
            feed(Tick(state.due_at))
        if not left():
            feed(event)
    return state, done


def test_a_command_that_ends_alone_is_left_at_once() -> None:
    state, done = play(State(), [Ended(3.0, 7, alone=True)])
    assert done == [(3.0, Leave())]
    assert (state.code, state.stop, state.killed_at) == (7, None, None)


def test_the_first_sigterm_is_passed_on_and_the_budget_ends_with_a_kill() -> None:
    state, done = play(State(grace=60, pre_stop=10), [Signalled(100.0, TERM), Tick(144.9), Tick(200.0)])
    assert done == [(100.0, Send(TERM)), (145.0, Send(KILL))], "60 s less preStop 10 and the sidecar's 5"
    assert state.stop is not None
    assert (state.stop.why, state.stop.until) == (Why.SIGNAL, 145.0)
    state, done = play(state, [Ended(145.1, 137, alone=False), Alone(145.2)])
    assert done == [(145.2, Leave())]


@pytest.mark.parametrize("again", [[TERM], [TERM, TERM], [INT, TERM], [INT]])
def test_later_stop_signals_join_the_first(again: list[int]) -> None:
    events = [Signalled(1.0, TERM), *(Signalled(2.0 + n, number) for n, number in enumerate(again))]
    state, done = play(State(), events)
    assert done == [(1.0, Send(TERM))]
    assert state.stop is not None
    assert state.stop.at == 1.0


def test_other_signals_are_passed_on_each_time() -> None:
    _, done = play(State(), [Signalled(1.0, HUP), Signalled(2.0, HUP), Signalled(3.0, TERM), Signalled(4.0, HUP)])
    assert [action for _, action in done] == [Send(HUP), Send(HUP), Send(TERM), Send(HUP)]


class TestNotice:
    NOTICE = Seen(50.0, draining=True, grace=30.0, pre_stop=8.0)

    def test_it_stops_nothing_and_the_budget_counts_from_it(self) -> None:
        _, done = play(State(), [self.NOTICE, Signalled(58.0, TERM), Tick(74.9), Tick(75.0)])
        assert done == [(58.0, Send(TERM)), (75.0, Send(KILL))], "notice at 50, 30 s, less the sidecar's 5"

    def test_a_sigterm_that_never_comes_is_sent_by_us(self) -> None:
        state, done = play(State(), [self.NOTICE, Tick(59.9), Tick(61.0)])
        assert done == [(60.0, Send(TERM))]
        assert state.stop is not None
        assert (state.stop.why, state.stop.until) == (Why.NOTICE, 75.0)
        _, more = play(state, [Signalled(62.0, TERM)])
        assert more == [], "one that comes late joins"

    def test_a_second_notice_moves_nothing(self) -> None:
        state, _ = play(State(), [self.NOTICE, Seen(55.0, draining=True)])
        assert state.notice_at == 50.0


class TestLoss:
    def test_it_stops_the_command_at_once(self) -> None:
        state, done = play(
            State(grace=60, pre_stop=10), [Seen(5.0, lost=True, reason="reclaimed"), Seen(6.0, lost=True), Tick(60.0)]
        )
        assert done == [(5.0, Send(TERM)), (50.0, Send(KILL))]
        assert state.stop is not None
        assert (state.stop.why, state.stop.reason) == (Why.LOST, "reclaimed")

    def test_after_the_command_s_end_it_stops_nothing(self) -> None:
        state, done = play(State(), [Ended(5.0, 0, alone=False), Seen(5.5, lost=True)])
        assert state.stop is None
        assert done == [(5.0, Send(TERM))]


class TestLeftovers:
    def test_without_a_stop_they_are_ended_in_five_seconds(self) -> None:
        _, done = play(State(), [Ended(10.0, 0, alone=False), Signalled(11.0, TERM), Tick(30.0)])
        assert done == [(10.0, Send(TERM)), (15.0, Send(KILL)), (16.0, Leave())]

    def test_in_a_stop_they_have_the_rest_of_its_budget(self) -> None:
        """`sh -c 'prepare; work'`: the shell dies of SIGTERM at once, and the work finishes."""
        events = [Signalled(0.0, TERM), Ended(0.1, 143, alone=False), Alone(20.0)]
        state, done = play(State(), events)
        assert done == [(0.0, Send(TERM)), (20.0, Leave())]
        assert state.code == 143

    def test_and_are_killed_at_its_end(self) -> None:
        _, done = play(State(), [Signalled(0.0, TERM), Ended(0.1, 143, alone=False), Tick(90.0), Tick(91.0)])
        assert done == [(0.0, Send(TERM)), (45.0, Send(KILL)), (46.0, Leave())]


def test_a_killed_command_is_waited_for_without_haste() -> None:
    state, _ = play(State(), [Signalled(0.0, TERM), Tick(46.0)])
    assert state.killed_at == 45.0
    assert state.due_at == supervise.FOREVER


@pytest.mark.parametrize(("grace", "share"), [(60, 5.0), (30, 5.0), (12, 2.0), (6, 1.0)])
def test_the_sidecars_share_of_a_grace_period(grace: float, share: float) -> None:
    assert supervise.sidecar_share(grace) == share


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (Result(3, True, None, False, "one\nboom\n"), "the command exited with 3: boom"),
        (Result(3, True, None, False, ""), "the command exited with 3"),
        (Result(137, True, None, True, "x"), "the command exited with 137 (SIGKILL): x"),
        (Result(255, True, None, False, ""), "the command exited with 255"),
        (Result(127, False, None, False, "nosuch: No such file"), "nosuch: No such file"),
        (Result(143, False, None, False, ""), "the command was not started"),
    ],
)
def test_one_line_for_people(result: Result, text: str) -> None:
    assert result.error == text
