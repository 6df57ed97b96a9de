"""GracefulShutdown with real threads and loops: order, cuts, names in the log, and the end by force."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from leasedjob.errors import DrainingError, InvalidShutdownBudgetError
from leasedjob.workload import GracefulShutdown, IntervalRegistry, Phase, ShutdownBudget, ShutdownState, metrics
from leasedjob.workload.phases import Outcome, PhaseReport

# What must be cut off is cut off soon; nothing that has to end within it takes any time.
SHORT = ShutdownBudget(total=50, pre_stop=0, http=0.5, intervals=0.5, background=0.5, consumers=10, pools=5)


class Exit:
    """Stands for os._exit."""

    def __init__(self) -> None:
        self.codes: list[int] = []
        self.called = threading.Event()

    def __call__(self, code: int) -> None:
        self.codes.append(code)
        self.called.set()


@pytest.fixture
def never() -> Iterator[Exit]:
    """An exit that the test must not take. The budget goes on after it: what comes then is no fault of the test."""
    exit = Exit()
    yield exit
    assert exit.codes == [], "the process was ended by force"


class Stubborn:
    """A part that ends when it is let, and says what it has in hand."""

    phase = Phase.BACKGROUND
    name = "relay"

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.cancelled = False

    async def stop(self) -> None:
        try:
            await self.go_on.wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise

    def in_hand(self) -> list[str]:
        return ["row 17", "row 18"]


async def test_parts_are_stopped_in_order_and_the_pool_last(never: Exit) -> None:
    state = ShutdownState()
    order: list[str] = []

    def noted(name: str) -> Callable[[], None]:
        return lambda: order.append(name)

    async def consumer() -> None:
        await asyncio.sleep(0)
        order.append("consumer")

    async with GracefulShutdown(state, exit=never) as shutdown:
        shutdown.on_stop(Phase.POOLS, "pool", noted("pool"))
        shutdown.on_stop(Phase.CONSUMERS, "kafka", consumer)
        shutdown.on_stop(Phase.HTTP, "api", noted("api"))
        state.begin()
        report = await shutdown.finished()
    assert order == ["api", "consumer", "pool"]
    assert [(line.phase, line.outcome) for line in report] == [
        (Phase.HTTP, Outcome.DONE),
        (Phase.CONSUMERS, Outcome.DONE),
        (Phase.POOLS, Outcome.DONE),
    ]


async def test_what_is_cut_off_is_named_and_the_rest_still_runs(caplog: pytest.LogCaptureFixture, never: Exit) -> None:
    state, relay, closed = ShutdownState(), Stubborn(), threading.Event()
    with caplog.at_level(logging.INFO, "leasedjob.workload"):
        async with GracefulShutdown(state, SHORT, exit=never) as shutdown:
            shutdown.add(relay)
            shutdown.on_stop(Phase.POOLS, "pool", closed.set)
            state.begin("SIGTERM")
            report = await shutdown.finished()
    assert [(line.phase, line.outcome) for line in report] == [
        (Phase.BACKGROUND, Outcome.CUT),
        (Phase.POOLS, Outcome.DONE),
    ]
    assert closed.is_set()
    assert relay.cancelled
    (line,) = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert "background: relay was cut off" in line
    assert "dropped: row 17, row 18" in line


async def test_a_part_that_raises_is_named_and_the_rest_still_runs(
    caplog: pytest.LogCaptureFixture, never: Exit
) -> None:
    state, closed = ShutdownState(), threading.Event()

    def fails() -> None:
        raise OSError("no route")

    async with GracefulShutdown(state, exit=never) as shutdown:
        shutdown.on_stop(Phase.HTTP, "api", fails)
        shutdown.on_stop(Phase.POOLS, "pool", closed.set)
        state.begin()
        report = await shutdown.finished()
    assert (report[0].outcome, closed.is_set()) == (Outcome.FAILED, True)
    assert "http: api failed: OSError: no route" in caplog.text


async def test_the_iteration_in_flight_is_awaited_before_the_pool_closes(never: Exit) -> None:
    state = ShutdownState()
    intervals = IntervalRegistry(state)
    began, go_on = asyncio.Event(), asyncio.Event()
    order: list[str] = []

    async def work() -> None:
        began.set()
        await go_on.wait()
        order.append("iteration")

    async with GracefulShutdown(state, exit=never) as shutdown:
        intervals.add("sync", 0.01, work)
        shutdown.add(intervals)
        shutdown.on_stop(Phase.POOLS, "pool", lambda: order.append("pool"))
        await began.wait()
        state.begin()
        await asyncio.sleep(0)
        go_on.set()
        await shutdown.finished()
    assert order == ["iteration", "pool"]


async def test_a_call_that_blocks_the_loop_keeps_nothing_else_from_ending(caplog: pytest.LogCaptureFixture) -> None:
    state, exit, closed = ShutdownState(), Exit(), threading.Event()
    short = {phase.value: 0.2 for phase in Phase}
    budget = ShutdownBudget(total=2, pre_stop=0, sidecar=1, **short)

    async def stop() -> None:
        raise AssertionError("the loop is blocked")

    shutdown = GracefulShutdown(state, budget, exit=exit)
    await shutdown.__aenter__()
    shutdown.on_stop(Phase.HTTP, "api", stop)
    shutdown.on_stop(Phase.POOLS, "pool", closed.set)
    state.begin()
    assert exit.called.wait(60), "this is the loop's own thread: nothing of it runs meanwhile"
    assert closed.is_set()
    assert exit.codes == [143]
    (words,) = [r.getMessage() for r in caplog.records if r.levelno == logging.CRITICAL]
    assert "cut off: api" in words
    assert "never begun: nothing" in words


def test_a_program_without_a_loop(never: Exit) -> None:
    state = ShutdownState()
    order: list[str] = []

    async def close() -> None:
        order.append("a coroutine, too")

    with GracefulShutdown(state, exit=never) as shutdown:
        shutdown.on_stop(Phase.CONSUMERS, "consumer", close)
        shutdown.on_stop(Phase.POOLS, "pool", lambda: order.append("pool"))
        threading.Thread(target=state.begin).start()
        assert shutdown.wait(60)
    assert order == ["a coroutine, too", "pool"]


def test_leaving_the_block_is_a_stop(never: Exit) -> None:
    state, closed = ShutdownState(), threading.Event()
    with GracefulShutdown(state, exit=never) as shutdown:
        shutdown.on_stop(Phase.POOLS, "pool", closed.set)
    assert (closed.is_set(), state.reason) == (True, "the program ends")


def test_a_program_that_goes_on_after_the_block_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    exit, budget = Exit(), ShutdownBudget(total=1.5, pre_stop=0, sidecar=1, **{phase.value: 0.1 for phase in Phase})
    with GracefulShutdown(ShutdownState(), budget, exit=exit):
        pass
    assert not exit.called.wait(1.5)

    state = ShutdownState()
    with GracefulShutdown(state, budget, exit=exit):
        state.begin("SIGTERM")
    assert exit.called.wait(60), "the Pod is stopped: whatever keeps the program from ending is in the way"
    assert "the program goes on" in caplog.text


def test_several_stops_are_one(never: Exit) -> None:
    state = ShutdownState()
    calls: list[int] = []
    with GracefulShutdown(state, exit=never) as shutdown:
        shutdown.on_stop(Phase.POOLS, "pool", lambda: calls.append(1))
        for reason in ("SIGTERM", "SIGTERM", "SIGINT"):
            state.begin(reason)
        assert shutdown.wait(60)
    assert calls == [1]


def test_nothing_is_added_once_a_stop_has_begun(never: Exit) -> None:
    state = ShutdownState()
    with GracefulShutdown(state, exit=never) as shutdown:
        shutdown.on_stop(Phase.POOLS, "pool", lambda: None)
        with pytest.raises(ValueError, match="'pool'"):
            shutdown.on_stop(Phase.HTTP, "pool", lambda: None)
        state.notice("preStop")
        with pytest.raises(DrainingError, match="preStop"):
            shutdown.on_stop(Phase.HTTP, "api", lambda: None)


class TestBudgetOfThePod:
    def of(self, grace: float, pre_stop: float) -> ShutdownState:
        state = ShutdownState()
        state.grace, state.pre_stop = grace, pre_stop
        return state

    def test_the_default_is_shortened_to_fit(self, never: Exit) -> None:
        with GracefulShutdown(self.of(30, 5), exit=never) as shutdown:
            assert shutdown._state.budget == ShutdownBudget.within(30, 5)

    def test_one_of_its_own_that_does_not_fit_is_refused_at_the_start(self, never: Exit) -> None:
        with pytest.raises(InvalidShutdownBudgetError, match=r"60 s with 10 s of preStop, but .* 30 and 5"):
            GracefulShutdown(self.of(30, 5), ShutdownBudget(), exit=never).__enter__()


class TestMetric:
    REPORT = PhaseReport(Phase.HTTP, Outcome.CUT, 25.0, ("api",))

    def test_by_phase_and_outcome(self) -> None:
        from prometheus_client import REGISTRY

        def count() -> float:
            labels = {"phase": "http", "outcome": "cut"}
            return REGISTRY.get_sample_value("app_shutdown_duration_seconds_count", labels) or 0.0

        before = count()
        metrics.observe(self.REPORT)
        assert count() == before + 1

    def test_without_prometheus_client_nothing_happens(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "prometheus_client", None)
        metrics._histogram.cache_clear()
        metrics.observe(self.REPORT)
        metrics._histogram.cache_clear()


HEAVY = (
    *("psycopg", "psycopg_pool", "sqlalchemy", "uvicorn", "apscheduler", "bullmq", "redis", "aiokafka"),
    *("prometheus_client", "kopf", "kubernetes", "pydantic", "click"),
)


@pytest.mark.parametrize(
    "modules",
    ["leasedjob.workload", "leasedjob.workload.run, leasedjob.workload.shutdown, leasedjob.workload.sidecar"],
)
def test_it_pulls_in_no_driver_no_adapter_and_no_loop(modules: str) -> None:
    program = f"import sys, {modules}; print(sorted({{m.partition('.')[0] for m in sys.modules}}))"
    found = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    assert not [name for name in ("asyncio", *HEAVY) if f"'{name}'" in found]


def test_no_name_of_the_package_pulls_in_a_driver_or_an_adapter() -> None:
    program = "import sys; from leasedjob.workload import *; print(sorted({m.partition('.')[0] for m in sys.modules}))"
    found = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    assert not [name for name in HEAVY if f"'{name}'" in found]
