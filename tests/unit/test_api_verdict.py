"""The verdict on a manifest without a cluster: what the API server and the operator say together."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from tests.contract.crd_rules import TABLE, spec_of

from leasedjob.api import verdict
from leasedjob.api.problem import Reason


def job(spec: dict[str, Any] | None = None, **change: Any) -> dict[str, Any]:
    base = {"schedule": "0 3 * * *", "template": {"spec": {"containers": [{"name": "c", "image": "i:1"}]}}}
    return {
        "apiVersion": "leasedjob.io/v1alpha1",
        "kind": "LeasedJob",
        "metadata": {"name": "orders", "namespace": "shop"},
        "spec": {**base, **(spec or {})},
        **change,
    }


def test_a_good_manifest_has_no_problems() -> None:
    assert verdict(job()) == []
    assert (
        verdict(job(metadata={"generateName": "orders-", "labels": {"a/b": ""}, "annotations": {"c": "x" * 999}})) == []
    )
    assert verdict({**job({"jobName": "orders"}), "kind": "LeasedJobRun", "spec": {"jobName": "orders"}}) == []


@pytest.mark.parametrize("case", [pytest.param(c, id=c["name"]) for k in ("refused", "reported") for c in TABLE[k]])
def test_what_api_server_or_operator_refuse(case: dict[str, Any]) -> None:
    found = verdict(job() | {"spec": spec_of(case)})
    assert any(case["field"] in problem.field and case["says"] in problem.message for problem in found), found


@pytest.mark.parametrize("case", [pytest.param(c, id=c["name"]) for c in TABLE["accepted"]])
def test_what_both_accept(case: dict[str, Any]) -> None:
    assert verdict(job() | {"spec": spec_of(case)}) == []


@pytest.mark.parametrize(
    ("manifest", "field", "words"),
    [
        ([], "", "object"),
        (None, "", "object"),
        (job(apiVersion="leasedjob.io/v1"), "apiVersion", "leasedjob.io/v1alpha1"),
        ({k: v for k, v in job().items() if k != "apiVersion"}, "apiVersion", "required"),
        (job(kind="CronJob"), "kind", "LeasedJob or LeasedJobRun"),
        (job(kind=["LeasedJob"]), "kind", "must be LeasedJob"),
        (job(metadata=None), "metadata", "required"),
        (job(metadata=[]), "metadata", "object"),
        (job(metadata={}), "metadata.name", "required"),
        (job(metadata={"name": "Orders"}), "metadata.name", "lower-case"),
        (job(metadata={"name": "a" * 254}), "metadata.name", "253"),
        (job(metadata={"name": 7}), "metadata.name", "text"),
        (job(metadata={"name": "a", "namespace": "a.b"}), "metadata.namespace", "63"),
        (job(metadata={"name": "a", "labels": {"x": True}}), "metadata.labels.x", "quotes"),
        (job(metadata={"name": "a", "labels": {"x": "-"}}), "metadata.labels.x", "63"),
        (job(metadata={"name": "a", "labels": {"a/b/c": ""}}), "metadata.labels", "key"),
        (job(metadata={"name": "a", "labels": []}), "metadata.labels", "object"),
        (job(metadata={"name": "a", "annotations": {"x": "x" * 300_000}}), "metadata.annotations", "stored"),
        (job(metadata={"name": "a", "lables": {}}), "metadata.lables", "did you mean labels?"),
        (job(Spec={}), "Spec", "did you mean spec?"),
        (job({"startingDeadlineSecond": 30}), "spec.startingDeadlineSecond", "did you mean startingDeadlineSeconds?"),
        (job({"lease": {"duration": 30}}), "spec.lease.duration", "is not a field of LeasedJob"),
        (job({"suspend": "no"}), "spec.suspend", "'no'"),
        (job({"code": "x" * 65}), "spec.code", "at most"),
        (job() | {"spec": None}, "spec", "required"),
        (job({"schedule": "0 3 30 2 *"}), "spec.schedule", "never fires"),
        (job({"timeZone": "Europe/Rom"}), "spec.timeZone", "Europe/Rome"),
        ({**job(), "kind": "LeasedJobRun", "spec": {"jobName": "a", "tick": "2027-02-30T00:00:00Z"}},
         "spec.tick", "date"),
    ],
)  # fmt: skip
def test_refusals_name_the_field(manifest: object, field: str, words: str) -> None:
    found = verdict(manifest)
    assert any(problem.field == field and words in problem.message for problem in found), found


def test_every_problem_is_told_at_once() -> None:
    found = verdict(job({"schedule": "61 3 * * *", "backofflimit": 1, "concurrencyPolicy": "forbid"}))
    assert {problem.field for problem in found} == {"spec.schedule", "spec.backofflimit", "spec.concurrencyPolicy"}
    assert {problem.reason for problem in found} >= {Reason.UNKNOWN_FIELD, Reason.INVALID_SCHEDULE}


def test_the_generator_of_the_definitions_runs_as_a_module_without_a_warning() -> None:
    """What the package imports at once would be in memory before the module is run."""
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-m", "leasedjob.api.crd", "--help"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
