"""The phases of a stop, by the core alone: exact times, no threads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from leasedjob.errors import InvalidShutdownBudgetError
from leasedjob.workload.phases import (
    LIMITS,
    Action,
    Added,
    Begin,
    Cut,
    Ended,
    Event,
    Finish,
    Force,
    Noticed,
    Outcome,
    Part,
    Phase,
    ShutdownBudget,
    State,
    Stopped,
    Tick,
    report,
    step,
)

HTTP = Part(Phase.HTTP, "api")
INTERVALS = Part(Phase.INTERVALS, "intervals")
RELAY = Part(Phase.BACKGROUND, "relay")
KAFKA = Part(Phase.CONSUMERS, "kafka")
POOL = Part(Phase.POOLS, "pool")
ALL = (HTTP, INTERVALS, RELAY, KAFKA, POOL)


class Play:
    """Feeds events in their order, and a Tick at each time that the state asks for in between."""

    def __init__(self, *parts: Part, **budget: Any) -> None:
        self.state = State(budget=ShutdownBudget(**budget))
        self.done: list[tuple[float, Action]] = []
        self(*(Added(0.0, part) for part in parts))

    def __call__(self, *events: Event) -> Play:
        for event in events:
            while self.state.due_at < event.at:
                self._feed(Tick(self.state.due_at))
            self._feed(event)
        return self

    def _feed(self, event: Event) -> None:
        self.state, actions = step(self.state, event)
        self.done += [(event.at, action) for action in actions]

    def of(self, kind: type[Action]) -> list[tuple[float, Any]]:
        return [(at, action) for at, action in self.done if isinstance(action, kind)]

    @property
    def begun(self) -> list[tuple[float, str]]:
        return [(at, action.part.name) for at, action in self.of(Begin)]

    @property
    def cut(self) -> list[tuple[float, str]]:
        return [(at, action.part.name) for at, action in self.of(Cut)]


def ends(at: float, *parts: Part) -> Iterable[Event]:
    return [Ended(at, part.name) for part in parts]


class TestOrder:
    def test_the_picture_of_the_rule(self) -> None:
        """Notice at 0, SIGTERM at 10; each phase uses its whole limit, and 5 s of 60 are left."""
        play = Play(*ALL)(Noticed(0.0), Stopped(10.0), Tick(60.0))
        assert play.begun == [
            (10.0, "api"),
            (10.0, "intervals"),
            (10.0, "relay"),
            (35.0, "kafka"),
            (50.0, "pool"),
        ]
        assert play.cut == [(30.0, "relay"), (35.0, "api"), (35.0, "intervals"), (50.0, "kafka"), (55.0, "pool")]
        assert play.of(Finish) == [] or play.of(Finish)[0][0] == 55.0
        ((at, force),) = play.of(Force)
        assert at == 55.0
        assert set(force.names) == {part.name for part in ALL}

    def test_a_stage_ends_with_its_last_part_and_not_at_its_limit(self) -> None:
        play = Play(*ALL)(Stopped(0.0), *ends(1.0, HTTP), *ends(2.0, RELAY), *ends(4.0, INTERVALS))
        assert play.begun[-1] == (4.0, "kafka")
        play(*ends(5.0, KAFKA), *ends(5.5, POOL))
        assert play.of(Finish) == [(5.5, Finish())]
        assert play.cut == []
        assert [(line.phase, line.outcome, line.seconds) for line in report(play.state)] == [
            (Phase.HTTP, Outcome.DONE, 1.0),
            (Phase.INTERVALS, Outcome.DONE, 4.0),
            (Phase.BACKGROUND, Outcome.DONE, 2.0),
            (Phase.CONSUMERS, Outcome.DONE, 1.0),
            (Phase.POOLS, Outcome.DONE, 0.5),
        ]

    def test_the_pool_closes_after_everything_even_if_it_alone_is_there(self) -> None:
        assert Play(POOL)(Stopped(3.0)).begun == [(3.0, "pool")]

    def test_nothing_to_stop_is_stopped_at_once(self) -> None:
        assert Play()(Stopped(3.0)).done == [(3.0, Finish())]

    def test_a_part_that_fails_is_named_and_the_rest_still_runs(self) -> None:
        play = Play(RELAY, POOL)(Stopped(0.0), Ended(1.0, "relay", "OSError: no"), *ends(2.0, POOL))
        assert play.of(Finish) == [(2.0, Finish())]
        assert report(play.state)[0].outcome is Outcome.FAILED

    def test_a_part_that_is_cut_off_delays_nobody_and_its_late_end_changes_nothing(self) -> None:
        play = Play(RELAY, KAFKA, POOL)(Stopped(0.0), Tick(20.0))
        assert play.cut == [(20.0, "relay")]
        assert play.begun[-1] == (20.0, "kafka")
        play(*ends(21.0, RELAY))
        assert [part for _, part in play.begun] == ["relay", "kafka"]
        play(*ends(22.0, KAFKA), *ends(23.0, POOL))
        assert report(play.state)[0].outcome is Outcome.CUT


class TestNoticeAndStop:
    def test_a_server_goes_on_serving_until_the_stop(self) -> None:
        play = Play(HTTP, RELAY)(Noticed(0.0), Tick(9.9))
        assert play.begun == []
        assert play(Stopped(10.0)).begun == [(10.0, "api"), (10.0, "relay")]

    def test_without_a_server_the_notice_is_enough(self) -> None:
        assert Play(RELAY, POOL)(Noticed(5.0)).begun == [(5.0, "relay")]

    def test_a_stop_that_never_comes_is_not_waited_for(self) -> None:
        assert Play(HTTP)(Noticed(0.0), Tick(13.0)).begun == [(12.0, "api")]

    def test_seconds_and_thirds_join(self) -> None:
        play = Play(HTTP)(Stopped(0.0), Stopped(1.0), Noticed(2.0), Stopped(3.0))
        assert play.begun == [(0.0, "api")]
        assert play.state.force_at == 45.0
        assert play.state.stop_at == 0.0

    def test_the_end_by_force_counts_from_the_notice(self) -> None:
        assert Play(HTTP)(Noticed(0.0), Stopped(10.0)).state.force_at == 55.0
        assert Play(HTTP)(Stopped(10.0)).state.force_at == 55.0

    def test_a_program_that_does_not_end_although_everything_has_is_ended(self) -> None:
        play = Play(POOL)(Stopped(0.0), *ends(1.0, POOL), Tick(44.9))
        assert play.of(Force) == []
        assert play(Tick(45.0)).of(Force) == [(45.0, Force((), ()))]
        assert play(Tick(99.0)).of(Force) == [(45.0, Force((), ()))], "once"


class TestLateParts:
    def test_one_for_a_later_stage_waits_for_it(self) -> None:
        play = Play(RELAY)(Stopped(0.0), Added(1.0, POOL), *ends(2.0, RELAY))
        assert play.begun == [(0.0, "relay"), (2.0, "pool")]

    def test_one_for_a_stage_that_runs_is_stopped_at_once_within_the_same_limit(self) -> None:
        play = Play(RELAY)(Stopped(0.0), Added(18.0, INTERVALS), Tick(25.0))
        assert play.begun == [(0.0, "relay"), (18.0, "intervals")]
        assert play.cut == [(20.0, "relay"), (25.0, "intervals")]

    def test_a_name_counts_once(self) -> None:
        assert Play(RELAY, RELAY).state.parts == (RELAY,)


def test_a_frozen_process_that_wakes_up_late_ends_and_names_what_never_began() -> None:
    play = Play(RELAY, KAFKA, POOL)(Stopped(0.0))
    play._feed(Tick(1000.0))
    assert play.cut == [(1000.0, "relay")]
    assert play.of(Force) == [(1000.0, Force(("relay",), ("kafka", "pool")))]
    assert [line.outcome for line in report(play.state)] == [Outcome.CUT, Outcome.SKIPPED, Outcome.SKIPPED]


class TestBudget:
    def test_the_default_fills_sixty_seconds(self) -> None:
        budget = ShutdownBudget()
        stages = max(budget.http, budget.intervals, budget.background), budget.consumers, budget.pools
        assert (budget.pre_stop, *stages, budget.sidecar) == (10, 25, 15, 5, 5)
        assert budget.pre_stop + sum(stages) + budget.sidecar == budget.total == 60

    @pytest.mark.parametrize("phase", list(Phase))
    def test_a_phase_beyond_its_limit_is_refused(self, phase: Phase) -> None:
        with pytest.raises(InvalidShutdownBudgetError, match=f"{phase} must be at most {LIMITS[phase]:g} s"):
            ShutdownBudget(pre_stop=0, **{phase.value: LIMITS[phase] + 0.1})

    @pytest.mark.parametrize(
        ("values", "text"),
        [
            ({"total": 59}, "10 + 25 + 15 + 5 + 5 = 60 s, but total is 59"),
            ({"pre_stop": 10.5}, "60.5 s, but total is 60"),
            ({"total": 61}, "total must be at most 60"),
            ({"sidecar": 4}, "sidecar must be at least 5"),
            ({"http": -1}, "http must be a number"),
            ({"http": float("nan")}, "http must be a number"),
            ({"http": "25"}, "http must be a number"),
            ({"http": True}, "http must be a number"),
        ],
    )
    def test_what_does_not_fit_is_refused(self, values: dict[str, Any], text: str) -> None:
        with pytest.raises(InvalidShutdownBudgetError, match=text.replace("+", r"\+")):
            ShutdownBudget(**values)

    def test_shorter_overlapping_phases_do_not_add_up(self) -> None:
        ShutdownBudget(total=50, http=15, intervals=15, background=15)

    @pytest.mark.parametrize(("total", "pre_stop"), [(60, 10), (60, 0), (30, 5), (6, 0), (60, 50)])
    def test_another_grace_period_shortens_all_alike(self, total: float, pre_stop: float) -> None:
        budget = ShutdownBudget.within(total, pre_stop)
        stages = [max(budget.http, budget.intervals, budget.background), budget.consumers, budget.pools]
        assert pre_stop + sum(stages) + budget.sidecar <= total + 1e-9
        assert budget.consumers / budget.http == pytest.approx(15 / 25)

    def test_no_time_at_all_is_refused(self) -> None:
        with pytest.raises(InvalidShutdownBudgetError, match="no time"):
            ShutdownBudget.within(30, 25)
