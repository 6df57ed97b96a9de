"""Asking the operator about clusters: a ConfigMap in its own namespace is the question, and is given the answer."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from leasedjob.cli.exits import Exit, Failure
from leasedjob.cli.options import operator_namespace_option
from leasedjob.protocol import ANSWER_KEY, LABEL_REQUEST, REQUEST_CLUSTERS

if TYPE_CHECKING:
    from leasedjob.cli.cluster import Cluster

F = TypeVar("F", bound=Callable[..., Any])
Object = dict[str, Any]
ANSWER_SECONDS: Final = 30.0
EXITS: Final = {"NotFound": Exit.NOT_FOUND, "Invalid": Exit.USAGE}


def operator_options(function: F) -> F:
    """--operator-namespace and --timeout."""
    for add in (
        click.option(
            "--timeout",
            type=click.FloatRange(min=0, min_open=True),
            default=ANSWER_SECONDS,
            metavar="SECONDS",
            help=f"How long the operator's answer is waited for; default: {ANSWER_SECONDS:g}.",
        ),
        operator_namespace_option,
    ):
        function = add(function)
    return function


def ask(operator: Cluster, namespace: str | None, timeout: float, **question: str) -> Object:
    """The operator's answer to a question, which is removed afterwards.

    Raises:
        Failure: NOT_FOUND where there is no operator, or no such cluster; NO_ACCESS; TIMED_OUT where no answer comes;
            RUN_REFUSED where the operator refuses.
    """
    there = replace(operator, namespace=namespace or the_namespace(operator))
    body = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"generateName": "leasedjob-request-", "labels": {LABEL_REQUEST: REQUEST_CLUSTERS}},
        "data": {key: value for key, value in question.items() if value},
    }
    name = there.create("configmaps", body)["metadata"]["name"]
    try:
        said = _answer(there, name, timeout)
    except KeyboardInterrupt:
        raise Failure(Exit.INTERRUPTED, "no longer waiting for an answer") from None
    finally:
        there.discard("configmaps", name)
    if error := said.get("error"):
        raise Failure(EXITS.get(str(error), Exit.RUN_REFUSED), str(said.get("message") or error))
    return said


def _answer(there: Cluster, name: str, timeout: float) -> Object:
    until = time.monotonic() + timeout
    while True:
        text = (there.get("configmaps", name).get("data") or {}).get(ANSWER_KEY)
        if text is not None:
            answer: Object = json.loads(text)
            return answer
        if time.monotonic() >= until:
            raise Failure(
                Exit.TIMED_OUT,
                f"no operator has answered within {timeout:g} s: does one run in the namespace {there.namespace}, of a "
                "version that knows this question, and may it list ConfigMaps there?",
            )
        time.sleep(0.3)


def the_namespace(cluster: Cluster) -> str:
    """Where the operator is.

    Raises:
        Failure: NOT_FOUND where there is none, USAGE where there are several.
    """
    from leasedjob.cli.dashboard import operator_pods

    found = sorted({pod["metadata"]["namespace"] for pod in operator_pods(cluster, None)})
    if not found:
        text = f"no Pod of an operator in any namespace ({cluster.where}); --operator-namespace says where it is"
        raise Failure(Exit.NOT_FOUND, text)
    if len(found) > 1:
        text = f"several operators, in the namespaces {', '.join(found)}: name one by --operator-namespace"
        raise Failure(Exit.USAGE, text)
    return str(found[0])


def cordoned(cluster: Cluster, namespace: str | None, timeout: float, name: str, action: str, reason: str) -> None:
    """Carries `cordon` or `uncordon` out, and tells in kubectl's words what became of it."""
    said = ask(cluster, namespace, timeout, action=action, cluster=name, reason=reason, by=cluster.user())
    click.echo(f"cluster/{said['cluster']} {said['message']}")
