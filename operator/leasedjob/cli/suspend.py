"""`kubectl leasedjob suspend`: no tick counts any more, until `resume`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from leasedjob.cli.options import cluster_options, complete_jobs, target
from leasedjob.cli.output import Format, format_option, show_object

if TYPE_CHECKING:
    from leasedjob.cli.cluster import Cluster


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...", shell_complete=complete_jobs)
@format_option(Format.JSON, Format.YAML, Format.NAME)
@cluster_options
@click.pass_context
def command(ctx: click.Context, names: tuple[str, ...], output: Format) -> None:
    """Suspend LeasedJobs: none of their ticks counts until `resume`.

    It sets spec.suspend. A run that goes on is left alone (see `cancel`), and runs can still be asked for. A resume
    replays nothing.
    """
    cluster = target(ctx)
    for name in names:
        job = cluster.get("leasedjobs", name)
        if job["spec"].get("suspend"):
            show_object(job, output, "is suspended already")
        else:
            show_object(set_suspend(cluster, job, True), output, "suspended")


def set_suspend(cluster: Cluster, job: dict[str, Any], value: bool) -> dict[str, Any]:
    """Sets spec.suspend, warns where somebody else keeps it, and returns the LeasedJob as it is then."""
    from leasedjob.cli.gitops import keeper

    name = job["metadata"]["name"]
    changed = cluster.merge("leasedjobs", name, {"spec": {"suspend": value}})
    by = keeper(job, "spec", "suspend")
    if by is not None:
        click.echo(
            f"warning: {by} keeps {name} as it is written elsewhere, and may undo this: "
            f"set spec.suspend to {str(value).lower()} there too",
            err=True,
        )
    return changed
