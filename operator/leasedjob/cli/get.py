"""`kubectl leasedjob get`: one LeasedJob, all that its status tells, for a person to read."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import click

from leasedjob.cli.list import columns, schedule, show_jobs, state
from leasedjob.cli.options import cluster_options, complete_jobs, target
from leasedjob.cli.output import Column, Format, ago, as_list, dump, format_option, printable, show_object, show_table

Object = dict[str, Any]


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME]...", shell_complete=complete_jobs)
@click.option("-A", "--all-namespaces", is_flag=True, help="Of all namespaces; without NAME.")
@format_option(Format.WIDE, Format.JSON, Format.YAML, Format.NAME)
@click.option("--no-headers", is_flag=True, help="Without the line of headers, where a table is shown.")
@cluster_options
@click.pass_context
def command(ctx: click.Context, names: tuple[str, ...], all_namespaces: bool, output: Format, no_headers: bool) -> None:
    """Show LeasedJobs.

    With a NAME: state, schedule, the next ticks, recent runs, ticks that did not run and why. With -o wide: the line
    that `list` shows. Without NAME: as `list`.
    """
    if names and all_namespaces:
        raise click.UsageError("a NAME is of one namespace: use -n instead of -A", ctx)
    cluster = target(ctx)
    if not names:
        show_jobs(cluster, all_namespaces=all_namespaces, output=output, headers=not no_headers)
        return
    jobs = [cluster.get("leasedjobs", name) for name in names]
    now = datetime.now(UTC)
    match output:
        case Format.WIDE:
            show_table(jobs, columns(now, with_namespace=False), wide=True, headers=not no_headers)
        case Format.TABLE:
            for number, job in enumerate(jobs):
                if number:
                    click.echo()
                _describe(job, now)
        case Format.JSON | Format.YAML if len(jobs) > 1:
            dump(as_list(jobs), output)
        case _:
            for job in jobs:
                show_object(job, output)


def _describe(job: Object, now: datetime) -> None:
    from leasedjob.cli.runs import columns as run_columns

    lines = list(_lines(job, now))
    width = max(len(title) for title, _ in lines) + 2
    for title, text in lines:
        click.echo(f"{title + ':' if title else '':<{width}} {printable(text)}".rstrip())
    status = job.get("status") or {}
    for title, rows, shown in (
        ("Runs", status.get("recentRuns"), run_columns(now)),
        ("Ticks that did not run", status.get("ledger"), ledger_columns(now)),
    ):
        if rows:
            click.echo(f"\n{title}:")
            show_table(rows, shown, wide=False, headers=True)


def _lines(job: Object, now: datetime) -> Iterator[tuple[str, str]]:
    """Title and text of each line; a title of "" goes on with the one above."""
    metadata, spec, status = job["metadata"], job["spec"], job.get("status") or {}
    yield "Name", f"{metadata.get('namespace', 'default')}/{metadata['name']}"
    yield "Code", status.get("code") or "<none>"
    message = next((c.get("message") for c in status.get("conditions") or [] if c.get("type") == "Ready"), "")
    yield "State", f"{state(job)}: {message}" if message and not state(job).startswith("Ready") else state(job)
    yield "Schedule", schedule(job)
    if spec.get("type") != "Initial":
        yield "Time zone", spec.get("timeZone", "Etc/UTC")
    for title, field in (("Not before", "notBefore"), ("Not after", "notAfter"), ("Jitter", "jitterSeconds")):
        if spec.get(field):
            yield title, f"{spec[field]} s" if field == "jitterSeconds" else str(spec[field])
    yield (
        "Policy",
        f"{spec.get('concurrencyPolicy', 'Forbid')}, {spec.get('missedRunPolicy', 'RunLatest')}, "
        f"backoffLimit {spec.get('backoffLimit', 0)}",
    )
    for number, tick in enumerate(status.get("nextScheduleTimes") or []):
        yield "" if number else "Next", f"{tick}  ({ago(tick, now)})"
    if status.get("holder"):
        yield "Holder", status["holder"]
    for title, field in (("Last success", "lastSuccessfulTime"), ("Last failure", "lastFailureTime")):
        if status.get(field):
            yield title, f"{status[field]}  ({ago(status[field], now)} ago)"
    counts = [
        f"{status[f'{kind}Ticks']} {kind}" for kind in ("skipped", "missed", "dropped") if status.get(f"{kind}Ticks")
    ]
    if counts:
        yield "Not run", f"{', '.join(counts)}, ever"
    for condition in status.get("conditions") or []:
        if condition.get("type") != "Ready" and condition.get("status") == "True":
            yield str(condition.get("type")), str(condition.get("message") or condition.get("reason"))


def ledger_columns(now: datetime) -> list[Column]:
    """The columns of a table of ticks that did not run; `now` is what ages count from."""
    return [
        Column("FROM", lambda entry: entry.get("from", "")),
        Column("TO", lambda entry: entry.get("to", "")),
        Column("TICKS", lambda entry: f"{'>=' if entry.get('exact') is False else ''}{entry.get('count', '')}"),
        Column("KIND", lambda entry: entry.get("kind", ""), coloured=True),
        Column("REASON", lambda entry: entry.get("reason", "")),
        Column("DECIDED", lambda entry: ago(entry.get("decidedAt"), now)),
        Column("BY", lambda entry: entry.get("decidedBy", "")),
    ]
