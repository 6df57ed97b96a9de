"""`kubectl leasedjob backfill`: past ticks, run under the same lease and policies, a few at a time."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import click

from leasedjob.cli.exits import Exit, Failure, Phase
from leasedjob.cli.options import Tick, cluster_options, complete_jobs, rfc3339, target
from leasedjob.cli.output import Column, Format, dump, format_option, show_object, show_table
from leasedjob.cli.request import raise_unless_good, request
from leasedjob.cli.wait import Wait, answered, first_answer, wait_options
from leasedjob.protocol import GROUP

Object = dict[str, Any]
REPROCESS = {"none": "None", "failed": "Failed", "all": "All"}
PLAN_SECONDS = 60.0


@click.command()
@click.argument("name", shell_complete=complete_jobs)
@click.option(
    "--from", "first", type=Tick(), required=True, metavar="TIME", help="The first instant; a tick at it runs."
)
@click.option("--to", "last", type=Tick(), required=True, metavar="TIME", help="The last instant; a tick at it runs.")
@click.option(
    "--reprocess",
    type=click.Choice(list(REPROCESS), case_sensitive=False),
    default="none",
    help="Ticks that have a run already: none of them (default), failed ones anew, or all, each as another run.",
)
@click.option("--max-active", type=click.IntRange(1, 100), default=1, metavar="N", help="Runs at a time; default: 1.")
@click.option("--dry-run", is_flag=True, help="Start nothing; show what would run.")
@click.option("--reason", metavar="TEXT", help="Why; kept in the LeasedJobRun.")
@wait_options("Wait until all its runs have ended; the exit code says how.")
@format_option(Format.JSON, Format.YAML, Format.NAME)
@cluster_options
@click.pass_context
def command(
    ctx: click.Context,
    name: str,
    first: datetime,
    last: datetime,
    reprocess: str,
    max_active: int,
    dry_run: bool,
    reason: str | None,
    wait: Wait | None,
    output: Format,
) -> None:
    """Run past ticks of a LeasedJob, the oldest first.

    It creates a LeasedJobRun; the operators of this cluster carry it out, under the job's own concurrencyPolicy: more
    than one run at a time needs Allow. A tick that has succeeded is never run again under its own key: --reprocess all
    gives it another run, with a key of its own.
    `cancel` stops a backfill.
    """
    if first > last:
        raise click.UsageError("--from is later than --to", ctx)
    cluster = target(ctx)
    backfill: Object = {
        "from": rfc3339(first),
        "to": rfc3339(last),
        "reprocess": REPROCESS[reprocess.lower()],
        "maxActive": max_active,
        **({"dryRun": True} if dry_run else {}),
    }
    run = request(cluster, name, backfill=backfill, **({"reason": reason} if reason else {}))
    run_name = run["metadata"]["name"]
    if dry_run:
        try:
            run = answered(cluster, run_name, wait.timeout or PLAN_SECONDS if wait else PLAN_SECONDS)
        finally:
            cluster.discard("leasedjobruns", run_name)
        raise_unless_good(run)
        _show_plan(run, output)
        return
    if wait is None:
        answer = first_answer(cluster, run_name)
        show_object(answer or run, output, f"created{_counts(answer)}")
        if answer is None:
            click.echo(f"no operator has answered yet: kubectl get leasedjobrun {run_name}", err=True)
        raise_unless_good(answer or run)
        return
    click.echo(f"leasedjobrun.{GROUP}/{run_name} created", err=True)
    run, phase = wait.follow(cluster, run_name)
    show_object(run, output, f"{phase}{_counts(run)}")
    raise_unless_good(run)


def _counts(run: Object | None) -> str:
    """`: 30 ticks, 28 succeeded, 2 skipped`; "" where nothing is known."""
    status = ((run or {}).get("status") or {}).get("backfill") or {}
    if status.get("ticks") is None:
        return ""
    parts = [f"{status['ticks']} ticks"]
    parts += [
        f"{status[key]} {key}" for key in ("planned", "running", "succeeded", "failed", "skipped") if status.get(key)
    ]
    return f": {', '.join(parts)}"


def _show_plan(run: Object, output: Format) -> None:
    status = run.get("status") or {}
    found = status.get("backfill")
    if found is None:
        raise Failure(
            Phase.of(run).exit_code or Exit.REFUSED, f"no plan came: {status.get('message') or Phase.of(run)}"
        )
    plan = found.get("plan") or []
    if output in (Format.JSON, Format.YAML):
        dump(found, output)
    elif output is Format.NAME:
        for tick in plan:
            if tick.get("action") != "Skip":
                click.echo(tick.get("runKey") or tick["tick"])
    else:
        if plan:
            columns = [
                Column("TICK", lambda tick: tick.get("tick", "")),
                Column("WHAT", lambda tick: tick.get("action", "")),
                Column("RUN KEY", lambda tick: tick.get("runKey", "")),
                Column("REASON", lambda tick: tick.get("reason", "")),
            ]
            show_table(plan, columns, wide=False, headers=True)
        more = int(found.get("ticks") or 0) - len(plan)
        click.echo(f"{found.get('ticks', 0)} ticks, {found.get('planned', 0)} would run", err=True)
        if more > 0:
            click.echo(f"and {more} more ticks that are not shown", err=True)
