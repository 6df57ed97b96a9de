"""`--wait` and `--timeout` of the verbs that can wait for a LeasedJobRun to end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from leasedjob.cli.exits import Exit, Failure, Phase
from leasedjob.cli.output import printable

if TYPE_CHECKING:
    from leasedjob.cli.cluster import Cluster

F = TypeVar("F", bound=Callable[..., Any])
ANSWER_SECONDS: Final = 10.0  # for which an operator's first word is waited for
NOT_YET: Final = ("Pending", "Planning")  # reasons of what an operator has seen and not judged


@dataclass(frozen=True, slots=True)
class Wait:
    """How to wait. timeout: seconds, None for ever."""

    timeout: float | None

    def follow(self, cluster: Cluster, name: str) -> tuple[dict[str, Any], Phase]:
        """Follows the run, telling each change on stderr, until it has ended; returns it and its final phase.

        Raises:
            Failure: TIMED_OUT, NOT_FOUND when the run was deleted, INTERRUPTED at Ctrl-C. The run itself goes on.
        """
        told = ""
        with _interruptible(name):
            for run in cluster.follow("leasedjobruns", name, self.timeout):
                phase = Phase.of(run)
                line = _line(run, phase)
                if line != told:
                    click.echo(f"{name}: {line}", err=True)
                    told = line
                if phase.exit_code is not None:
                    return run, phase
        raise Failure(Exit.TIMED_OUT, f"run {name} has not ended after {self.timeout:g} s; it goes on")


def first_answer(cluster: Cluster, name: str) -> dict[str, Any] | None:
    """The run as soon as an operator has judged it; None where none does within ANSWER_SECONDS, or where the run may
    not be watched.

    Raises:
        Failure: as `Wait.follow`.
    """
    try:
        with _interruptible(name):
            for run in cluster.follow("leasedjobruns", name, ANSWER_SECONDS):
                status = run.get("status") or {}
                # A claimed run has an attempt; its Pod may be Pending too.
                if status.get("phase") and (status.get("reason") not in NOT_YET or status.get("attempt")):
                    return run
    except Failure as failure:
        if failure.exit_code != Exit.NO_ACCESS:
            raise
    return None


def answered(cluster: Cluster, name: str, timeout: float) -> dict[str, Any]:
    """The LeasedJobRun of a question, once it has ended.

    Raises:
        Failure: TIMED_OUT where no operator answers in time, INTERRUPTED at Ctrl-C.
    """
    try:
        for run in cluster.follow("leasedjobruns", name, timeout):
            if Phase.of(run).exit_code is not None:
                return run
    except KeyboardInterrupt:
        raise Failure(Exit.INTERRUPTED, "no longer waiting for an answer") from None
    raise Failure(
        Exit.TIMED_OUT,
        f"no operator has answered within {timeout:g} s: is one running, and does it watch the namespace "
        f"{cluster.namespace}?",
    )


@contextmanager
def _interruptible(name: str) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        hint = f"the run goes on (kubectl leasedjob cancel {name} stops it)"
        raise Failure(Exit.INTERRUPTED, f"no longer waiting; {hint}") from None


def wait_options(text: str) -> Callable[[F], F]:
    """--wait, described by `text`, and --timeout; the function receives `wait: Wait | None`."""

    def seconds(ctx: click.Context, _param: click.Parameter, value: bool) -> Wait | None:
        timeout: float | None = ctx.params.pop("timeout")
        if timeout is not None and not value:
            raise click.UsageError("--timeout needs --wait", ctx)
        return Wait(timeout) if value else None

    def decorate(function: F) -> F:
        function = click.option(
            "--timeout",
            type=click.FloatRange(min=0, min_open=True),
            metavar="SECONDS",
            is_eager=True,  # so that --wait's callback finds it
            help="How long --wait waits; default: for ever.",
        )(function)
        return click.option("--wait", is_flag=True, callback=seconds, help=text)(function)

    return decorate


def _line(run: dict[str, Any], phase: Phase) -> str:
    status = run.get("status") or {}
    parts = [str(phase)]
    if status.get("attempt"):
        parts.append(f"attempt {status['attempt']}")
    if status.get("podName"):
        parts.append(f"Pod {status['podName']}")
    if status.get("message") or status.get("reason"):
        parts.append(str(status.get("message") or status["reason"]))
    return printable(", ".join(parts))
