"""`kubectl leasedjob clusters`: the clusters that work on the database."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Final

import click

from leasedjob.cli.door import ask, operator_options
from leasedjob.cli.options import cluster_options, target
from leasedjob.cli.output import Column, Format, ago, dump, format_option, parse_time, show_table

Object = dict[str, Any]
LOST_SECONDS: Final = 60.0  # without a sign of its operators; they give one every few seconds


@click.command()
@format_option(Format.WIDE, Format.JSON, Format.YAML, Format.NAME)
@click.option("--no-headers", is_flag=True, help="Without the line of headers.")
@operator_options
@cluster_options
@click.pass_context
def command(
    ctx: click.Context, output: Format, no_headers: bool, operator_namespace: str | None, timeout: float
) -> None:
    """List the clusters that share the database.

    With the time at which each was last seen, whether it is cordoned, and how many runs it holds now.
    """
    found = ask(target(ctx), operator_namespace, timeout, action="List")["clusters"]
    if output in (Format.JSON, Format.YAML):
        dump(found, output)
    elif output is Format.NAME:
        for each in found:
            click.echo(f"cluster/{each['name']}")
    else:
        show_table(found, columns(), wide=output is Format.WIDE, headers=not no_headers)


def columns() -> list[Column]:
    """The table's columns."""
    return [
        Column("NAME", lambda each: f"{each['name']}{' (this one)' if each.get('this') else ''}"),
        Column("STATUS", status, coloured=True),
        Column(
            "LAST SEEN", lambda each: f"{ago(each.get('lastSeen'), _now(each))} ago" if each.get("lastSeen") else ""
        ),
        Column("RUNS", lambda each: str(each.get("runs", ""))),
        Column("LEASEDJOBS", lambda each: str(each.get("leasedJobs", ""))),
        Column("VERSION", lambda each: str(each.get("version") or "")),
        Column("REASON", lambda each: str(each.get("reason") or "")),
        Column("CORDONED SINCE", lambda each: str(each.get("cordonedSince") or ""), wide=True),
        Column("CORDONED BY", lambda each: str(each.get("cordonedBy") or ""), wide=True),
        Column("RELEASE", lambda each: str(each.get("release") or ""), wide=True),
        Column("UID", lambda each: str(each.get("uid") or ""), wide=True),
    ]


def status(each: Object) -> str:
    """`Ready`, `Lost` (not seen for a minute) or `Unknown` (its operators are too old to say), as kubectl says it of
    nodes: `Ready,Cordoned`."""
    seen = parse_time(each.get("lastSeen"))
    word = "Unknown"
    if seen is not None:
        word = "Ready" if (_now(each) - seen).total_seconds() < LOST_SECONDS else "Lost"
    return f"{word},Cordoned" if each.get("cordoned") else word


def _now(each: Object) -> datetime:
    """The database's clock, by which the cluster was last seen."""
    return parse_time(each.get("now")) or datetime.now(UTC)
