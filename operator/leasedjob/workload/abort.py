"""AbortSignal: something that is set once, by any thread, and that everybody can wait for or be told of."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, Final

from leasedjob.errors import DrainingError

if TYPE_CHECKING:
    import asyncio

_log: Final = logging.getLogger("leasedjob.workload")


class AbortSignal:
    """Set once and for good. Safe to use from any thread, but not within a signal handler.

    A loop looks at `is_set()`, a thread waits with `wait()`, a coroutine with `await signal`, and `call()` ends what
    knows none of these (a process, a socket). `raise_if_set()` is for the gap between two steps.
    """

    def __init__(self) -> None:
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._calls: dict[object, Callable[[], object]] = {}
        self.reason = ""

    def is_set(self) -> bool:
        return self._event.is_set()

    def set(self, reason: str) -> bool:
        """Sets it; False if it was set before, whose reason stays."""
        with self._lock:
            if self._event.is_set():
                return False
            self.reason = reason
            self._event.set()
            calls, self._calls = list(self._calls.values()), {}
        for call in calls:
            _safely(call)
        return True

    def wait(self, timeout: float | None = None) -> bool:
        """Blocks a thread until it is set; False after `timeout` seconds."""
        return self._event.wait(timeout)

    def raise_if_set(self) -> None:
        """DrainingError, if it is set."""
        if self._event.is_set():
            raise DrainingError(self.reason)

    def call(self, function: Callable[[], object]) -> Callable[[], None]:
        """Calls `function` once, in the thread that sets the signal; at once if it is set. It must be short.

        Returns:
            a function that takes the wish back.
        """
        key = object()
        with self._lock:
            waits = not self._event.is_set()
            if waits:
                self._calls[key] = function
        if not waits:
            _safely(function)

        def forget() -> None:
            with self._lock:
                self._calls.pop(key, None)

        return forget

    def __await__(self) -> Generator[Any, None, str]:
        import asyncio  # costly, and whoever awaits has it already

        loop = asyncio.get_running_loop()
        told: asyncio.Future[None] = loop.create_future()

        def tell() -> None:
            if not told.done():
                told.set_result(None)

        def call() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(tell)

        forget = self.call(call)
        try:
            yield from told
        finally:
            forget()
        return self.reason


def _safely(call: Callable[[], object]) -> None:
    try:
        call()
    except Exception:
        _log.exception("a call that tells of an abort signal has failed")
