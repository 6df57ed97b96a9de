"""One batch: which message is begun when, and what is known at its end.

A message whose lane (topic and partition key) has one in hand waits for that one, and isn't begun in this batch if it
failed. Apart from that they are begun in the order of their ids, at most `concurrency` at once.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from leasedjob.workload.outbox.judge import Failure, Judge, Verdict
from leasedjob.workload.outbox.publisher import OutboxMessage, Publisher

Lane = tuple[str, str]
GIVE_UP_SECONDS: Final = 1.0


@dataclass(slots=True)
class Batch:
    """What has been claimed, and what has become of it.

    Args:
        messages: in the order of their ids.
        concurrency: how many are in hand at once, at most.
        end: when no further one is begun, by the loop's clock.
        seconds: for one message.
        cut: what is in hand is given up.

    Attributes:
        published, failures: what is known; of the others nothing has become.
        cancelled: the task was cancelled; what is known by then is to be written down before it ends.
    """

    messages: Sequence[OutboxMessage]
    concurrency: int
    end: float
    seconds: float
    cut: asyncio.Event
    published: list[OutboxMessage] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    cancelled: bool = False
    _waiting: list[OutboxMessage] = field(default_factory=list)
    _blocked: set[Lane] = field(default_factory=set)
    _hand: dict[asyncio.Task[None], OutboxMessage] = field(default_factory=dict)

    async def publish(self, publisher: Publisher, judge: Judge) -> None:
        """Publishes the messages. Raises nothing, also when it is cancelled."""
        self._waiting = list(self.messages)
        cutting = asyncio.create_task(self.cut.wait())
        try:
            while self._begin(publisher, judge):
                try:
                    await asyncio.wait([*self._hand, cutting], return_when=asyncio.FIRST_COMPLETED)
                except asyncio.CancelledError:
                    self.cancelled = True
                if self.cancelled or self.cut.is_set():
                    await self._give_up()
                self._take(judge)
        finally:
            cutting.cancel()

    def _begin(self, publisher: Publisher, judge: Judge) -> bool:
        """Begins what may be begun; whether something is in hand then."""
        loop = asyncio.get_running_loop()
        over = judge.stopped or self.cancelled or self.cut.is_set() or loop.time() >= self.end
        while not over and len(self._hand) < self.concurrency and (message := self._next()) is not None:
            self._hand[loop.create_task(_publish(publisher, message, self.seconds))] = message
        return bool(self._hand)

    def _next(self) -> OutboxMessage | None:
        busy = self._blocked | {lane for message in self._hand.values() if (lane := lane_of(message))}
        for index, message in enumerate(self._waiting):
            if lane_of(message) not in busy:
                return self._waiting.pop(index)
        return None

    def _take(self, judge: Judge) -> None:
        for task in [task for task in self._hand if task.done()]:
            message = self._hand.pop(task)
            if task.cancelled():
                self._block(message)
            elif (error := task.exception()) is None:
                judge.published(message)
                self.published.append(message)
            else:
                failure = judge.failed(message, error)
                self.failures.append(failure)
                if failure.verdict is not Verdict.PARKED:
                    self._block(message)

    def _block(self, message: OutboxMessage) -> None:
        if lane := lane_of(message):
            self._blocked.add(lane)

    async def _give_up(self) -> None:
        """What is in hand may arrive or not: it will be published again. What a thread does can't be interrupted, and
        who ignores being cancelled isn't waited for."""
        for task in self._hand:
            task.cancel()
        try:
            _, stubborn = await asyncio.wait(self._hand, timeout=GIVE_UP_SECONDS)
        except asyncio.CancelledError:
            self.cancelled = True
            stubborn = set(self._hand)
        for task in [task for task in stubborn if not task.done()]:
            del self._hand[task]


@dataclass(frozen=True, slots=True, kw_only=True)
class Relayed:
    """What became of one batch, or of several.

    Args:
        claimed: messages; those of which nothing became are tried again.
        pause: seconds for which the sink is left alone since it is unavailable.
        available: whether the sink, when it was last asked, didn't say that it is unavailable.
    """

    claimed: int = 0
    published: int = 0
    refused: int = 0
    parked: int = 0
    unavailable: int = 0
    pause: float = 0.0
    available: bool = True

    @classmethod
    def of(cls, batch: Batch, judge: Judge) -> Relayed:
        verdicts = [failure.verdict for failure in batch.failures]
        return cls(
            claimed=len(batch.messages),
            published=len(batch.published),
            refused=verdicts.count(Verdict.REFUSED),
            parked=verdicts.count(Verdict.PARKED),
            unavailable=verdicts.count(Verdict.UNAVAILABLE),
            available=not judge.doubtful,
            pause=judge.pause(),
        )

    def __add__(self, later: Relayed) -> Relayed:
        if not later.claimed:
            return self
        return Relayed(
            claimed=self.claimed + later.claimed,
            published=self.published + later.published,
            refused=self.refused + later.refused,
            parked=self.parked + later.parked,
            unavailable=self.unavailable + later.unavailable,
            available=later.available,
            pause=later.pause,
        )


def lane_of(message: OutboxMessage) -> Lane | None:
    """What is published in order; None for a message for which no order is asked."""
    return None if message.partition_key is None else (message.topic, message.partition_key)


async def _publish(publisher: Publisher, message: OutboxMessage, seconds: float) -> None:
    if inspect.iscoroutinefunction(publisher.publish):
        async with asyncio.timeout(seconds):
            await publisher.publish(message)
        return
    given = await asyncio.to_thread(publisher.publish, message)
    if inspect.isawaitable(given):
        async with asyncio.timeout(seconds):
            await given
