"""Which fields a definition lacks, and which of an object only a later version knows."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from tests.unit import controller_builders as b

from leasedjob.api.crd import KINDS
from leasedjob.api.fields import lacking, lacking_in, unknown, unknown_in_spec

Json = dict[str, Any]


def document() -> Json:
    """As the API server publishes the definitions."""
    schemas = {}
    for kind in KINDS:
        schema = kind.to_json()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
        names = {"group": "leasedjob.io", "version": "v1alpha1", "kind": kind.kind}
        schemas[f"io.leasedjob.v1alpha1.{kind.kind}"] = {**schema, "x-kubernetes-group-version-kind": [names]}
    return {"components": {"schemas": copy.deepcopy(schemas)}}


def test_the_definitions_of_this_version_lack_nothing() -> None:
    assert lacking_in(document()) == []


@pytest.mark.parametrize(
    ("at", "field"),
    [
        (("spec",), "activeDeadlineSeconds"),
        (("spec", "lease"), "heartbeatSeconds"),
        (("status",), "holder"),
        (("status", "recentRuns", "[]"), "podName"),
        (("status", "conditions", "[]"), "reason"),
    ],
)
def test_a_field_that_is_missing_is_named(at: tuple[str, ...], field: str) -> None:
    found = document()
    node = found["components"]["schemas"]["io.leasedjob.v1alpha1.LeasedJob"]
    path = "LeasedJob"
    for step in at:
        node = node["items"] if step == "[]" else node["properties"][step]
        path += step if step == "[]" else f".{step}"
    del node["properties"][field]
    assert lacking_in(found) == [f"{path}.{field}"]


def test_a_kind_that_is_missing_is_named() -> None:
    found = document()
    del found["components"]["schemas"]["io.leasedjob.v1alpha1.LeasedJobRun"]
    assert lacking_in(found) == ["LeasedJobRun"]
    assert lacking_in({}) == ["LeasedJob", "LeasedJobRun"]


def test_what_takes_everything_lacks_nothing() -> None:
    wanted = {"properties": {"a": {"properties": {"b": {}}}, "m": {"additionalProperties": {"properties": {"x": {}}}}}}
    assert list(lacking(wanted, {"x-kubernetes-preserve-unknown-fields": True})) == []
    assert list(lacking(wanted, {"properties": {"a": {}, "m": {}}})) == ["a.b", "m.*.x"]


def test_a_definition_that_is_newer_lacks_nothing() -> None:
    found = document()
    found["components"]["schemas"]["io.leasedjob.v1alpha1.LeasedJob"]["properties"]["spec"]["properties"]["later"] = {}
    assert lacking_in(found) == []


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({}, []),
        ({"later": 1}, ["spec.later"]),
        ({"later": {"deep": [1]}, "lease": {"durationSeconds": 300, "later": 1}}, ["spec.later", "spec.lease.later"]),
        ({"later": None}, []),
        ({"sidecar": {"resources": {"limits": {"example.com/gpu": 1}, "claims": [{"name": "x"}]}}}, []),
        ({"sidecar": {"imagePullSecrets": [{"name": "a"}, {"name": "b", "later": 1}]}},
         ["spec.sidecar.imagePullSecrets[1].later"]),
    ],
)  # fmt: skip
def test_what_only_a_later_version_knows(more: Json, named: list[str]) -> None:
    assert unknown_in_spec({**b.job_body({"schedule": "0 * * * *"})["spec"], **more}) == named


def test_a_template_is_somebody_elses() -> None:
    spec = copy.deepcopy(b.job_body({"schedule": "0 * * * *"})["spec"])
    spec["template"]["spec"]["later"] = {"x": 1}
    spec["template"]["spec"]["containers"][0]["later"] = 1
    spec["template"]["later"] = 1
    assert unknown_in_spec(spec) == []


def test_values_that_are_not_what_the_schema_says_are_left_to_the_rules() -> None:
    assert list(unknown({"properties": {"a": {"type": "string"}}}, {"a": ["x"]})) == []
    assert list(unknown({}, "text")) == []
