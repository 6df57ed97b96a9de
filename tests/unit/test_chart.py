"""The chart: what is asked of it whatever the values are, and what each setting changes."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from docsite import chart
from tests.unit.chart_rendering import (
    CHART,
    CLUSTER_SCOPED,
    EMBEDDED,
    EXISTING,
    NAMESPACED,
    REPOSITORY,
    VARIANTS,
    Json,
    containers,
    hooks,
    one,
    operator_env,
    pods,
    rules,
)

import leasedjob
from leasedjob import protocol
from leasedjob.api.v1alpha1 import LeasedJob
from leasedjob.controller.settings import Settings
from leasedjob.lease.tenants import SIDECAR_FUNCTIONS

# --- whatever the values are ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("values", VARIANTS.values(), ids=VARIANTS.keys())
def test_rendering_twice_gives_the_same_text(text: Any, values: Json) -> None:
    assert text(values) == text(values, fresh=True)


@pytest.mark.parametrize("values", [EXISTING, EMBEDDED], ids=["existing Secret", "embedded"])
def test_lint(helm: Any, values: Json) -> None:
    done = helm("lint", "--strict", str(CHART), values=values)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("values", VARIANTS.values(), ids=VARIANTS.keys())
def test_every_pod_passes_the_restricted_profile_with_a_read_only_root(render: Any, values: Json) -> None:
    seen = list(pods(render(values)))
    assert seen
    for name, pod in seen:
        security = pod["securityContext"]
        assert security["runAsNonRoot"] is True, name
        assert security["seccompProfile"]["type"] == "RuntimeDefault", name
        assert not any(pod.get(k) for k in ("hostNetwork", "hostPID", "hostIPC")), name
        assert {k for v in pod.get("volumes", []) for k in v} <= {"name", "emptyDir", "secret", "projected"}, name
        for c in containers(pod):
            own = c["securityContext"]
            assert own["allowPrivilegeEscalation"] is False, (name, c["name"])
            assert own["readOnlyRootFilesystem"] is True, (name, c["name"])
            assert own["capabilities"] == {"drop": ["ALL"]}, (name, c["name"])
            assert c["resources"]["requests"].keys() == {"cpu", "memory"}, (name, c["name"])
            assert "memory" in c["resources"]["limits"], (name, c["name"])


@pytest.mark.parametrize("values", VARIANTS.values(), ids=VARIANTS.keys())
def test_names_are_unique_and_namespaces_are_written_down(render: Any, values: Json) -> None:
    objects = render(values)
    keys = [(o["kind"], o["metadata"].get("namespace"), o["metadata"]["name"]) for o in objects]
    assert len(keys) == len(set(keys))
    for kind, namespace, name in keys:
        assert (namespace is None) == (kind in CLUSTER_SCOPED), (kind, name)


@pytest.mark.parametrize("values", VARIANTS.values(), ids=VARIANTS.keys())
def test_no_role_has_a_wildcard_or_a_right_over_roles(render: Any, values: Json) -> None:
    for o in render(values):
        if o["kind"] in ("Role", "ClusterRole"):
            for group, resource, verb, _ in rules(o):
                assert "*" not in (group, resource, verb)
                assert verb not in ("escalate", "bind", "impersonate")
                assert group != "rbac.authorization.k8s.io"


@pytest.mark.parametrize("values", VARIANTS.values(), ids=VARIANTS.keys())
def test_no_secret_is_rendered(text: Any, render: Any, values: Json) -> None:
    assert not [o for o in render(values) if o["kind"] == "Secret"]
    assert not re.search(r'password[\\": ]+[^\\", ]*[A-Za-z0-9]{8}', text(values).replace("create_database_secret", ""))


@pytest.mark.parametrize("values", VARIANTS.values(), ids=VARIANTS.keys())
def test_only_the_operator_and_its_helpers_get_an_api_token(render: Any, values: Json) -> None:
    for name, pod in pods(render(values)):
        wanted = name in ("lj-leasedjob", "lj-leasedjob-test") or "postgresql-secret" in name
        assert pod["automountServiceAccountToken"] is wanted, name


@pytest.mark.parametrize("values", VARIANTS.values(), ids=VARIANTS.keys())
def test_no_variable_is_set_to_nothing(render: Any, values: Json) -> None:
    """The API server drops an empty value, and whoever compares manifests would find a difference for ever."""
    for _, pod in pods(render(values)):
        assert not [e["name"] for c in containers(pod) for e in c.get("env", []) if e.get("value") == ""]


def test_the_operator_reads_every_setting_as_the_chart_writes_it(render: Any) -> None:
    values = {
        **NAMESPACED,
        "logLevel": "DEBUG",
        "sharedCodes": ["nightly"],
        "sidecar": {
            "image": {"registry": "r.example", "digest": "sha256:" + "0" * 64, "pullPolicy": "Always"},
            "imagePullSecrets": ["pull"],
            "resources": {"requests": {"cpu": "5m"}, "limits": {"memory": "64Mi"}},
            "database": {"host": "db.example", "port": 6432},
            "secret": {"name": "lj-db", "create": True},
            "rotation": {"afterDays": 0.5, "overlapSeconds": 86400},
        },
    }
    env = operator_env(render(values))
    assert env["LEASEDJOB_LOG_LEVEL"] == "DEBUG"
    settings = Settings.from_environment(env)
    assert settings.cluster == "east"
    assert settings.namespaces == ("team-a", "team-b")
    assert settings.sidecar_image == "r.example/leasedjob/sidecar@sha256:" + "0" * 64
    assert settings.sidecar_pull_policy == "Always"
    assert settings.image_pull_secrets == ("pull",)
    assert settings.sidecar_resources["requests"] == {"cpu": "5m", "memory": "48Mi"}
    assert (settings.sidecar_secret, settings.sidecar_secret_create) == ("lj-db", True)
    assert (settings.sidecar_database_host, settings.sidecar_database_port) == ("db.example", "6432")
    assert (settings.rotate_after_days, settings.rotation_overlap_seconds) == (0.5, 86400)
    assert settings.shared_codes == {"nightly"}
    assert (settings.health_port, settings.metrics_port) == (8080, 8081)


# Read by the operator and left to `extraEnv`: for tests, or of no use to anybody.
NOT_IN_THE_CHART = {
    "LEASEDJOB_KUBECONFIG",
    "LEASEDJOB_KOPF_LOG_LEVEL",
    "LEASEDJOB_ROTATION_CHECK_SECONDS",
}


def test_every_setting_of_the_operator_has_a_value() -> None:
    package = CHART.parents[1] / "operator" / "leasedjob" / "controller"
    sources = "".join((package / name).read_text() for name in ("settings.py", "main.py"))
    read = set(re.findall(r'"(LEASEDJOB_[A-Z_]+)"', sources))
    chart = (CHART / "templates" / "deployment.yaml").read_text()
    assert {name for name in read if f"name: {name}\n" not in chart} == NOT_IN_THE_CHART


def test_the_operator_is_told_what_is_its_own(render: Any) -> None:
    values = {"database": {"existingSecret": "lj-database", "ca": {"existingSecret": "db-ca"}}}
    settings = Settings.from_environment({**operator_env(render(values)), "POD_NAMESPACE": "leasedjob-system"})
    assert settings.own_secrets == {"lj-database", "db-ca"}
    assert (settings.own_namespace, settings.own_account) == ("leasedjob-system", "lj-leasedjob")
    settings = Settings.from_environment(operator_env(render({**EMBEDDED, "serviceAccount": {"create": False}})))
    assert (settings.own_secrets, settings.own_account) == ({"lj-leasedjob-postgresql"}, "default")


def test_how_hard_it_works_is_a_value(render: Any) -> None:
    database = {"existingSecret": "lj-database", "connections": 3}
    env = operator_env(render({"database": database, "compareSeconds": 15, "podConcurrency": 7, "podsPerSecond": 40}))
    settings = Settings.from_environment(env)
    assert (settings.compare_seconds, settings.pod_concurrency, settings.database_connections) == (15, 7, 3)
    assert settings.pods_per_second == 40
    found, own = Settings.from_environment(operator_env(render(EXISTING))), Settings()
    assert (found.compare_seconds, found.pod_concurrency) == (own.compare_seconds, own.pod_concurrency)
    assert found.pods_per_second == own.pods_per_second
    assert found.database_connections == own.database_connections


def test_runs_are_kept_for_ever_unless_it_is_asked_otherwise(render: Any) -> None:
    assert Settings.from_environment(operator_env(render(EXISTING))).retention_days == Settings().retention_days == 0
    env = operator_env(render({**EXISTING, "retention": {"days": 90}}))
    assert Settings.from_environment(env).retention_days == 90


def test_the_ledger_is_kept_for_ninety_days_unless_it_is_asked_otherwise(render: Any) -> None:
    assert Settings.from_environment(operator_env(render(EXISTING))).ledger_days == Settings().ledger_days == 90
    env = operator_env(render({**EXISTING, "retention": {"ledgerDays": 0}}))
    assert (Settings.from_environment(env).ledger_days, Settings.from_environment(env).retention_days) == (0, 0)


def test_the_chart_and_the_package_have_one_version() -> None:
    about = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert about["appVersion"] == about["version"] == leasedjob.__version__


def test_no_template_looks_into_the_cluster_or_rolls_dice() -> None:
    """What `lookup` finds differs from account to account, and what is generated differs each time."""
    for template in (CHART / "templates").rglob("*"):
        if template.is_file():
            code = " ".join(re.findall(r"\{\{(.*?)\}\}", template.read_text(), flags=re.DOTALL))
            found = re.findall(r"\b(lookup|rand\w+|gen[A-Z]\w+|now|uuidv4|htpasswd|bcrypt|derivePassword)\b", code)
            assert found == [], template.name


def test_definitions_are_upgraded_with_the_chart() -> None:
    """helm never touches again what is in crds/."""
    assert not (CHART / "crds").exists()
    repository = {p.name for p in (REPOSITORY / "crds").glob("*.yaml")}
    assert {p.name for p in (CHART / "templates" / "crds").glob("*.yaml")} >= {
        name.rpartition("_")[2] for name in repository
    }


def test_the_readme_gives_a_namespaces_role_what_its_sidecars_call() -> None:
    text = re.sub(r"\s+", " ", (CHART / "README.md").read_text())
    granted = text.partition("GRANT EXECUTE ON FUNCTION ")[2].partition(" TO team_a;")[0]
    assert granted == ", ".join(f"leasedjob.{function}" for function in SIDECAR_FUNCTIONS)


# --- rights -----------------------------------------------------------------------------------------------------------

IN_A_NAMESPACE = {
    *(("leasedjob.io", "leasedjobs", v, ()) for v in ("get", "list", "watch")),
    *(("leasedjob.io", "leasedjobruns", v, ()) for v in ("list", "watch")),
    *(("leasedjob.io", f"{r}/status", "patch", ()) for r in ("leasedjobs", "leasedjobruns")),
    *(("", "pods", v, ()) for v in ("get", "list", "watch", "create", "delete")),
    *(("", "events", v, ()) for v in ("create", "patch")),
}
SECRETS = {
    ("", "secrets", "create", ()),
    *(("", "secrets", v, ("leasedjob-sidecar",)) for v in ("get", "patch")),
}
CLUSTER_WIDE = {
    *(("apiextensions.k8s.io", "customresourcedefinitions", v, ()) for v in ("list", "watch")),
}
KUBE_SYSTEM = {("", "namespaces", "get", ("kube-system",))}
OWN = {("", "configmaps", v, ()) for v in ("list", "patch")}  # in the release's namespace


def test_cluster_wide_rights_are_exactly_these(render: Any) -> None:
    role = one(render(EXISTING), "ClusterRole", "-operator")
    assert rules(role) == IN_A_NAMESPACE | SECRETS | CLUSTER_WIDE | KUBE_SYSTEM


def test_a_named_cluster_is_told_from_others_of_that_name(render: Any) -> None:
    objects = render({**EXISTING, "clusterName": "east"})
    assert rules(one(objects, "ClusterRole", "-operator")) == IN_A_NAMESPACE | SECRETS | CLUSTER_WIDE | KUBE_SYSTEM
    assert rules(one(objects, "Role", "-operator-own")) == OWN
    assert operator_env(objects)["LEASEDJOB_RELEASE"] == "leasedjob-system/lj-leasedjob"
    assert "LEASEDJOB_CORDONED" not in operator_env(objects)


def test_a_cluster_is_cordoned_by_a_value(render: Any) -> None:
    values = {**EXISTING, "clusterName": "east", "cordoned": True, "clusterTakeover": "some-uid"}
    settings = Settings.from_environment(operator_env(render(values)))
    assert (settings.cluster, settings.cordoned, settings.cluster_takeover) == ("east", True, "some-uid")


def test_no_right_to_secrets_where_the_user_supplies_them(render: Any) -> None:
    objects = render({**EXISTING, "sidecar": {"secret": {"create": False}}})
    assert rules(one(objects, "ClusterRole", "-operator")) == IN_A_NAMESPACE | CLUSTER_WIDE | KUBE_SYSTEM
    assert operator_env(objects)["LEASEDJOB_SIDECAR_SECRET_CREATE"] == "false"


def test_namespaced_mode_has_a_role_in_each_namespace_and_nothing_cluster_scoped(render: Any) -> None:
    objects = render({**NAMESPACED, "crds": {"enabled": False}})
    assert not [o for o in objects if o["kind"] in CLUSTER_SCOPED]
    roles = {o["metadata"]["namespace"]: o for o in objects if o["kind"] == "Role"}
    bindings = {o["metadata"]["namespace"]: o for o in objects if o["kind"] == "RoleBinding"}
    own = roles.pop("leasedjob-system")
    assert rules(own) == {*OWN, ("", "namespaces", "get", ("leasedjob-system",))}
    assert bindings.pop("leasedjob-system")["roleRef"]["name"] == own["metadata"]["name"]
    assert roles.keys() == bindings.keys() == {"team-a", "team-b"}
    for namespace, role in roles.items():
        assert rules(role) == IN_A_NAMESPACE  # the user supplies the Secrets
        assert bindings[namespace]["roleRef"]["name"] == role["metadata"]["name"]
        assert bindings[namespace]["subjects"] == [
            {"kind": "ServiceAccount", "name": "lj-leasedjob", "namespace": "leasedjob-system"}
        ]
    assert operator_env(objects)["LEASEDJOB_SIDECAR_SECRET_CREATE"] == "false"


def test_namespaced_mode_keeps_only_the_definitions_cluster_scoped(render: Any) -> None:
    assert {o["kind"] for o in render(NAMESPACED) if o["kind"] in CLUSTER_SCOPED} <= {"CustomResourceDefinition"}


def test_namespaced_mode_makes_secrets_where_it_is_told_to(render: Any) -> None:
    objects = render({**NAMESPACED, "sidecar": {"secret": {"create": True}}})
    there = [o for o in objects if o["kind"] == "Role" and o["metadata"]["namespace"].startswith("team-")]
    assert [rules(o) for o in there] == [IN_A_NAMESPACE | SECRETS] * 2
    assert operator_env(objects)["LEASEDJOB_SIDECAR_SECRET_CREATE"] == "true"


def test_namespaced_mode_asks_for_the_clusters_name(refusal: Any) -> None:
    assert "clusterName is required with watchNamespaces" in refusal({**EXISTING, "watchNamespaces": ["team-a"]})


def test_namespaces_are_left_to_another_release(render: Any, refusal: Any) -> None:
    settings = Settings.from_environment(
        operator_env(render({**EXISTING, "excludeNamespaces": ["team-*", "alone"]})) | {"LEASEDJOB_CLUSTER": "east"}
    )
    served = [n for n in ("alone", "alone-2", "team-a", "team-", "a-team-a") if settings.serves(n)]
    assert served == ["alone-2", "a-team-a"]
    assert "excludeNamespaces can't be used" in refusal({**NAMESPACED, "excludeNamespaces": ["team-a"]})
    assert "/excludeNamespaces/0" in refusal({**EXISTING, "excludeNamespaces": ["Team"]})


def test_rbac_can_be_left_to_others(render: Any) -> None:
    kinds = {o["kind"] for o in render({**EXISTING, "rbac": {"create": False}, "serviceAccount": {"create": False}})}
    assert not kinds & {"Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding", "ServiceAccount"}


def test_view_and_edit_are_extended(render: Any) -> None:
    objects = render(EXISTING)
    view, edit = one(objects, "ClusterRole", "-view"), one(objects, "ClusterRole", "-edit")
    assert {v for *_, v, _ in rules(view)} == {"get", "list", "watch"}
    assert not any("status" in r or g != "leasedjob.io" for g, r, *_ in rules(edit))
    assert view["metadata"]["labels"]["rbac.authorization.k8s.io/aggregate-to-view"] == "true"


# --- database and migrations ------------------------------------------------------------------------------------------


def test_without_a_database_it_says_which_two_ways_there_are(refusal: Any) -> None:
    said = refusal({})
    assert "database.existingSecret" in said
    assert "postgresql.embedded=true" in said


def test_an_existing_secret_is_mounted_with_its_ca(render: Any) -> None:
    values = {"database": {"existingSecret": "lj-database", "ca": {"existingSecret": "db-ca", "key": "root.crt"}}}
    pod = one(render(values), "Deployment")["spec"]["template"]["spec"]
    volume = next(v for v in pod["volumes"] if v["name"] == "database")
    assert volume["projected"]["sources"] == [
        {"secret": {"name": "lj-database"}},
        {"secret": {"name": "db-ca", "items": [{"key": "root.crt", "path": "ca.crt"}]}},
    ]
    assert {m["mountPath"] for m in pod["containers"][0]["volumeMounts"] if m["name"] == "database"} == {
        operator_env(render(values))["LEASEDJOB_DATABASE_DIR"]
    }


def test_an_existing_database_is_migrated_by_a_hook_before_anything_else(render: Any) -> None:
    objects = render(EXISTING)
    job = one(objects, "Job", "-migrate")
    assert hooks(job) == {"pre-install", "pre-upgrade"}
    assert job["spec"]["template"]["spec"]["containers"][0]["command"][:2] == ["leasedjob", "migrate"]
    assert "initContainers" not in one(objects, "Deployment")["spec"]["template"]["spec"]
    # The hook's Pod comes before the release's own objects and may use none of them.
    assert "serviceAccountName" not in job["spec"]["template"]["spec"]


def test_the_embedded_database_is_migrated_by_each_operator_pod(render: Any) -> None:
    objects = render(EMBEDDED)
    assert not [o for o in objects if o["kind"] == "Job" and "-migrate" in o["metadata"]["name"]]
    (init,) = one(objects, "Deployment")["spec"]["template"]["spec"]["initContainers"]
    assert init["command"] == ["leasedjob", "migrate", "--wait", "60"]


def test_migrations_can_be_left_to_others(render: Any) -> None:
    for values in (EXISTING, EMBEDDED):
        objects = render({**values, "migrations": {"mode": "none"}})
        assert not [o for o in objects if o["kind"] == "Job" and "-migrate" in o["metadata"]["name"]]
        assert "initContainers" not in one(objects, "Deployment")["spec"]["template"]["spec"]


def test_a_hook_can_not_migrate_a_database_that_comes_after_it(refusal: Any) -> None:
    assert "migrations.mode=hook" in refusal({**EMBEDDED, "migrations": {"mode": "hook"}})


def test_jobs_have_another_name_when_and_only_when_they_differ(render: Any) -> None:
    def name(values: Json) -> str:
        return str(one(render({**EXISTING, **values}), "Job")["metadata"]["name"])

    assert name({}) == name({"replicas": 3})
    assert len({name({}), name({"image": {"tag": "0.2.0"}}), name({"migrations": {"waitSeconds": 5}})}) == 3


def test_the_password_is_made_by_a_hook_that_can_create_secrets_and_nothing_else(render: Any) -> None:
    mine = [o for o in render(EMBEDDED) if hooks(o) and "postgresql-secret" in o["metadata"]["name"]]
    assert {o["kind"] for o in mine} == {"ServiceAccount", "Role", "RoleBinding", "Job"}
    assert all(hooks(o) == {"pre-install", "pre-upgrade"} for o in mine)
    assert rules(one(mine, "Role")) == {("", "secrets", "create", ())}
    (container,) = one(mine, "Job")["spec"]["template"]["spec"]["containers"]
    compile(container["command"][2], "create_database_secret.py", "exec")
    secret = json.loads(container["env"][0]["value"])
    assert "password" not in secret["stringData"]
    assert secret["metadata"]["name"] == "lj-leasedjob-postgresql"
    # Reachable by that name from the runs' Pods, which live in other namespaces.
    assert secret["stringData"]["host"] == "lj-leasedjob-postgresql.leasedjob-system.svc"
    weights = {o["kind"]: int(o["metadata"]["annotations"]["helm.sh/hook-weight"]) for o in mine}
    assert weights["Job"] > max(weights["Role"], weights["RoleBinding"], weights["ServiceAccount"])


def test_the_embedded_database_takes_a_secret_of_ones_own(render: Any) -> None:
    objects = render({**EMBEDDED, **EXISTING})
    assert not [o for o in objects if "postgresql-secret" in o["metadata"]["name"]]
    volumes = one(objects, "StatefulSet")["spec"]["template"]["spec"]["volumes"]
    assert next(v for v in volumes if v["name"] == "database")["secret"]["secretName"] == "lj-database"


def test_an_upgrade_of_the_chart_leaves_the_embedded_database_running(render: Any, tmp_path: Path) -> None:
    newer = shutil.copytree(CHART, tmp_path / "leasedjob")
    chart = yaml.safe_load((newer / "Chart.yaml").read_text())
    (newer / "Chart.yaml").write_text(yaml.safe_dump(chart | {"version": "9.9.9", "appVersion": "9.9.9"}))
    more = {"commonLabels": {"team": "batch"}, "replicas": 3, "podAnnotations": {"a": "b"}, "resources": {}}
    before, after = render(EMBEDDED), render({**EMBEDDED, **more}, chart=newer)
    assert one(before, "Deployment")["spec"] != one(after, "Deployment")["spec"]
    assert one(before, "StatefulSet")["spec"] == one(after, "StatefulSet")["spec"]


def test_the_embedded_database_can_be_kept_on_a_volume(render: Any) -> None:
    values = {
        "postgresql": {"embedded": True, "persistence": {"enabled": True, "size": "2Gi", "storageClassName": "fast"}}
    }
    spec = one(render(values), "StatefulSet")["spec"]
    (claim,) = spec["volumeClaimTemplates"]
    assert claim["spec"]["storageClassName"] == "fast"
    assert claim["spec"]["resources"]["requests"]["storage"] == "2Gi"
    assert not [v for v in spec["template"]["spec"]["volumes"] if v["name"] == "data"]


def test_the_notes_warn_of_the_embedded_database(helm: Any) -> None:
    done = helm("install", "lj", str(CHART), "--dry-run=client", values=EMBEDDED)
    notes = done.stdout.partition("NOTES:")[2]
    assert "postgresql.embedded is for trying out" in notes
    assert "lost with that Pod" in notes
    done = helm("install", "lj", str(CHART), "--dry-run=client", values=EXISTING)
    assert "trying out" not in done.stdout.partition("NOTES:")[2]


# --- images, Pods -----------------------------------------------------------------------------------------------------


def images(objects: list[Json]) -> set[str]:
    return {c["image"] for _, pod in pods(objects) for c in containers(pod)} | {
        operator_env(objects)["LEASEDJOB_SIDECAR_IMAGE"]
    }


def test_images_by_default(render: Any) -> None:
    v = leasedjob.__version__
    assert images(render(EMBEDDED)) == {f"leasedjob/operator:{v}", f"leasedjob/sidecar:{v}", "leasedjob/postgresql:18"}


def test_one_registry_for_every_image(render: Any) -> None:
    objects = render({**EMBEDDED, "global": {"imageRegistry": "mirror.example:5000/x"}, "image": {"registry": "other"}})
    assert {i.split("/leasedjob/")[0] for i in images(objects)} == {"mirror.example:5000/x"}


def test_a_digest_takes_precedence_over_the_tag(render: Any) -> None:
    digest = "sha256:" + "a" * 64
    objects = render({**EXISTING, "image": {"tag": "x", "digest": digest}})
    assert f"leasedjob/operator@{digest}" in images(objects)
    assert not [i for i in images(objects) if "operator:" in i]


def test_pull_secrets_of_the_operator_and_of_the_runs_are_kept_apart(render: Any) -> None:
    values = {
        **EMBEDDED,
        "global": {"imagePullSecrets": ["a", "b"]},
        "imagePullSecrets": ["b", "c"],
        "sidecar": {"imagePullSecrets": ["theirs"]},
    }
    objects = render(values)
    for name, pod in pods(objects):
        assert pod["imagePullSecrets"] == [{"name": n} for n in "abc"], name
    assert json.loads(operator_env(objects)["LEASEDJOB_IMAGE_PULL_SECRETS"]) == ["theirs"]


def test_two_replicas_that_are_never_both_away(render: Any) -> None:
    objects = render(EXISTING)
    spec = one(objects, "Deployment")["spec"]
    assert spec["replicas"] == 2
    assert spec["strategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}
    (spread,) = spec["template"]["spec"]["topologySpreadConstraints"]
    assert spread["whenUnsatisfiable"] == "ScheduleAnyway"
    budget = one(objects, "PodDisruptionBudget")["spec"]
    assert budget["maxUnavailable"] == 1
    labels = spec["template"]["metadata"]["labels"]
    for selector in (spec["selector"]["matchLabels"], budget["selector"]["matchLabels"]):
        assert selector.items() <= labels.items()


def test_user_and_group_can_be_left_to_the_platform(render: Any) -> None:
    nobody = dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup"))
    for name, pod in pods(render({**EXISTING, "podSecurityContext": nobody})):
        assert pod["securityContext"].keys() == {"runAsNonRoot", "seccompProfile"}, name


def test_probes_and_metrics_meet_the_operators_ports(render: Any) -> None:
    objects = render(EXISTING)
    (container,) = one(objects, "Deployment")["spec"]["template"]["spec"]["containers"]
    ports = {p["name"]: p["containerPort"] for p in container["ports"]}
    assert (container["livenessProbe"]["httpGet"]["path"], container["readinessProbe"]["httpGet"]["path"]) == (
        "/healthz",
        "/readyz",
    )
    assert ports[container["livenessProbe"]["httpGet"]["port"]] == 8080
    (port,) = one(objects, "Service", "-metrics")["spec"]["ports"]
    assert ports[port["targetPort"]] == 8081


def test_metrics_can_be_left_out(render: Any) -> None:
    objects = render({**EXISTING, "metrics": {"service": {"enabled": False}}})
    assert not [o for o in objects if o["kind"] == "Service"]
    test = one(objects, "Pod", "-test")
    assert [e["name"] for e in test["spec"]["containers"][1]["env"]] == ["NAMESPACES"]


MONITORS = {"podMonitor": "PodMonitor", "serviceMonitor": "ServiceMonitor"}


@pytest.mark.parametrize(("value", "kind"), MONITORS.items())
def test_a_monitor_scrapes_every_replica_and_keeps_the_jobs_namespaces(render: Any, value: str, kind: str) -> None:
    relabel = [{"action": "labeldrop", "regex": "pod"}]
    more = {"enabled": True, "interval": "15s", "labels": {"release": "prometheus"}, "metricRelabelings": relabel}
    objects = render({**EXISTING, "metrics": {value: more}})
    monitor = one(objects, kind)
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    (endpoint,) = monitor["spec"].get("podMetricsEndpoints") or monitor["spec"]["endpoints"]
    assert (endpoint["port"], endpoint["interval"], endpoint["honorLabels"]) == ("metrics", "15s", True)
    assert endpoint["metricRelabelings"] == relabel
    target = one(objects, "Service", "-metrics") if kind == "ServiceMonitor" else one(objects, "Deployment")
    labels = (target["metadata"] if kind == "ServiceMonitor" else target["spec"]["template"]["metadata"])["labels"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= labels.items()
    other = next(k for k in MONITORS.values() if k != kind)
    assert not [o for o in objects if o["kind"] == other]


def test_monitors_that_would_scrape_twice_or_nothing_are_refused(refusal: Any) -> None:
    both = {"podMonitor": {"enabled": True}, "serviceMonitor": {"enabled": True}}
    assert "enable one of them" in refusal({**EXISTING, "metrics": both})
    nothing = {"service": {"enabled": False}, "serviceMonitor": {"enabled": True}}
    assert "metrics.serviceMonitor needs metrics.service.enabled" in refusal({**EXISTING, "metrics": nothing})


def test_nothing_of_prometheus_or_grafana_by_default(render: Any) -> None:
    kinds = {o["kind"] for o in render(EXISTING)}
    assert not kinds & {"PodMonitor", "ServiceMonitor", "PrometheusRule", "ConfigMap"}


def test_the_rules_are_the_file_word_for_word(render: Any) -> None:
    rule = one(render({**EXISTING, "metrics": {"prometheusRule": {"enabled": True}}}), "PrometheusRule")
    assert rule["spec"] == yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())


def test_rules_can_be_left_out_linked_and_added_to(render: Any) -> None:
    own = {"record": "team:runs", "expr": "sum(leasedjob_runs_total)"}
    values = {
        "enabled": True, "labels": {"release": "prometheus"}, "disabled": ["LeasedJobStartsLate"],
        "runbookBaseURL": "https://docs.example/runbooks/", "additionalRules": [own],
    }  # fmt: skip
    rule = one(render({**EXISTING, "metrics": {"prometheusRule": values}}), "PrometheusRule")
    assert rule["metadata"]["labels"]["release"] == "prometheus"
    *groups, added = rule["spec"]["groups"]
    assert added["rules"] == [own]
    alerts = {r["alert"]: r["annotations"]["runbook_url"] for g in groups for r in g["rules"]}
    assert "LeasedJobStartsLate" not in alerts
    assert alerts["LeasedJobNoSuccess"] == "https://docs.example/runbooks/LeasedJobNoSuccess.md"
    assert all(url == f"https://docs.example/runbooks/{name}.md" for name, url in alerts.items())


def test_the_dashboard_is_the_file_and_found_by_its_label(render: Any) -> None:
    values = {"enabled": True, "annotations": {"grafana_folder": "Batch"}}
    config = one(render({**EXISTING, "metrics": {"dashboard": values}}), "ConfigMap", "-dashboard")
    assert config["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert config["metadata"]["annotations"] == {"grafana_folder": "Batch"}
    file = json.loads((CHART / "files" / "dashboard.json").read_text())
    assert json.loads(config["data"]["leasedjob.json"]) == file


def test_monitors_of_tenants_are_called_only_where_they_are_listed(render: Any) -> None:
    objects = render(EXISTING)
    assert Settings.from_environment(operator_env(objects)).ping_hosts == Settings().ping_hosts
    assert "LEASEDJOB_PING_HOSTS" not in operator_env(objects)
    hosts = ["hc.example", "http://ping.team.svc", "*.checks.example:8443"]
    objects = render({**EXISTING, "monitoring": {"pingHosts": hosts, "secretName": "monitors"}})
    settings = Settings.from_environment(operator_env(objects))
    assert [(e.scheme, e.host, e.port) for e in settings.ping_hosts.entries] == [
        ("https", "hc.example", 443), ("http", "ping.team.svc", 80), ("https", "*.checks.example", 8443),
    ]  # fmt: skip
    assert settings.monitoring_secret == "monitors"
    wanted = IN_A_NAMESPACE | SECRETS | CLUSTER_WIDE | KUBE_SYSTEM | {("", "secrets", "get", ("monitors",))}
    assert rules(one(objects, "ClusterRole", "-operator")) == wanted


def test_traces_go_where_they_are_told_to_or_nowhere(render: Any) -> None:
    assert Settings.from_environment(operator_env(render(EXISTING))).otlp_endpoint == ""
    values = {**EXISTING, "tracing": {"otlpEndpoint": "http://collector.observability.svc:4318"}}
    settings = Settings.from_environment(operator_env(render(values)))
    assert settings.otlp_endpoint == "http://collector.observability.svc:4318"


def test_how_many_jobs_have_series_is_a_value(render: Any) -> None:
    assert Settings.from_environment(operator_env(render(EXISTING))).metrics_jobs == Settings().metrics_jobs
    none = operator_env(render({**EXISTING, "metrics": {"maxJobs": 0}}))
    assert Settings.from_environment(none).metrics_jobs == 0


def test_helm_test_checks_schema_and_cluster(render: Any) -> None:
    pod = one(render(NAMESPACED), "Pod", "-test")
    assert hooks(pod) == {"test"}
    database, cluster = pod["spec"]["containers"]
    assert database["command"] == ["leasedjob", "migrate", "--check"]
    compile(cluster["command"][2], "check_release.py", "exec")
    assert {"name": "NAMESPACES", "value": '["team-a","team-b"]'} in cluster["env"]


@pytest.mark.parametrize(("name", "full"), [("lj", "lj-leasedjob"), ("leasedjob", "leasedjob"), ("x" * 53, "x" * 36)])
def test_names_fit(render: Any, name: str, full: str) -> None:
    objects = render(EMBEDDED, name=name)
    assert one(objects, "Deployment")["metadata"]["name"] == full
    assert all(len(o["metadata"]["name"]) <= 63 for o in objects if o["kind"] not in CLUSTER_SCOPED)


# --- what goes where it is told to ------------------------------------------------------------------------------------


def test_more_objects_as_they_are_and_as_templates(render: Any) -> None:
    alert = {"annotations": {"summary": "{{ $labels.pod }} is away"}}
    own = {"apiVersion": "example/v1", "kind": "Rule", "metadata": {"name": "own", "namespace": "x"}, "spec": alert}
    template = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: '{{ .Release.Name }}-own', namespace: x}\n"
    objects = render({**EXISTING, "extraObjects": [own, template]})
    assert one(objects, "Rule") == own, "braces in an object are somebody else's"
    assert one(objects, "ConfigMap")["metadata"]["name"] == "lj-own"


def test_annotations_variables_and_classes_reach_their_objects(render: Any) -> None:
    objects = render(VARIANTS["everything set"] | {"migrations": {"mode": "hook"}, "revisionHistoryLimit": 0})
    deployment = one(objects, "Deployment")
    pod = deployment["spec"]["template"]
    assert deployment["metadata"]["annotations"] == {"reloader": "yes"}
    assert deployment["spec"]["revisionHistoryLimit"] == 0
    assert pod["metadata"]["annotations"]["note"] == "yes"
    assert pod["spec"]["containers"][0]["envFrom"] == [{"configMapRef": {"name": "more", "optional": True}}]
    for spec in (pod["spec"], one(objects, "Job", "-migrate")["spec"]["template"]["spec"]):
        assert spec["priorityClassName"] == "high"
        assert spec["tolerations"] == [{"operator": "Exists"}]
        assert spec["nodeSelector"] == {"kubernetes.io/os": "linux"}
        assert spec["affinity"] == {"nodeAffinity": {}}
    (spread,) = pod["spec"]["topologySpreadConstraints"]
    assert spread["topologyKey"] == "zone"
    assert one(objects, "Service", "-metrics")["metadata"]["annotations"] == {"a": "b"}
    assert one(objects, "ServiceAccount")["metadata"]["annotations"] == {"a": "b"}


def test_common_labels_are_on_every_object_of_the_charts_own(render: Any) -> None:
    for values in (EXISTING, EMBEDDED, NAMESPACED):
        objects = render({**values, "commonLabels": {"team": "batch"}, "networkPolicy": {"enabled": True}})
        for o in objects:
            if o["kind"] != "CustomResourceDefinition":
                assert o["metadata"]["labels"]["team"] == "batch", (o["kind"], o["metadata"]["name"])


def test_what_makes_the_databases_secret_is_no_endpoint_of_the_database(render: Any) -> None:
    objects = render(EMBEDDED)
    selector = one(objects, "Service", "-postgresql")["spec"]["selector"]
    for job in (o for o in objects if o["kind"] == "Job"):
        assert not selector.items() <= job["spec"]["template"]["metadata"]["labels"].items(), job["metadata"]["name"]


def test_what_artifact_hub_is_told_is_so(render: Any) -> None:
    notes = yaml.safe_load((CHART / "Chart.yaml").read_text())["annotations"]
    assert {i["image"] for i in yaml.safe_load(notes["artifacthub.io/images"])} == images(render(EMBEDDED))
    definitions = {
        o["metadata"]["name"]: o["spec"] for o in render(EXISTING) if o["kind"] == "CustomResourceDefinition"
    }
    told = yaml.safe_load(notes["artifacthub.io/crds"])
    assert {(c["name"], c["kind"]) for c in told} == {(n, s["names"]["kind"]) for n, s in definitions.items()}
    for crd in told:
        assert crd["version"] in [v["name"] for v in definitions[crd["name"]]["versions"] if v["served"]]
    for example in yaml.safe_load(notes["artifacthub.io/crdsExamples"]):
        LeasedJob.model_validate(example)
    assert {c["kind"] for c in yaml.safe_load(notes["artifacthub.io/changes"])} <= {
        "added", "changed", "deprecated", "removed", "fixed", "security",
    }  # fmt: skip


# --- policies of the network ------------------------------------------------------------------------------------------


def policies(objects: list[Json]) -> dict[str, Json]:
    return {o["metadata"]["name"]: o for o in objects if o["kind"] == "NetworkPolicy"}


def ports_of(policy: Json, way: str = "egress") -> set[tuple[str, int]]:
    return {(p["protocol"], p["port"]) for rule in policy["spec"].get(way, []) for p in rule["ports"]}


DNS = {("UDP", 53), ("TCP", 53)}
API = {("TCP", 443), ("TCP", 6443)}
DATABASE = {("TCP", 5432)}


def test_there_is_no_policy_by_default(render: Any) -> None:
    assert policies(render(EXISTING)) == {}


@pytest.mark.parametrize("values", [EXISTING, EMBEDDED], ids=["existing Secret", "embedded"])
def test_every_pod_of_the_release_has_one_policy(render: Any, values: Json) -> None:
    """One that selects it and no other, with what its kind of Pod needs and nothing else."""
    objects = render({**values, "networkPolicy": {"enabled": True}})
    needs = {
        "operator": DNS | API | DATABASE, "test": DNS | API | DATABASE | {("TCP", 8081)}, "migrate": DNS | DATABASE,
        "postgresql": set(), "postgresql-secret": DNS | API,
    }  # fmt: skip
    for o in objects:
        labels = o["metadata"]["labels"] if o["kind"] == "Pod" else None
        if o["kind"] in ("Deployment", "StatefulSet", "Job"):
            labels = o["spec"]["template"]["metadata"]["labels"]
        if labels is None:
            continue
        mine = [
            p for p in policies(objects).values() if p["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
        ]
        assert len(mine) == 1, o["metadata"]["name"]
        assert mine[0]["spec"]["policyTypes"] == ["Ingress", "Egress"]
        assert ports_of(mine[0]) == needs[labels["app.kubernetes.io/component"]], o["metadata"]["name"]
        # What runs before the release's own objects needs a policy that is there before.
        assert hooks(mine[0]) == (hooks(o) if o["kind"] == "Job" else set())


def test_monitors_and_the_collector_of_traces_are_let_through(render: Any) -> None:
    hosts = ["hc.example", "http://ping.team.svc", "*.checks.example:8443", "https://a.example", "http://b.example:81"]
    values = {
        **EXISTING, "networkPolicy": {"enabled": True}, "monitoring": {"pingHosts": hosts},
        "tracing": {"otlpEndpoint": "http://collector.observability.svc:4318/path"},
    }  # fmt: skip
    operator = policies(render(values))["lj-leasedjob-operator"]
    assert ports_of(operator) == DNS | API | DATABASE | {("TCP", p) for p in (443, 80, 8443, 81, 4318)}


def test_policies_name_the_places_that_are_known(render: Any) -> None:
    api, database, scraper = ([{"ipBlock": {"cidr": f"10.0.{n}.0/24"}}] for n in range(3))
    network = {
        "enabled": True, "apiServer": {"to": api, "ports": [6443]}, "database": {"to": database, "ports": [6432]},
        "metrics": {"from": scraper}, "extraEgress": [{"ports": [{"port": 9}]}], "runNamespaces": ["team-a"],
    }  # fmt: skip
    found = policies(render({**EXISTING, "networkPolicy": network, "sidecar": {"database": {"port": 6433}}}))
    operator = found["lj-leasedjob-operator"]["spec"]
    assert {"ports": [{"protocol": "TCP", "port": 6443}], "to": api} in operator["egress"]
    assert {"ports": [{"protocol": "TCP", "port": 6432}], "to": database} in operator["egress"]
    assert {"ports": [{"port": 9}]} in operator["egress"]
    assert {"ports": [{"protocol": "TCP", "port": 8081}], "from": scraper} in operator["ingress"]
    runs = found["lj-leasedjob-runs"]
    assert runs["metadata"]["namespace"] == "team-a"
    assert runs["spec"]["podSelector"] == {"matchLabels": {protocol.LABEL_MANAGED: "true"}}
    assert ports_of(runs) == DNS | {("TCP", 6432), ("TCP", 6433)}


# --- custom resources -------------------------------------------------------------------------------------------------


def test_definitions_are_kept_on_uninstall_unless_told_otherwise(render: Any) -> None:
    def definitions(crds: Json) -> list[Json]:
        return [o for o in render({**EXISTING, "crds": crds}) if o["kind"] == "CustomResourceDefinition"]

    kept = definitions({})
    assert {o["metadata"]["name"] for o in kept} == {"leasedjobs.leasedjob.io", "leasedjobruns.leasedjob.io"}
    assert all(o["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep" for o in kept)
    for o in definitions({"keep": False, "annotations": {"a": "b"}}):
        assert "helm.sh/resource-policy" not in o["metadata"]["annotations"]
        assert o["metadata"]["annotations"]["a"] == "b"
    assert definitions({"enabled": False}) == []


# --- refusals ---------------------------------------------------------------------------------------------------------


# What is refused -> the value that helm's message has to name, and what has to be said of it.
REFUSED: list[tuple[Json, str, str]] = [
    ({"replica": 3}, "", "additional properties 'replica' not allowed"),
    ({"replicas": -1}, "/replicas", "got -1, want 0"),
    ({"replicas": "two"}, "/replicas", "got string, want integer"),
    ({"image": {"tagg": "1"}}, "/image", "'tagg'"),
    ({"image": {"tag": "a b"}}, "/image/tag", "'a b'"),
    ({"image": {"digest": "abc"}}, "/image/digest", "'abc'"),
    ({"image": {"repository": "Leased/Job"}}, "/image/repository", "'Leased/Job'"),
    ({"image": {"pullPolicy": "Sometimes"}}, "/image/pullPolicy", "'Always', 'IfNotPresent', 'Never'"),
    ({"imagePullSecrets": [{"name": "pull"}]}, "/imagePullSecrets/0", "got object, want string"),
    ({"watchNamespaces": ["Team"]}, "/watchNamespaces/0", "'Team'"),
    ({"watchNamespaces": ["a", "a"]}, "/watchNamespaces", "equal"),
    ({"watchNamespaces": "a"}, "/watchNamespaces", "got string, want array"),
    ({"sharedCodes": ["x" * 65]}, "/sharedCodes/0", "got 65, want 64"),
    ({"sharedCodes": [" x"]}, "/sharedCodes/0", "' x'"),
    ({"clusterName": "two words"}, "/clusterName", "'two words'"),
    ({"migrations": {"mode": "sometimes"}}, "/migrations/mode", "'auto', 'hook', 'initContainer', 'none'"),
    ({"logLevel": "VERBOSE"}, "/logLevel", "'DEBUG', 'INFO', 'WARNING', 'ERROR'"),
    ({"retention": {"days": -1}}, "/retention/days", "got -1, want 0"),
    ({"sidecar": {"secret": {"create": "yes"}}}, "/sidecar/secret/create", "got string"),
    ({"sidecar": {"database": {"port": 0}}}, "/sidecar/database/port", "got 0, want 1"),
    ({"sidecar": {"database": {"port": "pg"}}}, "/sidecar/database/port", "'pg'"),
    ({"sidecar": {"rotation": {"afterDays": -1}}}, "/sidecar/rotation/afterDays", "got -1, want 0"),
    ({"postgresql": {"enabled": True}}, "/postgresql", "'enabled'"),
    ({"postgresql": {"persistence": {"size": "big"}}}, "/postgresql/persistence/size", "'big'"),
    ({"database": {"existingSecret": "a", "password": "b"}}, "/database", "'password'"),
    ({"metrics": {"service": {"port": 70000}}}, "/metrics/service/port", "got 70,000, want 65,535"),
    ({"metrics": {"maxJobs": -1}}, "/metrics/maxJobs", "got -1, want 0"),
    ({"metrics": {"serviceMonitor": {"interval": "often"}}}, "/metrics/serviceMonitor/interval", "'often'"),
    ({"metrics": {"prometheusRule": {"disabled": ["Other"]}}}, "/metrics/prometheusRule/disabled/0", "'Other'"),
    ({"metrics": {"prometheusRule": {"runbookBaseURL": "docs"}}}, "/metrics/prometheusRule/runbookBaseURL", "'docs'"),
    ({"monitoring": {"pingHosts": ["https://hc.example/ping"]}}, "/monitoring/pingHosts/0", "hc.example/ping"),
    ({"monitoring": {"secretName": "My_Secret"}}, "/monitoring/secretName", "'My_Secret'"),
    ({"tracing": {"otlpEndpoint": "collector:4318"}}, "/tracing/otlpEndpoint", "'collector:4318'"),
    ({"extraEnv": [{"value": "x"}]}, "/extraEnv/0", "missing property 'name'"),
    ({"extraEnv": {"A": "b"}}, "/extraEnv", "got object, want array"),
    ({"extraEnvFrom": [{"secret": {"name": "a"}}]}, "/extraEnvFrom/0", "'secret'"),
    ({"extraVolumes": [{"name": "a"}]}, "/extraVolumes/0", "minProperties"),
    ({"extraVolumeMounts": [{"name": "a", "mountPath": "/a", "path": "/a"}]}, "/extraVolumeMounts/0", "'path'"),
    ({"podAnnotations": {"a": True}}, "/podAnnotations/a", "got boolean, want string"),
    ({"podLabels": {"a": "b c"}}, "/podLabels/a", "'b c'"),
    ({"resources": {"limit": {"memory": "1Gi"}}}, "/resources", "'limit'"),
    ({"resources": {"limits": {"memory": "1 GB"}}}, "/resources/limits/memory", "'1 GB'"),
    ({"tolerations": [{"effect": "NoRun"}]}, "/tolerations/0/effect", "'NoSchedule'"),
    ({"affinity": {"nodeaffinity": {}}}, "/affinity", "'nodeaffinity'"),
    ({"topologySpreadConstraints": [{"maxSkew": 1}]}, "/topologySpreadConstraints/0", "topologyKey"),
    ({"securityContext": {"readOnlyRootFileSystem": True}}, "/securityContext", "'readOnlyRootFileSystem'"),
    ({"podDisruptionBudget": {"maxUnavailable": "one"}}, "/podDisruptionBudget/maxUnavailable", "'one'"),
    ({"networkPolicy": {"database": {"ports": []}}}, "/networkPolicy/database/ports", "got 0, want 1"),
    ({"networkPolicy": {"apiServer": {"to": ["10.0.0.1"]}}}, "/networkPolicy/apiServer/to/0", "got string"),
    ({"networkPolicy": {"dns": {"to": [{"ipBlock": {"cidr": "10"}}]}}}, "/networkPolicy/dns/to/0/ipBlock/cidr", "'10'"),
    ({"extraObjects": [1]}, "/extraObjects/0", "got number"),
]


@pytest.mark.parametrize(("values", "path", "said"), REFUSED, ids=[json.dumps(v)[:60] for v, *_ in REFUSED])
def test_unknown_or_wrong_values_are_refused_by_name(refusal: Any, values: Json, path: str, said: str) -> None:
    """One mistake is one line, which names the value."""
    lines = [line for line in refusal({**EXISTING, **values}).splitlines() if line.lstrip().startswith("- at '")]
    assert len(lines) == 1, lines
    assert lines[0].startswith(f"- at '{path}'")
    assert said in lines[0]


def test_the_schema_is_closed_at_each_level() -> None:
    """But for what a parent chart writes into `global`, and the sources of volumes, of which Kubernetes gets more."""
    open_ones = []

    def look(node: Any, path: str) -> None:
        if isinstance(node, dict):
            named = isinstance(node.get("properties"), dict)
            if named and node.get("type") == "object" and node.get("additionalProperties") is not False:
                open_ones.append(path)
            for key, inner in node.items():
                look(inner, f"{path}/{key}")

    look(json.loads((CHART / "values.schema.json").read_text()), "")
    assert open_ones == ["/properties/global", "/properties/extraVolumes/items"]


def test_a_chart_that_has_this_one_as_a_dependency_may_name_a_condition(render: Any) -> None:
    assert render({**EXISTING, "enabled": True})


@pytest.mark.parametrize(
    "name", ["charts/leasedjob/values.schema.json", "charts/leasedjob/README.md"], ids=["schema", "README"]
)
def test_what_is_generated_is_current(name: str) -> None:
    wanted = chart.schema() if name.endswith("json") else chart.readme()
    assert (REPOSITORY / name).read_text() == wanted, "run `make generate`"


def test_a_value_without_a_description_or_a_type_is_found() -> None:
    (value,) = chart.read("# -- Says what.\n# and more\n# @schema {minimum: 1}\nnumber: 3\n")
    assert (value.path, value.default, value.text, value.words) == ("number", 3, "Says what. and more", {"minimum": 1})
    (bare,) = chart.read("list: []\n")
    assert (bare.text, bare.words) == ("", None)
    with pytest.raises(ValueError, match=r"list: a default of .* needs @schema"):
        chart._node(bare)


def test_a_parent_chart_may_write_into_global(render: Any) -> None:
    assert render({**EXISTING, "global": {"someOtherChart": {"a": 1}}})


OPTIONAL = {"claims", "enabled"}  # `enabled` is the condition of a chart that has this one as a dependency


def test_every_value_is_in_the_schema_and_the_reverse() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())

    def compare(value: Any, node: Json, path: str) -> None:
        properties = node.get("properties")
        if isinstance(value, dict) and properties and not path.endswith(("ontext", "ffinity")):  # Kubernetes' own
            missing = properties.keys() - value.keys() - OPTIONAL
            assert not missing, f"{path}: no default for {missing}"
            assert value.keys() <= properties.keys(), path
            for key, inner in value.items():
                compare(inner, properties[key], f"{path}.{key}")

    compare(values, schema, "")
