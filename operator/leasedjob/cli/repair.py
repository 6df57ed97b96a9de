"""What `release` and `forget` share: they look first, say what they will do, ask, and leave it to the operator."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from leasedjob.cli.exits import Exit, Failure, Phase
from leasedjob.cli.options import rfc3339, target, which_run
from leasedjob.cli.output import Format, printable, show_object
from leasedjob.cli.request import raise_unless_good, request
from leasedjob.cli.wait import Wait, answered, first_answer

if TYPE_CHECKING:
    from leasedjob.cli.cluster import Cluster

Object = dict[str, Any]
F = TypeVar("F", bound=Callable[..., Any])
LOOK_SECONDS: Final = 30.0


def repair_options(function: F) -> F:
    """--at, --run-key, --reason and --yes."""
    for add in (
        click.option("-y", "--yes", is_flag=True, help="Don't ask."),
        click.option("--reason", metavar="TEXT", help="Why; kept in the LeasedJobRun and in the audit line."),
        which_run(at="The run of this tick.", run_key="The run with this key; none is needed for type Initial."),
    ):
        function = add(function)
    return function


def repair(
    ctx: click.Context,
    name: str,
    action: str,
    *,
    tick: datetime | None,
    run_key: str | None,
    reason: str | None,
    yes: bool,
    wait: Wait | None,
    output: Format,
    says: Callable[[Object], str],
    done: str,
    force: bool = False,
) -> None:
    """Carries an action out: explain the run, say by `says` what will be done to it, ask, request, tell the answer.

    Args:
        done: how it is called when it is done.
        says: what will be done, from the operator's explanation of the run; raises Failure where nothing is to do.
    """
    if tick is not None and run_key is not None:
        raise click.UsageError("--at and --run-key exclude each other", ctx)
    cluster = target(ctx)
    job = cluster.get("leasedjobs", name)
    if tick is None and run_key is None and job["spec"].get("type") != "Initial":
        raise click.UsageError("name the run: --at TICK or --run-key KEY", ctx)
    about: Object = {"tick": rfc3339(tick)} if tick else {"runKey": run_key} if run_key else {}
    plan = says(_look(cluster, name, about))
    click.echo(printable(plan), err=True)
    if not yes:
        confirm(ctx)
    spec = {**about, **({"reason": reason} if reason else {}), **({"force": True} if force else {})}
    run = request(cluster, name, action=action, **spec)
    run_name = run["metadata"]["name"]
    answer = wait.follow(cluster, run_name)[0] if wait is not None else first_answer(cluster, run_name)
    if answer is None:
        raise Failure(Exit.TIMED_OUT, f"no operator has answered yet; it stays asked for: kubectl get ljr {run_name}")
    raise_unless_good(answer)
    note = done if Phase.of(answer).exit_code is not None else f"is being {done}"
    message = (answer.get("status") or {}).get("message")
    show_object(answer, output, f"{note}: {message}" if message else note)


def _look(cluster: Cluster, name: str, about: Object) -> Object:
    run = request(cluster, name, action="Explain", **about)
    run_name = run["metadata"]["name"]
    try:
        run = answered(cluster, run_name, LOOK_SECONDS)
    finally:
        cluster.discard("leasedjobruns", run_name)
    explanation: Object | None = (run.get("status") or {}).get("explanation")
    if explanation is None:
        raise_unless_good(run)
        raise Failure(Exit.REFUSED, f"no answer about {name}: {(run.get('status') or {}).get('message')}")
    return explanation


def the_run(explanation: Object) -> Object:
    """The run that an explanation is about. Raises Failure NOT_FOUND where there is none."""
    run: Object | None = explanation.get("run")
    if run is None:
        said = explanation.get("message") or explanation.get("verdict")
        raise Failure(Exit.NOT_FOUND, f"there is no such run, so nothing is done: {said}")
    return run


def described(run: Object) -> str:
    """The run as it stands, as a sentence."""
    from leasedjob.cli.explain import run_in_words

    return run_in_words(run, datetime.now(UTC))


def _somebody_is_there() -> bool:
    return sys.stdin.isatty()


def confirm(ctx: click.Context) -> None:
    """Asks whether to go on. Raises UsageError where nobody is there, Failure where the answer is no."""
    if not _somebody_is_there():
        raise click.UsageError("nobody is there to be asked: --yes says yes", ctx)
    if not click.confirm("Go on?", err=True):
        raise Failure(Exit.INTERRUPTED, "nothing was done")
