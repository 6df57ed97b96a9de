"""Many small requests, few round trips: what is asked while one batch is under way goes out together in the next.

A thousand objects that are due at one tick ask a thousand times and cost two or three statements; one object alone
waits for nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Hashable, Iterator, Sequence
from typing import Generic, TypeVar

from leasedjob.controller.turns import Turns
from leasedjob.errors import LeasedJobError

Req = TypeVar("Req")
Res = TypeVar("Res")


class _MismatchError(RuntimeError):
    """Not as many answers as requests: whose they are can't be known."""


class Batcher(Generic[Req, Res]):
    """Collects requests for `send`, which answers them in order.

    Args:
        send: one round trip for many requests.
        limit: most requests in one batch.
        owner: whose request it is. Where not all go into one batch, owners take turns; by default there is only one.
        shared: failures that hit a batch as a whole. After any other each of its requests is sent alone.
    """

    def __init__(
        self,
        send: Callable[[Sequence[Req]], Awaitable[Sequence[Res]]],
        *,
        limit: int = 500,
        owner: Callable[[Req], Hashable] = lambda _: None,
        shared: tuple[type[Exception], ...] = (LeasedJobError, OSError),
    ) -> None:
        self._send = send
        self._shared = shared
        self._limit = limit
        self._owner = owner
        self._waiting: Turns[Hashable, tuple[Req, asyncio.Future[Res]]] = Turns()
        self._pump: asyncio.Task[None] | None = None

    async def ask(self, request: Req) -> Res:
        future: asyncio.Future[Res] = asyncio.get_running_loop().create_future()
        self._waiting.add(self._owner(request), (request, future))
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._run())
        return await future

    @contextlib.contextmanager
    def _cancels(self, batch: Sequence[tuple[Req, asyncio.Future[Res]]]) -> Iterator[None]:
        """The end of this task is the end of all that wait: nobody else would answer them."""
        try:
            yield
        except Exception:
            raise
        except BaseException:
            for _, future in batch:
                future.cancel()
            while len(self._waiting):
                self._waiting.take()[1].cancel()
            raise

    async def _alone(self, request: Req, future: asyncio.Future[Res]) -> None:
        try:
            (answer,) = await self._send([request])
        except Exception as e:
            if not future.done():
                future.set_exception(e)
        else:
            if not future.done():
                future.set_result(answer)

    async def _run(self) -> None:
        await asyncio.sleep(0)  # let everybody who is ready to ask do so
        while len(self._waiting):
            batch = [self._waiting.take() for _ in range(min(self._limit, len(self._waiting)))]
            batch = [(request, future) for request, future in batch if not future.done()]  # whose asker still waits
            if not batch:
                continue
            try:
                with self._cancels(batch):
                    answers = await self._send([request for request, _ in batch])
                if len(answers) != len(batch):
                    raise _MismatchError(f"{len(batch)} requests were answered by {len(answers)} answers")
            except Exception as e:
                if len(batch) > 1 and not isinstance(e, (*self._shared, _MismatchError)):
                    # One request that can't be answered must not fail the others: each goes alone.
                    with self._cancels(batch):
                        for request, future in batch:
                            await self._alone(request, future)
                    continue
                for _, future in batch:
                    if not future.done():
                        future.set_exception(e)
                continue
            for (_, future), answer in zip(batch, answers, strict=True):
                if not future.done():
                    future.set_result(answer)
