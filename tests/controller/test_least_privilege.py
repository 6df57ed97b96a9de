"""Least privilege: the rules that the chart renders, beside every request that an operator with them makes.

A proxy records the requests over a whole life: starts, requests, a backfill, a cancellation, an attempt that fails, a
holder that is lost, a rotation, pings, Events that repeat, deletions. None is refused, and no rule goes without use.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from kubernetes import client

from leasedjob.lease.rows import Outcome
from leasedjob.protocol import ANSWER_KEY, LABEL_REQUEST, REQUEST_CLUSTERS
from tests.controller.control_plane import GROUP, Bench, Json, Kubelet, wait_until
from tests.controller.proxy import ApiProxy, Request
from tests.controller.test_backfill import DAILY, answer, backfill, node, ticks
from tests.controller.test_monitoring import Monitor, monitor  # noqa: F401  # fixture
from tests.controller.test_rights import DISCOVERY, Account
from tests.unit.chart_rendering import (  # noqa: F401  # fixtures
    EXISTING,
    helm,
    helm_home,
    helm_program,
    one,
    operator_env,
    render,
    rendered,
    rules,
    text,
)

QUICK = {"LEASEDJOB_ROTATION_CHECK_SECONDS": "1", "LEASEDJOB_ROTATION_OVERLAP_SECONDS": "2"}
MODES: dict[str, Json] = {
    "the whole cluster": {},
    "some namespaces": {"sidecar": {"secret": {"create": True}}, "clusterName": "east", "watchNamespaces": ["own"]},
}
# (group, resource, verb, names) -> why the chart grants what no workload here makes the operator ask for.
UNUSED: dict[tuple[str, str, str, tuple[str, ...]], str] = {}


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request needs the right to."""

    group: str
    resource: str  # with the subresource
    verb: str
    name: str
    namespace: str

    def granted_by(self, rule: tuple[str, str, str, tuple[str, ...]]) -> bool:
        group, resource, verb, names = rule
        return (group, resource, verb) == (self.group, self.resource, self.verb) and (not names or self.name in names)


def asked(request: Request) -> Asked | None:
    """None: a document that everybody may read."""
    url = urlsplit(request.path)
    if DISCOVERY.match(url.path):
        return None
    found = re.fullmatch(
        r"/(?:api|apis/(?P<group>[^/]+))/[^/]+(?:/namespaces/(?P<ns>[^/]+)(?=/.))?/(?P<plural>[^/]+)(?:/(?P<name>[^/]+))?"
        r"(?:/(?P<sub>[^/]+))?",
        url.path,
    )
    assert found, request.path
    name = found["name"] or ""
    watch = parse_qs(url.query).get("watch", ["false"])[0] in ("true", "1")
    verb = {
        "GET": "get" if name else "watch" if watch else "list", "POST": "create", "PATCH": "patch", "PUT": "update",
        "DELETE": "delete" if name else "deletecollection",
    }[request.method]  # fmt: skip
    resource = found["plural"] + (f"/{found['sub']}" if found["sub"] else "")
    return Asked(found["group"] or "", resource, verb, name, found["ns"] or "")


@pytest.mark.parametrize(
    ("path", "method", "wanted"),
    [
        ("/api/v1/namespaces/a/pods?limit=5", "GET", Asked("", "pods", "list", "", "a")),
        ("/api/v1/pods?watch=true", "GET", Asked("", "pods", "watch", "", "")),
        ("/api/v1/namespaces/kube-system", "GET", Asked("", "namespaces", "get", "kube-system", "")),
        (
            f"/apis/{GROUP}/v1alpha1/namespaces/a/leasedjobs/b/status",
            "PATCH",
            Asked(GROUP, "leasedjobs/status", "patch", "b", "a"),
        ),
        ("/api/v1/namespaces/a/pods", "DELETE", Asked("", "pods", "deletecollection", "", "a")),
        ("/openapi/v3/apis/leasedjob.io/v1alpha1", "GET", None),
    ],
)
def test_what_a_request_needs(path: str, method: str, wanted: Asked | None) -> None:
    assert asked(Request(method, path, b"")) == wanted


def test_a_right_that_nobody_used_is_found() -> None:
    granted = {("", "secrets", "get", ("own",)), ("", "secrets", "get", ("other",)), ("", "pods", "get", ())}
    assert _unused(granted, {Asked("", "secrets", "get", "own", "a"), Asked("", "pods", "list", "", "a")}) == {
        ("", "secrets", "get", ("other",)), ("", "pods", "get", ()),
    }  # fmt: skip


def _grant(bench: Bench, objects: list[Json]) -> list[Json]:
    """Creates what the chart renders of rights; the roles."""
    rights = client.RbacAuthorizationV1Api(bench.plane.api())
    roles = []
    for o in objects:
        where = o["metadata"].get("namespace")
        match o["kind"]:
            case "ClusterRole" if o["metadata"]["name"].endswith("-operator"):
                rights.create_cluster_role(o)
                roles.append(o)
            case "ClusterRoleBinding":
                rights.create_cluster_role_binding(o)
            case "Role":
                rights.create_namespaced_role(where, o)
                roles.append(o)
            case "RoleBinding":
                rights.create_namespaced_role_binding(where, o)
    return roles


def _events(bench: Bench, reason: str) -> list[Any]:
    return list(bench.core.list_namespaced_event(bench.namespace, field_selector=f"reason={reason}").items)


def _whole_life(bench: Bench, host: str) -> None:
    """Everything that an operator does, as far as it asks the API server for something."""
    secret = {"metadata": {"name": "leasedjob-monitoring"}, "stringData": {"nightly": f"{host}/ping"}}
    bench.core.create_namespaced_secret(bench.namespace, secret)
    bench.apply("job", suspend=True, monitoring={"pingURLKey": "nightly"})
    bench.whole_run("job")
    # What may not be called is told once and then counted.
    bench.apply("refused", suspend=True, monitoring={"pingURL": "https://elsewhere.example"})
    for _ in range(2):
        bench.whole_run("refused")
    wait_until("it is counted", lambda: max((e.count for e in _events(bench, "PingRefused")), default=0) > 1, 60)
    # A cancellation deletes a Pod.
    bench.apply("cancelled", suspend=True)
    run = bench.run_now("cancelled")["metadata"]["name"]
    kubelet = Kubelet(bench, bench.pod_for("cancelled"))
    kubelet.run()
    bench.cancel(run)
    wait_until("its Pod is deleted", lambda: bench.deleting(kubelet.pod), 60)
    bench.gone(kubelet.pod)
    # An attempt that fails, and one whose holder is lost: the Pod before is looked up.
    bench.apply("lost", suspend=True)
    bench.run_now("lost")
    first = Kubelet(bench, bench.pod_for("lost"))
    first.run()
    assert first.report(Outcome.RELEASE)
    first.end(1)
    second = Kubelet(bench, bench.pod_for("lost", 2, seconds=60))
    second.run()
    bench.sql(
        "UPDATE leasedjob.job_scheduler SET modified_at = modified_at - interval '100 s' WHERE id = %s", second.lease_id
    )
    third = Kubelet(bench, bench.pod_for("lost", 3, seconds=60))
    third.run()
    third.end(0)
    # Its registration is gone, as when another replica has heard of a deletion: the object is looked up.
    bench.sql("DELETE FROM leasedjob.job_registration WHERE name = 'lost' AND namespace = %s", bench.namespace)
    bench.whole_run("lost", seconds=60)
    # A backfill, on a schedule of its own; its Pods are removed by the history's limit.
    bench.apply("daily", **DAILY, suspend=True, successfulRunsHistoryLimit=0)
    with node(bench):
        done = answer(bench, backfill(bench, "daily", ticks(2)[0], ticks(2)[-1]))
    assert done["phase"] == "Succeeded"
    # A rotation: a Secret is changed.
    before = bench.core.read_namespaced_secret("leasedjob-sidecar", bench.namespace).data["user"]
    bench.sql("UPDATE leasedjob.tenant SET slot_since = slot_since - interval '31 days'")
    wait_until(
        "the credential is another one",
        lambda: bench.core.read_namespaced_secret("leasedjob-sidecar", bench.namespace).data["user"] != before,
        60,
    )
    question = {
        "metadata": {"name": "question", "labels": {LABEL_REQUEST: REQUEST_CLUSTERS}},
        "data": {"action": "List"},
    }
    bench.core.create_namespaced_config_map(bench.namespace, question)
    wait_until(
        "a question about clusters is answered",
        lambda: ANSWER_KEY in bench.core.read_namespaced_config_map("question", bench.namespace).data,
        60,
    )
    for job in ("job", "refused", "cancelled", "lost", "daily"):
        bench.delete(job)
    wait_until("they are forgotten", lambda: not bench.sql("SELECT 1 FROM leasedjob.job_registration"), 60)


@pytest.mark.parametrize("mode", MODES)
def test_no_request_is_refused_and_no_right_is_without_use(
    bench: Bench,
    render: Any,  # noqa: F811
    monitor: Monitor,  # noqa: F811
    mode: str,
) -> None:
    account = Account(bench)
    mine = {"watchNamespaces": [bench.namespace]} if "watchNamespaces" in MODES[mode] else {}
    values = {
        **EXISTING, **MODES[mode], **mine, "monitoring": {"pingHosts": [monitor.host]}, "compareSeconds": 5,
        "serviceAccount": {"create": False, "name": account.name}, "fullnameOverride": f"r{bench.namespace}",
    }  # fmt: skip
    objects = render(values, namespace=bench.namespace)
    granted = {rule for role in _grant(bench, objects) for rule in rules(role)}
    places = ("LEASEDJOB_DATABASE_DIR", "LEASEDJOB_HEALTH_PORT", "LEASEDJOB_METRICS_PORT")
    env = {k: v for k, v in operator_env(objects).items() if k not in places}
    env = {"LEASEDJOB_CLUSTER": "", "LEASEDJOB_NAMESPACES": "", "POD_NAMESPACE": bench.namespace, **env, **QUICK}
    with ApiProxy(bench.plane) as proxy:
        operators = [bench.operator(f"op-{n}", **account.environment(proxy, **env)) for n in range(2)]
        _whole_life(bench, monitor.host)
        assert [o.stop() for o in operators] == [0, 0]
    refused = [(r.method, r.path, status) for r, status in proxy.answers if status in (401, 403)]
    assert refused == []
    needed = {a for a in map(asked, proxy.requests) if a}
    beyond = {a for a in needed if not any(a.granted_by(rule) for rule in granted)}
    assert beyond == set()
    assert _unused(granted, needed) == set(UNUSED)
    if mine:
        # A namespace itself counts as being in it.
        assert {a.name if a.resource == "namespaces" else a.namespace for a in needed} == {bench.namespace}


def _unused(granted: Iterable[tuple[str, str, str, tuple[str, ...]]], needed: set[Asked]) -> set[Any]:
    return {rule for rule in granted if not any(a.granted_by(rule) for a in needed)}
