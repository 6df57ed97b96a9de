"""The operator's own credentials, and the ways a Pod template has to name a Secret or an account."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit import controller_builders as b

from leasedjob.controller import own
from leasedjob.controller.settings import Settings

Json = dict[str, Any]
HERE = "leasedjob-system"
SETTINGS = Settings(own_namespace=HERE, own_secrets=frozenset({"lj-database", "db-ca"}), own_account="lj")


def container(**more: Any) -> Json:
    return {"containers": [{"name": "main", "image": "i", **more}]}


SECRET = {"name": "lj-database"}
TOKEN = {"serviceAccountToken": {"path": "t"}}
# The path that is refused -> a Pod's spec.
WAYS: dict[str, Json] = {
    "serviceAccountName": {**container(), "serviceAccountName": "lj"},
    "serviceAccount": {**container(), "serviceAccount": "lj"},
    "containers[0].env[1].valueFrom.secretKeyRef.name": container(
        env=[{"name": "A", "value": "b"}, {"name": "P", "valueFrom": {"secretKeyRef": {**SECRET, "key": "password"}}}]
    ),
    "containers[0].envFrom[0].secretRef.name": container(envFrom=[{"secretRef": SECRET}]),
    "initContainers[0].envFrom[0].secretRef.name": {
        **container(), "initContainers": [{"name": "i", "envFrom": [{"prefix": "X", "secretRef": SECRET}]}],
    },
    "volumes[0].secret.secretName": {
        **container(), "volumes": [{"name": "v", "secret": {"secretName": "lj-database"}}],
    },
    "volumes[0].projected.sources[1].secret.name": {
        **container(), "volumes": [{"name": "v", "projected": {"sources": [TOKEN, {"secret": SECRET}]}}],
    },
    "volumes[0].csi.nodePublishSecretRef.name": {
        **container(), "volumes": [{"name": "v", "csi": {"driver": "d", "nodePublishSecretRef": SECRET}}],
    },
    "volumes[0].azureFile.secretName": {
        **container(), "volumes": [{"name": "v", "azureFile": {"secretName": "db-ca", "shareName": "s"}}],
    },
}  # fmt: skip


@pytest.mark.parametrize(("path", "spec"), WAYS.items(), ids=WAYS)
def test_each_way_is_refused_by_its_path_in_the_operators_namespace_alone(path: str, spec: Json) -> None:
    (problem,) = own.problems(HERE, {"spec": spec}, SETTINGS)
    assert problem.field == f"spec.template.spec.{path}"
    assert own.problems("team-a", {"spec": spec}, SETTINGS) == []
    assert own.problems(HERE, {"spec": spec}, Settings()) == [], "an operator that was not told has nothing to compare"


def test_other_secrets_and_accounts_are_the_users() -> None:
    spec = {
        **container(envFrom=[{"secretRef": {"name": "mine"}}, {"configMapRef": SECRET}]),
        "serviceAccountName": "mine",
        "imagePullSecrets": [SECRET],  # read by the kubelet, not by a container
        "volumes": [{"name": "lj-database", "configMap": {"name": "lj-database"}}],
    }
    assert own.problems(HERE, {"spec": spec}, SETTINGS) == []
    assert own.problems(HERE, {"spec": container()}, SETTINGS) == []


def test_where_the_operator_runs_as_default_every_template_has_to_name_another_account() -> None:
    settings = Settings(own_namespace=HERE, own_account="default")
    (problem,) = own.problems(HERE, {"spec": container()}, settings)
    assert problem.field == "spec.template.spec.serviceAccountName"
    assert own.problems(HERE, {"spec": {**container(), "serviceAccountName": "mine"}}, settings) == []


def test_what_is_nonsense_is_no_mistake_of_this_check() -> None:
    spec = {"containers": [None, 3, {"envFrom": None, "env": [{"valueFrom": {"secretKeyRef": "x"}}]}], "volumes": {}}
    assert own.problems(HERE, {"spec": spec}, SETTINGS) == []


def test_the_object_says_which_field_it_is_and_starts_nothing() -> None:
    template = {"spec": {**container(), "serviceAccountName": "lj"}}
    settings = Settings(own_namespace=b.NAMESPACE, own_account="lj")
    found = b.entry(b.job_body({"schedule": "0 * * * *", "template": template}), settings)
    assert found.policy is None
    assert found.registration is None
    assert found.problem == (
        "InvalidTemplate",
        "spec.template.spec.serviceAccountName: must not be lj: that account has the operator's rights",
    )
