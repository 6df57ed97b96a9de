"""Conditions keep their transition time while their truth stays."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit import controller_builders as b

from leasedjob.api.v1alpha1 import ConditionStatus
from leasedjob.controller.conditions import condition

TRUE, FALSE = ConditionStatus.TRUE, ConditionStatus.FALSE


def old(truth: str, at: Any = "2026-07-20T03:00:00Z", kind: str = "Ready") -> b.Json:
    return {"conditions": [{"type": kind, "status": truth, "lastTransitionTime": at, "reason": "R"}]}


@pytest.mark.parametrize(
    ("before", "truth", "since"),
    [
        (old("True"), TRUE, 0),
        (old("False"), TRUE, 99),
        (old("Unknown"), FALSE, 99),
        (old("True", kind="Other"), TRUE, 99),
        (old("True", at=None), TRUE, 99),
        (old("True", at="yesterday"), TRUE, 99),
        ({}, TRUE, 99),
        ({"conditions": None}, FALSE, 99),
    ],
)
def test_the_transition_time(before: b.Json, truth: ConditionStatus, since: float) -> None:
    found = condition(before, "Ready", truth, "Accepted", "words", 3, b.at(99))
    assert found.last_transition_time == b.at(since)
    assert (found.status, found.reason, found.message, found.observed_generation) == (truth, "Accepted", "words", 3)


def test_reason_and_message_may_change_without_a_transition() -> None:
    found = condition(old("False"), "Ready", FALSE, "InvalidSpec", "another", 4, b.at(99))
    assert found.last_transition_time == b.T0
    assert found.reason == "InvalidSpec"


def test_texts_are_bounded() -> None:
    found = condition({}, "Ready", FALSE, "R" * 500, "<" * 100_000, 1, b.T0)
    assert len(found.reason) <= 64
    assert len(found.message) <= 1024
