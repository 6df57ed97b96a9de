"""`kubectl leasedjob cordon`: a cluster takes no new runs."""

from __future__ import annotations

import click

from leasedjob.cli.door import cordoned, operator_options
from leasedjob.cli.options import cluster_options, target


@click.command()
@click.argument("which", required=False, default="", metavar="[CLUSTER]")
@click.option("--reason", default="", metavar="TEXT", help="Why, for people; shown wherever the cordon is.")
@operator_options
@cluster_options
@click.pass_context
def command(ctx: click.Context, which: str, reason: str, operator_namespace: str | None, timeout: float) -> None:
    """Let a cluster take no new runs.

    Runs that it holds go on and are recorded; ticks, retries and takeovers are left to the other clusters on the same
    database. Without CLUSTER: the one that is asked. With CLUSTER, a name that `clusters` lists: any, also one that
    can't be reached. It lasts until `uncordon`, whatever the chart's values say.
    """
    cordoned(target(ctx), operator_namespace, timeout, which, "Cordon", reason)
