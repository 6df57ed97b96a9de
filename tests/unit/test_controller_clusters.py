"""What a cluster's operator says of its name and of its cordon, what it is asked, and what a cordon leaves undone."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from tests.unit import controller_builders as b
from tests.unit.test_controller_decide import views

from leasedjob.controller.clusters import (
    ClusterAction,
    ClusterRequest,
    answer_of,
    cordon_of,
    forgotten,
    hindrance,
)
from leasedjob.controller.decide import Claim, End, Launch, RecordTicks, decide
from leasedjob.controller.model import JobView, ManualRun
from leasedjob.controller.settings import Settings, SettingsError
from leasedjob.identity import JobSchedulerType
from leasedjob.lease.clusters import CordonAnswer, ForgetAnswer, Greeting, Identity, Standing
from leasedjob.lease.rows import JobSchedulerStatus

OWN = Identity(cluster="east", uid="uid-1", release="system/lj")
WHY = "cluster east is cordoned since 2026-07-20T03:00:00Z: disks"


def said(verdict: Standing = Standing.MINE, **more: Any) -> Greeting:
    values: dict[str, Any] = {
        "other": None, "other_uid": None, "other_release": None, "seen_ago": None, "live": 0,
        "cordoned_at": None, "cordoned_by": "", "cordon_reason": "", **more,
    }  # fmt: skip
    return Greeting(verdict=verdict, **values)


# --- names -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("verdict", [Standing.MINE, Standing.SUCCEEDED])
def test_nothing_hinders_a_cluster_that_has_its_name_or_had_it(verdict: Standing) -> None:
    assert hindrance(said(verdict, other="west"), OWN) == ""


def test_a_taken_name_tells_whose_it_is_and_what_to_do() -> None:
    other = said(Standing.TAKEN, other="east", other_uid="uid-2", seen_ago=timedelta(seconds=3.7))
    words = hindrance(other, OWN)
    for part in ("clusterName 'east'", "UID uid-2", "this one has uid-1", "3 s ago", "`clusterTakeover`"):
        assert part in words
    same = said(Standing.TAKEN, other="east", other_uid="uid-1", other_release="team/lj", seen_ago=timedelta())
    assert "another release in this cluster, team/lj" in hindrance(same, OWN)


def test_a_former_name_is_waited_for() -> None:
    words = hindrance(said(Standing.WAITS, other="former", live=3), OWN)
    assert "was called 'former', and 3 of its runs are live" in words


@pytest.mark.parametrize("name", ["a", "east-1", "East.1_b", "x" * 253, "6f9a0c1e-0000-4000-8000-000000000001"])
def test_names_that_do(name: str) -> None:
    assert Settings.from_environment({"LEASEDJOB_CLUSTER": name}).cluster == name


@pytest.mark.parametrize("name", ["a/b", "-a", "a-", "two words", "ü", "x" * 254, "a\nb"])
def test_names_that_do_not_are_refused_by_name(name: str) -> None:
    with pytest.raises(SettingsError, match=r"LEASEDJOB_CLUSTER \(clusterName\)"):
        Settings.from_environment({"LEASEDJOB_CLUSTER": name})


# --- cordons ---------------------------------------------------------------------------------------------------------
def test_a_cordon_in_words() -> None:
    assert cordon_of(said(), OWN, by_values=False) == ""
    assert cordon_of(said(), OWN, by_values=True) == "cluster east is cordoned by the chart's value `cordoned`"
    full = said(cordoned_at=b.T0, cordoned_by="alice", cordon_reason="disks")
    assert cordon_of(full, OWN, by_values=True) == (
        "cluster east is cordoned since 2026-07-20T03:00:00Z, asked for by alice: disks"
    )
    assert "is called west by now" in cordon_of(said(Standing.SUCCEEDED, other="west"), OWN, by_values=False)


def cordoned(view: JobView) -> JobView:
    return replace(view, cordoned=WHY)


def test_due_ticks_are_neither_run_nor_recorded() -> None:
    due = b.view(now=3 * 3600 + 5)
    assert any(isinstance(a, Claim) for a in decide(due).actions)
    found = decide(cordoned(due))
    assert found.actions == ()
    assert WHY in found.waits[0]


def test_a_suspended_schedule_is_still_written_down() -> None:
    view = cordoned(b.view(now=3 * 3600 + 5, suspend=True))
    assert [type(a) for a in decide(view).actions] == [RecordTicks]


def test_retries_and_expired_leases_are_left_to_others() -> None:
    failed = b.run(JobSchedulerStatus.FAIL, retry_at=b.at(5))
    lost = b.run(expires=5, cluster=b.OTHER_CLUSTER)
    mine = b.run(pod_uid="gone", expires=5)
    for row in (failed, lost, mine):
        view = b.view(row, now=10)
        assert any(isinstance(a, Claim) for a in decide(view).actions)
        assert decide(cordoned(view)).actions == ()


def test_what_was_claimed_before_is_launched_and_what_ends_is_recorded() -> None:
    (action,) = decide(cordoned(b.view(b.run(expires=60), now=30))).actions
    assert isinstance(action, Launch)
    body = b.pod()
    (action,) = decide(cordoned(b.view(b.adopted(body, expires=900), pods=[body], now=40))).actions
    assert isinstance(action, End)


def test_initial_jobs_and_requests_wait() -> None:
    asked = ManualRun("u", "now", "manual/a", "v2:x", None, cancel=False)
    for view in (b.view(manual=[asked]), b.view(type=JobSchedulerType.INITIAL, schedule=None)):
        assert any(isinstance(a, Claim) for a in decide(view).actions)
        assert decide(cordoned(view)).actions == ()


@given(views())
def test_a_cordon_takes_claims_away_and_nothing_else(view: JobView) -> None:
    """But for ticks that would have been written down as missed: whether they are is for whoever runs the others."""
    found = decide(cordoned(view)).actions
    assert not any(isinstance(a, Claim) for a in found)
    without = [a for a in decide(view).actions if not isinstance(a, Claim | RecordTicks)]
    given_up = [a for a in without if a not in found]
    assert [a for a in found if not isinstance(a, RecordTicks)] == [a for a in without if a not in given_up]
    assert all("PendingDeadlineExceeded" in getattr(a, "reason", "") for a in given_up)


# --- what is asked ---------------------------------------------------------------------------------------------------
def test_a_question_without_a_name_is_about_the_cluster_that_is_asked() -> None:
    assert ClusterRequest.of({"action": "Cordon", "reason": "x"}, "east") == ClusterRequest(
        ClusterAction.CORDON, "east", "x"
    )
    assert ClusterRequest.of({"action": "List"}, "east") == ClusterRequest(ClusterAction.LIST, "east", "")


@pytest.mark.parametrize(
    ("data", "key"),
    [({}, "action"), ({"action": "cordon"}, "action"), ({"action": "Cordon", "reason": "x" * 1025}, "reason")],
)
def test_a_question_that_is_none_names_the_key(data: dict[str, str], key: str) -> None:
    answer = ClusterRequest.of(data, "east")
    assert isinstance(answer, str)
    assert answer.startswith(f"{key}: ")


@pytest.mark.parametrize(
    ("action", "changed", "message"),
    [
        (ClusterAction.CORDON, True, "cordoned"),
        (ClusterAction.CORDON, False, "already cordoned"),
        (ClusterAction.UNCORDON, True, "uncordoned"),
        (ClusterAction.UNCORDON, False, "already uncordoned"),
    ],
)
def test_the_answer_is_in_kubectls_words(action: ClusterAction, changed: bool, message: str) -> None:
    did = CordonAnswer(known=True, changed=changed, by_values=False, clusters=["east"])
    assert answer_of(ClusterRequest(action, "east", ""), did)["message"] == message


def test_what_becomes_of_a_cluster_to_be_forgotten() -> None:
    def told(**more: Any) -> tuple[str | None, str]:
        plain = {"known": True, "forgotten": False, "busy": False, "seen_ago": None, "live": 0, "jobs": 2}
        said_ = forgotten("west", ForgetAnswer(**{**plain, "clusters": ["east"], **more}))
        return said_.get("error"), said_["message"]

    assert told(forgotten=True) == (None, "forgotten, with its 2 LeasedJobs")
    error, why = told(seen_ago=timedelta(minutes=14), live=3)
    assert (error, "840 s ago" in why, "cordoned instead" in why) == ("Alive", True, True)
    error, why = told(seen_ago=timedelta(minutes=15), live=3)
    assert (error, "3 of its runs are held" in why) == ("RunsLive", True)
    assert told(busy=True)[0] == "Busy"
    error, why = told(known=False)
    assert (error, "there are: east" in why) == ("NotFound", True)


def test_what_can_not_be_done_is_an_error() -> None:
    unknown = CordonAnswer(known=False, changed=False, by_values=False, clusters=["east", "west"])
    said_ = answer_of(ClusterRequest(ClusterAction.CORDON, "esat", ""), unknown)
    assert (said_["error"], "there are: east, west" in said_["message"]) == ("NotFound", True)
    by_values = CordonAnswer(known=True, changed=True, by_values=True, clusters=["east"])
    assert answer_of(ClusterRequest(ClusterAction.UNCORDON, "east", ""), by_values)["error"] == "CordonedByValues"
    assert "error" not in answer_of(ClusterRequest(ClusterAction.CORDON, "east", ""), by_values)
