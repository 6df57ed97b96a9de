"""`kubectl leasedjob suspend`: no tick counts any more, until `resume`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from leasedjob.cli.options import cluster_options, complete_jobs, target
from leasedjob.protocol import GROUP

if TYPE_CHECKING:
    from leasedjob.cli.cluster import Cluster


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...", shell_complete=complete_jobs)
@cluster_options
@click.pass_context
def command(ctx: click.Context, names: tuple[str, ...]) -> None:
    """Suspend LeasedJobs: none of their ticks counts until `resume`.

    It sets spec.suspend. A run that goes on is left alone (see `cancel`), and runs can still be asked for. A resume
    replays nothing.
    """
    cluster = target(ctx)
    for name in names:
        job = cluster.get("leasedjobs", name)
        if job["spec"].get("suspend"):
            click.echo(f"leasedjob.{GROUP}/{name} is suspended already")
            continue
        set_suspend(cluster, job, True)
        click.echo(f"leasedjob.{GROUP}/{name} suspended")


def set_suspend(cluster: Cluster, job: dict[str, Any], value: bool) -> None:
    """Sets spec.suspend, and warns where somebody else keeps it."""
    from leasedjob.cli.gitops import keeper

    name = job["metadata"]["name"]
    cluster.merge("leasedjobs", name, {"spec": {"suspend": value}})
    by = keeper(job, "spec", "suspend")
    if by is not None:
        click.echo(
            f"warning: {by} keeps {name} as it is written elsewhere, and may undo this: "
            f"set spec.suspend to {str(value).lower()} there too",
            err=True,
        )
