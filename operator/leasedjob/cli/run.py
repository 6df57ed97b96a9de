"""`kubectl leasedjob run`: a run now, or of a named tick, under the same lease and policies as a scheduled one."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import click

from leasedjob.cli.exits import Failure, Phase
from leasedjob.cli.options import cluster_options, complete_jobs, target
from leasedjob.cli.output import Format, format_option, show_object
from leasedjob.cli.wait import Wait, first_answer, wait_options
from leasedjob.protocol import GROUP, VERSION


class Tick(click.ParamType[datetime]):
    """An instant in RFC 3339, whole seconds, with its offset; becomes UTC.

    An offset is asked for because a time without one means something else on every machine.
    """

    name = "tick"

    def convert(self, value: str | datetime, param: click.Parameter | None, ctx: click.Context | None) -> datetime:
        if isinstance(value, datetime):
            return value
        try:
            tick = datetime.fromisoformat(value.upper())
            as_utc = tick.astimezone(UTC)
        except (ValueError, OverflowError):
            self.fail(f"{value!r} is no time; write it like 2026-07-20T03:00:00Z", param, ctx)
        if "T" not in value.upper() or tick.tzinfo is None:
            self.fail(f"{value!r} names no instant; write date, time and offset: 2026-07-20T03:00:00Z", param, ctx)
        if tick.microsecond:
            self.fail(f"{value!r} has fractions of a second; ticks are whole seconds", param, ctx)
        return as_utc


@click.command()
@click.argument("name", shell_complete=complete_jobs)
@click.option(
    "--tick",
    type=Tick(),
    metavar="TIME",
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

    It creates a LeasedJobRun; the operator carries it out under the LeasedJob's lease and policies. With --tick it is
    the run of that tick: one that has already succeeded is never run again, and a time that is no tick of the schedule
    is refused. The command waits some seconds for that answer.
    """
    cluster = target(ctx)
    job = cluster.get("leasedjobs", name)  # so that a wrong name is an error here, not a refused object in the cluster
    spec: dict[str, object] = {"jobName": name}
    if tick is not None:
        spec["tick"] = tick.isoformat().replace("+00:00", "Z")
    if reason is not None:
        spec["reason"] = reason
    body = {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": "LeasedJobRun",
        "metadata": {
            "generateName": f"{name}-",
            "ownerReferences": [
                {
                    "apiVersion": f"{GROUP}/{VERSION}",
                    "kind": "LeasedJob",
                    "name": name,
                    "uid": job["metadata"]["uid"],
                }
            ],
        },
        "spec": spec,
    }
    run = cluster.create("leasedjobruns", body)
    run_name = run["metadata"]["name"]
    if wait is None:
        answered = first_answer(cluster, run_name) if tick is not None else None
        show_object(answered or run, output, "created")
        if tick is not None and answered is None:
            click.echo(f"no operator has said yet whether it runs: kubectl get leasedjobrun {run_name}", err=True)
        _raise_unless_good(answered or run, Phase.of(answered or run))
        return
    click.echo(f"leasedjobrun.{GROUP}/{run_name} created", err=True)
    run, phase = wait.follow(cluster, run_name)
    show_object(run, output, str(phase))
    _raise_unless_good(run, phase)


def _raise_unless_good(run: dict[str, Any], phase: Phase) -> None:
    """Ends the command with the code of a run that has ended otherwise than well."""
    if phase.exit_code:
        message = (run.get("status") or {}).get("message") or phase
        raise Failure(phase.exit_code, f"run {run['metadata']['name']}: {message}")
