"""`kubectl leasedjob lint`: what API server and operator would say of manifests, without asking either."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from leasedjob.cli.exits import Exit, Failure
from leasedjob.cli.options import cluster_options
from leasedjob.cli.output import Format, dump, format_option, printable
from leasedjob.protocol import GROUP

if TYPE_CHECKING:
    from leasedjob.cli.manifests import Document

Object = dict[str, Any]


@click.command()
@click.argument("paths", nargs=-1, type=click.Path(), metavar="[FILE]...")
@click.option(
    "-f", "--filename", "files", multiple=True, type=click.Path(), metavar="FILE", help="A manifest; - is stdin."
)
@click.option("--strict", is_flag=True, help="Warnings count as problems.")
@click.option("--timing", is_flag=True, help="Say what each lease is good for: trust, outages, takeover.")
@format_option(Format.JSON, Format.YAML, Format.NAME)
@cluster_options
@click.pass_context
def command(
    ctx: click.Context, paths: tuple[str, ...], files: tuple[str, ...], strict: bool, timing: bool, output: Format
) -> None:
    """Judge manifests of LeasedJobs and LeasedJobRuns, offline.

    The verdict is that of the API server's schema and rules and of the operator together. Exit code 20 says that
    something would be refused. What only a cluster knows, such as quotas, other objects or earlier versions of this
    one, is not judged. Objects of other kinds are left out.
    """
    from leasedjob.cli.manifests import STDIN, read

    sources = [*paths, *files]
    if not sources:
        if sys.stdin.isatty():
            raise click.UsageError("name a manifest, or - for standard input", ctx)
        sources = [STDIN]
    documents = read(sources)
    ours = [document for document in documents if _is_ours(document)]
    if not ours:
        raise Failure(
            Exit.USAGE, "there is no LeasedJob and no LeasedJobRun in it" if documents else "the input is empty"
        )
    found = [_judge(document) for document in ours]
    bad = [entry for entry in found if entry["problems"] or (strict and entry["warnings"])]
    if output in (Format.JSON, Format.YAML):
        dump(found, output)
    elif output is Format.NAME:
        for entry in bad:
            click.echo(f"{entry['kind'].lower()}.{GROUP}/{entry['name']}")
    else:
        for entry in found:
            for line in _lines(entry, timing):
                click.echo(printable(line))
    if bad:
        raise Failure(Exit.INVALID, f"{len(bad)} of {len(found)} objects would not be accepted" if len(found) > 1 else (
            "it would not be accepted"
        ))  # fmt: skip


def _is_ours(document: Document) -> bool:
    version = document.body.get("apiVersion")
    return document.kind in ("LeasedJob", "LeasedJobRun") or (
        isinstance(version, str) and version.startswith(f"{GROUP}/")
    )


def _judge(document: Document) -> Object:
    from leasedjob.api import verdict

    problems = verdict(document.body)
    return {
        "where": document.where,
        "kind": document.kind,
        "name": document.name or str((document.body.get("metadata") or {}).get("generateName") or ""),
        "problems": [
            {"field": problem.field, "reason": str(problem.reason), "message": problem.message} for problem in problems
        ],
        "warnings": [] if problems else list(_warnings(document)),
        "timing": None if problems else _timing(document),
    }


def _warnings(document: Document) -> Iterator[str]:
    """What the operator would accept, and tell as a ScheduleWarning."""
    from leasedjob.api.v1alpha1 import LeasedJobSpec, parse_job

    if document.kind != "LeasedJob":
        return
    spec = parse_job(document.body)
    if isinstance(spec, LeasedJobSpec) and (timetable := spec.schedule_for("")) is not None:
        yield from timetable.warnings


def _timing(document: Document) -> Object | None:
    """What the lease is good for, in whole seconds; None of what has no lease of its own."""
    from leasedjob.api.v1alpha1 import LeasedJobSpec, parse_job

    spec = parse_job(document.body) if document.kind == "LeasedJob" else None
    if not isinstance(spec, LeasedJobSpec):
        return None
    timing = spec.timing
    return {
        "trustedSeconds": math.floor(timing.trust),
        "outageSeconds": math.floor(timing.tolerated_outage),
        "takeoverSeconds": timing.duration,
        "message": timing.in_words(),
    }


def _lines(entry: Object, timing: bool) -> Iterator[str]:
    what = f"{entry['where']}: {entry['kind'].lower()}/{entry['name'] or '?'}"
    for problem in entry["problems"]:
        yield f"{what}: {problem['field']}{': ' if problem['field'] else ''}{problem['message']}"
    for warning in entry["warnings"]:
        yield f"{what}: warning: {warning}"
    if not entry["problems"] and not entry["warnings"]:
        yield f"{what}: ok"
    if timing and entry["timing"]:
        yield f"{what}: {entry['timing']['message']}"
