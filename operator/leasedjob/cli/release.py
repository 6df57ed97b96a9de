"""`kubectl leasedjob release`: ends the present attempt of a run, so that the next one may begin."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import click

from leasedjob.cli.exits import Exit, Failure
from leasedjob.cli.options import cluster_options, complete_jobs
from leasedjob.cli.output import Format, format_option
from leasedjob.cli.repair import described, repair, repair_options, the_run
from leasedjob.cli.wait import Wait, wait_options

Object = dict[str, Any]


@click.command()
@click.argument("name", shell_complete=complete_jobs)
@repair_options
@click.option(
    "--force", is_flag=True, help="End the lease now; only where you have made sure that the workload has stopped."
)
@wait_options("Wait until it is done, however long the workload takes to stop.")
@format_option(Format.JSON, Format.YAML, Format.NAME)
@cluster_options
@click.pass_context
def command(
    ctx: click.Context,
    name: str,
    tick: datetime | None,
    run_key: str | None,
    reason: str | None,
    yes: bool,
    force: bool,
    wait: Wait | None,
    output: Format,
) -> None:
    """End the present attempt of a run.

    The run goes on with the next one. For a run whose holder hangs or is lost. A Pod in this cluster is stopped
    with its grace period; elsewhere the lease isn't extended any more, and the next attempt begins when it has run
    out. It is no failure. The command says first what it will do, and asks.
    """

    def says(explanation: Object) -> str:
        run = the_run(explanation)
        if run.get("outcome") not in ("Pending", "Running"):
            raise Failure(Exit.REFUSED, f"nobody holds it, so there is nothing to release: {described(run)}")
        if force:
            then = (
                "Its lease will end at once, and the next attempt may begin beside it: if the workload still runs, it "
                "runs twice."
            )
        else:
            then = (
                "It will be stopped with its grace period; where its Pod can't be reached, its lease is not extended "
                "any more. Then the next attempt begins. It is no failure; attempt and fencing token go on growing."
            )
        return f"{described(run)} {then}"

    repair(
        ctx, name, "Release",
        tick=tick, run_key=run_key, reason=reason, yes=yes, wait=wait, output=output,
        says=says, done="released", force=force,
    )  # fmt: skip
