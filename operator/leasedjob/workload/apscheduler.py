"""APScheduler 3, so that no job begins once a stop has, and none is dropped halfway. The extra `apscheduler`.

    scheduler = AsyncIOScheduler()              # or BackgroundScheduler()
    jobs = SchedulerJobs(scheduler, state)      # before it is started
    shutdown.add(jobs)
    scheduler.add_job(sync_orders, "interval", minutes=1)
    scheduler.start()

Its own `shutdown(wait=True)` cancels the coroutines that run, whatever its name says, and threads that wait in its pool
still begin. So jobs run in a DrainingExecutor instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

try:
    from apscheduler.executors.base import BaseExecutor, run_coroutine_job, run_job
    from apscheduler.schedulers import SchedulerNotRunningError
    from apscheduler.schedulers.base import BaseScheduler
    from apscheduler.util import iscoroutinefunction_partial
except ModuleNotFoundError as error:
    error.add_note("it comes with: pip install 'leasedjob[apscheduler]'")
    raise

from leasedjob.workload.draining import ShutdownState
from leasedjob.workload.phases import Phase

_log: Final = logging.getLogger("leasedjob.workload")
THREADS: Final = 10


class DrainingExecutor(BaseExecutor):  # type: ignore[misc]
    """Runs coroutine functions on the scheduler's event loop and functions in threads; begins nothing while draining.

    Args:
        state: whose draining it follows.
        threads: how many functions run at once; further ones wait.
    """

    def __init__(self, state: ShutdownState, *, threads: int = THREADS) -> None:
        if threads < 1:
            raise ValueError(f"threads must be 1 or more, not {threads!r}")
        super().__init__()
        self._state = state
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="apscheduler")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._idle = threading.Condition()
        self._running: dict[object, str] = {}

    @property
    def running(self) -> Sequence[str]:
        """The jobs whose iteration runs, as name and id."""
        with self._idle:
            return list(self._running.values())

    def wait(self) -> None:
        """Blocks a thread until nothing runs."""
        with self._idle:
            self._idle.wait_for(lambda: not self._running)

    # --- called by the scheduler ---

    def start(self, scheduler: BaseScheduler, alias: str) -> None:
        super().start(scheduler, alias)
        self._loop = getattr(scheduler, "_eventloop", None)

    def shutdown(self, wait: bool = True) -> None:
        """Interrupts nothing. What has not begun never will; `wait` is for threads only."""
        self._threads.shutdown(wait, cancel_futures=True)

    def _do_submit_job(self, job: Any, run_times: list[Any]) -> None:
        if iscoroutinefunction_partial(job.func):
            if self._loop is None:
                raise TypeError(f"job {job.id} is a coroutine function, which needs an AsyncIOScheduler")
            # From the scheduler's own loop, or from a thread that calls its methods.
            future = asyncio.run_coroutine_threadsafe(self._coroutine(job, run_times), self._loop)
        else:
            future = self._threads.submit(self._function, job, run_times)
        future.add_done_callback(lambda done: self._done(job.id, done))

    def _begin(self, job: Any) -> object | None:
        """What stands for the iteration; None if it is not to begin. Whoever waits afterwards waits for it."""
        with self._idle:
            if self._state.is_draining():
                _log.info("job %s: its tick is dropped: %s", job.id, self._state.reason)
                return None
            key = object()
            self._running[key] = f"{job.name} ({job.id})"
            return key

    def _end(self, key: object) -> None:
        with self._idle:
            del self._running[key]
            self._idle.notify_all()

    def _function(self, job: Any, run_times: list[Any]) -> list[Any]:
        if (key := self._begin(job)) is None:
            return []
        try:
            events: list[Any] = run_job(job, job._jobstore_alias, run_times, self._logger.name)
            return events
        finally:
            self._end(key)

    async def _coroutine(self, job: Any, run_times: list[Any]) -> list[Any]:
        if (key := self._begin(job)) is None:
            return []
        try:
            work: Coroutine[Any, Any, list[Any]] = run_coroutine_job(
                job, job._jobstore_alias, run_times, self._logger.name
            )
            return await work
        finally:
            self._end(key)

    def _done(self, job_id: str, done: Future[list[Any]]) -> None:
        error = None if done.cancelled() else done.exception()
        if error is not None:
            self._run_job_error(job_id, error, error.__traceback__)
        else:
            self._run_job_success(job_id, [] if done.cancelled() else done.result())


class SchedulerJobs:
    """The jobs of an APScheduler, as a part of a GracefulShutdown: those that run are awaited, for at most 25 s.

    Args:
        scheduler: not started yet, and with no default executor of its own. An AsyncIOScheduler or BackgroundScheduler;
            jobs in other executors than a DrainingExecutor are stopped as APScheduler stops them.
        state: whose draining ends the ticks.
        threads: how many functions run at once.
        name: for log lines.

    Raises:
        ValueError: the scheduler has been started, or has a default executor.
    """

    phase: Final = Phase.INTERVALS

    def __init__(
        self, scheduler: BaseScheduler, state: ShutdownState, *, threads: int = THREADS, name: str = "apscheduler"
    ) -> None:
        if scheduler.running:
            raise ValueError("scheduler: it has been started, with an executor that drops jobs halfway")
        self.name = name
        self._scheduler = scheduler
        self._executor = DrainingExecutor(state, threads=threads)
        scheduler.add_executor(self._executor, "default")
        self._pause: Callable[[], None] = state.signal.call(self._hold)

    def _hold(self) -> None:
        """Ticks that fall due from now on stay due, in job stores that survive the Pod."""
        with contextlib.suppress(SchedulerNotRunningError):
            self._scheduler.pause()

    def stop(self) -> None:
        """Begins no job any more, waits for those that run, and shuts the scheduler down."""
        self._hold()
        self._executor.wait()
        with contextlib.suppress(SchedulerNotRunningError):
            self._scheduler.shutdown(wait=False)

    def in_hand(self) -> Sequence[str]:
        """The jobs that run."""
        return [f"the running job {job}" for job in self._executor.running]
