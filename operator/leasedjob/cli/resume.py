"""`kubectl leasedjob resume`: ticks count again, from now on."""

from __future__ import annotations

import click

from leasedjob.cli.explain import AFTER_FAILURES, ready_reason
from leasedjob.cli.options import cluster_options, complete_jobs, target
from leasedjob.cli.output import Format, format_option, show_object
from leasedjob.cli.request import raise_unless_good, request
from leasedjob.cli.suspend import set_suspend
from leasedjob.cli.wait import first_answer


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...", shell_complete=complete_jobs)
@click.option("--reason", metavar="TEXT", help="Why; kept in the LeasedJobRun that ends a suspension after failures.")
@format_option(Format.JSON, Format.YAML, Format.NAME)
@cluster_options
@click.pass_context
def command(ctx: click.Context, names: tuple[str, ...], reason: str | None, output: Format) -> None:
    """Let the ticks of suspended LeasedJobs count again.

    It sets spec.suspend to false. A suspension after failures (spec.suspendAfterFailures) is no part of spec: it is
    ended by a LeasedJobRun with action Resume, which no tool that keeps spec undoes. Missed ticks are not replayed.
    """
    cluster = target(ctx)
    for name in names:
        job = cluster.get("leasedjobs", name)
        done = False
        if job["spec"].get("suspend"):
            job, done = set_suspend(cluster, job, False), True
        if ready_reason(job) == AFTER_FAILURES:
            run = request(cluster, name, action="Resume", **({"reason": reason} if reason else {}))
            answer = first_answer(cluster, run["metadata"]["name"])
            if answer is None:
                click.echo(
                    f"no operator has answered yet: kubectl get leasedjobrun {run['metadata']['name']}", err=True
                )
            else:
                raise_unless_good(answer)
            done = True
        show_object(job, output, "resumed" if done else "is not suspended")
