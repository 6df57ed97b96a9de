"""`kubectl leasedjob version`."""

from __future__ import annotations

import click


@click.command()
def command() -> None:
    """Print the plugin's version."""
    from leasedjob import __version__

    click.echo(__version__)
