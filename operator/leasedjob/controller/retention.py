"""Old records are deleted by the operators themselves: runs where the chart asks for it (`retention.days`), and what
says of ticks why they did not run (`retention.ledgerDays`)."""

from __future__ import annotations

import asyncio
import logging
import random
from datetime import timedelta
from typing import Final

from leasedjob.controller.engine import DATABASE_FAULTS
from leasedjob.lease.service import JobSchedulerService

log = logging.getLogger(__name__)
FIRST_SECONDS: Final = 600.0
EVERY_SECONDS: Final = 6 * 3600.0


class Retention:
    """Prunes some times a day. Each replica does; they don't get into each other's way, and seldom meet.

    Args:
        days: how long ago a run must have ended, and its tick must have been; 0: runs stay.
        ledger_days: how long ago ticks must have been that did not run; 0: the ledger stays.
    """

    def __init__(self, jobs: JobSchedulerService, days: float, ledger_days: float) -> None:
        self._jobs, self._days, self._ledger_days = jobs, days, ledger_days

    async def run(self) -> None:
        """For ever."""
        pause = FIRST_SECONDS
        while True:
            await asyncio.sleep(pause * random.uniform(0.5, 1.5))
            await self.step()
            pause = EVERY_SECONDS

    async def step(self) -> None:
        """Prunes once; a fault is logged, and the next time is soon enough."""
        try:
            ranges = await self._jobs.prune_ledger(timedelta(days=self._ledger_days)) if self._ledger_days else 0
            if ranges:
                log.info("deleted %d records of ticks that did not run, older than %g days", ranges, self._ledger_days)
            done = await self._jobs.prune(timedelta(days=self._days)) if self._days else []
        except DATABASE_FAULTS as e:
            log.warning("old records were not deleted: %s", e)
        except Exception:
            log.exception("old records were not deleted")
        else:
            if done:
                rows = sum(item.rows for item in done)
                log.info("deleted %d runs of %d codes that ended more than %g days ago", rows, len(done), self._days)
