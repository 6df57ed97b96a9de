"""What becomes of a message that could not be published. Pure: no clock, no I/O.

    refused        the sink takes others, but not this one: a try is spent, and it waits 1 s, doubling to 5 min. After
                   the last try it is parked
    unavailable    the sink takes nothing: no try is spent, and the relay waits 0.5 s, doubling to 15 s

"Unavailable" is what a publisher says, but it may be wrong: a server that chokes on one message answers 500 to it and
works for all others. So one such answer isn't believed yet. Another message is tried; if that one isn't taken either,
no further one is begun, and after the pause one is tried at a time, each time another one. And whoever says it of a
message *again*, although others were published in between, means that message: a try is spent. But one at the most
until the next is published, for it may be another outage that begins. A sink that says when it wants to be asked again
is believed at once.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from leasedjob.errors import MessageRefusedError, PublisherUnavailableError
from leasedjob.workload.outbox.publisher import OutboxMessage

ERROR_LIMIT: Final = 2000  # characters of an error's text
SILENT: Final = 2  # answers "unavailable", one after the other: it is
DOUBTS: Final = 10_000  # messages that are remembered; another relay may have published them long ago
SAYS_ITSELF: Final = (PublisherUnavailableError, TimeoutError, ConnectionError, socket.gaierror)


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long is waited, in seconds, and how often something is tried.

    Args:
        max_tries: refusals after which a message is parked.
        first_wait, longest_wait: of a message that was refused.
        first_pause, longest_pause: of the relay, while the sink is unavailable; more if the sink asks for it, but not
            more than longest_wait. A message that met this waits twice as long, so that others come first: it might be
            the cause.
    """

    max_tries: int = 10
    first_wait: float = 1.0
    longest_wait: float = 300.0
    first_pause: float = 0.5
    longest_pause: float = 15.0

    def __post_init__(self) -> None:
        if isinstance(self.max_tries, bool) or not isinstance(self.max_tries, int) or self.max_tries < 1:
            raise ValueError(f"max_tries must be a whole number, 1 or more, not {self.max_tries!r}")
        for first, longest in (("first_wait", "longest_wait"), ("first_pause", "longest_pause")):
            if not 0 < getattr(self, first) <= getattr(self, longest) < float("inf"):
                raise ValueError(f"{first} must be positive, and {longest} as long at least")

    def wait(self, tries: int) -> float:
        """After so many refusals of a message, 1 and more."""
        return min(self.longest_wait, self.first_wait * 2.0 ** min(tries - 1, 60))

    def pause(self, outages: int) -> float:
        """After so many batches in a row that met an unavailable sink, 1 and more."""
        return min(self.longest_pause, self.first_pause * 2.0 ** min(outages - 1, 60))


class Verdict(StrEnum):
    """What becomes of a message that was not published."""

    REFUSED = "refused"
    PARKED = "parked"
    UNAVAILABLE = "unavailable"


@dataclass(frozen=True, slots=True)
class Failure:
    """A message that was not published.

    Args:
        tries: refusals so far, this one included.
        wait: seconds until it is due again; None if it is parked.
    """

    message: OutboxMessage
    verdict: Verdict
    tries: int
    wait: float | None
    error: str


class Judge:
    """Remembers, for one relay, what tells a poisonous message from a sink that is down."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._published = 0  # so far
        self._doubts: dict[int, int] = {}  # a message that wasn't taken -> how many others were until then
        self._blamed = False  # a message, for an answer "unavailable", since the last one that was taken
        self._silent = 0  # messages that weren't taken since the last one that was
        self._outages = 0  # pauses since then
        self._asked: float | None = None  # for so many seconds of peace

    @property
    def stopped(self) -> bool:
        """No further message of this batch is to be begun."""
        return self._asked is not None or self._silent >= SILENT

    @property
    def doubtful(self) -> bool:
        """The last answer was that the sink is unavailable."""
        return self._asked is not None or self._silent > 0

    def published(self, message: OutboxMessage) -> None:
        self._published += 1
        self._silent = self._outages = 0
        self._blamed = False
        self._doubts.pop(message.id, None)

    def failed(self, message: OutboxMessage, error: BaseException) -> Failure:
        """What becomes of it."""
        text = said(error)
        if isinstance(error, SAYS_ITSELF) and not self._means_the_message(message, error):
            return Failure(message, Verdict.UNAVAILABLE, message.tries, 2 * self._next_pause(), text)
        tries = message.tries + 1
        if tries >= self._patience.max_tries or (isinstance(error, MessageRefusedError) and error.final):
            return Failure(message, Verdict.PARKED, tries, None, text)
        return Failure(message, Verdict.REFUSED, tries, self._patience.wait(tries), text)

    def pause(self) -> float:
        """At the end of a batch: for how long the sink is to be left alone, in seconds; 0 if it isn't."""
        if not self.stopped:
            return 0.0
        pause = self._next_pause()
        self._outages += 1
        self._silent, self._asked = SILENT - 1, None
        return pause

    def _next_pause(self) -> float:
        return max(self._patience.pause(self._outages + 1), self._asked or 0.0)

    def _means_the_message(self, message: OutboxMessage, error: BaseException) -> bool:
        if isinstance(error, PublisherUnavailableError) and error.retry_after is not None:
            self._asked = max(self._asked or 0.0, min(error.retry_after, self._patience.longest_wait))
            return False
        before, self._doubts[message.id] = self._doubts.pop(message.id, None), self._published
        if len(self._doubts) > DOUBTS:
            del self._doubts[next(iter(self._doubts))]
        if before is not None and before < self._published and not self._blamed:
            self._blamed = True
            return True
        self._silent += 1
        return False


def said(error: BaseException) -> str:
    """An error's text, for the row."""
    if isinstance(error, MessageRefusedError | PublisherUnavailableError):
        return str(error)[:ERROR_LIMIT]
    return f"{type(error).__name__}: {error}"[:ERROR_LIMIT]
