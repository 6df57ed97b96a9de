"""Conditions that keep their transition time. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from leasedjob.api.v1alpha1 import Condition, ConditionStatus
from leasedjob.controller.facts import parse_time

Json = Mapping[str, Any]


def condition(
    old: Json, kind: str, truth: ConditionStatus, reason: str, message: str, generation: int, now: datetime
) -> Condition:
    """A condition that keeps its transition time while its truth stays."""
    before: Json = next((c for c in old.get("conditions") or [] if c.get("type") == kind), {})
    since = parse_time(before.get("lastTransitionTime")) if before.get("status") == truth.value else None
    return Condition(
        type=kind,
        status=truth,
        reason=reason,
        message=message,
        observed_generation=generation,
        last_transition_time=since or now,
    )
