"""`kubectl leasedjob convert`: CronJobs, from manifests or from the cluster, as LeasedJobs."""

from __future__ import annotations

import re
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from leasedjob.cli.exits import Exit, Failure
from leasedjob.cli.options import Tick, cluster_options, complete_cron_jobs, rfc3339, target
from leasedjob.cli.output import Format, dump_documents, format_option, printable

if TYPE_CHECKING:
    from leasedjob.cli.manifests import Document

_LIVE: Final = re.compile(r"(?:cj|cronjobs?)(?:\.v1)?(?:\.batch)?/(.+)")


@click.command()
@click.argument("sources", nargs=-1, metavar="[cronjob/NAME | FILE]...", shell_complete=complete_cron_jobs)
@click.option(
    "-f", "--filename", "files", multiple=True, type=click.Path(), metavar="FILE", help="A manifest; - is stdin."
)
@click.option(
    "--default-time-zone",
    metavar="ZONE",
    help="Zone of a CronJob that names none; default: Etc/UTC, that of most kube-controller-managers.",
)
@click.option(
    "--not-before", type=Tick(), metavar="TIME", help="From when ticks count, for a cut-over at a known time."
)
@click.option("-q", "--quiet", is_flag=True, help="Don't tell differences, only what can't be converted.")
@format_option(Format.YAML, Format.JSON, Format.NAME)
@cluster_options
@click.pass_context
def command(
    ctx: click.Context,
    sources: tuple[str, ...],
    files: tuple[str, ...],
    default_time_zone: str | None,
    not_before: datetime | None,
    quiet: bool,
    output: Format,
) -> None:
    """Write CronJobs as LeasedJobs.

    CronJobs come from manifests, standard input or the cluster (cronjob/NAME). Each difference is told on stderr. A
    CronJob that would do something else as a LeasedJob is not converted, and the exit code is 20. Nothing in the
    cluster is changed.
    """
    from leasedjob.cli.cronjob import NOTES, Severity, Wishes, convert

    wishes = Wishes(default_time_zone, rfc3339(not_before) if not_before else None)
    converted, refused = [], []
    for document in _cron_jobs(ctx, sources, files):
        shown = f"cronjob/{document.name or '?'}"
        conversion = convert(document.body, datetime.now(UTC), wishes)
        for finding in conversion.findings:
            if finding.severity is Severity.ERROR or not quiet:
                click.echo(printable(f"{finding.severity}: {shown}: {finding}"), err=True)
        if conversion.job is None:
            refused.append(shown)
        else:
            converted.append(conversion.job)
    if converted and not quiet:
        for note in NOTES:
            click.echo(f"note: {note}", err=True)
    if output is Format.NAME:
        for job in converted:
            click.echo(f"leasedjob.leasedjob.io/{job['metadata']['name']}")
    elif converted:
        dump_documents(converted, output or Format.YAML)
    if refused:
        raise Failure(Exit.INVALID, f"not converted, since a LeasedJob would do something else: {', '.join(refused)}")


def _cron_jobs(ctx: click.Context, sources: tuple[str, ...], files: tuple[str, ...]) -> list[Document]:
    """What is to be converted; of other kinds it is said that they are left out."""
    from leasedjob.cli.manifests import STDIN, Document, read

    if not sources and not files:
        if sys.stdin.isatty():
            raise click.UsageError("name a manifest (-f FILE, - for standard input) or a CronJob (cronjob/NAME)", ctx)
        files = (STDIN,)
    found: list[Document] = []
    cluster = None
    for source in sources:
        live = _LIVE.fullmatch(source)
        if live:
            cluster = cluster or target(ctx)
            found.append(Document(source, cluster.get("cronjobs", live[1])))
        elif source == STDIN or Path(source).exists():
            found += read([source])
        else:
            raise Failure(
                Exit.NOT_FOUND, f"{source}: no such file; a CronJob of the cluster is written cronjob/{source}"
            )
    found += read(files)
    others = [document for document in found if document.kind != "CronJob"]
    for document in others:
        hint = "; type: Initial is the LeasedJob that runs once" if document.kind == "Job" else ""
        click.echo(
            printable(f"note: {document.kind.lower()}/{document.name or '?'} is left out: it is no CronJob{hint}"),
            err=True,
        )
    cron_jobs = [document for document in found if document.kind == "CronJob"]
    if not cron_jobs:
        raise Failure(Exit.USAGE, "there is no CronJob in it" if others else "the input is empty")
    return cron_jobs
