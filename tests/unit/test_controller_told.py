"""What is told of attempts whose end no statement of this operator wrote: by their Pods, or asked to stop."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit import controller_builders as b

from leasedjob.controller.act import Actor
from leasedjob.controller.engine import _ended_since
from leasedjob.controller.events import EventReason
from leasedjob.controller.settings import Settings
from leasedjob.identity import run_key_for
from leasedjob.lease.rows import JobSchedulerStatus, Outcome, Run

SUCCESS, FAIL = JobSchedulerStatus.SUCCESS, JobSchedulerStatus.FAIL
WHICH = f"{run_key_for(b.T0)}, attempt 1"


class Events:
    def __init__(self) -> None:
        self.said: list[tuple[str, str, bool]] = []

    def record(self, regarding: b.Json, reason: str, message: str, *, warning: bool = False, once: str = "") -> None:
        assert once, "every replica says it"
        self.said.append((reason, message, warning))


def told(run: Run) -> list[tuple[str, str, bool]]:
    events = Events()
    nothing: Any = None
    actor = Actor(Settings(), nothing, nothing, nothing, events, nothing, nothing)  # type: ignore[arg-type]
    actor.ended_elsewhere(b.entry(), run)
    return events.said


@pytest.mark.parametrize(
    ("row", "reason", "message", "warning"),
    [
        (b.run(SUCCESS, outcome=Outcome.COMPLETE), EventReason.RUN_SUCCEEDED, WHICH, False),
        (b.run(FAIL, outcome=Outcome.FAIL), EventReason.RUN_FAILED, f"{WHICH}: Reported", True),
        (
            b.run(FAIL, outcome=Outcome.FAIL, data={"error": "no such order", "exitCode": 3}),
            EventReason.RUN_FAILED,
            f"{WHICH}: Reported: no such order",
            True,
        ),
        (b.run(FAIL, outcome=Outcome.RELEASE), EventReason.RUN_INTERRUPTED, f"{WHICH}: Reported", True),
        (
            b.run(FAIL, outcome=Outcome.RELEASE, stop_reason="Cancelled", reason="Cancelled"),
            EventReason.RUN_CANCELLED,
            f"{WHICH}: Cancelled",
            False,
        ),
        (b.run(FAIL, stop_reason="Replaced", reason="Replaced"), EventReason.RUN_REPLACED, f"{WHICH}: Replaced", False),
        (
            b.run(FAIL, stop_reason="PendingDeadlineExceeded: x", reason="PendingDeadlineExceeded: x"),
            EventReason.RUN_FAILED,
            f"{WHICH}: PendingDeadlineExceeded: x",
            True,
        ),
        (b.run(SUCCESS, outcome=Outcome.COMPLETE, stop_reason="Cancelled"), EventReason.RUN_SUCCEEDED, WHICH, False),
    ],
)
def test_what_no_operator_wrote(row: Run, reason: str, message: str, warning: bool) -> None:
    assert told(row) == [(reason, message, warning)]


@pytest.mark.parametrize("row", [b.run(SUCCESS, reason="Completed"), b.run(FAIL, reason="OOMKilled: m")])
def test_what_an_operator_wrote_it_tells_itself(row: Run) -> None:
    assert told(row) == []


@pytest.mark.parametrize(
    ("old", "new", "ended"),
    [
        (b.run(pod_uid="p"), b.run(SUCCESS, pod_uid="p"), True),
        (b.run(), b.run(FAIL, pod_uid="p", retry_at=b.at(9)), True),
        (b.run(), b.run(FAIL), False),  # a claim that no Pod adopted
        (b.run(pod_uid="p"), b.run(pod_uid="p"), False),
        (b.run(FAIL, pod_uid="p", retry_at=b.at(9)), b.run(FAIL, pod_uid="p"), False),  # no attempt's end
        (b.run(pod_uid="p"), b.run(FAIL, pod_uid="p", attempt=2), False),  # of this one nothing is known
    ],
)
def test_when_an_attempt_has_ended_since(old: Run, new: Run, ended: bool) -> None:
    assert _ended_since(old, new) == ended
