"""The flags that every verb of `kubectl leasedjob` takes, spelled as kubectl spells them.

They may stand before or behind the verb. Only click is imported here; the client comes with `target()`.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click
from click.shell_completion import CompletionItem

if TYPE_CHECKING:
    from leasedjob.cli.cluster import Cluster

F = TypeVar("F", bound=Callable[..., Any])


def cluster_options(function: F) -> F:
    """Adds -n/--namespace, --context and --kubeconfig. Their values are kept in the context, not passed on."""
    for add in (
        click.option(
            "--kubeconfig",
            type=click.Path(),
            metavar="FILE",
            expose_value=False,
            callback=_remember,
            help="Path of the kubeconfig; default: $KUBECONFIG, ~/.kube/config, the Pod's service account.",
        ),
        click.option(
            "--context",
            metavar="NAME",
            expose_value=False,
            callback=_remember,
            shell_complete=_contexts,
            help="Context of the kubeconfig; default: its current one.",
        ),
        click.option(
            "-n",
            "--namespace",
            metavar="NAME",
            expose_value=False,
            callback=_remember,
            shell_complete=_namespaces,
            help="Namespace; default: the context's.",
        ),
    ):
        function = add(function)
    return function


def operator_namespace_option(function: F) -> F:
    """Adds --operator-namespace, for verbs that need the operator itself."""
    option = click.option(
        "--operator-namespace",
        metavar="NAME",
        help="Where the operator is; default: the namespace of -n if it is there, else wherever it is found.",
    )
    return option(function)


def _remember(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    if value is not None:
        _chosen(ctx)[str(param.name)] = value
    return value


def _chosen(ctx: click.Context) -> dict[str, str]:
    return cast("dict[str, str]", ctx.find_root().ensure_object(dict))


def target(ctx: click.Context) -> Cluster:
    """The cluster that the flags name.

    Raises `Failure` (UNREACHABLE) where there is no kubeconfig or no such context.
    """
    from leasedjob.cli.cluster import Cluster

    chosen = _chosen(ctx)
    cluster = Cluster.connect(chosen.get("kubeconfig"), chosen.get("context"), chosen.get("namespace"))
    ctx.find_root().call_on_close(cluster.close)
    return cluster


def chosen_namespace(ctx: click.Context) -> str | None:
    """The namespace that -n names; None where the context's counts."""
    return _chosen(ctx).get("namespace")


class Tick(click.ParamType[datetime]):
    """An instant in RFC 3339, whole seconds, with its offset; becomes UTC.

    An offset is asked for because a time without one means something else on every machine.
    """

    name = "tick"

    def convert(self, value: str | datetime, param: click.Parameter | None, ctx: click.Context | None) -> datetime:
        if isinstance(value, datetime):
            return value
        try:
            tick = datetime.fromisoformat(value.upper())
            as_utc = tick.astimezone(UTC)
        except (ValueError, OverflowError):
            self.fail(f"{value!r} is no time; write it like 2026-07-20T03:00:00Z", param, ctx)
        if "T" not in value.upper() or tick.tzinfo is None:
            self.fail(f"{value!r} names no instant; write date, time and offset: 2026-07-20T03:00:00Z", param, ctx)
        if tick.microsecond:
            self.fail(f"{value!r} has fractions of a second; ticks are whole seconds", param, ctx)
        return as_utc


def rfc3339(at: datetime) -> str:
    """As the API writes an instant: in UTC, whole seconds, `Z`."""
    return at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def which_run(*, at: str, run_key: str) -> Callable[[F], F]:
    """--at (also --tick) and --run-key: which run of the LeasedJob is meant. The arguments are their help."""

    def decorate(function: F) -> F:
        function = click.option("--run-key", metavar="KEY", shell_complete=complete_run_keys, help=run_key)(function)
        return click.option(
            "--at", "--tick", "tick", type=Tick(), metavar="TICK", shell_complete=complete_ticks, help=at
        )(function)

    return decorate


# --- completion: silent on every error, and quick ---------------------------------------------------------------------


def _complete(ctx: click.Context, incomplete: str, names: Callable[[Cluster], list[str]]) -> list[str]:
    try:
        return [name for name in names(target(ctx)) if name.startswith(incomplete)]
    except Exception:
        return []  # a completion that complains would garble the command line


def complete_jobs(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    """Names of LeasedJobs in the namespace."""
    return _complete(ctx, incomplete, lambda cluster: cluster.names("leasedjobs"))


def complete_cron_jobs(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """`cronjob/NAME` for the CronJobs in the namespace, and files."""
    names = _complete(ctx, incomplete, lambda cluster: [f"cronjob/{name}" for name in cluster.names("cronjobs")])
    return [*map(CompletionItem, names), *click.Path().shell_complete(ctx, param, incomplete)]


def complete_run_keys(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    """Keys of the recent runs of the LeasedJob that the command line names."""
    # Behind an option that waits for its value click has not given the arguments their names.
    name = str(ctx.params.get("name") or next(iter(ctx.args), ""))

    def keys(cluster: Cluster) -> list[str]:
        status = cluster.get("leasedjobs", name, timeout=cluster.QUICK).get("status") or {}
        return [run["runKey"] for run in status.get("recentRuns") or [] if run.get("runKey")]

    return _complete(ctx, incomplete, keys) if name else []


def complete_ticks(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Those of the keys that are ticks."""
    return [key for key in complete_run_keys(ctx, param, incomplete) if key.endswith("Z")]


def complete_runs(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    """Names of LeasedJobRuns in the namespace that have not ended."""
    from leasedjob.cli.exits import Phase

    def going_on(cluster: Cluster) -> list[str]:
        runs = cluster.list_all("leasedjobruns", timeout=cluster.QUICK)
        return [run["metadata"]["name"] for run in runs if Phase.of(run).exit_code is None]

    return _complete(ctx, incomplete, going_on)


def _namespaces(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    return _complete(ctx, incomplete, lambda cluster: cluster.namespaces())


def _contexts(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    from leasedjob.cli.cluster import context_names

    try:
        return [name for name in context_names(_chosen(ctx).get("kubeconfig")) if name.startswith(incomplete)]
    except Exception:
        return []
