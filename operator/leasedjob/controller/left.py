"""The ticks that a registration leaves behind: of a schedule that was edited, of a suspension that ends, of an object
that is no more. Pure.

What was registered speaks for itself: whoever comes next knows the schedules that were in force, whether or not anybody
ran when they were edited.
"""

from __future__ import annotations

from datetime import datetime

from leasedjob.lease.rows import CodeState, Passed, Registration
from leasedjob.schedule import CodeTicks, TickReason, passed_over


def left_by(state: CodeState | None, wanted: Registration, now: datetime) -> Passed | None:
    """What `wanted` passes if it moves the watermark; None where it has no reason to.

    Args:
        state: None: the code is new.
        now: the database's clock, or somewhat less.
    """
    if state is None:
        return None
    anew = state.registered_uid != wanted.uid
    resumed = bool(state.registered_suspended) and not wanted.suspended
    if not (anew or resumed or state.registered_schedule != wanted.schedule_hash):
        return None
    at = min(wanted.created_at, now) if anew and not state.active_elsewhere else now
    ranges = passed_over(CodeTicks.after(state.watermark, state.schedules), state.watermark, at, _reason(state, anew))
    return Passed(at=at, ranges=ranges, version=state.version)


def _reason(state: CodeState, anew: bool) -> TickReason:
    if state.suspension is not None:
        return TickReason.SuspendedAfterFailures
    if state.registered_uid is None and any(s.until is None for s in state.schedules):
        return TickReason.Suspended  # in every cluster that has the code, else nothing would be passed
    if anew:
        return TickReason.JobDeleted
    return TickReason.Suspended if state.registered_suspended else TickReason.ScheduleEdited
