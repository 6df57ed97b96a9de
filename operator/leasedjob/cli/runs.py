"""`kubectl leasedjob runs`: the most recent runs of one LeasedJob, as its status tells them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import click

from leasedjob.cli.options import cluster_options, complete_jobs, target
from leasedjob.cli.output import Column, Format, ago, dump, duration, format_option, parse_time, show_table

Object = dict[str, Any]


@click.command()
@click.argument("name", shell_complete=complete_jobs)
@format_option(Format.WIDE, Format.JSON, Format.YAML)
@click.option("--no-headers", is_flag=True, help="Without the line of headers.")
@cluster_options
@click.pass_context
def command(ctx: click.Context, name: str, output: Format, no_headers: bool) -> None:
    """List a LeasedJob's recent runs.

    At most ten, as its status tells them: first those that go on, then the latest.
    """
    cluster = target(ctx)
    runs: list[Object] = (cluster.get("leasedjobs", name).get("status") or {}).get("recentRuns") or []
    if output in (Format.JSON, Format.YAML):
        dump(runs, output)
    elif runs:
        show_table(runs, columns(datetime.now(UTC)), wide=output is Format.WIDE, headers=not no_headers)
    else:
        click.echo(f"No run of {name} yet.", err=True)


def columns(now: datetime) -> list[Column]:
    """The table's columns; `now` is what ages count from."""
    return [
        Column("RUN KEY", lambda run: run.get("runKey") or "(once)"),
        Column("ATTEMPT", lambda run: str(run.get("attempt", ""))),
        Column("OUTCOME", lambda run: run.get("outcome", ""), coloured=True),
        Column("REASON", lambda run: run.get("reason", "")),
        Column("SCHEDULED", lambda run: ago(run.get("scheduledTime"), now)),
        Column("STARTED", lambda run: ago(run.get("startTime"), now)),
        Column("DURATION", _took),
        Column("POD", lambda run: run.get("podName", "")),
        Column("HOLDER", lambda run: run.get("holder", ""), wide=True),
        Column("MESSAGE", lambda run: run.get("message", ""), wide=True),
    ]


def _took(run: Object) -> str:
    started, ended = parse_time(run.get("startTime")), parse_time(run.get("completionTime"))
    return duration((ended - started).total_seconds()) if started and ended else ""
