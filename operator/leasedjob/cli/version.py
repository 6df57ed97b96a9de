"""`kubectl leasedjob version`."""

from __future__ import annotations

import click

from leasedjob.cli.options import cluster_options


@click.command()
@cluster_options
def command() -> None:
    """Print the plugin's version."""
    from leasedjob import __version__

    click.echo(__version__)
