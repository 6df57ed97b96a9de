"""ShutdownState: whether this process is to stop, and how long it may take.

    state = ShutdownState.listening()      # as early as possible, in the main thread
    while not state.is_draining():
        one_item()

A stop has two moments. The *notice* comes when the Pod begins to terminate, `preStopSeconds` before SIGTERM: from then
on nothing new is begun and readiness is 503, while requests still arrive that were on their way. SIGTERM, SIGINT or a
call of `begin` is the *stop* itself. Whoever has no use for the difference looks at `is_draining()` alone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from leasedjob import protocol
from leasedjob.workload.abort import AbortSignal

if TYPE_CHECKING:
    from leasedjob.workload.sidecar import Sidecar, View

_log: Final = logging.getLogger("leasedjob.workload")
FIRST_LOOK_SECONDS: Final = 5.0
_HANDLED: Final = 0x80  # marks what a handler wrote, beside what the C part of Python wrote


class ShutdownState:
    """Draining, seen from every thread and every coroutine of the process.

    Attributes:
        signal: set at the notice, or at the stop if no notice came: the abort signal for work.
        stopping: set at the stop: servers close their doors.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self.signal = AbortSignal()
        self.stopping = AbortSignal()
        self.notice_at: float | None = None
        self.stop_at: float | None = None
        self.grace: float | None = None  # as the sidecar says
        self.pre_stop: float | None = None
        self.sidecar: Sidecar | None = None  # which is told how the program has stopped

    @classmethod
    def listening(
        cls,
        *,
        signals: Sequence[int] = (signal.SIGTERM, signal.SIGINT),
        env: Mapping[str, str] = os.environ,
    ) -> ShutdownState:
        """A state that follows the process's signals, and the sidecar where there is one.

        What came before is not lost: a signal that ended nothing yet is seen at once by way of the sidecar's notice.

        Raises:
            ValueError: not in the main thread, where alone Python lets signals be handled.
        """
        state = cls()
        state.listen(signals)
        if url := env.get(protocol.ENV_SIDECAR_URL):
            from leasedjob.workload.sidecar import sidecar_at

            state.watch(sidecar_at(url))
        return state

    # --- asking ---

    def is_draining(self) -> bool:
        """Nothing new is to be begun."""
        return self.signal.is_set()

    def is_stopping(self) -> bool:
        """SIGTERM came, or the stop was begun by hand."""
        return self.stopping.is_set()

    @property
    def reason(self) -> str:
        """What began it, for people; "" before."""
        return self.signal.reason

    def wait(self, timeout: float | None = None) -> bool:
        """Blocks a thread until draining; False after `timeout` seconds."""
        return self.signal.wait(timeout)

    def __await__(self) -> Generator[Any, None, str]:
        return self.signal.__await__()

    def readiness(self) -> tuple[int, str]:
        """What a readiness probe is to be answered: 200, or 503 from the first moment of draining."""
        return (503, f"draining: {self.reason}") if self.is_draining() else (200, "ready")

    # --- telling ---

    def notice(self, reason: str) -> bool:
        """A stop is coming. True if this was the first word of it."""
        return self._begin(reason, stop=False)

    def begin(self, reason: str = "begun by hand") -> bool:
        """The stop. True if this began it; every further call joins it."""
        return self._begin(reason, stop=True)

    def _begin(self, reason: str, *, stop: bool) -> bool:
        with self._lock:
            now = self._clock()
            first = self.stop_at is None and (stop or self.notice_at is None)
            if first and stop:
                self.stop_at = now
            elif first:
                self.notice_at = now
        if not first:
            _log.info("%s: joins the stop that has begun (%s)", reason, self.reason)
            return False
        _log.info("%s: %s", "stopping" if stop else "draining", reason)
        self.signal.set(reason)
        if stop:
            self.stopping.set(reason)
        return True

    # --- sources ---

    def watch(self, sidecar: Sidecar) -> None:
        """The sidecar's drain notice begins draining; a lost lease is a stop. Asks once before it returns."""
        from leasedjob.errors import SidecarUnavailableError

        self.sidecar = sidecar

        def tell(view: View) -> None:
            self.grace, self.pre_stop = view.grace, view.pre_stop
            if view.draining and not self.is_draining():
                self.notice("the sidecar's drain notice")
            if view.fenced and not self.is_stopping():
                self.begin(f"the lease is lost: {view.reason}")

        with contextlib.suppress(SidecarUnavailableError):  # it will be asked again and again
            tell(sidecar.look(seconds=FIRST_LOOK_SECONDS))
        sidecar.subscribe(tell)

    def listen(self, signals: Sequence[int] = (signal.SIGTERM, signal.SIGINT)) -> None:
        """These signals begin the stop. Handlers that were there before are replaced.

        Raises:
            ValueError: not in the main thread.
        """
        if threading.current_thread() is not threading.main_thread():
            raise ValueError("signals can be listened to in the main thread only")
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)

        def handler(number: int, _frame: object) -> None:
            # Nothing but a write: whatever lock the main thread holds, it is in the middle of it.
            with contextlib.suppress(OSError):
                theirs.send(bytes([number | _HANDLED]))

        before = {number: signal.signal(number, handler) for number in signals}
        # Also without Python's help, so that a call in C that doesn't return keeps no other thread from hearing of it.
        # An event loop with signal handlers of its own takes this over; then the handlers above serve.
        if (others := signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)) != -1:
            signal.set_wakeup_fd(others, warn_on_full_buffer=False)
        _not_in_children(before, handler, theirs.fileno())
        wanted = frozenset(signals)
        threading.Thread(target=self._hear, args=(ours, theirs, wanted), name="leasedjob-signals", daemon=True).start()

    def _hear(self, ours: socket.socket, _theirs: socket.socket, wanted: frozenset[int]) -> None:
        seen: dict[int, int] = {}  # what came from C and will come from its handler as well
        while data := ours.recv(4096):
            for byte in data:
                number, handled = byte & ~_HANDLED, bool(byte & _HANDLED)
                if number not in wanted:
                    continue
                if handled and seen.get(number):
                    seen[number] -= 1
                    continue
                if not handled:
                    seen[number] = seen.get(number, 0) + 1
                self.begin(signal.Signals(number).name)


def _not_in_children(before: Mapping[int, Any], handler: Callable[[int, Any], None], descriptor: int) -> None:
    """A child that is forked shares the socket: without this, a signal that ends a worker of a process pool would stop
    its parent, and not the worker. In children the handlers of before serve, until they listen themselves."""
    held = threading.local()

    def hold() -> None:  # a signal in between would still be written to the socket
        held.mask = signal.pthread_sigmask(signal.SIG_BLOCK, before)

    def release() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, held.mask)

    def in_child() -> None:
        for number, former in before.items():
            if signal.getsignal(number) is handler:
                signal.signal(number, signal.SIG_DFL if former is None else former)
        if (current := signal.set_wakeup_fd(-1)) not in (-1, descriptor):
            signal.set_wakeup_fd(current, warn_on_full_buffer=False)
        release()

    os.register_at_fork(before=hold, after_in_parent=release, after_in_child=in_child)
