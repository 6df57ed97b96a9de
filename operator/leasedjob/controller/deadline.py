"""By when a job has to have succeeded again, as its schedule allows. Pure.

What a dead-man's switch asks is not whether something failed, but whether success has stayed away: it notices as well
what never began, was skipped each time, or hangs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any, Final

from leasedjob.controller.cache import Entry
from leasedjob.controller.facts import parse_time
from leasedjob.lease.rows import JobSchedulerStatus, LedgerEntry
from leasedjob.schedule import TickReason, Timetable

LEAST_GRACE: Final = timedelta(minutes=5)
# Somebody wanted these ticks not to run: that they brought no success is no one's failure.
EXCUSED: Final = frozenset(
    {
        TickReason.Suspended,
        TickReason.SuspendedAfterFailures,
        TickReason.ScheduleEdited,
        TickReason.JobDeleted,
    }
)


def success_deadline(
    schedule: Timetable,
    *,
    success: datetime | None,
    created: datetime,
    ledger: Iterable[LedgerEntry] = (),
    grace: timedelta | None = None,
) -> datetime | None:
    """The instant by which a run has to have succeeded.

    It is the start of the first tick after the last success, and then the grace.

    Args:
        success: when a run last succeeded; None: never.
        created: when the object was created: earlier ticks are none of its.
        ledger: what is known of ticks that did not run.
        grace: None: until the start of the tick after that one, at least five minutes.

    Returns:
        None where no further tick comes.
    """
    excused = [entry.last for entry in ledger if entry.reason in EXCUSED]
    first = schedule.next(max([created, *excused, *([] if success is None else [success])]))
    if first is None:
        return None
    start = schedule.start_of(first)
    if grace is not None:
        return start + grace
    following = schedule.next(first)
    return max(start + LEAST_GRACE, first if following is None else schedule.start_of(following))


def last_success(entry: Entry) -> datetime | None:
    """When a run of this job last succeeded, in any cluster, as far as rows and status tell."""
    status: Mapping[str, Any] = entry.body.get("status") or {}
    times = [r.finished_at for r in entry.rows.values() if r.status is JobSchedulerStatus.SUCCESS]
    return max((t for t in (*times, parse_time(status.get("lastSuccessfulTime"))) if t is not None), default=None)


def deadline_of(entry: Entry) -> datetime | None:
    """By when this job has to succeed. None: never, since it is suspended, not Ready, Initial, or at its end."""
    policy = entry.policy
    if policy is None or policy.suspend or policy.schedule is None or entry.problem is not None:
        return None
    return success_deadline(
        policy.schedule,
        success=last_success(entry),
        created=entry.created_at,
        ledger=entry.state.ledger if entry.state else (),
        grace=policy.monitoring.grace,
    )
