"""GracefulShutdown: a program's parts are stopped in phases, each within its budget, and nothing is dropped silently.

    async with GracefulShutdown(state) as shutdown:
        shutdown.add(intervals)                              # anything with phase, name and stop()
        shutdown.on_stop(Phase.POOLS, "database", pool.close)
        await shutdown.finished()                            # until a stop has come and everything has ended

The phases are decided in `phases`. They are carried out by a thread, so that an event loop that a call in C blocks
keeps no other phase from ending, and the process from ending by itself when the budget is over.
"""

from __future__ import annotations

import inspect
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Protocol, Self

from leasedjob.errors import DrainingError, InvalidShutdownBudgetError
from leasedjob.protocol import PhaseEnd
from leasedjob.workload import phases
from leasedjob.workload.abort import AbortSignal
from leasedjob.workload.draining import ShutdownState
from leasedjob.workload.phases import (
    Added,
    Begin,
    Cut,
    Ended,
    Event,
    Finish,
    Force,
    Noticed,
    Part,
    Phase,
    PhaseReport,
    ShutdownBudget,
    State,
    Stopped,
    Tick,
)

if TYPE_CHECKING:
    import asyncio

_log: Final = logging.getLogger("leasedjob.workload")
EXIT_FORCED: Final = 143  # as SIGTERM would have ended it
LAST_WORDS_SECONDS: Final = 1.0


class Stoppable(Protocol):
    """What GracefulShutdown stops, and what an adapter implements.

    Attributes:
        phase: when it is stopped.
        name: for log lines; unique in the program.
    """

    @property
    def phase(self) -> Phase: ...

    @property
    def name(self) -> str: ...

    def stop(self) -> Awaitable[object] | object:
        """Takes nothing new, lets what is in hand end, and returns (or ends, as a coroutine) when it has.

        It is cancelled at its phase's limit if it is a coroutine function; a plain function runs in a thread and is
        left to itself then.
        """

    def in_hand(self) -> Sequence[str]:
        """What would be lost if it were cut off now, for people."""


@dataclass(frozen=True, slots=True)
class Stopping:
    """A Stoppable made of a function."""

    phase: Phase
    name: str
    call: Callable[[], Awaitable[object] | object]

    def stop(self) -> Awaitable[object] | object:
        return self.call()

    def in_hand(self) -> Sequence[str]:
        return ()


class GracefulShutdown:
    """Waits for a stop, then stops the program's parts. A context manager, synchronous and asynchronous.

    Args:
        state: whose draining it follows.
        budget: default: the phases' limits, shortened until they fit into what the sidecar says of the Pod, if it does.
        exit: ends the process past the budget; default os._exit, since anything gentler could hang.

    Raises:
        InvalidShutdownBudgetError: on entering: the budget doesn't fit into what the sidecar says of the Pod.
    """

    def __init__(
        self,
        state: ShutdownState,
        budget: ShutdownBudget | None = None,
        *,
        exit: Callable[[int], object] = os._exit,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._shutdown, self._exit, self._clock = state, exit, clock
        self._budget = budget
        self._state = State(budget=budget or ShutdownBudget())
        self._parts: dict[str, Stoppable] = {}
        self._work: dict[str, Future[Any]] = {}
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._done = AbortSignal()
        self._left = False  # by itself, with no stop: whatever the program does then is its own affair
        self._thread: threading.Thread | None = None

    # --- what is to be stopped ---

    def add(self, part: Stoppable) -> None:
        """From now on `part` is stopped in its phase.

        Raises:
            ValueError: the name is taken.
            DrainingError: a stop has begun; what was not added is not to be started.
        """
        if part.name in self._parts:
            raise ValueError(f"{part.name!r} is the name of another part")
        if self._shutdown.is_draining():
            raise DrainingError(f"{part.name} is not to be started: {self._shutdown.reason}")
        self._parts[part.name] = part
        self._events.put(Added(self._clock(), Part(part.phase, part.name)))

    def on_stop(self, phase: Phase, name: str, call: Callable[[], Awaitable[object] | object]) -> None:
        """The same for a function or a coroutine function."""
        self.add(Stopping(phase, name, call))

    # --- waiting ---

    def wait(self, timeout: float | None = None) -> bool:
        """Blocks a thread until a stop has come and everything has ended; False after `timeout` seconds."""
        return self._done.wait(timeout)

    async def finished(self) -> tuple[PhaseReport, ...]:
        """The same for a coroutine; how each phase ended."""
        await self._done
        return self.report()

    def report(self) -> tuple[PhaseReport, ...]:
        """How each phase ended; complete once everything has."""
        return phases.report(self._state)

    # --- from start to end ---

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        """Leaving begins the stop if none has, and waits for its end."""
        self._left = self._shutdown.begin("the program ends")
        self._done.wait()

    async def __aenter__(self) -> Self:
        import asyncio  # costly, and not needed by a program without a loop

        self._loop = asyncio.get_running_loop()
        self._start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._left = self._shutdown.begin("the program ends")
        await self._done

    def _start(self) -> None:
        self._state = replace(self._state, budget=self._fitting())
        self._thread = threading.Thread(target=self._drive, name="leasedjob-shutdown", daemon=True)
        self._thread.start()
        self._shutdown.signal.call(lambda: self._events.put(Noticed(self._clock())))
        self._shutdown.stopping.call(lambda: self._events.put(Stopped(self._clock())))

    def _fitting(self) -> ShutdownBudget:
        grace, pre_stop = self._shutdown.grace, self._shutdown.pre_stop
        if grace is None or pre_stop is None:
            return self._state.budget
        if self._budget is None:
            return ShutdownBudget.within(grace, pre_stop)
        if (self._budget.total, self._budget.pre_stop) != (grace, pre_stop):
            raise InvalidShutdownBudgetError(
                f"the budget is made for {self._budget.total:g} s with {self._budget.pre_stop:g} s of preStop, but the "
                f"LeasedJob's shutdown gives {grace:g} and {pre_stop:g}"
            )
        return self._budget

    def _drive(self) -> None:
        while True:
            due = self._state.due_at
            try:
                event = self._events.get(timeout=None if due == phases.FOREVER else max(0.0, due - self._clock()))
            except queue.Empty:
                event = Tick(self._clock())
            if event is not None:
                self._feed(event)

    def _feed(self, event: Event) -> None:
        if isinstance(event, Noticed) and self._shutdown.stop_at is not None:
            return  # draining begins with the stop itself
        self._state, actions = phases.step(self._state, event)
        for action in actions:
            match action:
                case Begin():
                    self._begin(action)
                case Cut():
                    self._cut(action)
                case Finish():
                    self._finish()
                case Force():
                    self._force(action)

    def _begin(self, action: Begin) -> None:
        part = self._parts[action.part.name]
        _log.info("shutdown: %s: stopping %s, %.0f s at most", part.phase, part.name, action.limit_at - self._clock())
        loop = self._loop
        if loop is not None and inspect.iscoroutinefunction(_function(part)):
            import asyncio

            self._follow(part.name, asyncio.run_coroutine_threadsafe(_awaited(part), loop))
            return
        future: Future[Any] = Future()

        def run() -> None:
            try:
                given = part.stop()
                if inspect.isawaitable(given):
                    import asyncio

                    given = (
                        asyncio.run(_all(given))
                        if loop is None
                        else asyncio.run_coroutine_threadsafe(_all(given), loop).result()
                    )
                future.set_result(given)
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, name=f"stop-{part.name}", daemon=True).start()
        self._follow(part.name, future)

    def _follow(self, name: str, future: Future[Any]) -> None:
        self._work[name] = future

        def ended(done: Future[Any]) -> None:
            error = "it was cancelled" if done.cancelled() else done.exception()
            text = "" if error is None else f"{type(error).__name__}: {error}" if error != "it was cancelled" else error
            self._events.put(Ended(self._clock(), name, str(text)))

        future.add_done_callback(ended)

    def _cut(self, action: Cut) -> None:
        held = _in_hand(self._parts[action.part.name])
        _log.error(
            "shutdown: %s: %s was cut off after %.1f s; %s",
            action.part.phase,
            action.part.name,
            action.seconds,
            f"dropped: {held}" if held else "what it had in hand is not known",
        )
        self._work[action.part.name].cancel()

    def _finish(self) -> None:
        from leasedjob.workload import metrics

        for track in self._state.tracks.values():
            if track.error:
                _log.error("shutdown: %s: %s failed: %s", track.part.phase, track.part.name, track.error)
        for line in self.report():
            _log.info("shutdown: %s: %s after %.1f s", line.phase, line.outcome, line.seconds)
            metrics.observe(line)
        self._hand_over()
        self._done.set("everything has ended")

    def _hand_over(self) -> None:
        """A Pod's metric dies with the Pod, so its sidecar keeps the durations, and the operator exports them."""
        ends = [PhaseEnd(line.phase.value, line.outcome.value, round(line.seconds, 3)) for line in self.report()]
        if ends and self._shutdown.sidecar is not None:
            self._shutdown.sidecar.report_shutdown(ends)

    def _force(self, action: Force) -> None:
        """The budget is over: last words, for a second at most, since even a log can hang."""
        if self._left and self._done.is_set():
            return
        budget = self._state.budget
        threads = [t.name for t in threading.enumerate() if not t.daemon and t is not threading.main_thread()]
        text = "shutdown: the budget of {:g} s is over; cut off: {}; never begun: {}{}; the process ends now".format(
            budget.total - budget.sidecar,
            ", ".join(action.names) or "nothing, but the program goes on",
            ", ".join(action.skipped) or "nothing",
            f"; threads: {', '.join(threads)}" if threads else "",
        )

        def last_words() -> None:
            _log.critical("%s", text)
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            if not self._done.is_set():
                self._hand_over()

        speaker = threading.Thread(target=last_words, daemon=True)
        speaker.start()
        speaker.join(LAST_WORDS_SECONDS)
        self._exit(EXIT_FORCED)


def _function(part: Stoppable) -> Callable[..., Any]:
    return part.call if isinstance(part, Stopping) else part.stop


async def _awaited(part: Stoppable) -> None:
    given = part.stop()
    if inspect.isawaitable(given):
        await given


async def _all(given: Awaitable[object]) -> object:
    return await given


def _in_hand(part: Stoppable) -> str:
    try:
        return ", ".join(part.in_hand())
    except Exception as error:
        return f"unknown ({type(error).__name__}: {error})"
