"""`kubectl leasedjob forget-cluster`: a cluster that is gone for good counts no more."""

from __future__ import annotations

import click

from leasedjob.cli.door import ask, operator_options
from leasedjob.cli.exits import Exit, Failure
from leasedjob.cli.options import cluster_options, target
from leasedjob.cli.output import printable
from leasedjob.cli.repair import confirm


@click.command()
@click.argument("which", metavar="CLUSTER")
@click.option("--reason", default="", metavar="TEXT", help="Why; kept in the audit line.")
@click.option("-y", "--yes", is_flag=True, help="Don't ask.")
@operator_options
@cluster_options
@click.pass_context
def command(
    ctx: click.Context, which: str, reason: str, yes: bool, operator_namespace: str | None, timeout: float
) -> None:
    """Forget a cluster that is gone for good.

    Its LeasedJobs count no more: neither their schedules, where they differ from those of other clusters, nor their
    concurrencyPolicy. What it ran stays recorded. It must not have been seen for 15 minutes, and hold no run. The
    command says first what it will do, and asks. A cluster that comes back registers its LeasedJobs anew.
    """
    operator = target(ctx)
    found = {each["name"]: each for each in ask(operator, operator_namespace, timeout, action="List")["clusters"]}
    if which not in found:
        raise Failure(Exit.NOT_FOUND, f"no cluster {which!r}; there are: {', '.join(found) or 'none'}")
    jobs, seen = found[which].get("leasedJobs", 0), found[which].get("lastSeen")
    plan = (
        f"Cluster {which}, last seen {seen or 'by no operator that says so'}, will be forgotten, with its {jobs} "
        "LeasedJobs: their schedules and policies count no more. Runs that only it had get no further attempt; what "
        "has run stays recorded."
    )
    click.echo(printable(plan), err=True)
    if not yes:
        confirm(ctx)
    user = operator.user()
    said = ask(operator, operator_namespace, timeout, action="Forget", cluster=which, reason=reason, by=user)
    click.echo(f"cluster/{said['cluster']} {said['message']}")
