"""Why a LeasedJob runs, or doesn't, in words: now, by its status, and at a tick, by the operator's answer. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any, Final

from leasedjob.cli.output import ago, duration, parse_time

Object = dict[str, Any]

SUSPENDED: Final = "Suspended"
AFTER_FAILURES: Final = "SuspendedAfterFailures"
OVERDUE_SECONDS: Final = 60.0  # past which a tick that the status still calls the next one is worth a word


def ready(job: Object) -> Object:
    """The condition Ready; {} where no operator has looked at the object yet."""
    conditions = (job.get("status") or {}).get("conditions") or []
    return next((c for c in conditions if c.get("type") == "Ready"), {})


def ready_reason(job: Object) -> str:
    """The reason of the condition Ready; "" without one."""
    return str(ready(job).get("reason") or "")


def now_in_words(job: Object, now: datetime) -> list[str]:
    """Why a LeasedJob does, or doesn't, run at this moment: a few sentences, the answer first."""
    return [*_state(job), *_active(job, now), *_waiting(job, now), *_last(job, now), *_other_conditions(job)]


def _state(job: Object) -> Iterator[str]:
    name, condition = job["metadata"]["name"], ready(job)
    if not condition or condition.get("status") == "Unknown":
        yield (
            "No operator has looked at it yet, so nothing starts: is one running, and does it watch the namespace "
            f"{job['metadata'].get('namespace', 'default')}?"
        )
        return
    seen = (job.get("status") or {}).get("observedGeneration")
    if seen is not None and seen < job["metadata"].get("generation", seen):
        yield "The operator has not seen the last edit yet; what follows is of the object before it."
    reason, message = condition.get("reason", ""), condition.get("message", "")
    if reason == SUSPENDED:
        yield f"No tick starts a run: spec.suspend is true. `kubectl leasedjob resume {name}` ends that."
    elif reason == AFTER_FAILURES:
        yield f"No tick starts a run: {message or 'too many runs in a row have failed'}."
    elif condition.get("status") != "True":
        yield f"No tick starts a run: {reason}: {message}"


def _active(job: Object, now: datetime) -> Iterator[str]:
    active = (job.get("status") or {}).get("active") or []
    for run in active:
        yield run_in_words(run, now)
    policy = job["spec"].get("concurrencyPolicy", "Forbid")
    if active and policy == "Forbid":
        yield "While it is active, a tick that comes due is skipped (concurrencyPolicy: Forbid)."
    elif active and policy == "Replace":
        yield "A tick that comes due stops it first (concurrencyPolicy: Replace)."


def run_in_words(run: Object, now: datetime) -> str:
    """How one run of a status stands, as a sentence."""
    parts = [f"{shown_key(run)} is {run.get('outcome') or 'unknown'}"]
    if run.get("reason"):
        parts[0] += f" ({run['reason']})"
    if run.get("attempt"):
        parts.append(f"attempt {run['attempt']}")
    if run.get("holder"):
        parts.append(f"held by {run['holder']}")
    started, ended = parse_time(run.get("startTime")), parse_time(run.get("completionTime"))
    if started and ended:
        parts.append(f"took {duration((ended - started).total_seconds())}, ended {ago(run['completionTime'], now)} ago")
    elif started:
        parts.append(f"for {ago(run['startTime'], now)}")
    sentence = ", ".join(parts)
    return f"{sentence}: {run['message']}" if run.get("message") else f"{sentence}."


def shown_key(run: Object) -> str:
    """A run's key as a person reads it; of type Initial there is none."""
    return f"Run {run['runKey']}" if run.get("runKey") else "The one run"


def _waiting(job: Object, now: datetime) -> Iterator[str]:
    status = job.get("status") or {}
    if job["spec"].get("type") == "Initial":
        if not status.get("recentRuns"):
            yield "It runs once, ever, and has not begun."
        elif not status.get("active"):
            yield "It runs once, ever, and has had its run."
        return
    if not ready(job) or ready(job).get("status") != "True" or ready_reason(job) in (SUSPENDED, AFTER_FAILURES):
        return
    following = parse_time(status.get("nextScheduleTime"))
    if following is None:
        yield "No further tick comes: the schedule, or spec.notAfter, has ended."
        return
    late = (now - following).total_seconds()
    if late > OVERDUE_SECONDS:
        yield (
            f"The tick {status['nextScheduleTime']} is {duration(late)} overdue: the operator, or its database, seems "
            "to be away."
        )
    elif status.get("active"):
        yield f"The next tick is {status['nextScheduleTime']}, {ago(status['nextScheduleTime'], now)}."
    else:
        yield (
            "Nothing runs, because no tick is due: the next one is "
            f"{status['nextScheduleTime']}, {ago(status['nextScheduleTime'], now)}."
        )


def _last(job: Object, now: datetime) -> Iterator[str]:
    """The last decision: of the latest run that has ended, or of the latest ticks that did not run."""
    status = job.get("status") or {}
    ended = [run for run in status.get("recentRuns") or [] if run.get("completionTime")]
    active = {run.get("runKey") for run in status.get("active") or []}
    run = max(
        (run for run in ended if run.get("runKey") not in active),
        key=lambda run: str(run["completionTime"]),
        default=None,
    )
    entry = max(status.get("ledger") or [], key=lambda entry: str(entry.get("to")), default=None)
    last_run = str((run or {}).get("scheduledTime") or (run or {}).get("startTime") or "")
    if entry is not None and str(entry.get("to")) > last_run:
        yield f"The last decision: {range_in_words(entry)}"
    if run is not None:
        yield f"The last run: {run_in_words(run, now)}"
    elif entry is None and not active and ready(job) and job["spec"].get("type") != "Initial":
        yield "It has not run yet."


def _other_conditions(job: Object) -> Iterator[str]:
    for condition in (job.get("status") or {}).get("conditions") or []:
        if condition.get("type") != "Ready" and condition.get("status") == "True":
            yield f"{condition.get('type')}: {condition.get('message') or condition.get('reason')}"


def range_in_words(entry: Object) -> str:
    """Ticks of the ledger that did not run, as a sentence."""
    first, last, count = entry.get("from"), entry.get("to"), int(entry.get("count") or 1)
    which = f"the tick {first}" if first == last else f"{count} ticks from {first} to {last}"
    if entry.get("exact") is False:
        which = f"at least {which}"
    verb = "was" if first == last else "were"
    sentence = f"{which} {verb} {str(entry.get('kind', '')).lower()}: {entry.get('reason')}"
    said = why_not(str(entry.get("reason")))
    sentence += f" ({said})" if said else ""
    if entry.get("decidedBy"):
        sentence += f", decided by {entry['decidedBy']}"
    if entry.get("decidedAt"):
        sentence += f" at {entry['decidedAt']}"
    return f"{sentence}."


_WHY_NOT: Final = {
    "Overlap": "a run was still active, and concurrencyPolicy is Forbid",
    "Suspended": "spec.suspend was true",
    "SuspendedAfterFailures": "too many runs in a row had failed",
    "StartingDeadline": "nobody could start it within startingDeadlineSeconds",
    "MissedRunPolicy": "nobody could start it at its time, and missedRunPolicy makes up for fewer",
    "MissedRunLimit": "nobody could start it at its time, and missedRunLimit makes up for fewer",
    "SpecDiffers": "only another cluster's schedule had it, and nobody there had started it before a later tick here",
    "ScheduleEdited": "it was due and not decided when the schedule was edited",
    "JobDeleted": "it was due and not decided when the LeasedJob was deleted",
}


def why_not(reason: str) -> str:
    """A ledger's reason in words; "" for one that is not known here."""
    return _WHY_NOT.get(reason, "")


def from_status(job: Object, key: str) -> Object | None:
    """What the status alone says of a run key, in the shape of the operator's answer; None where it says nothing.

    For who may not ask the operator. Of a range only its two ends are surely ticks.
    """
    status = job.get("status") or {}
    run = next((run for run in status.get("recentRuns") or [] if run.get("runKey") == key), None)
    if run is not None:
        verdict = {"Pending": "Pending", "Running": "Running", "Retrying": "Retrying"}.get(
            str(run.get("outcome")), "Ran"
        )
        return {"verdict": verdict, "reason": run.get("reason") or run.get("outcome"), "run": run}
    entry = next((entry for entry in status.get("ledger") or [] if key in (entry.get("from"), entry.get("to"))), None)
    if entry is not None:
        return {
            "verdict": entry.get("kind"),
            "reason": entry.get("reason"),
            "message": range_in_words(entry),
            "tick": key,
            "range": entry,
        }
    if key in (status.get("nextScheduleTimes") or [status.get("nextScheduleTime")]):
        return {"verdict": "Pending", "reason": "Future", "message": "it has not come yet", "tick": key}
    return None


def explanation_in_words(name: str, explanation: Object, now: datetime) -> list[str]:
    """The operator's answer about one tick or run: the verdict first, then what it rests on."""
    verdict, tick = str(explanation.get("verdict") or ""), explanation.get("tick")
    lines = [f"{verdict}: {explanation['message']}" if explanation.get("message") else verdict]
    if explanation.get("run"):
        lines.append(run_in_words(explanation["run"], now))
    tries = [
        f"{explanation[key]} {one if explanation[key] == 1 else many}"
        for key, one, many in (
            ("failures", "failure that counted", "failures that counted"),
            ("interruptions", "interruption that didn't count", "interruptions that didn't count"),
        )
        if explanation.get(key)
    ]
    if tries:
        lines.append(f"So far: {', '.join(tries)}.")
    lines += [f"Again, by a backfill: {run_in_words(run, now)}" for run in explanation.get("reruns") or []]
    entry = explanation.get("range") or {}
    if int(entry.get("count") or 1) > 1 and explanation.get("message") != range_in_words(entry):
        lines.append(f"In the ledger: {range_in_words(entry)}")
    if verdict in ("Skipped", "Missed", "Dropped", "BeforeWatermark") and tick:
        lines.append(f"To run it all the same: kubectl leasedjob run {name} --at {tick}")
    return lines
