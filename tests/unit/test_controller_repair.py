"""What a person asks to be done to a run: which step, in which order, and when it is over."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.unit import controller_builders as b

from leasedjob.api.v1alpha1 import RunAction, RunPhase
from leasedjob.controller.repair import LONGEST_STOP, Answer, Observed, RepairReason, Step, next_step
from leasedjob.lease.rows import JobSchedulerStatus, Run

RUNNING, SUCCESS, FAIL = JobSchedulerStatus.RUNNING, JobSchedulerStatus.SUCCESS, JobSchedulerStatus.FAIL
CANCEL, RELEASE, FORGET = RunAction.CANCEL, RunAction.RELEASE, RunAction.FORGET


def seen(run: Run | None, **more: Any) -> Observed:
    values: dict[str, Any] = {"now": b.at(100), "cluster": b.CLUSTER, "run": run, "pod": None, "before": {}}
    return Observed(**values | more)


def held(**more: Any) -> Run:
    return b.run(RUNNING, **{"pod_uid": "p", **more})


@pytest.mark.parametrize("action", [CANCEL, RELEASE, FORGET])
def test_nothing_is_done_to_a_run_that_is_not_there(action: RunAction) -> None:
    found = next_step(action, seen(None))
    assert isinstance(found, Answer)
    assert (found.phase, found.reason) == (RunPhase.REFUSED, RepairReason.NO_SUCH_RUN)


@pytest.mark.parametrize("action", [CANCEL, RELEASE, FORGET])
def test_a_recorded_success_is_never_touched(action: RunAction) -> None:
    for force in (False, True):
        found = next_step(action, seen(b.run(SUCCESS), force=force))
        assert isinstance(found, Answer)
        assert found.phase is RunPhase.REFUSED


STOPPING = {"reason": "Stopping", "attempt": 1}
FENCED = {"reason": "Fenced", "attempt": 1}


@pytest.mark.parametrize(
    ("action", "observed", "expected"),
    [
        # cancel
        (CANCEL, seen(held()), Step.CANCEL),
        (CANCEL, seen(b.run(FAIL, retry_at=b.at(900))), Step.CANCEL),
        (CANCEL, seen(held(stop_requested_at=b.at(50)), before=STOPPING), RepairReason.STOPPING),
        (CANCEL, seen(held(stop_requested_at=b.at(50))), RepairReason.STOPPING),  # somebody else has asked
        (CANCEL, seen(b.run(FAIL, reason="Cancelled"), before=STOPPING), RepairReason.CANCELLED),
        (CANCEL, seen(b.run(FAIL, reason="Error"), before=STOPPING), RepairReason.CANCELLED),
        (CANCEL, seen(b.run(FAIL, reason="Cancelled")), RepairReason.CANCELLED),
        (CANCEL, seen(b.run(FAIL, reason="Error")), RepairReason.NOT_RUNNING),
        (CANCEL, seen(b.run(SUCCESS), before=STOPPING), RepairReason.ALREADY_SUCCEEDED),
        # release: a claim
        (RELEASE, seen(b.run(RUNNING)), Step.RELEASE),
        # release: a Pod here, first with its grace period
        (RELEASE, seen(held(), pod=b.facts(phase="Running")), Step.DELETE_POD),
        (RELEASE, seen(held(), pod=b.facts(phase="Running", deleted=90)), RepairReason.STOPPING),
        (RELEASE, seen(held(), pod=b.facts(phase="Running", deleted=90), now=b.at(90) + LONGEST_STOP), Step.RELEASE),
        (RELEASE, seen(held(), pod=b.facts(phase="Failed")), Step.RELEASE),
        # release: no Pod, or a Pod that this operator can't stop
        (RELEASE, seen(held()), Step.RELEASE),
        (RELEASE, seen(held(cluster=b.OTHER_CLUSTER)), Step.RELEASE),
        (RELEASE, seen(held(cluster=b.OTHER_CLUSTER), pod=b.facts(phase="Running")), Step.RELEASE),
        (RELEASE, seen(held(), before=FENCED), RepairReason.FENCED),  # once
        (RELEASE, seen(held(), before=FENCED, pod=b.facts(phase="Running")), RepairReason.FENCED),
        (RELEASE, seen(b.run(RUNNING, job_uid=""), before=FENCED), RepairReason.FENCED),  # of the library
        # release: by force, at once
        (RELEASE, seen(held(), pod=b.facts(phase="Running"), force=True), Step.RELEASE),
        # release: over
        (RELEASE, seen(b.run(FAIL, retry_at=b.at(90)), before=STOPPING), RepairReason.RELEASED),
        (RELEASE, seen(held(attempt=2), before=FENCED), RepairReason.RELEASED),
        (RELEASE, seen(b.run(FAIL, retry_at=b.at(900), reason="Error")), RepairReason.NOT_RUNNING),
        # forget
        (FORGET, seen(b.run(FAIL)), Step.FORGET),
        (FORGET, seen(b.run(FAIL, retry_at=b.at(900))), Step.FORGET),
        (FORGET, seen(held()), RepairReason.STILL_RUNNING),
        (FORGET, seen(b.run(SUCCESS)), RepairReason.ALREADY_SUCCEEDED),
    ],
)
def test_the_next_step(action: RunAction, observed: Observed, expected: Step | RepairReason) -> None:
    found = next_step(action, observed)
    assert (found.reason if isinstance(found, Answer) else found) == expected


def test_a_request_that_goes_on_is_not_final_and_one_that_is_over_is() -> None:
    for observed, phase in (
        (seen(held(), before=FENCED), RunPhase.RUNNING),
        (seen(held(), pod=b.facts(phase="Running", deleted=90)), RunPhase.RUNNING),
        (seen(held(attempt=2), before=FENCED), RunPhase.SUCCEEDED),
    ):
        found = next_step(RELEASE, observed)
        assert isinstance(found, Answer)
        assert found.phase is phase


def test_until_when_a_fenced_lease_holds_is_said() -> None:
    run = replace(held(), expires_at=b.at(900))
    found = next_step(RELEASE, seen(run, before=FENCED))
    assert isinstance(found, Answer)
    assert f"{b.at(900):%H:%M:%S} UTC at the latest" in found.message
