"""What the operator may do: rights that come late, or for some namespaces only, and that none are asked for in vain."""

from __future__ import annotations

import re
import time
from typing import Any
from uuid import uuid4

import pytest
from kubernetes import client

from tests.controller.control_plane import GROUP, Bench, Json, Kubelet, OperatorProcess, wait_until
from tests.controller.proxy import ApiProxy

# The chart's rules for each namespace that is watched.
READ = ["get", "list", "watch"]
LEASEDJOBS: Json = {"apiGroups": [GROUP], "resources": ["leasedjobs"], "verbs": READ}
RUNS: Json = {"apiGroups": [GROUP], "resources": ["leasedjobruns"], "verbs": READ}
PODS: Json = {"apiGroups": [""], "resources": ["pods"], "verbs": [*READ, "create", "delete"]}
REST: list[Json] = [
    {"apiGroups": [GROUP], "resources": ["leasedjobs/status", "leasedjobruns/status"], "verbs": ["patch"]},
    {"apiGroups": [""], "resources": ["events"], "verbs": ["create"]},
    {"apiGroups": [""], "resources": ["secrets"], "verbs": ["create", "get", "patch"]},
]
ALL = [LEASEDJOBS, RUNS, PODS, *REST]
NEVER_COMPARED = {"LEASEDJOB_COMPARE_SECONDS": "3600"}  # so that what is noticed later, a watch has delivered


class Account:
    """A ServiceAccount that may do nothing until it is let."""

    def __init__(self, bench: Bench) -> None:
        self.bench, self.name = bench, f"operator-{uuid4().hex[:8]}"
        bench.core.create_namespaced_service_account(bench.namespace, {"metadata": {"name": self.name}})
        wanted = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"expirationSeconds": 3600}}
        made = bench.core.create_namespaced_service_account_token(self.name, bench.namespace, wanted)
        self.token = made.status.token
        self.rights = client.RbacAuthorizationV1Api(bench.plane.api())
        self._bound: set[str] = set()
        self._subject = {"kind": "ServiceAccount", "name": self.name, "namespace": bench.namespace}

    def environment(self, proxy: ApiProxy | None = None, **more: str) -> dict[str, str]:
        path = self.bench.plane.kubeconfig(proxy.port if proxy else None, token=self.token)
        return {"LEASEDJOB_KUBECONFIG": str(path), **more}

    def _ref(self, kind: str) -> Json:
        return {"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": self.name}

    def may(self, *rules: Json, namespace: str = "") -> None:
        """Exactly these rules, in one namespace."""
        where = namespace or self.bench.namespace
        role = {"metadata": {"name": self.name}, "rules": list(rules)}
        if where in self._bound:
            self.rights.replace_namespaced_role(self.name, where, role)
            return
        self._bound.add(where)
        self.rights.create_namespaced_role(where, role)
        binding = {"metadata": {"name": self.name}, "subjects": [self._subject], "roleRef": self._ref("Role")}
        self.rights.create_namespaced_role_binding(where, binding)

    def may_everywhere(self, *rules: Json) -> None:
        self.rights.create_cluster_role({"metadata": {"name": self.name}, "rules": list(rules)})
        binding = {"metadata": {"name": self.name}, "subjects": [self._subject], "roleRef": self._ref("ClusterRole")}
        self.rights.create_cluster_role_binding(binding)

    def forget(self) -> None:
        self.rights.delete_cluster_role(self.name)
        self.rights.delete_cluster_role_binding(self.name)


def _unready(operator: OperatorProcess, *words: str, before: bool = False) -> None:
    """Until /readyz has these words. `before`: it may have been ready, else it must not say so for a moment."""

    def says_so() -> bool:
        assert operator.alive, operator.tail()
        status, text = operator.probe("/readyz")
        assert before or status != 200, "not everything is watched, and it says that it is ready"
        return status != 200 and all(w in text for w in words)

    wait_until(f"/readyz names {words}", says_so, 60)
    assert operator.probe("/healthz")[0] == 200, "a restart would not help"


def _works(bench: Bench, job: str) -> None:
    """Each step is noticed by another watch: the request by that of LeasedJobRuns, the end by that of Pods."""
    bench.apply(job, suspend=True)
    bench.whole_run(job)


def test_rights_that_come_late_in_namespaced_mode(bench: Bench) -> None:
    """One right after the other, long after the start: no restart, ready when all are there, and all watches run."""
    account = Account(bench)
    operator = bench.operator(start=False, **account.environment(**NEVER_COMPARED))
    operator.start()
    _unready(operator, "leasedjobs", "forbidden")
    account.may(LEASEDJOBS, *REST)
    _unready(operator, "leasedjobruns", "forbidden")
    account.may(LEASEDJOBS, RUNS, *REST)
    _unready(operator, '"pods"', "forbidden")
    account.may(LEASEDJOBS, {**RUNS, "verbs": ["get", "list"]}, PODS, *REST)
    _unready(operator, 'cannot watch resource "leasedjobruns"')
    account.may(*ALL)
    bench.wait_ready(operator)
    _works(bench, "job")


def test_rights_that_come_late_in_the_whole_cluster(bench: Bench) -> None:
    account = Account(bench)
    operator = bench.operator(start=False, **account.environment(LEASEDJOB_NAMESPACES="", **NEVER_COMPARED))
    operator.start()
    _unready(operator, "leasedjobs", "cluster scope")
    account.may_everywhere(
        *ALL, {"apiGroups": ["apiextensions.k8s.io"], "resources": ["customresourcedefinitions"], "verbs": READ[1:]}
    )
    try:
        bench.wait_ready(operator)
        _works(bench, "job")
    finally:
        operator.kill()
        account.forget()


def test_a_namespace_without_rights_is_not_the_end_of_the_others(bench: Bench) -> None:
    """It is named, and watched as soon as it may be; when the right goes, what is registered there stays so."""
    account = Account(bench)
    account.may(*ALL)
    other = f"{bench.namespace}-b"
    bench.core.create_namespace({"metadata": {"name": other}})
    both = {"LEASEDJOB_NAMESPACES": f"{bench.namespace},{other}", "LEASEDJOB_COMPARE_SECONDS": "2"}
    operator = bench.operator(start=False, **account.environment(**both))
    operator.start()
    _unready(operator, f"namespace {other}", "forbidden")
    _works(bench, "here")
    account.may(*ALL, namespace=other)
    bench.wait_ready(operator)
    there = {**bench.job("here"), "metadata": {"name": "there"}, "status": None}
    bench.custom.create_namespaced_custom_object(GROUP, "v1alpha1", other, "leasedjobs", there)

    def registered() -> list[Any]:
        return bench.sql("SELECT name FROM leasedjob.job_registration ORDER BY name")

    wait_until("it is known there", lambda: registered() == [("here",), ("there",)])
    account.rights.delete_namespaced_role_binding(account.name, other)
    _unready(operator, f"namespace {other}", "forbidden", before=True)
    bench.whole_run("here")
    assert registered() == [("here",), ("there",)], "what can't be seen is not gone"
    operator.kill()
    bench.core.delete_namespace(other)


DISCOVERY = re.compile(r"/(version|api|apis|api/v1|apis/[^/]+(/[^/]+)?|openapi/v3.*)$")  # documents, not objects


def test_namespaced_mode_asks_for_nothing_outside_its_namespace(bench: Bench) -> None:
    """A whole life of runs with a Role alone: no request goes elsewhere, and none is refused."""
    account = Account(bench)
    account.may(*ALL)
    with ApiProxy(bench.plane) as proxy:
        operator = bench.operator(**account.environment(proxy, LEASEDJOB_COMPARE_SECONDS="1"))
        for job in ("one", "two"):
            _works(bench, job)
        bench.apply("removed", suspend=True, successfulRunsHistoryLimit=0)
        bench.run_now("removed")
        kubelet = Kubelet(bench, bench.pod_for("removed"))
        kubelet.run()
        kubelet.end(0)
        wait_until("its Pod is removed", lambda: bench.deleting(kubelet.pod))

        def compared() -> int:
            return len([r for r in proxy.requests if "/leasedjobs?limit=" in r.path])

        before = compared()
        wait_until("two more comparisons", lambda: compared() >= before + 2)
        assert operator.stop() == 0
    mine = re.compile(rf"/(api/v1|apis/leasedjob\.io/v1alpha1)/namespaces/{bench.namespace}/")
    paths = {f"{r.method} {r.path.partition('?')[0]}" for r in proxy.requests}
    outside = [p for p in paths if not mine.match(p.split(" ")[1]) and not DISCOVERY.match(p.split(" ")[1])]
    assert outside == []
    assert not [p for p in paths if "kopf.dev" in p], "no peering: another operator's objects have no say"
    refused = [(r.method, r.path, status) for r, status in proxy.answers if status in (401, 403)]
    assert refused == []
    assert {m.partition(" ")[0] for m in paths} == {"GET", "POST", "PATCH", "DELETE"}, "it did all that it does"


@pytest.mark.soak
def test_rights_that_come_after_a_watcher_would_have_been_given_up(bench: Bench) -> None:
    """A minute and a half without any."""
    account = Account(bench)
    operator = bench.operator(start=False, **account.environment(**NEVER_COMPARED))
    operator.start()
    until = time.monotonic() + 90
    while time.monotonic() < until:
        _unready(operator, "forbidden")
        time.sleep(1)
    account.may(*ALL)
    bench.wait_ready(operator)
    _works(bench, "job")
