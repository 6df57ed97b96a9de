"""Many small requests, few round trips; each asker gets its own answer, or its batch's failure."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from leasedjob.controller.batch import Batcher


class Database:
    """Answers each number with its double; a round trip ends when `answer` is set."""

    def __init__(self, *, instant: bool = True) -> None:
        self.batches: list[list[int]] = []
        self.answer = asyncio.Event()
        self.asked = asyncio.Event()
        self.failures: list[BaseException] = []
        if instant:
            self.answer.set()

    async def send(self, requests: Sequence[int]) -> list[int]:
        self.batches.append(list(requests))
        self.asked.set()
        await self.answer.wait()
        if self.failures:
            raise self.failures.pop(0)
        return [2 * r for r in requests]


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_one_alone_waits_for_nobody() -> None:
    db = Database()
    assert await Batcher(db.send).ask(4) == 8
    assert db.batches == [[4]]


async def test_a_thousand_at_once_are_few_round_trips() -> None:
    db = Database()
    batcher = Batcher(db.send)
    assert await asyncio.gather(*(batcher.ask(n) for n in range(1000))) == [2 * n for n in range(1000)]
    assert [len(x) for x in db.batches] == [500, 500]
    assert [r for x in db.batches for r in x] == list(range(1000)), "in the order in which they were asked"


async def test_what_is_asked_meanwhile_goes_out_together() -> None:
    db = Database(instant=False)
    batcher = Batcher(db.send)
    first = asyncio.create_task(batcher.ask(1))
    await db.asked.wait()
    rest = [asyncio.create_task(batcher.ask(n)) for n in (2, 3, 4)]
    await settle()
    assert db.batches == [[1]], "one round trip at a time"
    db.answer.set()
    assert await asyncio.gather(first, *rest) == [2, 4, 6, 8]
    assert db.batches == [[1], [2, 3, 4]]


@pytest.mark.parametrize("limit", [1, 2, 3])
async def test_the_limit(limit: int) -> None:
    db = Database()
    batcher = Batcher(db.send, limit=limit)
    assert await asyncio.gather(*(batcher.ask(n) for n in range(5))) == [0, 2, 4, 6, 8]
    assert max(len(x) for x in db.batches) == limit
    assert len(db.batches) == -(-5 // limit)


async def test_it_works_again_after_a_pause() -> None:
    db = Database()
    batcher = Batcher(db.send)
    assert await batcher.ask(1) == 2
    await settle()
    assert await batcher.ask(2) == 4


async def test_a_request_that_cannot_be_answered_fails_alone() -> None:
    class Strict(Database):
        async def send(self, requests: Sequence[int]) -> list[int]:
            if 2 in requests:
                self.failures = [ValueError("2 can't be doubled")]
            return await super().send(requests)

    db = Strict()
    batcher = Batcher(db.send)
    found = await asyncio.gather(*(batcher.ask(n) for n in range(4)), return_exceptions=True)
    assert [type(x) for x in found] == [int, int, ValueError, int]
    assert db.batches == [[0, 1, 2, 3], [0], [1], [2], [3]]


async def test_a_failure_is_that_of_its_whole_batch_and_of_no_other() -> None:
    db = Database()
    db.failures = [OSError("the database is away")]
    batcher = Batcher(db.send, limit=2)
    found = await asyncio.gather(*(batcher.ask(n) for n in range(4)), return_exceptions=True)
    assert [type(x) for x in found] == [OSError, OSError, int, int]
    assert found[2:] == [4, 6]
    assert await batcher.ask(9) == 18


@pytest.mark.parametrize("sent", [False, True])
async def test_one_asker_that_is_cancelled_does_not_disturb_the_others(sent: bool) -> None:
    db = Database(instant=False)
    batcher = Batcher(db.send)
    asks = [asyncio.create_task(batcher.ask(n)) for n in range(3)]
    await (db.asked.wait() if sent else asyncio.sleep(0))
    asks[1].cancel()
    await settle()
    db.answer.set()
    found = await asyncio.gather(*asks, return_exceptions=True)
    assert found[0] == 0
    assert isinstance(found[1], asyncio.CancelledError)
    assert found[2] == 4
    assert db.batches == [[0, 1, 2] if sent else [0, 2]], "what nobody waits for any more isn't asked"


async def test_all_askers_are_cancelled_before_it_is_sent() -> None:
    db = Database()
    batcher = Batcher(db.send)
    asks = [asyncio.create_task(batcher.ask(n)) for n in range(3)]
    await asyncio.sleep(0)
    for ask in asks:
        ask.cancel()
    await asyncio.gather(*asks, return_exceptions=True)
    await settle()
    assert db.batches == []
    assert await batcher.ask(7) == 14


@pytest.mark.parametrize("answers", [[], [1], [1, 2, 3]])
async def test_answers_that_don_t_match_are_an_error_and_nobody_hangs(answers: list[int]) -> None:
    async def send(requests: Sequence[int]) -> list[int]:
        return answers

    batcher = Batcher(send)
    async with asyncio.timeout(5):
        found = await asyncio.gather(batcher.ask(1), batcher.ask(2), return_exceptions=True)
    assert all(isinstance(x, RuntimeError) for x in found)


async def test_the_end_of_the_loop_leaves_nobody_waiting() -> None:
    db = Database(instant=False)
    batcher = Batcher(db.send, limit=1)
    asks = [asyncio.create_task(batcher.ask(n)) for n in range(3)]
    await db.asked.wait()
    assert batcher._pump is not None
    batcher._pump.cancel()
    async with asyncio.timeout(5):
        found = await asyncio.gather(*asks, return_exceptions=True)
    assert all(isinstance(x, asyncio.CancelledError) for x in found)
