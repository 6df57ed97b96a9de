"""ShutdownState and AbortSignal: one moment, seen from everywhere."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from leasedjob.errors import DrainingError, SidecarUnavailableError
from leasedjob.workload import AbortSignal, ShutdownState
from leasedjob.workload.sidecar import View


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def view(**changes: Any) -> View:
    values: dict[str, Any] = {
        "lease_id": "x",
        "attempt": 1,
        "fencing_token": 7,
        "fenced": False,
        "draining": False,
        "reason": "",
        "grace": 30.0,
        "pre_stop": 5.0,
        "since_adoption": 1.0,
        "revision": 1,
    }
    return View(**{**values, **changes})


class FakeSidecar:
    """What ShutdownState needs of a Sidecar; `say` is the sidecar's next state."""

    def __init__(self, first: View | None) -> None:
        self._first = first
        self.say: Any = None

    def look(self, **_: Any) -> View:
        if self._first is None:
            raise SidecarUnavailableError("not up yet")
        return self._first

    def subscribe(self, tell: Any) -> None:
        self.say = tell


def watching(first: View | None) -> tuple[ShutdownState, FakeSidecar]:
    state, sidecar = ShutdownState(clock=Clock()), FakeSidecar(first)
    state.watch(sidecar)  # type: ignore[arg-type]
    return state, sidecar


class TestState:
    def test_a_notice_then_a_stop(self) -> None:
        clock = Clock()
        state = ShutdownState(clock=clock)
        assert (state.is_draining(), state.readiness()) == (False, (200, "ready"))
        assert state.notice("preStop")
        assert (state.is_draining(), state.is_stopping()) == (True, False)
        assert state.readiness() == (503, "draining: preStop")
        clock.now = 110.0
        assert state.begin("SIGTERM")
        assert (state.is_stopping(), state.reason) == (True, "preStop")
        assert (state.notice_at, state.stop_at) == (100.0, 110.0)

    def test_a_stop_without_a_notice(self) -> None:
        state = ShutdownState(clock=Clock())
        assert state.begin()
        assert (state.notice_at, state.stop_at) == (None, 100.0)
        assert not state.notice("late"), "it joins"
        assert state.notice_at is None

    def test_of_many_at_once_one_begins_it(self) -> None:
        state = ShutdownState()
        gate = threading.Barrier(8)
        won: list[bool] = []

        def begin() -> None:
            gate.wait(60)
            won.append(state.begin())

        threads = [threading.Thread(target=begin) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert sorted(won) == [False] * 7 + [True]

    async def test_a_coroutine_and_a_thread_wait_for_the_same(self) -> None:
        state = ShutdownState()
        assert not state.wait(0)
        thread = asyncio.create_task(asyncio.to_thread(state.wait, 60))
        waiting = asyncio.ensure_future(_await(state))
        await asyncio.sleep(0)
        assert not waiting.done()
        threading.Thread(target=state.begin, args=("by hand",)).start()
        assert await waiting == "by hand"
        assert await thread
        assert await state == "by hand", "and later comers at once"


async def _await(state: ShutdownState) -> str:
    return await state


class TestSidecar:
    def test_a_notice_that_came_before_us_is_seen_at_once(self) -> None:
        state, _ = watching(view(draining=True))
        assert (state.is_draining(), state.is_stopping()) == (True, False)
        assert (state.grace, state.pre_stop) == (30.0, 5.0)

    def test_one_that_comes_later(self) -> None:
        state, sidecar = watching(None)
        assert not state.is_draining()
        sidecar.say(view())
        assert not state.is_draining()
        sidecar.say(view(draining=True))
        assert state.reason == "the sidecar's drain notice"

    def test_a_lost_lease_is_a_stop(self) -> None:
        state, sidecar = watching(view())
        sidecar.say(view(fenced=True, reason="reclaimed"))
        assert (state.is_stopping(), state.reason) == (True, "the lease is lost: reclaimed")


class TestAbortSignal:
    def test_calls_are_made_once_and_can_be_taken_back(self) -> None:
        signal, told = AbortSignal(), []
        signal.call(lambda: told.append("a"))
        signal.call(lambda: told.append("b"))()
        signal.call(lambda: 1 / 0)
        assert signal.set("why")
        assert not signal.set("again")
        assert (told, signal.reason) == (["a"], "why")
        signal.call(lambda: told.append("late"))
        assert told == ["a", "late"]

    def test_between_two_steps(self) -> None:
        signal = AbortSignal()
        signal.raise_if_set()
        signal.set("SIGTERM")
        with pytest.raises(DrainingError, match="SIGTERM"):
            signal.raise_if_set()

    async def test_a_waiter_that_is_cancelled_leaves_nothing_behind(self) -> None:
        signal = AbortSignal()

        async def wait() -> str:
            return await signal

        waiting = asyncio.create_task(wait())
        await asyncio.sleep(0)
        assert signal._calls
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert not signal._calls


def test_only_the_main_thread_listens_to_signals() -> None:
    raised: list[BaseException] = []

    def listen() -> None:
        try:
            ShutdownState.listening(env={})
        except ValueError as error:
            raised.append(error)

    thread = threading.Thread(target=listen)
    thread.start()
    thread.join(60)
    assert "main thread" in str(raised[0])
