"""Many small requests, few round trips: what is asked while one batch is under way goes out together in the next.

A thousand objects that are due at one tick ask a thousand times and cost two or three statements; one object alone
waits for nobody.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

Req = TypeVar("Req")
Res = TypeVar("Res")


class Batcher(Generic[Req, Res]):
    """Collects requests for `send`, which answers them in order; a failure of `send` is the failure of its whole batch.

    Args:
        send: one round trip for many requests.
        limit: most requests in one batch.
    """

    def __init__(self, send: Callable[[Sequence[Req]], Awaitable[Sequence[Res]]], *, limit: int = 500) -> None:
        self._send = send
        self._limit = limit
        self._waiting: deque[tuple[Req, asyncio.Future[Res]]] = deque()
        self._pump: asyncio.Task[None] | None = None

    async def ask(self, request: Req) -> Res:
        future: asyncio.Future[Res] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, future))
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._run())
        return await future

    async def _run(self) -> None:
        await asyncio.sleep(0)  # let everybody who is ready to ask do so
        while self._waiting:
            batch = [self._waiting.popleft() for _ in range(min(self._limit, len(self._waiting)))]
            batch = [(request, future) for request, future in batch if not future.done()]  # whose asker still waits
            if not batch:
                continue
            try:
                answers = await self._send([request for request, _ in batch])
                if len(answers) != len(batch):
                    raise RuntimeError(f"{len(batch)} requests were answered by {len(answers)} answers")
            except BaseException as e:
                if not isinstance(e, Exception):  # the end of this task: nobody else would answer those that wait
                    for _, future in (*batch, *self._waiting):
                        future.cancel()
                    self._waiting.clear()
                    raise
                for _, future in batch:
                    if not future.done():
                        future.set_exception(e)
                continue
            for (_, future), answer in zip(batch, answers, strict=True):
                if not future.done():
                    future.set_result(answer)
