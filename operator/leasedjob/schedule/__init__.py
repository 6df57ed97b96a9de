"""Schedules: the cron dialect, time zones, clock changes, and what is due after a gap. Pure.

Preview, validator and firing are one function: `Schedule.next`.
"""

from __future__ import annotations

from leasedjob.schedule.dialect import MACROS
from leasedjob.schedule.due import (
    DEFAULT_LIMIT,
    DueTicks,
    MissedRunPolicy,
    TickRange,
    TickReason,
    Ticks,
    ticks_due,
)
from leasedjob.schedule.evaluation import ClockChangePolicy, Schedule
from leasedjob.schedule.zones import DEFAULT_ZONE, ClockChange, clock_changes, load_zone, zone_names

__all__ = [
    "DEFAULT_LIMIT",
    "DEFAULT_ZONE",
    "MACROS",
    "ClockChange",
    "ClockChangePolicy",
    "DueTicks",
    "MissedRunPolicy",
    "Schedule",
    "TickRange",
    "TickReason",
    "Ticks",
    "clock_changes",
    "load_zone",
    "ticks_due",
    "zone_names",
]
