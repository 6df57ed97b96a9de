"""Who may create a Pod when: turns between owners, a rate, a concurrency, and what waits for all of them."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from leasedjob.controller.launches import Launches
from leasedjob.controller.turns import Turns


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_owners_take_turns() -> None:
    turns: Turns[str, str] = Turns()
    for number in range(4):
        turns.add("many", f"many-{number}")
    turns.add("one", "one-0")
    turns.add("two", "two-0")
    turns.add("two", "two-1")
    assert len(turns) == 7
    assert [turns.take() for _ in range(7)] == ["many-0", "one-0", "two-0", "many-1", "two-1", "many-2", "many-3"]
    with pytest.raises(IndexError):
        turns.take()


def test_an_owner_that_comes_again_queues_anew() -> None:
    turns: Turns[str, int] = Turns()
    turns.add("a", 1)
    assert turns.take() == 1
    turns.add("b", 2)
    turns.add("a", 3)
    assert [turns.take(), turns.take()] == [2, 3]


class Maker:
    """Creations that end when they are told to."""

    def __init__(self, launches: Launches[str]) -> None:
        self.launches, self.begun = launches, list[str]()
        self.open: dict[str, asyncio.Event] = {}
        self.tasks: list[asyncio.Task[None]] = []

    def want(self, key: str, name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(self._make(key, name))
        self.tasks.append(task)
        return task

    async def _make(self, key: str, name: str) -> None:
        async with self.launches.turn(key):
            self.begun.append(name)
            await self.open.setdefault(name, asyncio.Event()).wait()

    async def end(self, name: str) -> None:
        self.open[name].set()
        await settle()


async def test_one_with_many_holds_nobody_up() -> None:
    maker = Maker(Launches(2))
    for number in range(50):
        maker.want("backfill", f"b{number}")
    await settle()
    for key in ("x", "y", "z"):
        maker.want(key, key)
    await settle()
    assert maker.begun == ["b0", "b1"], "two at a time"
    for name in ("b0", "b1"):
        await maker.end(name)
    assert set(maker.begun[2:]) == {"b2", "x"}
    for name in ("b2", "x"):
        await maker.end(name)
    assert set(maker.begun[4:]) == {"y", "z"}, "the others came before the rest of the fifty"
    for task in maker.tasks:
        task.cancel()


async def test_the_rate() -> None:
    now = 0.0
    launches: Launches[str] = Launches(100, 10, clock=lambda: now)
    maker = Maker(launches)
    for number in range(30):
        maker.want("a", str(number))
    await settle()
    assert len(maker.begun) == 10, "one second's worth at once"
    now = 0.5
    launches._rung()
    await settle()
    assert len(maker.begun) == 15
    now = 100.0
    launches._rung()
    await settle()
    assert len(maker.begun) == 25, "what was not used is not saved up for more than a second"
    for task in maker.tasks:
        task.cancel()


async def test_the_rate_goes_on_by_itself() -> None:
    maker = Maker(Launches(1000, 200))
    for number in range(240):
        maker.want("a", str(number))
    async with asyncio.timeout(60):
        while len(maker.begun) < 240:
            await asyncio.sleep(0.01)
    for task in maker.tasks:
        task.cancel()


async def test_whoever_gives_up_costs_no_place() -> None:
    maker = Maker(Launches(1))
    first, second = maker.want("a", "1"), maker.want("b", "2")
    third = maker.want("c", "3")
    await settle()
    second.cancel()
    await settle()
    await maker.end("1")
    assert maker.begun == ["1", "3"]
    third.cancel()
    await settle()
    maker.want("d", "4")
    await settle()
    assert maker.begun == ["1", "3", "4"]
    await maker.end("4")
    assert first.done()


async def test_given_up_in_the_moment_of_its_turn() -> None:
    maker = Maker(Launches(1))
    maker.want("a", "1")
    second = maker.want("b", "2")
    await settle()
    maker.open["1"].set()
    await asyncio.sleep(0)  # the first ends, and lets the second in
    second.cancel()
    await settle()
    maker.want("c", "3")
    await settle()
    assert "3" in maker.begun
    await maker.end("3")


async def test_a_failed_creation_frees_its_place() -> None:
    launches: Launches[str] = Launches(1)
    for _ in range(3):
        with contextlib.suppress(OSError):
            async with launches.turn("a"):
                raise OSError("no answer")


async def test_what_can_wait_waits_until_nothing_is_to_be_created() -> None:
    launches: Launches[str] = Launches(4)
    await launches.calm()
    with launches.expected():
        waiting = asyncio.create_task(launches.calm())
        await settle()
        assert not waiting.done()
    await settle()
    assert waiting.done()


async def test_nobody_waits_for_creations_that_stand_still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leasedjob.controller.launches.STALLED", 0.01)
    launches: Launches[str] = Launches(4)
    with launches.expected():
        async with asyncio.timeout(30):
            await launches.calm()
