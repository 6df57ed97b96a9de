"""`kubectl leasedjob logs`: what a run's Pod has written."""

from __future__ import annotations

import sys
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from leasedjob.cli.exits import Exit, Failure
from leasedjob.cli.options import cluster_options, complete_jobs, rfc3339, target, which_run
from leasedjob.cli.output import printable

if TYPE_CHECKING:
    from leasedjob.cli.attempts import Attempt
    from leasedjob.cli.cluster import Cluster

Object = dict[str, Any]


@click.command()
@click.argument("name", shell_complete=complete_jobs)
@which_run(at="Of the run of this tick; default: of the latest run.", run_key="Of the run with this key.")
@click.option("-p", "--previous", is_flag=True, help="Of the run before the latest one.")
@click.option("--attempt", type=click.IntRange(min=1), metavar="NUMBER", help="The attempt; default: the latest.")
@click.option("-c", "--container", metavar="NAME", help="The container; default: the first of the workload's.")
@click.option("-f", "--follow", is_flag=True, help="Wait for the container to start, and follow it to its end.")
@click.option("--tail", type=click.IntRange(min=0), metavar="LINES", help="Only the last lines.")
@click.option("--timestamps", is_flag=True, help="With the time of each line.")
@cluster_options
@click.pass_context
def command(
    ctx: click.Context,
    name: str,
    tick: datetime | None,
    run_key: str | None,
    previous: bool,
    attempt: int | None,
    container: str | None,
    follow: bool,
    tail: int | None,
    timestamps: bool,
) -> None:
    """Print the log of a run's Pod.

    Pods are kept by spec.successfulRunsHistoryLimit and spec.failedRunsHistoryLimit. Of a failure the end of the output
    is also in `runs -o wide`.
    """
    from leasedjob.cli.attempts import of_job

    if sum((tick is not None, run_key is not None, previous)) > 1:
        raise click.UsageError("only one of --at, --run-key and --previous names the run", ctx)
    key = rfc3339(tick) if tick else run_key
    cluster = target(ctx)
    job = cluster.get("leasedjobs", name)
    chosen = _choose(cluster, job, of_job(cluster, name), key, previous=previous, number=attempt)
    source = container or _container(chosen)
    if follow and chosen.waits:
        _wait_for_start(cluster, chosen)
    out = sys.stdout.buffer
    try:
        for piece in cluster.log(chosen.pod, source, follow=follow, tail=tail, timestamps=timestamps):
            out.write(piece)
            out.flush()
    except KeyboardInterrupt:
        raise Failure(Exit.INTERRUPTED, "no longer following; the run goes on") from None


def _choose(
    cluster: Cluster, job: Object, found: list[Attempt], key: str | None, *, previous: bool, number: int | None
) -> Attempt:
    """The attempt whose log is meant. Raises Failure NOT_FOUND with what is known of it elsewhere."""
    name = job["metadata"]["name"]
    runs = list(dict.fromkeys(attempt.run_key for attempt in found))  # in the order in which they began
    if previous:
        if len(runs) < 2:
            raise Failure(Exit.NOT_FOUND, f"no Pod is left of a run of {name} before the latest one")
        key = runs[-2]
    elif key is None and runs:
        key = runs[-1]
    of_run = [attempt for attempt in found if attempt.run_key == key]
    of_number = [attempt for attempt in of_run if number in (None, attempt.number)]
    if of_number:
        return max(of_number, key=lambda attempt: attempt.number)
    what = f"run {key} of {name}" if key else name
    if of_run:
        kept = ", ".join(str(attempt.number) for attempt in of_run)
        raise Failure(Exit.NOT_FOUND, f"no Pod is left of attempt {number} of {what} (there are: {kept})")
    raise Failure(Exit.NOT_FOUND, f"no Pod of {what} is in this cluster; {_known_of(job, key)}")


def _known_of(job: Object, key: str | None) -> str:
    """What the status knows of a run whose Pod isn't here."""
    runs = (job.get("status") or {}).get("recentRuns") or []
    run = next((run for run in runs if key in (None, run.get("runKey"))), None)
    if run is None:
        return "it has not run yet" if not runs else "its status doesn't know of it either"
    said = f"attempt {run.get('attempt', '?')} is {run.get('outcome', 'unknown')}"
    if run.get("holder"):
        said += f", last held by {run['holder']} (cluster/namespace/Pod)"
    return f"{said}: {run['message']}" if run.get("message") else said


def _container(attempt: Attempt) -> str:
    if attempt.default_container in attempt.containers:
        return attempt.default_container
    if len(attempt.containers) > 1:
        click.echo(
            printable(f"of container {attempt.containers[0]}; there are also {', '.join(attempt.containers[1:])}"),
            err=True,
        )
    return attempt.containers[0]


def _wait_for_start(cluster: Cluster, attempt: Attempt) -> None:
    """Returns when the Pod's workload has started, or can't any more."""
    from leasedjob.cli.attempts import attempts
    from leasedjob.protocol import ANNOTATION_JOB

    told = ""
    try:
        for pod in cluster.follow("pods", attempt.pod, None):
            (now,) = attempts([pod], pod["metadata"]["annotations"][ANNOTATION_JOB])
            if not now.waits:
                return
            line = f"{attempt.pod}: waits: {now.reason or 'Pending'}"
            if line != told:
                click.echo(printable(line), err=True)
                told = line
    except KeyboardInterrupt:
        raise Failure(Exit.INTERRUPTED, "no longer waiting; the run goes on") from None
