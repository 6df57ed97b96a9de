"""`kubectl leasedjob forget`: forgets that a run failed, so that it may be tried again."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import click

from leasedjob.cli.exits import Exit, Failure
from leasedjob.cli.options import cluster_options, complete_jobs
from leasedjob.cli.output import Format, format_option
from leasedjob.cli.repair import described, repair, repair_options, the_run

Object = dict[str, Any]


@click.command()
@click.argument("name", shell_complete=complete_jobs)
@repair_options
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
    output: Format,
) -> None:
    """Forget that a run failed or was cancelled.

    It can be claimed again, its failures counted from zero. Attempt and fencing token go on growing, and the
    idempotency key stays. A run that succeeded is never touched. The command says first what it will do, and asks.
    """

    def says(explanation: Object) -> str:
        run = the_run(explanation)
        outcome = run.get("outcome")
        if outcome == "Success":
            raise Failure(Exit.REFUSED, f"what succeeded is never forgotten: {described(run)}")
        if outcome not in ("Failed", "Cancelled", "Replaced"):
            raise Failure(Exit.REFUSED, f"it has not ended, so there is nothing to forget: {described(run)}")
        return (
            f"{described(run)} That will be forgotten: the run can be claimed again at once, its failures counted from "
            "zero. Attempt and fencing token go on growing, and the idempotency key stays the same."
        )

    repair(
        ctx, name, "Forget",
        tick=tick, run_key=run_key, reason=reason, yes=yes, wait=None, output=output, says=says, done="forgotten",
    )  # fmt: skip
