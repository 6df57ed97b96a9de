"""The Pod of an attempt: the template kept as written, and what the fence and the stopping budget add."""

from __future__ import annotations

import copy
import json
import re
from datetime import timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit import controller_builders as b

from leasedjob import protocol
from leasedjob.controller import pods
from leasedjob.controller.facts import pod_facts
from leasedjob.controller.pods import Attempt, Owner, Sidecar, build_pod, claim_digest
from leasedjob.identity import label_value
from leasedjob.lease.trust import Timing

ATTEMPT = Attempt(
    lease_id=str(b.lease_id_of()),
    claim_token="11111111-2222-3333-4444-555555555555",
    lock_key="v2:abc",
    run_type="SCHEDULE",
    code=b.CODE,
    run_key="2026-07-20T03:00:00Z",
    tick=b.T0,
    number=2,
    fencing_token=77,
)
SIDECAR = Sidecar(
    image="registry.example/leasedjob/sidecar:1",
    pull_policy="IfNotPresent",
    resources={"requests": {"cpu": "10m", "memory": "48Mi"}, "limits": {"memory": "128Mi"}},
    pull_secrets=("chart-secret",),
    secret="leasedjob-sidecar",
)
DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")


def build(template: Any = None, **more: Any) -> b.Json:
    options: b.Json = {
        "owner": Owner(b.JOB, b.NAMESPACE, b.JOB_UID),
        "template": b.TEMPLATE if template is None else template,
        "attempt": ATTEMPT,
        "timing": b.TIMING,
        "sidecar": SIDECAR,
        "cluster": b.CLUSTER,
        "active_deadline_seconds": None,
        "finish_policy": "{}",
    }
    return build_pod(**options | more)


def template(container: b.Json | None = None, *, metadata: b.Json | None = None, **spec: Any) -> b.Json:
    main = {"name": "main", "image": "busybox"} | (container or {})
    return {"metadata": metadata or {}, "spec": {"containers": [main]} | spec}


def by_name(pod: b.Json, name: str) -> b.Json:
    spec = pod["spec"]
    return next(c for c in spec["initContainers"] + spec["containers"] if c["name"] == name)


def env(container: b.Json) -> dict[str, Any]:
    return {e["name"]: e.get("value") for e in container["env"]}


# --- kept as written -------------------------------------------------------------------------------------------------

RICH: b.Json = {
    "metadata": {"labels": {"team": "billing"}, "annotations": {"note": "ünïcode"}},
    "spec": {
        "serviceAccountName": "worker",
        "automountServiceAccountToken": False,
        "nodeSelector": {"disk": "ssd"},
        "tolerations": [{"key": "spot", "operator": "Exists"}],
        "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": []}}},
        "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "zone"}],
        "priorityClassName": "high",
        "runtimeClassName": "gvisor",
        "securityContext": {"runAsUser": 1000, "fsGroup": 2000, "seccompProfile": {"type": "RuntimeDefault"}},
        "hostAliases": [{"ip": "10.0.0.1", "hostnames": ["db"]}],
        "dnsConfig": {"options": [{"name": "ndots", "value": "1"}]},
        "volumes": [{"name": "data", "emptyDir": {}}],
        "imagePullSecrets": [{"name": "mine"}],
        "aFieldOfTomorrow": {"deeply": [{"nested": True}]},
        "initContainers": [
            {"name": "fetch", "image": "curl", "env": [{"name": "URL", "value": "x"}]},
            {"name": "proxy", "image": "envoy", "restartPolicy": "Always", "startupProbe": {"tcpSocket": {"port": 1}}},
        ],
        "containers": [
            {
                "name": "main",
                "image": "app:1",
                "command": ["run"],
                "args": ["--key=$(LEASEDJOB_IDEMPOTENCY_KEY)"],
                "env": [{"name": "A", "value": "1"}, {"name": "B", "valueFrom": {"fieldRef": {"fieldPath": "x"}}}],
                "envFrom": [{"configMapRef": {"name": "c"}}],
                "resources": {"limits": {"cpu": 1}},
                "ports": [{"name": "http", "containerPort": 8080}],
                "readinessProbe": {"httpGet": {"port": "http"}},
                "lifecycle": {"postStart": {"exec": {"command": ["x"]}}},
                "volumeMounts": [{"name": "data", "mountPath": "/data"}],
                "securityContext": {"runAsNonRoot": True},
                "terminationMessagePolicy": "File",
                "stdin": True,
            },
            {"name": "second", "image": "app:2"},
        ],
    },
}
OUR_ENV = {e["name"] for e in pods.identity_env(ATTEMPT, containers=1, deadline=None)}


def without_ours(pod: b.Json, original: b.Json) -> b.Json:
    """The manifest with every addition of ours taken out again, in the template's shape."""
    pod = copy.deepcopy(pod)
    spec, before = pod["spec"], original["spec"]
    del spec["restartPolicy"], spec["terminationGracePeriodSeconds"]
    for key in ("initContainers", "volumes"):
        spec[key] = [x for x in spec[key] if not x["name"].startswith(protocol.RESERVED_PREFIX)]
    spec["imagePullSecrets"] = [s for s in spec["imagePullSecrets"] if s["name"] not in SIDECAR.pull_secrets]
    for container in spec["containers"] + spec["initContainers"]:
        container["env"] = [e for e in container["env"] if e["name"] not in OUR_ENV]
    for container in spec["containers"]:
        was = next(c for c in before["containers"] if c["name"] == container["name"])
        del container["livenessProbe"]
        if "livenessProbe" in was:
            container["livenessProbe"] = was["livenessProbe"]
        if not (was.get("lifecycle") or {}).get("preStop"):
            del container["lifecycle"]["preStop"]
        if not container["lifecycle"] and "lifecycle" not in was:
            del container["lifecycle"]
        if "terminationMessagePolicy" not in was:
            del container["terminationMessagePolicy"]
    for container in spec["containers"] + spec["initContainers"]:
        if not container["env"]:
            del container["env"]
    for key in ("initContainers", "volumes", "imagePullSecrets"):
        if not spec[key] and key not in before:
            del spec[key]
    meta = {
        kind: {k: v for k, v in pod["metadata"][kind].items() if not k.startswith("leasedjob.io/")}
        for kind in ("labels", "annotations")
    }
    return {"metadata": {k: v for k, v in meta.items() if v}, "spec": spec}


@pytest.mark.parametrize("original", [RICH, b.TEMPLATE, template(volumes=[{"name": "v"}])])
def test_the_template_is_kept_as_written(original: b.Json) -> None:
    before = copy.deepcopy(original)
    pod = build(original)
    assert original == before, "the object in the cache is not touched"
    expected = {"metadata": {k: v for k, v in (original.get("metadata") or {}).items() if v}, "spec": original["spec"]}
    assert without_ours(pod, original) == expected


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=5),
    lambda s: st.lists(s, max_size=3) | st.dictionaries(st.text(max_size=5), s, max_size=3),
    max_leaves=8,
)
OWN_SPEC = {"containers", "initContainers", "volumes", "imagePullSecrets", "restartPolicy", "securityContext"}
OWN_SPEC |= {"activeDeadlineSeconds", "terminationGracePeriodSeconds"}
OWN = {"name", "image", "env", "livenessProbe", "lifecycle", "terminationMessagePolicy", "ports"}


@given(
    st.dictionaries(st.text(max_size=8).filter(lambda k: k not in OWN_SPEC), JSON, max_size=3),
    st.dictionaries(st.text(max_size=8).filter(lambda k: k not in OWN), JSON, max_size=3),
)
def test_fields_that_nobody_knows_are_kept(spec: b.Json, container: b.Json) -> None:
    original = template(container, **spec)
    assert without_ours(build(original), original) == {"metadata": {}, "spec": original["spec"]}


@pytest.mark.parametrize(
    "original",
    [
        {"metadata": None, "spec": {"containers": [{"name": "main", "image": "x", "lifecycle": None, "env": None}]}},
        template({"livenessProbe": None, "ports": None}, initContainers=None, volumes=None, imagePullSecrets=None),
        template(securityContext=None, activeDeadlineSeconds=None),
    ],
)
def test_explicit_nulls(original: b.Json) -> None:
    pod = build(original)
    assert by_name(pod, "main")["lifecycle"]["preStop"] == {"sleep": {"seconds": 10}}


# --- what is added ---------------------------------------------------------------------------------------------------


def test_the_order_of_the_init_containers() -> None:
    pod = build(RICH)
    names = [c["name"] for c in pod["spec"]["initContainers"]]
    assert names == ["leasedjob-adopt", "leasedjob-hold", "fetch", "proxy", "leasedjob-gate"]
    assert by_name(pod, "leasedjob-hold")["restartPolicy"] == "Always"
    assert "restartPolicy" not in by_name(pod, "leasedjob-adopt")
    assert "restartPolicy" not in by_name(pod, "leasedjob-gate")
    assert "startupProbe" not in by_name(pod, "leasedjob-hold"), "it costs a second and is judged again on a restart"


@pytest.mark.parametrize("name", ["leasedjob-adopt", "leasedjob-hold", "leasedjob-gate"])
def test_ours_pass_the_restricted_profile(name: str) -> None:
    container = by_name(build(), name)
    context = container["securityContext"]
    assert context["allowPrivilegeEscalation"] is False
    assert context["runAsNonRoot"] is True
    assert context["capabilities"] == {"drop": ["ALL"]}
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    assert context["readOnlyRootFilesystem"] is True
    assert "runAsUser" not in context, "a platform may assign one"
    assert container["resources"] == SIDECAR.resources, "a quota or limit range asks for them"
    assert (container["image"], container["imagePullPolicy"]) == (SIDECAR.image, SIDECAR.pull_policy)


@pytest.mark.parametrize(("user", "own"), [(0, pods.SIDECAR_UID), (1000, None), (None, None)])
def test_a_pod_that_runs_as_root_does_not_make_the_sidecar_root(user: int | None, own: int | None) -> None:
    pod = build(template(securityContext={} if user is None else {"runAsUser": user}))
    for name in ("leasedjob-adopt", "leasedjob-hold", "leasedjob-gate"):
        assert by_name(pod, name)["securityContext"].get("runAsUser") == own
    assert "securityContext" not in by_name(pod, "main")


def test_volumes_are_ours_alone() -> None:
    pod = build(RICH)
    volumes = {v["name"]: v for v in pod["spec"]["volumes"]}
    assert volumes["leasedjob-handoff"]["emptyDir"]["medium"] == "Memory"
    assert volumes["leasedjob-database"]["secret"]["secretName"] == SIDECAR.secret
    for name in ("main", "second", "fetch", "proxy", "leasedjob-gate"):
        mounts = [m["name"] for m in by_name(pod, name).get("volumeMounts") or []]
        assert not any(m.startswith("leasedjob-") for m in mounts), f"{name} must not see token or credential"
    for name in ("leasedjob-adopt", "leasedjob-hold"):
        mounts = {m["name"]: m for m in by_name(pod, name)["volumeMounts"]}
        assert set(mounts) == {"leasedjob-handoff", "leasedjob-database"}
        assert mounts["leasedjob-database"]["readOnly"] is True


def test_the_claim_token_goes_to_adopt_alone() -> None:
    pod = build(RICH)
    seen = [
        c["name"] for c in pod["spec"]["initContainers"] + pod["spec"]["containers"] if ATTEMPT.claim_token in str(c)
    ]
    assert seen == ["leasedjob-adopt"]
    assert ATTEMPT.claim_token not in str(pod["metadata"])
    assert pod["metadata"]["annotations"][protocol.ANNOTATION_CLAIM] == claim_digest(ATTEMPT.claim_token)


def test_sidecar_environment() -> None:
    pod = build()
    adopt, hold = env(by_name(pod, "leasedjob-adopt")), env(by_name(pod, "leasedjob-hold"))
    assert adopt[protocol.ENV_LEASE_ID] == hold[protocol.ENV_LEASE_ID] == ATTEMPT.lease_id
    assert Timing.from_json(hold[protocol.ENV_TIMING]) == Timing.from_json(adopt[protocol.ENV_TIMING]) == b.TIMING
    assert int(adopt[protocol.ENV_ADOPT_DEADLINE]) < 60, "adopt speaks before its claim runs out"
    assert protocol.ENV_USER_PROBES not in hold
    sources = {e["name"]: e["valueFrom"] for e in by_name(pod, "leasedjob-adopt")["env"] if "valueFrom" in e}
    assert sources[protocol.ENV_POD_UID] == {"fieldRef": {"fieldPath": "metadata.uid"}}
    assert sources[protocol.ENV_POD_NAME] == {"fieldRef": {"fieldPath": "metadata.name"}}


class TestEnvironment:
    EXPECTED: b.Json = {  # noqa: RUF012
        "LEASEDJOB_TYPE": "SCHEDULE",
        "LEASEDJOB_CODE": b.CODE,
        "LEASEDJOB_RUN_KEY": "2026-07-20T03:00:00Z",
        "LEASEDJOB_SCHEDULED_TIME": "2026-07-20T03:00:00Z",
        "LEASEDJOB_IDEMPOTENCY_KEY": "v2:abc",
        "LEASEDJOB_ATTEMPT": "2",
        "LEASEDJOB_FENCING_TOKEN": "77",
        "LEASEDJOB_SIDECAR_URL": "http://127.0.0.1:17891",
        "LEASEDJOB_CONTAINERS": "1",
        "LEASEDJOB_ACTIVE_DEADLINE_SECONDS": "",
    }

    @pytest.mark.parametrize(("name", "containers"), [("main", "2"), ("second", "2"), ("fetch", "0"), ("proxy", "0")])
    def test_each_of_the_user_s_containers_learns_of_its_run(self, name: str, containers: str) -> None:
        found = env(by_name(build(RICH), name))
        assert {k: found[k] for k in self.EXPECTED} == {**self.EXPECTED, "LEASEDJOB_CONTAINERS": containers}
        assert all(isinstance(v, str) for v in found.values() if v is not None), "the API takes strings only"

    def test_ours_stand_first_so_that_others_may_refer_to_them(self) -> None:
        own = [{"name": "KEY", "value": "$(LEASEDJOB_IDEMPOTENCY_KEY)"}, {"name": "LAST", "value": "$(KEY)"}]
        names = [e["name"] for e in by_name(build(template({"env": own})), "main")["env"]]
        assert names == [*self.EXPECTED, "KEY", "LAST"]

    @pytest.mark.parametrize("name", list(EXPECTED))
    def test_ours_can_t_be_replaced(self, name: str) -> None:
        own = [{"name": name, "value": "mine"}, {"name": name, "valueFrom": {"configMapKeyRef": {}}}]
        found = [e for e in by_name(build(template({"env": own})), "main")["env"] if e["name"] == name]
        assert found == [{"name": name, "value": self.EXPECTED[name]}]

    def test_without_tick_and_key(self) -> None:
        initial = Attempt("id", "t", "v2:k", "INITIAL", b.CODE, None, None, 1, 5)
        pod = build(attempt=initial)
        found = env(by_name(pod, "main"))
        assert (found["LEASEDJOB_RUN_KEY"], found["LEASEDJOB_SCHEDULED_TIME"]) == ("", "")
        assert protocol.ANNOTATION_RUN_KEY not in pod["metadata"]["annotations"]

    def test_a_tick_is_told_in_utc(self) -> None:
        """Also if the driver hands out times in the session's zone."""
        tick = b.T0.astimezone(timezone(timedelta(hours=2)))
        attempt = Attempt("id", "t", "v2:k", "SCHEDULE", b.CODE, "k", tick, 1, 5)
        assert env(by_name(build(attempt=attempt), "main"))["LEASEDJOB_SCHEDULED_TIME"] == "2026-07-20T03:00:00Z"


class TestFence:
    def test_each_workload_container_asks_for_its_lease_and_attempt(self) -> None:
        pod = build(RICH)
        for name in ("main", "second"):
            probe = by_name(pod, name)["livenessProbe"]
            assert probe["httpGet"] == {
                "path": f"/v1/lease/{ATTEMPT.lease_id}/2/{name}",
                "port": protocol.PROBE_PORT,
                "scheme": "HTTP",
            }
            timing = b.TIMING.probe
            assert probe["periodSeconds"] == timing.period
            assert probe["failureThreshold"] == timing.threshold
            assert probe["timeoutSeconds"] == timing.timeout
            assert "initialDelaySeconds" not in probe
            assert "terminationGracePeriodSeconds" not in probe, "the kubelet ignores it, and it would mislead"
        assert "livenessProbe" not in by_name(pod, "fetch")

    @given(st.integers(20, 86400))
    def test_the_kubelet_has_decided_within_the_detection_time(self, duration: int) -> None:
        timing = Timing(duration=duration, heartbeat=1, grace=5, pre_stop=0)
        probe = by_name(build(timing=timing), "main")["livenessProbe"]
        detection = probe["periodSeconds"] * probe["failureThreshold"] + probe["timeoutSeconds"]
        assert detection <= min(20, duration / 10)
        assert min(probe["periodSeconds"], probe["failureThreshold"], probe["timeoutSeconds"]) >= 1

    @pytest.mark.parametrize(
        ("own", "moved"),
        [
            ({"httpGet": {"port": "http", "path": "/ok"}}, {"httpGet": {"port": 8080, "path": "/ok"}}),
            ({"httpGet": {"port": 9000}}, {"httpGet": {"port": 9000}}),
            ({"httpGet": {"port": "9000"}}, {"httpGet": {"port": 9000}}),
            ({"tcpSocket": {"port": "db"}}, {"tcpSocket": {"port": 5432}}),
        ],
    )
    def test_the_user_s_own_probe_moves_to_the_sidecar(self, own: b.Json, moved: b.Json) -> None:
        ports = [{"name": "http", "containerPort": 8080}, {"name": "db", "containerPort": 5432}, {"containerPort": 1}]
        own = own | {"periodSeconds": 7, "failureThreshold": 2}
        original = template({"livenessProbe": own, "ports": ports})
        pod = build(original)
        told = json.loads(env(by_name(pod, "leasedjob-hold"))[protocol.ENV_USER_PROBES])
        assert told == {"main": moved | {"periodSeconds": 7, "failureThreshold": 2}}
        assert by_name(pod, "main")["livenessProbe"]["httpGet"]["port"] == protocol.PROBE_PORT
        assert original["spec"]["containers"][0]["livenessProbe"] == own

    def test_a_port_s_name_is_looked_up_in_its_own_container(self) -> None:
        containers = [
            {"name": n, "image": "x", "ports": [{"name": "http", "containerPort": p}]} for n, p in (("a", 1), ("b", 2))
        ]
        for container in containers:
            container["livenessProbe"] = {"httpGet": {"port": "http"}}
        pod = build({"spec": {"containers": containers}})
        told = json.loads(env(by_name(pod, "leasedjob-hold"))[protocol.ENV_USER_PROBES])
        assert {n: p["httpGet"]["port"] for n, p in told.items()} == {"a": 1, "b": 2}

    def test_facts_reads_the_same_probe(self) -> None:
        seen = pod_facts(build())
        assert seen is not None
        assert seen.soonest_stop == (b.TIMING.probe.threshold - 1) * b.TIMING.probe.period


class TestStopping:
    def test_one_budget(self) -> None:
        pod = build()
        assert pod["spec"]["terminationGracePeriodSeconds"] == 60
        assert pod["spec"]["restartPolicy"] == "Never"
        assert by_name(pod, "main")["lifecycle"] == {"preStop": {"sleep": {"seconds": 10}}}
        drain = by_name(pod, "leasedjob-hold")["lifecycle"]["preStop"]["exec"]["command"]
        assert drain == ["leasedjob-sidecar", "drain"]

    @pytest.mark.parametrize(
        "own", [{"exec": {"command": ["bye"]}}, {"httpGet": {"port": 1}}, {"sleep": {"seconds": 3}}]
    )
    def test_the_user_s_own_pre_stop_is_kept(self, own: b.Json) -> None:
        lifecycle = {"preStop": own, "postStart": {"exec": {"command": ["hi"]}}}
        assert by_name(build(template({"lifecycle": lifecycle})), "main")["lifecycle"] == lifecycle

    def test_no_pre_stop_where_the_budget_has_none(self) -> None:
        timing = Timing(duration=900, heartbeat=60, grace=60, pre_stop=0)
        assert "lifecycle" not in by_name(build(timing=timing), "main")

    def test_init_containers_have_none(self) -> None:
        assert "lifecycle" not in by_name(build(RICH), "fetch")

    @pytest.mark.parametrize(
        ("ours", "theirs", "expected"),
        [(None, None, None), (60, None, 60), (None, 90, 90), (60, 90, 60), (90, 60, 60), (60, 60, 60)],
    )
    def test_the_shorter_active_deadline_holds(
        self, ours: int | None, theirs: int | None, expected: int | None
    ) -> None:
        original = template(**({} if theirs is None else {"activeDeadlineSeconds": theirs}))
        pod = build(original, active_deadline_seconds=ours)
        assert pod["spec"].get("activeDeadlineSeconds") == expected
        told = env(by_name(pod, "main"))["LEASEDJOB_ACTIVE_DEADLINE_SECONDS"]
        assert told == ("" if expected is None else str(expected))


# --- names, labels, secrets ------------------------------------------------------------------------------------------

NAMES = [
    "a",
    "nightly",
    "n" * 52,
    "n" * 62,
    "n" * 63,
    "n" * 253,
    "with.dots.in.it",
    "9to5",
    f"{'a' * 61}-b",
    f"{'a.' * 126}a",
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("number", [1, 21, 10_000])
def test_names_and_labels_are_valid(name: str, number: int) -> None:
    attempt = Attempt("id", "t", "v2:k", "SCHEDULE", f"ns/{name}", "k" * 1024, b.T0, number, 1)
    pod = build(owner=Owner(name, b.NAMESPACE, "u"), attempt=attempt)
    meta = pod["metadata"]
    assert DNS_LABEL.fullmatch(meta["name"]), meta["name"]
    for value in meta["labels"].values():
        assert LABEL_VALUE.fullmatch(value), value
    assert meta["annotations"][protocol.ANNOTATION_JOB] == name, "the exact text stands in an annotation"
    assert meta["annotations"][protocol.ANNOTATION_RUN_KEY] == "k" * 1024


def test_names_are_distinct_and_deterministic() -> None:
    seen = set()
    for name in NAMES:
        for key in ("v2:a", "v2:b"):
            for number in (1, 2, 11):
                attempt = Attempt("id", "t", key, "SCHEDULE", "c", "k", b.T0, number, 1)
                options: b.Json = {"owner": Owner(name, b.NAMESPACE, "u"), "attempt": attempt}
                found = build(**options)["metadata"]["name"]
                assert build(**options)["metadata"]["name"] == found
                seen.add(found)
    assert len(seen) == len(NAMES) * 6


@given(st.text(max_size=300))
def test_any_text_becomes_a_label_value(text: str) -> None:
    value = label_value(text)
    assert LABEL_VALUE.fullmatch(value)
    assert value
    if LABEL_VALUE.fullmatch(text) and text:
        assert value == text


def test_ours_win_over_the_template_s_labels() -> None:
    labels = {protocol.LABEL_MANAGED: "false", "team": "x"}
    notes = {protocol.ANNOTATION_LEASE: "forged"}
    meta = build(template(metadata={"labels": labels, "annotations": notes}))["metadata"]
    assert (meta["labels"][protocol.LABEL_MANAGED], meta["labels"]["team"]) == ("true", "x")
    assert meta["annotations"][protocol.ANNOTATION_LEASE] == ATTEMPT.lease_id


def test_the_owner_never_delays_a_deletion() -> None:
    meta = build(template(metadata={"finalizers": ["x/y"], "name": "mine"}))["metadata"]
    (owner,) = meta["ownerReferences"]
    assert (owner["kind"], owner["uid"], owner["controller"]) == ("LeasedJob", b.JOB_UID, True)
    assert owner["blockOwnerDeletion"] is False
    assert "finalizers" not in meta
    assert meta["name"] != "mine"


@pytest.mark.parametrize(
    ("theirs", "ours", "expected"),
    [
        (None, (), None),
        (None, ("a", "b"), ["a", "b"]),
        ([{"name": "mine"}], ("a",), ["mine", "a"]),
        ([{"name": "a"}], ("a", "a"), ["a"]),
        ([{"name": "mine"}], (), ["mine"]),
        ([{}], ("a",), [None, "a"]),
    ],
)
def test_pull_secrets_are_merged(theirs: Any, ours: tuple[str, ...], expected: list[str] | None) -> None:
    original = template(**({} if theirs is None else {"imagePullSecrets": theirs}))
    sidecar = Sidecar("i", "Always", {}, ours, "s")
    found = build(original, sidecar=sidecar)["spec"].get("imagePullSecrets")
    assert (None if found is None else [s.get("name") for s in found]) == expected


def test_what_is_built_is_recognized() -> None:
    seen = pod_facts(build(finish_policy='{"x":1}'))
    assert seen is not None
    assert (seen.lease_id, seen.attempt, seen.code) == (ATTEMPT.lease_id, 2, b.CODE)
    assert (seen.run_key, seen.job_name, seen.job_uid) == (ATTEMPT.run_key, b.JOB, b.JOB_UID)
    assert (seen.claim_digest, seen.finish_policy) == (claim_digest(ATTEMPT.claim_token), '{"x":1}')


def test_two_clusters_pods_have_different_labels() -> None:
    one, two = (build(cluster=c)["metadata"]["labels"][protocol.LABEL_CLUSTER] for c in (b.CLUSTER, b.OTHER_CLUSTER))
    assert one != two
