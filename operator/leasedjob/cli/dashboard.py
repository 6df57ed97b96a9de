"""`kubectl leasedjob dashboard`: the operator's status page, by a port of this machine."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, urlencode

import click

from leasedjob.cli.exits import Exit, Failure
from leasedjob.cli.options import chosen_namespace, cluster_options, complete_jobs, operator_namespace_option, target

if TYPE_CHECKING:
    from leasedjob.cli.cluster import Cluster
    from leasedjob.cli.forward import Target

Object = dict[str, Any]
LABELS: Final = "app.kubernetes.io/component=operator"
PROGRAM: Final = "leasedjob-operator"
PORT_NAME: Final = "page"
FIRST_SECONDS: Final = 20.0


@click.command()
@click.argument("name", required=False, shell_complete=complete_jobs)
@click.option("--port", type=click.IntRange(0, 65535), default=0, metavar="PORT", help="Of this machine; default: any.")
@click.option("--no-browser", is_flag=True, help="Print the URL and open nothing.")
@operator_namespace_option
@click.option("--pod", metavar="NAME", help="Which of the operator's Pods; default: any that runs.")
@cluster_options
@click.pass_context
def command(
    ctx: click.Context,
    name: str | None,
    port: int,
    no_browser: bool,
    operator_namespace: str | None,
    pod: str | None,
) -> None:
    """Show the operator's status page in a browser.

    A port of this machine leads to the operator's Pod, through the API server, until Ctrl-C. With NAME that LeasedJob
    is shown first. The page has to be switched on in the chart (statusPage.enabled), and shows all namespaces.
    """
    from leasedjob.cli.forward import Forward

    cluster = target(ctx)
    named = chosen_namespace(ctx)

    def find() -> Target:
        return the_pod(cluster, operator_namespace, pod)

    with Forward(cluster, find, port) as forward:
        _first_answer(forward)
        where = path(name, cluster.namespace, named if named != forward.target.namespace else None)
        url = f"http://127.0.0.1:{forward.port}{where}"
        click.echo(url)
        click.echo(f"Forwarding to Pod {forward.target.namespace}/{forward.target.pod}; Ctrl-C ends it.", err=True)
        if not no_browser:
            _open(url)
        try:
            while True:
                time.sleep(0.5)
        except KeyboardInterrupt:
            click.echo("", err=True)


def path(name: str | None, namespace: str, filtered: str | None) -> str:
    """Where the browser begins: at a job, or at the jobs of a namespace, or at all."""
    if name is not None:
        return f"/jobs/{quote(namespace, safe='')}/{quote(name, safe='')}"
    return f"/?{urlencode({'ns': filtered})}" if filtered else "/"


def _first_answer(forward: Any) -> None:
    """Waits until the page answers; Failure REFUSED, with what was said, where it doesn't."""
    from leasedjob.http1 import HttpError, ask

    until = time.monotonic() + FIRST_SECONDS
    while True:
        why = ""
        try:
            status, _ = ask("127.0.0.1", forward.port, "GET", "/static/icon.svg", seconds=FIRST_SECONDS)
            if status == 200:
                return
            why = f"it answers {status}"
        except (OSError, HttpError) as e:
            why = forward.trouble or str(e)
        if time.monotonic() >= until or forward.trouble:
            place = f"Pod {forward.target.namespace}/{forward.target.pod}"
            raise Failure(Exit.REFUSED, f"{place} shows no page: {why}")
        time.sleep(0.2)


def the_pod(cluster: Cluster, namespace: str | None, name: str | None) -> Target:
    """The operator's Pod to forward to.

    Raises:
        Failure: NOT_FOUND, NOT_INSTALLED where the page is off, USAGE where it isn't clear which one is meant.
    """
    found = operator_pods(cluster, namespace)
    if name is not None:
        found = [pod for pod in found if pod["metadata"]["name"] == name]
    if not found:
        where = f"namespace {namespace}" if namespace else f"any namespace ({cluster.where})"
        what = f"no Pod {name} of an operator" if name else "no Pod of an operator"
        raise Failure(Exit.NOT_FOUND, f"{what} in {where}; --operator-namespace says where it is")
    ready = [pod for pod in found if _runs(pod)]
    if not ready:
        names = ", ".join(_name(pod) for pod in found)
        raise Failure(Exit.NOT_FOUND, f"none of the operator's Pods runs: {names}")
    serving = [pod for pod in ready if _page_port(pod) is not None]
    if not serving:
        raise Failure(
            Exit.NOT_INSTALLED,
            f"the operator ({_name(ready[0])}) serves no page: set statusPage.enabled=true in the chart's values",
        )
    releases = sorted({(pod["metadata"]["namespace"], _instance(pod)) for pod in serving})
    if len(releases) > 1:
        said = ", ".join(f"{instance or 'unnamed'} in {where}" for where, instance in releases)
        raise Failure(Exit.USAGE, f"several releases serve a page: {said}; name one by --operator-namespace or --pod")
    chosen = min(serving, key=_name)
    from leasedjob.cli.forward import Target

    return Target(chosen["metadata"]["namespace"], chosen["metadata"]["name"], _page_port(chosen) or 0)


def operator_pods(cluster: Cluster, namespace: str | None) -> list[Object]:
    """The operator's Pods: in this namespace; else in that of the flags if they are there, else wherever they are.

    Raises:
        Failure: NO_ACCESS where it may not be looked for.
    """
    if namespace is not None:
        return _of_operator(replace(cluster, namespace=namespace).list_all("pods", labels=LABELS))
    try:
        if here := _of_operator(cluster.list_all("pods", labels=LABELS)):
            return here
    except Failure as failure:
        if failure.exit_code != Exit.NO_ACCESS:
            raise
    try:
        return _of_operator(cluster.list_all("pods", all_namespaces=True, labels=LABELS))
    except Failure as failure:
        if failure.exit_code != Exit.NO_ACCESS:
            raise
        text = f"{failure.message}; --operator-namespace says in which namespace to look for the operator"
        raise Failure(Exit.NO_ACCESS, text) from failure


def _of_operator(pods: list[Object]) -> list[Object]:
    """Many charts have a component called operator."""
    return [pod for pod in pods if _container(pod) is not None]


def _container(pod: Object) -> Object | None:
    containers = (pod.get("spec") or {}).get("containers") or []
    return next((c for c in containers if PROGRAM in (c.get("command") or [])), None)


def _page_port(pod: Object) -> int | None:
    ports = (_container(pod) or {}).get("ports") or []
    return next((int(p["containerPort"]) for p in ports if p.get("name") == PORT_NAME), None)


def _runs(pod: Object) -> bool:
    """It may also be one whose database is away: that is when a page is wanted. It only has to run."""
    status = pod.get("status") or {}
    return status.get("phase") == "Running" and not pod["metadata"].get("deletionTimestamp")


def _name(pod: Object) -> str:
    return f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"


def _instance(pod: Object) -> str:
    return str((pod["metadata"].get("labels") or {}).get("app.kubernetes.io/instance") or "")


def _open(url: str) -> None:
    """Opens a browser, if this machine has a screen; one in the terminal would take the place of this command."""
    import webbrowser

    screen = os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY") or os.environ.get("BROWSER")
    if screen or sys.platform in ("darwin", "win32"):
        webbrowser.open(url)
