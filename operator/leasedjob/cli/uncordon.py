"""`kubectl leasedjob uncordon`: a cluster takes runs again."""

from __future__ import annotations

import click

from leasedjob.cli.door import cordoned, operator_options
from leasedjob.cli.options import cluster_options, target


@click.command()
@click.argument("which", required=False, default="", metavar="[CLUSTER]")
@operator_options
@cluster_options
@click.pass_context
def command(ctx: click.Context, which: str, operator_namespace: str | None, timeout: float) -> None:
    """Let a cluster take runs again.

    Ticks that no cluster has run meanwhile are judged by missedRunPolicy. A cordon by the chart's values
    (`cordoned: true`) is ended by them alone.
    """
    cordoned(target(ctx), operator_namespace, timeout, which, "Uncordon", "")
