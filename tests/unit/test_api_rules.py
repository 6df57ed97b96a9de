"""The models refuse what tests/contract/crd-rules.yaml says, and name the field as the user writes it.

tests/e2e/test_crd_rules.py puts the same cases to a real API server.
"""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
from tests.contract.crd_rules import TABLE, spec_of

from leasedjob.api.problem import Problem, Reason, reason_for
from leasedjob.api.v1alpha1 import LeasedJobSpec, parse_job


def body_of(case: dict[str, Any]) -> dict[str, Any]:
    return {"spec": spec_of(case)}


def cases(kind: str) -> list[Any]:
    return [pytest.param(case, id=case["name"]) for case in TABLE[kind]]


def found(case: dict[str, Any]) -> list[Problem]:
    result = parse_job(body_of(case))
    assert isinstance(result, list), f"accepted: {result}"
    return result


@pytest.mark.parametrize("case", cases("accepted"))
def test_accepts(case: dict[str, Any]) -> None:
    body = body_of(case)
    before = copy.deepcopy(body)
    result = parse_job(body)
    assert isinstance(result, LeasedJobSpec), [str(problem) for problem in result]
    assert result.template == before["spec"]["template"], "the template is kept as written"
    assert body == before, "the input is untouched"


@pytest.mark.parametrize("case", cases("refused"))
def test_refuses_what_the_api_server_refuses(case: dict[str, Any]) -> None:
    problems = found(case)
    fields = [problem.field for problem in problems]
    assert any(field.startswith(case["field"]) for field in fields), [str(problem) for problem in problems]
    if not re.fullmatch(r"[a-z]+|", case["says"]):  # one lower-case word is the API server's own wording
        assert any(case["says"] in problem.message for problem in problems), [str(problem) for problem in problems]


@pytest.mark.parametrize("case", cases("reported"))
def test_refuses_what_the_api_server_cannot_see(case: dict[str, Any]) -> None:
    (problem,) = found(case)
    assert (problem.field, problem.reason) == (case["field"], case["reason"])
    assert case["says"] in problem.message


@pytest.mark.parametrize("case", cases("refused") + cases("reported"))
def test_names_the_field_once(case: dict[str, Any]) -> None:
    for problem in found(case):
        leaf = re.sub(r"\[\d+\]", "", problem.field).split(".")[-1]
        assert str(problem) == f"{problem.field}: {problem.message}"
        assert not re.match(rf"(\S*\.)?{leaf}\b", problem.message), str(problem)
        assert problem.reason == reason_for(problem.field)


def test_reports_every_problem_of_one_level_at_once() -> None:
    problems = found({"spec": {"backoffLimit": -1, "timeZone": "Local", "code": " "}})
    assert {problem.field for problem in problems} == {"spec.backoffLimit", "spec.timeZone", "spec.code"}


@pytest.mark.parametrize("body", [{}, {"spec": None}, {"spec": []}, {"spec": "x"}])
def test_refuses_an_object_without_a_spec(body: dict[str, Any]) -> None:
    assert parse_job(body) == [Problem("spec", Reason.INVALID_SPEC, "is required")]


def test_treats_null_as_absent_and_whole_floats_as_integers_like_the_api_server() -> None:
    body = body_of({"spec": {"backoffLimit": 2.0}})
    body["spec"] |= {"code": None, "lease": None, "startingDeadlineSeconds": None}
    spec = parse_job(body)
    assert isinstance(spec, LeasedJobSpec)
    assert (spec.backoff_limit, spec.code, spec.lease.duration_seconds) == (2, None, 900)


def test_a_huge_value_does_not_fill_the_message() -> None:
    (problem,) = found({"spec": {"concurrencyPolicy": "x" * 100_000}})
    assert len(problem.message) < 200
