"""`kubectl leasedjob run`: a run now, or of a named tick, under the same lease and policies as a scheduled one."""

from __future__ import annotations

from datetime import datetime

import click

from leasedjob.cli.options import Tick, cluster_options, complete_jobs, rfc3339, target
from leasedjob.cli.output import Format, format_option, show_object
from leasedjob.cli.request import raise_unless_good, request
from leasedjob.cli.wait import Wait, first_answer, wait_options
from leasedjob.protocol import GROUP


@click.command()
@click.argument("name", shell_complete=complete_jobs)
@click.option(
    "--at",
    "--tick",
    "tick",
    type=Tick(),
    metavar="TICK",
    help="The tick to run, e.g. 2026-07-20T03:00:00Z (RFC 3339); default: a run of its own.",
)
@click.option("--reason", metavar="TEXT", help="Why; kept in the LeasedJobRun.")
@wait_options("Wait until the run has ended; the exit code says how.")
@format_option(Format.JSON, Format.YAML, Format.NAME)
@cluster_options
@click.pass_context
def command(
    ctx: click.Context,
    name: str,
    tick: datetime | None,
    reason: str | None,
    wait: Wait | None,
    output: Format,
) -> None:
    """Start a run of a LeasedJob.

    It creates a LeasedJobRun; the operator carries it out under the LeasedJob's lease and policies. With --at it is
    the run of that tick: one that has already succeeded is never run again, and a time that is no tick of the schedule
    is refused. The command waits some seconds for that answer.
    """
    cluster = target(ctx)
    run = request(cluster, name, **({"tick": rfc3339(tick)} if tick else {}), **({"reason": reason} if reason else {}))
    run_name = run["metadata"]["name"]
    if wait is None:
        answered = first_answer(cluster, run_name) if tick is not None else None
        show_object(answered or run, output, "created")
        if tick is not None and answered is None:
            click.echo(f"no operator has said yet whether it runs: kubectl get leasedjobrun {run_name}", err=True)
        raise_unless_good(answered or run)
        return
    click.echo(f"leasedjobrun.{GROUP}/{run_name} created", err=True)
    run, phase = wait.follow(cluster, run_name)
    show_object(run, output, str(phase))
    raise_unless_good(run)
