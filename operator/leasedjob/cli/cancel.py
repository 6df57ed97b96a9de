"""`kubectl leasedjob cancel`: asks the operator to stop a run, or a backfill, for good. It never deletes anything."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import click

from leasedjob.cli.exits import Phase
from leasedjob.cli.options import cluster_options, complete_runs, target
from leasedjob.cli.request import raise_unless_good, request
from leasedjob.cli.wait import Wait, first_answer, wait_options
from leasedjob.protocol import GROUP

if TYPE_CHECKING:
    from leasedjob.cli.cluster import Cluster

ENDED: Final = ("AlreadySucceeded", "NotRunning")  # reasons of a refusal: there is nothing left to stop


@click.command()
@click.argument("run", metavar="RUN|JOB/RUNKEY", shell_complete=complete_runs)
@wait_options("Wait until the run has ended, however it ends.")
@cluster_options
@click.pass_context
def command(ctx: click.Context, run: str, wait: Wait | None) -> None:
    """Cancel a run, or a backfill.

    RUN is the name of a LeasedJobRun. JOB/RUNKEY is any run of the LeasedJob JOB, also one that the schedule started.
    The workload gets its whole grace period, and no further attempt follows. A run that has ended stays as it is, and
    that is no error.
    """
    cluster = target(ctx)
    job, _, run_key = run.partition("/")
    found = _by_key(cluster, job, run_key) if "/" in run else cluster.get("leasedjobruns", run)
    if found is None:
        _by_action(cluster, job, run_key, wait)
        return
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


def _by_key(cluster: Cluster, job: str, run_key: str) -> dict[str, Any] | None:
    """The LeasedJobRun that carries that run out: one that goes on, else one that has ended; None for the schedule's.

    One that was refused, or is about the run instead, says nothing of how the run stands.
    """
    candidates = [
        run
        for run in cluster.list_all("leasedjobruns")
        if run["spec"].get("jobName") == job
        and run_key in (run["spec"].get("tick"), (run.get("status") or {}).get("runKey"))
        and run["spec"].get("action", "Run") == "Run"
        and Phase.of(run) is not Phase.REFUSED
    ]
    return min(candidates, key=lambda run: Phase.of(run).exit_code is not None, default=None)


def _by_action(cluster: Cluster, job: str, run_key: str, wait: Wait | None) -> None:
    """Cancels a run that no LeasedJobRun carries out."""
    name = request(cluster, job, action="Cancel", **({"runKey": run_key} if run_key else {}))["metadata"]["name"]
    shown = f"run {run_key} of {job}" if run_key else f"the run of {job}"
    if wait is not None:
        answer, _ = wait.follow(cluster, name)
    elif (first := first_answer(cluster, name)) is None:
        click.echo(f"{shown} is to be cancelled; no operator has answered yet: kubectl get leasedjobrun {name}")
        return
    else:
        answer = first
    status = answer.get("status") or {}
    message = status.get("message")
    if status.get("reason") in ENDED:
        click.echo(f"{shown} has already ended: {message}")
        return
    raise_unless_good(answer)
    ended = "cancelled" if Phase.of(answer).exit_code is not None else "being cancelled"
    click.echo(f"{shown} is {ended}{f': {message}' if message else ''}")
