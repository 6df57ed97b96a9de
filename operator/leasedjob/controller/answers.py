"""What a LeasedJobRun that asks for something beside a run is told, and when it is looked at again."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Final

from leasedjob.api.v1alpha1 import RunPhase
from leasedjob.controller import manual
from leasedjob.controller.cache import Entry
from leasedjob.controller.clock import DatabaseClock
from leasedjob.controller.manual import RequestReason
from leasedjob.controller.status import StatusWriter

Json = Mapping[str, Any]
Problem = tuple[str, str]  # why a LeasedJob isn't Ready, reason and message
SOON: Final = timedelta(milliseconds=300)
AGAIN: Final = timedelta(seconds=5)  # for what no event tells


class Answers:
    """Writes the statuses of such objects. Each method says when to look again; None: not by itself."""

    def __init__(self, status: StatusWriter, clock: DatabaseClock) -> None:
        self._status = status
        self._clock = clock

    async def say(
        self, body: Json, entry: Entry, phase: RunPhase, reason: str, message: str = "", **facts: Any
    ) -> timedelta | None:
        """Writes the status, if it says something new; soon again where somebody else has written meanwhile."""
        facts.setdefault("code", entry.code or None)
        status = manual.answer(body, phase, reason, message, self._clock.now(), facts)
        settled = await self._status.write_answer(body, status)
        if phase in manual.FINAL:
            return None if settled else SOON
        return AGAIN

    async def not_ready(self, body: Json, entry: Entry, problem: Problem | None) -> timedelta | None:
        """The LeasedJob starts nothing."""
        message = f"LeasedJob {entry.name} is not Ready" + (f": {problem[1]}" if problem else "")
        return await self.say(body, entry, RunPhase.PENDING, RequestReason.JOB_NOT_READY, message)
