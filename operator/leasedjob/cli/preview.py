"""`kubectl leasedjob preview`: the next ticks, in any zone, with what clock changes do to them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, assert_never

import click

from leasedjob.cli.exits import Exit, Failure
from leasedjob.cli.options import Tick, cluster_options, complete_jobs, rfc3339, target
from leasedjob.cli.output import Column, Format, ago, dump, format_option, show_table

if TYPE_CHECKING:
    from leasedjob.schedule import ClockEffect, Timetable, Upcoming

Object = dict[str, Any]
COUNT: Final = 10
MAX_COUNT: Final = 1000
_POLICIES: Final = ("RunOnce", "Kubernetes")


@click.command()
@click.argument("name", required=False, shell_complete=complete_jobs)
@click.option("-f", "--filename", type=click.Path(), metavar="FILE", help="A manifest, instead of NAME; - is stdin.")
@click.option("--schedule", metavar="CRON", help="A schedule, instead of NAME.")
@click.option("--time-zone", metavar="ZONE", help="Of --schedule; default: Etc/UTC.")
@click.option("--clock-change-policy", type=click.Choice(_POLICIES), help=f"Of --schedule; default: {_POLICIES[0]}.")
@click.option("--code", metavar="CODE", help="Of --schedule, with an H in it: namespace/name of the LeasedJob.")
@click.option(
    "--count", type=click.IntRange(1, MAX_COUNT), default=COUNT, metavar="N", help=f"How many; default: {COUNT}."
)
@click.option("--zone", "--tz", "zone", metavar="ZONE", help="Zone to show times in; default: the schedule's own.")
@click.option("--after", type=Tick(), metavar="TIME", help="Ticks later than this; default: now.")
@format_option(Format.WIDE, Format.JSON, Format.YAML)
@click.option("--no-headers", is_flag=True, help="Without the line of headers.")
@cluster_options
@click.pass_context
def command(
    ctx: click.Context,
    name: str | None,
    filename: str | None,
    schedule: str | None,
    time_zone: str | None,
    clock_change_policy: str | None,
    code: str | None,
    count: int,
    zone: str | None,
    after: datetime | None,
    output: Format,
    no_headers: bool,
) -> None:
    """Show the next ticks.

    Of a LeasedJob in the cluster (NAME), of a manifest (-f) or of a schedule (--schedule). The function that is asked
    is the one that fires. What a clock change moves, leaves out or doubles is marked. Whether the object is suspended
    doesn't matter here.
    """
    if sum(source is not None for source in (name, filename, schedule)) != 1:
        raise click.UsageError("name one LeasedJob, or give -f or --schedule", ctx)
    if schedule is None and (time_zone, clock_change_policy, code) != (None, None, None):
        raise click.UsageError("--time-zone, --clock-change-policy and --code go with --schedule", ctx)
    from leasedjob.errors import InvalidScheduleError
    from leasedjob.schedule import ClockChangePolicy, Timetable, preview

    if schedule is not None:
        try:
            policy = ClockChangePolicy(clock_change_policy or _POLICIES[0])
            timetable = Timetable.of(
                [schedule], time_zone or "Etc/UTC", policy=policy, code=code or "", fields=["--schedule"]
            )
        except InvalidScheduleError as error:
            flag = "--time-zone" if error.field == "timeZone" else error.field
            raise Failure(Exit.INVALID, f"{flag}: {error.message}") from error
        if code is None and re.search(r"(?<![A-Za-z])H(?![A-Za-z])", schedule):
            click.echo("note: H follows from the code; --code names it", err=True)
    else:
        job = _from_file(filename) if filename is not None else target(ctx).get("leasedjobs", str(name))
        timetable = _timetable(job)
    now = datetime.now(UTC)
    try:
        ticks = preview(timetable, after or now, count, zone)
    except InvalidScheduleError as error:
        raise Failure(Exit.USAGE, f"--zone: {error.message}") from error
    for warning in timetable.warnings:
        click.echo(f"warning: {warning}", err=True)
    if output in (Format.JSON, Format.YAML):
        dump([_plain(line) for line in ticks], output)
    elif not ticks:
        click.echo("No further tick comes.", err=True)
    else:
        rows = [{"line": line, "now": now} for line in ticks]
        show_table(rows, _columns(timetable), wide=output is Format.WIDE, headers=not no_headers)


def _from_file(file: str) -> Object:
    from leasedjob.cli.manifests import read

    found = [document for document in read([file]) if document.kind == "LeasedJob"]
    if len(found) != 1:
        raise Failure(
            Exit.USAGE, f"{file}: has {len(found) or 'no'} LeasedJob{'s' * (len(found) > 1)}; one is previewed"
        )
    return found[0].body


def _timetable(job: Object) -> Timetable:
    """The schedules of a LeasedJob, as the operator reads them."""
    from leasedjob.api.v1alpha1 import parse_job
    from leasedjob.identity import job_code

    metadata = job.get("metadata") or {}
    name = str(metadata.get("name") or "")
    spec = parse_job(job)
    if isinstance(spec, list):
        raise Failure(Exit.INVALID, f"{name} is not accepted: {'; '.join(str(problem) for problem in spec)}")
    code = (job.get("status") or {}).get("code") or job_code(
        str(metadata.get("namespace") or "default"), name, spec.code
    )
    timetable = spec.schedule_for(code)
    if timetable is None:
        raise Failure(Exit.USAGE, f"{name} is of type Initial: it runs once, ever, and has no ticks")
    return timetable


def _columns(timetable: Timetable) -> list[Column]:
    several, jitter = len(timetable.schedules) > 1, bool(timetable.jitter)
    return [
        Column("TICK", lambda row: rfc3339(row["line"].tick)),
        Column("LOCAL TIME", lambda row: row["line"].local.strftime("%a %Y-%m-%d %H:%M %Z")),
        *([Column("START", lambda row: rfc3339(row["line"].start))] if jitter else []),
        Column("IN", lambda row: ago(rfc3339(row["line"].start), row["now"]).removeprefix("in ")),
        Column("SCHEDULE", lambda row: ", ".join(row["line"].schedules), wide=not several),
        Column("CLOCK CHANGE", lambda row: "; ".join(remarks(row["line"])) or "-"),
    ]


def remarks(line: Upcoming) -> Iterator[str]:
    """What clock changes do to a tick, and between it and the one before, in words."""
    for change in line.changes:
        moved = change.after - change.before
        way = "forward" if moved > timedelta(0) else "back"
        yield f"clock goes {way} {_minutes(abs(moved))} at {rfc3339(change.at)}"
    for wall in line.left_out:
        yield f"{wall:%Y-%m-%d %H:%M} is skipped and not run"
    if line.effect is not None and line.wall is not None:
        yield _effect(line.effect, line.wall)


def _effect(effect: ClockEffect, wall: datetime) -> str:
    from leasedjob.schedule import ClockEffect

    match effect:
        case ClockEffect.MovedAfterGap:
            said = f"{wall:%H:%M} is skipped: runs right after the gap"
        case ClockEffect.FirstOfRepeated:
            said = f"{wall:%H:%M} comes twice: runs the first time only"
        case ClockEffect.Doubled:
            said = f"{wall:%H:%M} comes twice: runs each time"
        case ClockEffect.Displaced:
            said = f"not what is written ({wall:%H:%M}), as in CronJob"
        case _:
            assert_never(effect)
    return said


def _minutes(moved: timedelta) -> str:
    minutes = int(moved.total_seconds()) // 60
    return f"{minutes // 60} h" if minutes % 60 == 0 else f"{minutes} min"


def _plain(line: Upcoming) -> Object:
    return {
        "tick": rfc3339(line.tick),
        "localTime": line.local.isoformat(),
        "startTime": rfc3339(line.start),
        "schedules": list(line.schedules),
        **({"clockChange": "; ".join(found)} if (found := list(remarks(line))) else {}),
        **({"effect": str(line.effect)} if line.effect is not None else {}),
        **({"skipped": [wall.isoformat() for wall in line.left_out]} if line.left_out else {}),
    }
