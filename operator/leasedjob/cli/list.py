"""`kubectl leasedjob list`: LeasedJobs, whether they are in order, and how their last run went."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from leasedjob.cli.options import cluster_options, target
from leasedjob.cli.output import Column, Format, ago, as_list, dump, format_option, qualified, show_table

if TYPE_CHECKING:
    from leasedjob.cli.cluster import Cluster

Object = dict[str, Any]


@click.command(name="list")
@click.option("-A", "--all-namespaces", is_flag=True, help="Of all namespaces.")
@format_option(Format.WIDE, Format.JSON, Format.YAML, Format.NAME)
@click.option("--no-headers", is_flag=True, help="Without the line of headers.")
@cluster_options
@click.pass_context
def command(ctx: click.Context, all_namespaces: bool, output: Format, no_headers: bool) -> None:
    """List LeasedJobs and their last results."""
    show_jobs(target(ctx), all_namespaces=all_namespaces, output=output, headers=not no_headers)


def show_jobs(cluster: Cluster, *, all_namespaces: bool, output: Format, headers: bool) -> None:
    """All LeasedJobs of the namespace, or of the cluster, in `output`."""
    jobs = cluster.list_all("leasedjobs", all_namespaces=all_namespaces)
    if output in (Format.JSON, Format.YAML):
        dump(as_list(jobs), output)
    elif output is Format.NAME:
        for job in jobs:
            click.echo(qualified(job))
    elif jobs:
        show_table(jobs, columns(datetime.now(UTC), all_namespaces), wide=output is Format.WIDE, headers=headers)
    else:
        where = "in any namespace" if all_namespaces else f"in namespace {cluster.namespace}"
        click.echo(f"No LeasedJobs {where}.", err=True)


def columns(now: datetime, with_namespace: bool) -> list[Column]:
    """The table's columns; `now` is what ages count from."""
    return [
        *([Column("NAMESPACE", lambda job: job["metadata"]["namespace"])] if with_namespace else []),
        Column("NAME", lambda job: job["metadata"]["name"]),
        Column("SCHEDULE", schedule),
        Column("TIME ZONE", lambda job: job["spec"].get("timeZone", "")),
        Column("STATE", state, coloured=True),
        Column("ACTIVE", lambda job: str(_status(job).get("activeCount") or 0)),
        Column("NEXT", lambda job: ago(_status(job).get("nextScheduleTime"), now)),
        Column("LAST SCHEDULE", lambda job: ago(_status(job).get("lastScheduleTime"), now)),
        Column("LAST RESULT", last_result, coloured=True),
        Column("AGE", lambda job: ago(job["metadata"].get("creationTimestamp"), now)),
        Column("HOLDER", lambda job: _status(job).get("holder", ""), wide=True),
        Column("ATTEMPT", lambda job: str((_status(job).get("recentRuns") or [{}])[0].get("attempt") or ""), wide=True),
        Column("CODE", lambda job: _status(job).get("code", ""), wide=True),
    ]


def state(job: Object) -> str:
    """`Ready`, `Suspended`, both with `,Cordoned` where its cluster takes no new runs, `Unknown` (no operator has
    looked yet), or the reason why it isn't ready."""
    ready = next((c for c in _status(job).get("conditions") or [] if c.get("type") == "Ready"), None)
    if ready is None or ready.get("status") == "Unknown":
        return "Unknown"
    if ready.get("status") != "True":
        return f"False: {ready.get('reason', '')}"
    word = "Suspended" if ready.get("reason") == "Suspended" else "Ready"
    cordoned = any(c.get("type") == "Cordoned" and c.get("status") == "True" for c in _status(job)["conditions"])
    return f"{word},Cordoned" if cordoned else word  # as kubectl says it of nodes


def last_result(job: Object) -> str:
    """How the latest run stands or ended, with its reason where there is one: `Failed Error`."""
    result = _status(job).get("lastResult", "")
    reasons = (r.get("reason") for r in _status(job).get("recentRuns") or [] if r.get("outcome") == result)
    return f"{result} {next(reasons, None) or ''}".strip()


def schedule(job: Object) -> str:
    """The schedule as it was written, several of them with commas between; `Initial` for a job that runs once."""
    spec = job["spec"]
    written = [spec["schedule"]] if spec.get("schedule") else spec.get("schedules") or []
    return ", ".join(map(str, written)) or str(spec.get("type", ""))


def _status(job: Object) -> Object:
    return job.get("status") or {}
