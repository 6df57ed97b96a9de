"""`template.problems` on its own: every path is the one the user writes, and nothing raises on nonsense."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leasedjob import protocol
from leasedjob.api.problem import Problem, Reason
from leasedjob.api.template import problems
from leasedjob.api.v1alpha1 import LeasedJobSpec

GOOD: dict[str, Any] = {"spec": {"containers": [{"name": "main", "image": "i:1"}]}}
SPEC = LeasedJobSpec.model_validate({"schedule": "0 3 * * *", "template": GOOD})


def with_container(**fields: Any) -> dict[str, Any]:
    template = copy.deepcopy(GOOD)
    template["spec"]["containers"][0].update(fields)
    return template


def fields(template: dict[str, Any]) -> list[str]:
    found = problems(template, SPEC)
    assert all(problem.reason is Reason.INVALID_TEMPLATE for problem in found)
    return [problem.field.removeprefix("spec.template.spec.") for problem in found]


def test_a_good_template_has_no_problem_and_is_not_touched() -> None:
    template = copy.deepcopy(GOOD)
    assert problems(template, SPEC) == []
    assert template == GOOD


def test_the_grace_period_is_the_specs() -> None:
    shorter = LeasedJobSpec.model_validate(
        {"schedule": "0 3 * * *", "template": GOOD, "shutdown": {"terminationGracePeriodSeconds": 30}}
    )
    template = {"spec": {**GOOD["spec"], "terminationGracePeriodSeconds": 30}}
    assert problems(template, shorter) == []
    assert fields(template) == ["terminationGracePeriodSeconds"]


def test_reports_all_of_one_level_at_once() -> None:
    template = with_container(
        name=protocol.CONTAINER_GATE,
        ports=[{"containerPort": protocol.PROBE_PORT}, {"containerPort": 80}, {"containerPort": protocol.REPORT_PORT}],
        volumeMounts=[{"name": protocol.VOLUME_DATABASE, "mountPath": "/x"}],
    )
    assert fields(template) == [
        "containers[0].name",
        "containers[0].ports[0].containerPort",
        "containers[0].ports[2].containerPort",
        "containers[0].volumeMounts[0].name",
    ]


@pytest.mark.parametrize("name", [protocol.CONTAINER_ADOPT, protocol.CONTAINER_HOLD, protocol.CONTAINER_GATE])
def test_names_of_added_containers_are_reserved(name: str) -> None:
    assert fields(with_container(name=name)) == ["containers[0].name"]


@pytest.mark.parametrize("kind", ["volumeMounts", "volumeDevices"])
@pytest.mark.parametrize("name", [protocol.VOLUME_HANDOFF, protocol.VOLUME_DATABASE])
def test_the_handoff_cannot_be_mounted(kind: str, name: str) -> None:
    """The token in it would let the workload speak for the sidecar."""
    assert fields(with_container(**{kind: [{"name": name}]})) == [f"containers[0].{kind}[0].name"]
    init = {"name": "i", "image": "i:1", kind: [{"name": name}]}
    assert fields({"spec": {**GOOD["spec"], "initContainers": [init]}}) == [f"initContainers[0].{kind}[0].name"]


@pytest.mark.parametrize(
    ("probe", "ports", "bad"),
    [
        ({"httpGet": {"port": 80}}, [], None),
        ({"httpGet": {"port": "80"}}, [], None),
        ({"httpGet": {"port": "web"}}, [{"name": "web", "containerPort": 80}], None),
        ({"httpGet": {"port": "web"}}, [{"name": "other", "containerPort": 80}], "httpGet.port"),
        ({"tcpSocket": {"port": "web"}}, [], "tcpSocket.port"),
        ({"tcpSocket": {"port": 0}}, [], "tcpSocket.port"),
        ({"tcpSocket": {"port": 65536}}, [], "tcpSocket.port"),
        ({"tcpSocket": {"port": True}}, [], "tcpSocket.port"),
        ({"tcpSocket": {"port": [1]}}, [], "tcpSocket.port"),
        ({"tcpSocket": {"port": "٣"}}, [], "tcpSocket.port"),
    ],
)
def test_the_sidecar_must_find_the_port_of_a_probe(probe: dict[str, Any], ports: list[Any], bad: str | None) -> None:
    wanted = [] if bad is None else [f"containers[0].livenessProbe.{bad}"]
    assert fields(with_container(livenessProbe=probe, ports=ports)) == wanted


def test_nulls_are_absent() -> None:
    template = with_container(livenessProbe=None, startupProbe=None, restartPolicy=None, ports=None)
    template["spec"] |= {"restartPolicy": None, "hostNetwork": None, "volumes": None, "initContainers": None}
    template["metadata"] = None
    assert problems(template, SPEC) == []


def test_a_field_in_another_spelling_is_somebody_elses() -> None:
    """Kubernetes knows no snake_case; such a field is kept, and means nothing."""
    assert problems(with_container(restart_policy="Always"), SPEC) == []


def test_names_are_used_once() -> None:
    template: dict[str, Any] = {
        "spec": {
            "initContainers": [{"name": "a", "image": "i:1"}],
            "containers": [{"name": "a", "image": "i:1"}, {"name": "b", "image": "i:1"}, {"name": "b", "image": "i:1"}],
            "volumes": [{"name": "v"}, {"name": "w"}, {"name": "v"}],
        }
    }
    assert fields(template) == ["containers[0].name", "containers[2].name", "volumes[2].name"]


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=10,
)
_keys = st.sampled_from(
    [
        "name",
        "image",
        "ports",
        "livenessProbe",
        "startupProbe",
        "restartPolicy",
        "volumeMounts",
        "httpGet",
        "exec",
        "port",
    ]
)
_part = st.dictionaries(_keys, st.one_of(_json, st.dictionaries(_keys, _json, max_size=3)), max_size=4)


@given(
    st.one_of(_json, _part, st.lists(_part, max_size=2)), st.sampled_from(["containers", "initContainers", "volumes"])
)
def test_nonsense_is_a_problem_and_never_an_exception(value: Any, key: str) -> None:
    template = {"spec": {**GOOD["spec"], key: value}}
    before = copy.deepcopy(template)
    for problem in problems(template, SPEC):
        assert isinstance(problem, Problem)
        assert problem.field.startswith("spec.template.spec")
        assert len(problem.message) < 400
    assert template == before
