"""IntervalRegistry in virtual time: when ticks come, and what happens to an iteration that runs."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading

import pytest
from tests.unit.virtual_time import run

from leasedjob.workload import IntervalRegistry, Phase, ShutdownState, SyncIntervalRegistry
from leasedjob.workload.intervals import next_due


class Bench:
    """A registry, and when its work began and ended, in seconds since the test began."""

    def __init__(self) -> None:
        self.state = ShutdownState()
        self.intervals = IntervalRegistry(self.state)
        self.loop = asyncio.get_running_loop()
        self._zero = self.loop.time()
        self.began: list[float] = []
        self.ended: list[float] = []

    @property
    def now(self) -> float:
        return round(self.loop.time() - self._zero, 6)

    def taking(self, seconds: float):  # type: ignore[no-untyped-def]
        async def work() -> None:
            self.began.append(self.now)
            await asyncio.sleep(seconds)
            self.ended.append(self.now)

        return work


def test_ticks_come_at_their_interval() -> None:
    async def main() -> list[float]:
        bench = Bench()
        bench.intervals.add("a", 10, bench.taking(1))
        await asyncio.sleep(35)
        await bench.intervals.stop()
        return bench.began

    assert run(main()) == [10, 20, 30]


def test_an_iteration_longer_than_its_interval_never_overlaps_itself() -> None:
    async def main() -> tuple[list[float], list[float]]:
        bench = Bench()
        bench.intervals.add("a", 10, bench.taking(25))
        await asyncio.sleep(80)
        await bench.intervals.stop()
        return bench.began, bench.ended

    assert run(main()) == ([10, 40, 70], [35, 65, 95])


def test_two_intervals_run_side_by_side() -> None:
    async def main() -> list[float]:
        bench = Bench()
        for name in ("a", "b"):
            bench.intervals.add(name, 10, bench.taking(5))
        await asyncio.sleep(12)
        assert sorted(bench.intervals.in_hand()) == [
            "the running iteration of interval a",
            "the running iteration of interval b",
        ]
        await bench.intervals.stop()
        return bench.began

    assert run(main()) == [10, 10]


def test_delete_ends_the_ticks_and_not_the_iteration_that_runs() -> None:
    async def main() -> tuple[list[float], list[float], float]:
        bench = Bench()
        bench.intervals.add("a", 10, bench.taking(20))
        await asyncio.sleep(15)
        bench.intervals.delete("a")
        assert not bench.intervals.exists("a")
        await bench.intervals.stop()
        stopped = bench.now
        await asyncio.sleep(100)
        return bench.began, bench.ended, stopped

    assert run(main()) == ([10], [30], 30)


def test_a_name_that_is_used_anew_waits_for_the_iteration_of_before() -> None:
    async def main() -> tuple[list[float], list[float]]:
        bench = Bench()
        bench.intervals.add("a", 10, bench.taking(20))
        await asyncio.sleep(11)
        bench.intervals.delete("a")
        bench.intervals.add("a", 5, bench.taking(1))
        await asyncio.sleep(20.5)
        await bench.intervals.stop()
        return bench.began, bench.ended

    began, ended = run(main())
    assert (began, ended) == ([10, 31], [30, 32])


def test_draining_ends_the_ticks_and_stop_awaits_what_runs() -> None:
    async def main() -> tuple[list[float], list[float], float]:
        bench = Bench()
        bench.intervals.add("a", 10, bench.taking(8))
        bench.intervals.add("idle", 60, bench.taking(0))
        await asyncio.sleep(12)
        bench.state.begin()
        assert not bench.intervals.exists("a")
        await asyncio.sleep(3)
        await bench.intervals.stop()
        stopped = bench.now
        await asyncio.sleep(100)
        return bench.began, bench.ended, stopped

    assert run(main()) == ([10], [18], 18)


def test_a_failing_iteration_frees_its_place_and_the_next_tick_comes(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> int:
        bench = Bench()
        count = 0

        async def work() -> None:
            nonlocal count
            count += 1
            raise OSError("the other side is down")

        bench.intervals.add("a", 10, work)
        await asyncio.sleep(35)
        assert not bench.intervals.in_hand()
        await bench.intervals.stop()
        return count

    with caplog.at_level(logging.ERROR):
        assert run(main()) == 3
    assert "interval a" in caplog.text
    assert "the other side is down" in caplog.text


def test_an_iteration_whose_own_task_was_cancelled_ends_no_interval(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> list[float]:
        bench = Bench()

        async def work() -> None:
            bench.began.append(bench.now)
            inner = asyncio.create_task(asyncio.sleep(5))
            inner.cancel()
            await inner

        bench.intervals.add("a", 10, work)
        await asyncio.sleep(25)
        await bench.intervals.stop()
        return bench.began

    assert run(main()) == [10, 20]
    assert caplog.text.count("interval a: an iteration was cancelled") == 2


async def test_a_plain_function_runs_in_a_thread_and_is_awaited() -> None:
    state = ShutdownState()
    intervals = IntervalRegistry(state)
    began, go_on, done = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        began.set()
        go_on.wait(60)
        done.set()

    intervals.add("a", 0.01, work)
    assert await asyncio.to_thread(began.wait, 60)
    state.begin()
    stopping = asyncio.create_task(intervals.stop())
    await asyncio.sleep(0)
    assert not stopping.done()
    go_on.set()
    await stopping
    assert done.is_set()


def test_names_and_numbers_that_can_t_be() -> None:
    async def main() -> None:
        intervals = IntervalRegistry(ShutdownState())
        intervals.add("a", 10, lambda: None)
        with pytest.raises(ValueError, match="'a'"):
            intervals.add("a", 10, lambda: None)
        for seconds in (0, -1, float("nan"), float("inf")):
            with pytest.raises(ValueError, match="positive"):
                intervals.add("b", seconds, lambda: None)
        with pytest.raises(KeyError):
            intervals.delete("c")
        await intervals.stop()

    run(main())
    assert IntervalRegistry.phase is Phase.INTERVALS


@pytest.mark.parametrize(("now", "due"), [(0, 10), (10, 15), (12, 15), (15, 20), (31, 35)])
def test_the_grid_of_ticks(now: float, due: float) -> None:
    assert next_due(10, 5, now) == due


def test_without_a_loop_the_other_registry_is_named() -> None:
    with pytest.raises(RuntimeError, match="SyncIntervalRegistry"):
        IntervalRegistry(ShutdownState()).add("a", 1, print)


# --- without an event loop -------------------------------------------------------------------------------------------


class Gate:
    """Work that says when it has begun, and ends when it may."""

    def __init__(self) -> None:
        self.begun, self.may_end = threading.Semaphore(0), threading.Semaphore(0)
        self.running = self.most = self.ended = 0
        self._lock = threading.Lock()

    def __call__(self) -> None:
        with self._lock:
            self.running += 1
            self.most = max(self.most, self.running)
        self.begun.release()
        self.may_end.acquire(timeout=LONG)
        with self._lock:
            self.running -= 1
            self.ended += 1


LONG = 60.0


class TestThreads:
    def test_it_never_overlaps_itself_and_ticks_go_on(self) -> None:
        intervals, gate = SyncIntervalRegistry(ShutdownState()), Gate()
        intervals.add("a", 0.01, gate)
        for _ in range(3):
            assert gate.begun.acquire(timeout=LONG)
            assert not gate.begun.acquire(timeout=0.05), "ticks that fall into an iteration are dropped"
            assert intervals.in_hand() == ["the running iteration of interval a"]
            gate.may_end.release()
        gate.may_end.release(1000)
        intervals.stop()
        assert gate.most == 1
        assert not intervals.in_hand()
        assert not intervals.exists("a")

    def test_delete_ends_the_ticks_and_a_name_used_anew_waits_for_the_iteration(self) -> None:
        intervals, old, new = SyncIntervalRegistry(ShutdownState()), Gate(), Gate()
        intervals.add("a", 0.01, old)
        assert old.begun.acquire(timeout=LONG)
        intervals.delete("a")
        assert not intervals.exists("a")
        intervals.add("a", 0.01, new)
        assert intervals.exists("a")
        assert not new.begun.acquire(timeout=0.1)
        old.may_end.release()
        assert new.begun.acquire(timeout=LONG)
        new.may_end.release(1000)
        intervals.stop()
        assert old.ended == 1

    def test_draining_begins_nothing_and_stop_waits_for_what_runs(self) -> None:
        state = ShutdownState()
        intervals, gate = SyncIntervalRegistry(state), Gate()
        intervals.add("a", 0.01, gate)
        assert gate.begun.acquire(timeout=LONG)
        state.begin()
        assert not intervals.exists("a")
        stopping = threading.Thread(target=intervals.stop)
        stopping.start()
        stopping.join(0.1)
        assert stopping.is_alive()
        gate.may_end.release(1000)
        stopping.join(LONG)
        assert not stopping.is_alive()
        assert gate.ended == 1

    def test_a_failing_iteration_frees_its_place(self, caplog: pytest.LogCaptureFixture) -> None:
        intervals, twice = SyncIntervalRegistry(ShutdownState()), threading.Semaphore(0)

        def work() -> None:
            twice.release()
            raise OSError("the other side is down")

        with caplog.at_level(logging.ERROR):
            intervals.add("a", 0.01, work)
            assert twice.acquire(timeout=LONG)
            assert twice.acquire(timeout=LONG)
            intervals.stop()
        assert "the other side is down" in caplog.text

    def test_an_iteration_that_exits_ends_no_interval(self, caplog: pytest.LogCaptureFixture) -> None:
        intervals, again = SyncIntervalRegistry(ShutdownState()), threading.Semaphore(0)

        def work() -> None:
            again.release()
            sys.exit("no")

        intervals.add("a", 0.01, work)
        assert again.acquire(timeout=LONG)
        assert again.acquire(timeout=LONG)
        intervals.stop()
        assert "interval a: an iteration has failed" in caplog.text

    def test_what_is_refused(self) -> None:
        async def work() -> None:
            pass

        intervals = SyncIntervalRegistry(ShutdownState())
        intervals.add("a", 10, lambda: None)
        with pytest.raises(ValueError, match="'a'"):
            intervals.add("a", 10, lambda: None)
        for seconds in (0, -1, float("nan"), float("inf"), True, "1"):
            with pytest.raises(ValueError, match="positive"):
                intervals.add("b", seconds, lambda: None)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="event loop"):
            intervals.add("b", 1, work)
        with pytest.raises(KeyError):
            intervals.delete("b")
        intervals.stop()
        assert SyncIntervalRegistry.phase is Phase.INTERVALS
