"""`kubectl leasedjob cancel`: asks the operator to stop a LeasedJobRun. It never deletes anything."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from leasedjob.cli.exits import Exit, Failure, Phase
from leasedjob.cli.options import cluster_options, complete_runs, target
from leasedjob.cli.wait import Wait, wait_options
from leasedjob.protocol import GROUP

if TYPE_CHECKING:
    from leasedjob.cli.cluster import Cluster


@click.command()
@click.argument("run", shell_complete=complete_runs)
@wait_options("Wait until the run has ended, however it ends.")
@cluster_options
@click.pass_context
def command(ctx: click.Context, run: str, wait: Wait | None) -> None:
    """Cancel a run that was started by `run`.

    RUN is the name of a LeasedJobRun, or JOB/RUNKEY for the one that carries out that run of the LeasedJob JOB. The
    workload gets its whole grace period. A run that has ended stays as it is, and that is no error.
    """
    cluster = target(ctx)
    found = _by_key(cluster, *run.split("/", 1)) if "/" in run else cluster.get("leasedjobruns", run)
    name = found["metadata"]["name"]
    shown = f"leasedjobrun.{GROUP}/{name}"
    phase = Phase.of(found)
    if phase.exit_code is not None:
        click.echo(f"{shown} has already ended: {phase}")
        return
    cluster.merge("leasedjobruns", name, {"spec": {"cancel": True}})
    if wait is None:
        click.echo(f"{shown} is being cancelled")
        return
    _, phase = wait.follow(cluster, name)
    click.echo(f"{shown} {phase}")


def _by_key(cluster: Cluster, job: str, run_key: str) -> dict[str, Any]:
    """The LeasedJobRun of that run; one that still goes on before one that has ended."""
    candidates = [
        run
        for run in cluster.list_all("leasedjobruns")
        if run["spec"].get("jobName") == job
        and run_key in (run["spec"].get("tick"), (run.get("status") or {}).get("runKey"))
    ]
    if not candidates:
        cluster.get("leasedjobs", job)  # a wrong name is the likelier mistake, and has its own message
        raise Failure(
            Exit.NOT_FOUND,
            f"no LeasedJobRun of {job} has the run key {run_key}; a run that the schedule started can't be cancelled "
            "by name: spec.suspend stops further ticks",
        )
    return min(candidates, key=lambda run: Phase.of(run).exit_code is not None)
