"""Schedules: the cron dialect, time zones, clock changes, and what is due after a gap. Pure.

Preview, validator and firing are one function: `Schedule.next`. An object's schedules together are a `Timetable`.
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
    passed_over,
    ticks_due,
)
from leasedjob.schedule.evaluation import ClockChangePolicy, ClockEffect, Schedule
from leasedjob.schedule.inforce import CodeTicks, InForce, written
from leasedjob.schedule.timetable import MAX_JITTER_SECONDS, MAX_SCHEDULES, Timetable
from leasedjob.schedule.upcoming import Upcoming, preview
from leasedjob.schedule.zones import DEFAULT_ZONE, ClockChange, clock_changes, load_zone, zone_names

__all__ = [
    "DEFAULT_LIMIT",
    "DEFAULT_ZONE",
    "MACROS",
    "MAX_JITTER_SECONDS",
    "MAX_SCHEDULES",
    "ClockChange",
    "ClockChangePolicy",
    "ClockEffect",
    "CodeTicks",
    "DueTicks",
    "InForce",
    "MissedRunPolicy",
    "Schedule",
    "TickRange",
    "TickReason",
    "Ticks",
    "Timetable",
    "Upcoming",
    "clock_changes",
    "load_zone",
    "passed_over",
    "preview",
    "ticks_due",
    "written",
    "zone_names",
]
