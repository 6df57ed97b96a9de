"""The agenda, in virtual time: each key once at its time, however often it is set, for ten thousand keys."""

from __future__ import annotations

import asyncio
import random
import time
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit import controller_builders as b

from leasedjob.controller import agenda as module
from leasedjob.controller.agenda import LONGEST_SLEEP, Agenda


class World:
    """A clock that stands still until it is moved, and what came due."""

    def __init__(self) -> None:
        self.now = b.T0
        self.due: list[str] = []
        self.agenda: Agenda[str] = Agenda(lambda: self.now, self.due.append)

    def to(self, seconds: float) -> list[str]:
        """What comes due by moving the clock to this second."""
        self.now = b.at(seconds)
        self.due.clear()
        self.agenda.pop_due()
        return list(self.due)


@pytest.fixture
def world() -> World:
    return World()


def test_each_key_once_at_its_time(world: World) -> None:
    world.agenda.set("a", b.at(5))
    assert world.to(4.999) == []
    assert world.to(5) == ["a"]
    assert world.to(6) == []


def test_earliest_first_and_those_of_one_instant_in_their_order(world: World) -> None:
    for key, at in (("c", 3), ("a", 1), ("x", 2), ("y", 2), ("z", 9)):
        world.agenda.set(key, b.at(at))
    assert world.to(5) == ["a", "x", "y", "c"]


def test_the_past_is_due_at_once(world: World) -> None:
    world.agenda.set("a", b.at(-100))
    assert world.agenda.next_in() == 0
    assert world.to(0) == ["a"]


@pytest.mark.parametrize(("first", "second"), [(5, 10), (10, 5), (5, 5)])
def test_a_new_time_replaces_the_old_one(world: World, first: float, second: float) -> None:
    world.agenda.set("a", b.at(first))
    world.agenda.set("a", b.at(second))
    assert world.to(second - 0.1) == []
    assert world.to(second) == ["a"]
    assert world.to(100) == []


def test_back_and_forth(world: World) -> None:
    for at in (5, 10, 5, 10, 5):
        world.agenda.set("a", b.at(at))
    assert world.to(100) == ["a"]


def test_unset(world: World) -> None:
    world.agenda.set("a", b.at(5))
    world.agenda.set("a", None)
    world.agenda.set("never", None)
    assert world.to(10) == []
    world.agenda.set("a", b.at(5))
    assert world.to(10) == ["a"], "the same time as before it was unset"
    assert world.to(11) == []


def test_set_again_from_within(world: World) -> None:
    seen: list[datetime] = []

    def due(key: str) -> None:
        seen.append(world.now)
        again.set(key, world.now + timedelta(seconds=60))

    again: Agenda[str] = Agenda(lambda: world.now, due)
    again.set("a", b.T0)
    for second in range(0, 601, 20):
        world.now = b.at(second)
        again.pop_due()
    assert seen == [b.at(60 * n) for n in range(11)]


class TestSleep:
    def test_bounded(self, world: World) -> None:
        assert world.agenda.next_in() == LONGEST_SLEEP
        world.agenda.set("a", b.at(2))
        assert world.agenda.next_in() == 2
        world.agenda.set("a", b.at(3600))
        assert world.agenda.next_in() <= LONGEST_SLEEP
        world.now = b.at(7200)
        assert world.agenda.next_in() == 0

    def test_a_step_of_the_clock_is_seen_within_the_longest_sleep(self, world: World) -> None:
        world.agenda.set("a", b.at(3600))
        assert world.agenda.next_in() == LONGEST_SLEEP
        assert world.to(3600) == ["a"], "forward"

    def test_a_clock_that_was_set_back(self, world: World) -> None:
        world.agenda.set("a", b.at(10))
        assert world.to(-3600) == []
        assert world.agenda.next_in() == LONGEST_SLEEP
        assert world.to(10) == ["a"]


def test_ten_thousand_keys(world: World) -> None:
    rng = random.Random(7)
    times = {f"k{n}": rng.randrange(0, 3600) for n in range(10_000)}
    began = time.process_time()
    for _ in range(5):
        for key in times:
            world.agenda.set(key, b.at(rng.randrange(3600, 9999)))
    for key, at in times.items():
        world.agenda.set(key, b.at(at))
    assert len(world.agenda._heap) <= 64 + 4 * len(times) + 1, "old entries don't pile up"
    seen: list[str] = []
    for second in range(0, 3600, 10):
        came = world.to(second)
        assert all(second - 10 < times[k] <= second for k in came)
        seen += came
    seen += world.to(3600)
    assert sorted(seen) == sorted(times)
    assert world.to(99_999) == []
    assert time.process_time() - began < 10


def test_one_key_that_is_set_for_ever_stays_small(world: World) -> None:
    for n in range(100_000):
        world.agenda.set("a", b.at(n + 10))
    assert len(world.agenda._heap) < 200


@given(st.lists(st.tuples(st.sampled_from("abc"), st.none() | st.integers(0, 50), st.integers(0, 5)), max_size=60))
def test_against_a_dictionary(steps: list[tuple[str, int | None, int]]) -> None:
    world = World()
    model: dict[str, int] = {}
    now = 0
    for key, at, passes in steps:
        world.agenda.set(key, None if at is None else b.at(at))
        if at is None:
            model.pop(key, None)
        else:
            model[key] = at
        now += passes
        expected = sorted(k for k, t in model.items() if t <= now)
        assert sorted(world.to(now)) == expected
        for k in expected:
            del model[k]
        if model:
            assert world.agenda.next_in() <= min(LONGEST_SLEEP, min(model.values()) - now)


class TestRun:
    """The loop itself, on the real clock of the event loop."""

    async def until(self, found: list[str], count: int) -> None:
        async with asyncio.timeout(10):
            while len(found) < count:
                await asyncio.sleep(0)

    async def test_it_wakes_for_an_earlier_time(self) -> None:
        found: list[str] = []
        agenda: Agenda[str] = Agenda(lambda: datetime.now(UTC), found.append)
        agenda.set("later", datetime.now(UTC) + timedelta(hours=1))
        task = asyncio.create_task(agenda.run())
        await asyncio.sleep(0)
        began = time.monotonic()
        agenda.set("now", datetime.now(UTC))
        await self.until(found, 1)
        assert time.monotonic() - began < LONGEST_SLEEP / 2
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert found == ["now"]

    async def test_it_keeps_time(self) -> None:
        found: list[str] = []
        late: list[float] = []

        def due(key: str) -> None:
            found.append(key)
            late.append((datetime.now(UTC) - at).total_seconds())

        agenda: Agenda[str] = Agenda(lambda: datetime.now(UTC), due)
        at = datetime.now(UTC) + timedelta(seconds=0.05)
        agenda.set("a", at)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(agenda.run())
            await self.until(found, 1)
            task.cancel()
        assert late[0] >= 0, "never early"

    async def test_a_step_of_the_clock(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "LONGEST_SLEEP", 0.01)
        found: list[str] = []
        now = [b.T0]
        agenda: Agenda[str] = Agenda(lambda: now[0], found.append)
        agenda.set("a", b.at(3600))
        async with asyncio.TaskGroup() as group:
            task = group.create_task(agenda.run())
            await asyncio.sleep(0.05)
            assert found == []
            now[0] = b.at(3600)
            await self.until(found, 1)
            task.cancel()
        assert found == ["a"]
