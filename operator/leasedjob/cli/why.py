"""`kubectl leasedjob why`: why it does, or doesn't, run: now, or at a tick."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import click

from leasedjob.cli.exits import Exit, Failure, Phase
from leasedjob.cli.options import cluster_options, complete_jobs, rfc3339, target, which_run
from leasedjob.cli.output import Format, dump, format_option, printable

if TYPE_CHECKING:
    from leasedjob.cli.cluster import Cluster

Object = dict[str, Any]
ANSWER_SECONDS: Final = 30.0


@click.command()
@click.argument("name", shell_complete=complete_jobs)
@which_run(
    at="A tick, e.g. 2026-07-20T03:00:00Z; default: now.",
    run_key="A run instead: a rerun (...Z#r1), or one that somebody asked for.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=ANSWER_SECONDS,
    metavar="SECONDS",
    help=f"How long the operator's answer is waited for; default: {ANSWER_SECONDS:g}.",
)
@format_option(Format.JSON, Format.YAML)
@cluster_options
@click.pass_context
def command(
    ctx: click.Context, name: str, tick: datetime | None, run_key: str | None, timeout: float, output: Format
) -> None:
    """Say why a LeasedJob does, or doesn't, run.

    Without --at: why it does or doesn't run now, by its status. With --at: what became of that tick, and why, by the
    ledger in the database. The operator is asked, with a LeasedJobRun of action Explain that is removed afterwards.
    """
    from leasedjob.cli import explain

    if tick is not None and run_key is not None:
        raise click.UsageError("--at and --run-key exclude each other", ctx)
    cluster = target(ctx)
    now = datetime.now(UTC)
    if tick is None and run_key is None:
        job = cluster.get("leasedjobs", name)
        words = explain.now_in_words(job, now)
        status = job.get("status") or {}
        kept = ("active", "nextScheduleTime", "lastScheduleTime", "lastResult", "ledger")
        found: Object = {"ready": explain.ready(job), **{key: status[key] for key in kept if key in status}}
    else:
        found = _ask(cluster, name, {"tick": rfc3339(tick)} if tick else {"runKey": run_key}, timeout)
        words = explain.explanation_in_words(name, found, now)
    if output in (Format.JSON, Format.YAML):
        dump({**found, "words": words}, output)
        return
    for line in words:
        click.echo(printable(line))


def _ask(cluster: Cluster, name: str, about: Object, timeout: float) -> Object:
    from leasedjob.cli.explain import from_status
    from leasedjob.cli.request import request
    from leasedjob.cli.wait import answered

    job = cluster.get("leasedjobs", name)
    try:
        run = request(cluster, name, action="Explain", **about)
    except Failure as failure:
        known = from_status(job, str(about.get("tick") or about.get("runKey")))
        if failure.exit_code != Exit.NO_ACCESS or known is None:
            raise
        click.echo(
            "note: you may not ask the operator (create leasedjobruns), so this is by the status alone", err=True
        )
        return known
    run_name = run["metadata"]["name"]
    try:
        run = answered(cluster, run_name, timeout)
    finally:
        cluster.discard("leasedjobruns", run_name)
    status = run.get("status") or {}
    explanation: Object | None = status.get("explanation")
    if explanation is None:
        phase = Phase.of(run)
        raise Failure(phase.exit_code or Exit.REFUSED, f"no answer about {name}: {status.get('message') or phase}")
    return explanation
