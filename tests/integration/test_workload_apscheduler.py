"""APScheduler 3: jobs that run are awaited, no job begins while draining."""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from apscheduler.executors.pool import ThreadPoolExecutor
from apscheduler.schedulers.asyncio import AsyncIOScheduler
from apscheduler.schedulers.background import BackgroundScheduler

from leasedjob.workload import GracefulShutdown, Phase, ShutdownState
from leasedjob.workload.apscheduler import DrainingExecutor, SchedulerJobs
from leasedjob.workload.phases import Outcome

from .workload_parts import LONG


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "apscheduler")


@pytest.fixture
def background() -> Iterator[BackgroundScheduler]:
    scheduler = BackgroundScheduler(timezone="UTC")
    yield scheduler
    if scheduler.running:
        scheduler.shutdown(wait=False)


class Work:
    """Says when it has begun, and ends when it may."""

    def __init__(self) -> None:
        self.begun, self.may_end = threading.Semaphore(0), threading.Event()
        self.began = self.ended = 0

    def sync(self) -> None:
        self.began += 1
        self.begun.release()
        assert self.may_end.wait(LONG)
        self.ended += 1

    async def asynchronous(self) -> None:
        self.began += 1
        self.begun.release()
        while not self.may_end.is_set():
            await asyncio.sleep(0.01)
        self.ended += 1


async def begun(work: Work) -> None:
    assert await asyncio.to_thread(work.begun.acquire, timeout=LONG)


async def test_jobs_of_both_kinds_are_awaited() -> None:
    state, scheduler = ShutdownState(), AsyncIOScheduler(timezone="UTC")
    jobs = SchedulerJobs(scheduler, state)
    assert jobs.phase is Phase.INTERVALS
    one, other = Work(), Work()
    async with GracefulShutdown(state) as shutdown:
        shutdown.add(jobs)
        scheduler.add_job(one.sync, "interval", seconds=0.02, id="1", name="one")
        scheduler.add_job(other.asynchronous, "interval", seconds=0.02, id="2", name="other")
        scheduler.start()
        await begun(one)
        await begun(other)
        state.begin()
        await asyncio.sleep(0.2)
        assert scheduler.running
        assert sorted(jobs.in_hand()) == ["the running job one (1)", "the running job other (2)"]
        one.may_end.set()
        other.may_end.set()
        (line,) = await shutdown.finished()
        assert line.outcome is Outcome.DONE
    assert (one.began, one.ended, other.began, other.ended) == (1, 1, 1, 1)
    assert not scheduler.running
    assert jobs.in_hand() == []


def test_a_scheduler_in_threads(background: BackgroundScheduler) -> None:
    state, work = ShutdownState(), Work()
    with GracefulShutdown(state) as shutdown:
        shutdown.add(SchedulerJobs(background, state))
        background.add_job(work.sync, "interval", seconds=0.02)
        background.start()
        assert work.begun.acquire(timeout=LONG)
        state.notice("preStop")
        assert not shutdown.wait(0.2)
        work.may_end.set()
        assert shutdown.wait(LONG)
    assert (work.began, work.ended) == (1, 1)


def test_what_waits_for_a_thread_does_not_begin_any_more(background: BackgroundScheduler) -> None:
    state, first, second = ShutdownState(), Work(), Work()
    jobs = SchedulerJobs(background, state, threads=1)
    background.start()
    background.add_job(first.sync)
    assert first.begun.acquire(timeout=LONG)
    submitted = threading.Event()
    background.add_listener(lambda _event: submitted.set())
    background.add_job(second.sync)
    assert submitted.wait(LONG)
    state.begin()
    first.may_end.set()
    second.may_end.set()
    jobs.stop()
    assert (first.ended, second.began) == (1, 0)


async def test_a_tick_that_is_under_way_when_draining_begins_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    """The scheduler looks for a pause when it wakes, and not once more before each job."""
    state, work = ShutdownState(), Work()
    scheduler = AsyncIOScheduler(timezone="UTC")
    jobs = SchedulerJobs(scheduler, state)
    scheduler.start()
    job = scheduler.add_job(work.asynchronous, "interval", hours=1, id="1")
    with caplog.at_level(logging.INFO, "leasedjob.workload"):
        state.begin("SIGTERM")
        scheduler._lookup_executor("default").submit_job(job, [datetime.now(UTC)])
        await asyncio.sleep(0.05)
        await asyncio.to_thread(jobs.stop)
    assert work.began == 0
    assert "job 1: its tick is dropped: SIGTERM" in caplog.text


async def test_a_job_that_fails_is_reported_and_the_next_tick_comes() -> None:
    state, scheduler = ShutdownState(), AsyncIOScheduler(timezone="UTC")
    jobs = SchedulerJobs(scheduler, state)
    failed, twice = [], threading.Semaphore(0)

    async def work() -> None:
        twice.release()
        raise OSError("the other side is down")

    scheduler.add_listener(lambda event: failed.append(str(getattr(event, "exception", ""))))
    logging.getLogger("apscheduler").setLevel(logging.CRITICAL)
    scheduler.add_job(work, "interval", seconds=0.02)
    scheduler.start()
    for _ in range(2):
        assert await asyncio.to_thread(twice.acquire, timeout=LONG)
    await asyncio.to_thread(jobs.stop)
    assert "the other side is down" in failed


def test_what_is_refused(background: BackgroundScheduler) -> None:
    state = ShutdownState()
    with pytest.raises(ValueError, match="default"):
        SchedulerJobs(BackgroundScheduler(executors={"default": ThreadPoolExecutor(1)}), state)
    with pytest.raises(ValueError, match="threads"):
        DrainingExecutor(state, threads=0)
    background.start()
    with pytest.raises(ValueError, match="has been started"):
        SchedulerJobs(background, state)


def test_a_coroutine_function_needs_a_loop(background: BackgroundScheduler) -> None:
    SchedulerJobs(background, ShutdownState())
    background.start()
    executor: Any = background._lookup_executor("default")
    job = background.add_job(functools.partial(Work().asynchronous), "interval", hours=1)
    with pytest.raises(TypeError, match="AsyncIOScheduler"):
        executor.submit_job(job, [datetime.now(UTC)])


def test_a_scheduler_that_was_never_started(background: BackgroundScheduler) -> None:
    state = ShutdownState()
    jobs = SchedulerJobs(background, state)
    state.begin()
    jobs.stop()
