"""The outcome of an attempt: the table of the guarantees row by row, and what tries to break it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit import controller_builders as b

from leasedjob import protocol
from leasedjob.api.v1alpha1 import ExitZeroOnStop
from leasedjob.controller.outcome import (
    MESSAGE_LIMIT,
    Outcome,
    Result,
    Undecided,
    adoption_refusal,
    cut,
    outcome,
    waiting_reason,
)
from leasedjob.protocol import Seen

NOT_YET = ("the Pod has not ended", "the sidecar has not ended")  # everything else is for ever
NEVER_BEGAN: b.Json = {"workload": b.waiting(), "gate": b.waiting(), "phase": "Failed"}
DEADLINE: b.Json = {
    "phase": "Failed",
    "reason": "DeadlineExceeded",
    "message": "Pod was active on the node longer than the specified deadline",
}


def of(stop: str = "Retry", **options: Any) -> Outcome | Undecided:
    return outcome(b.facts(**options), exit_zero_on_stop=ExitZeroOnStop(stop))


def decided(**options: Any) -> Outcome:
    found = of(**options)
    assert isinstance(found, Outcome), found
    return found


def undecided(**options: Any) -> Undecided:
    found = of(**options)
    assert isinstance(found, Undecided), found
    return found


# --- the table -------------------------------------------------------------------------------------------------------

REPORTS = [
    ("complete", Result.COMPLETE, {}),
    ("fail", Result.FAIL, {}),
    ("release", Result.RELEASE, {"released": True}),
]
EXITS = [b.ended(0, 30), b.ended(1, 30), b.ended(137, 30, reason="OOMKilled"), b.unknown()]


@pytest.mark.parametrize(("word", "result", "data"), REPORTS)
@pytest.mark.parametrize("exit", EXITS)
@pytest.mark.parametrize("stop", [{}, {"deleted": 10}, {"disrupted": ("EvictionByEvictionAPI", 10)}, DEADLINE])
@pytest.mark.parametrize("recorded", [True, False])
def test_a_report_decides_whatever_else_is_seen(
    word: str, result: Result, data: b.Json, exit: b.Json, stop: b.Json, recorded: bool
) -> None:
    hold = b.holder(b.said(Seen.REPORTED, outcome=word, recorded=recorded))
    found = decided(**{"phase": "Failed", "workload": exit, "hold": hold} | stop)
    assert (found.result, found.reason, found.data) == (result, "Reported", data)


@pytest.mark.parametrize("exit", EXITS)
@pytest.mark.parametrize("stop", [{}, {"deleted": 10}])
@pytest.mark.parametrize("policy", ["Retry", "Success"])
def test_fenced_is_released_whatever_the_exit(exit: b.Json, stop: b.Json, policy: str) -> None:
    """Also a workload that traps SIGTERM and exits 0: fenced is never a SUCCESS."""
    hold = b.holder(b.said(Seen.FENCED, fenced_at=b.at(20).timestamp(), reason="no heartbeat was answered"))
    found = decided(**{"phase": "Failed", "workload": exit, "hold": hold, "stop": policy} | stop)
    assert (found.result, found.reason, found.message) == (Result.RELEASE, "Fenced", "no heartbeat was answered")
    assert found.data == {"released": True, "fencedAt": b.at(20).timestamp()}


def test_all_exits_0() -> None:
    found = decided()
    assert (found.result, found.reason) == (Result.COMPLETE, "Completed")
    assert found.data == {"containers": [{"name": "main", "exitCode": 0, "reason": "Completed"}]}
    both = decided(workload={"main": b.ended(), "second": b.ended()})
    assert both.result is Result.COMPLETE


@pytest.mark.parametrize(
    ("state", "reason", "message"),
    [
        (b.ended(1, 30, message="ValueError: no such table"), "Error", "exited with 1: ValueError: no such table"),
        (b.ended(137, 30, reason="OOMKilled"), "OOMKilled", "exited with 137 (OOMKilled)"),
        (b.ended(128, 30, reason="StartError", message="no such file"), "StartError", "128 (StartError): no such file"),
        (b.ended(143, 30), "Error", "exited with 143"),
    ],
)
def test_an_exit_that_is_not_0_counts_and_says_why(state: b.Json, reason: str, message: str) -> None:
    found = decided(phase="Failed", workload=state)
    assert (found.result, found.reason) == (Result.FAIL, reason)
    assert found.message.startswith("container main ")
    assert message in found.message


def test_of_several_containers_the_first_that_failed_is_named() -> None:
    states = {"a": b.ended(0, 10), "b": b.ended(2, 25, message="second"), "c": b.ended(1, 20, message="first")}
    found = decided(phase="Failed", workload=states)
    assert found.result is Result.FAIL
    assert found.message == "container c exited with 1: first"
    assert [c["exitCode"] for c in found.data["containers"]] == [0, 2, 1]


@pytest.mark.parametrize("stop", [{"deleted": 20}, {"disrupted": ("PreemptionByScheduler", 20)}])
@pytest.mark.parametrize("code", [0, 1, 137, 143])
def test_a_stop_before_the_exit_is_an_interruption(stop: b.Json, code: int) -> None:
    found = decided(**{"phase": "Failed", "workload": b.ended(code, 30)} | stop)
    assert (found.result, found.reason) == (Result.RELEASE, "Interrupted")
    assert found.data["released"] is True
    assert found.data["containers"][0]["exitCode"] == code


@pytest.mark.parametrize(
    ("states", "result"),
    [
        ({"main": b.ended(0, 30)}, Result.COMPLETE),
        ({"main": b.ended(0, 30), "second": b.ended(0, 25)}, Result.COMPLETE),
        ({"main": b.ended(0, 30), "second": b.ended(143, 30)}, Result.RELEASE),
        ({"main": b.ended(143, 30)}, Result.RELEASE),
    ],
)
def test_exit_zero_on_stop_success(states: b.Json, result: Result) -> None:
    assert decided(workload=states, deleted=20, stop="Success").result is result


def test_the_drain_notice_is_no_evidence_of_a_stop() -> None:
    """The sidecar's preStop runs at every end; only deletion and disruption are evidence."""
    assert decided().result is Result.COMPLETE


@pytest.mark.parametrize(
    ("deleted", "result"),
    [(29, Result.RELEASE), (30, Result.RELEASE), (32, Result.RELEASE), (33, Result.COMPLETE), (300, Result.COMPLETE)],
)
def test_a_deletion_within_two_seconds_of_the_end_counts_as_before(deleted: float, result: Result) -> None:
    assert decided(workload=b.ended(0, 30), deleted=deleted).result is result


def test_the_last_container_s_end_is_what_a_stop_is_compared_with() -> None:
    states = {"main": b.ended(0, 10), "second": b.ended(0, 30)}
    assert decided(workload=states, deleted=20).result is Result.RELEASE


@pytest.mark.parametrize("state", [b.ended(0, 30), b.ended(137, 30), b.ended(143, 30)])
@pytest.mark.parametrize("message", [b.said(), b.said(Seen.FENCED), ""])
def test_the_active_deadline_is_a_failure_whatever_the_exit(state: b.Json, message: str) -> None:
    found = decided(**DEADLINE, workload=state, hold=b.holder(message))
    assert (found.result, found.reason) == (Result.FAIL, "DeadlineExceeded")


def test_the_active_deadline_while_an_init_container_runs() -> None:
    found = decided(**{**NEVER_BEGAN, **DEADLINE}, init={"fetch": b.ended(137, 30)})
    assert (found.result, found.reason) == (Result.FAIL, "DeadlineExceeded")
    stopped = decided(**{**NEVER_BEGAN, **DEADLINE}, deleted=10)
    assert stopped.reason == "DeadlineExceeded"


@pytest.mark.parametrize("state", [b.ended(0, 30), b.ended(1, 30), b.unknown()])
@pytest.mark.parametrize("hold", [b.holder(""), b.holder("Killed"), b.holder("", code=137)])
def test_without_testimony_nothing_is_written(state: b.Json, hold: b.Json) -> None:
    assert undecided(workload=state, hold=hold).why not in NOT_YET


# --- what tries to pass for a SUCCESS --------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [137, 143, 0, 1])
def test_a_sidecar_s_own_exit_code_never_decides(code: int) -> None:
    assert decided(hold=b.holder(code=code)).result is Result.COMPLETE
    cut_off = b.said(beat=31.2, final=False)
    assert decided(hold=b.holder(cut_off, code=code, finished=92)).result is Result.COMPLETE, "workload ended first"


class TestCutOffTestimony:
    """The sidecar was killed before it could say its last word."""

    @pytest.mark.parametrize(
        ("beat", "result"),
        [(32, Result.COMPLETE), (30, Result.COMPLETE), (27, Result.COMPLETE), (26, None), (15, None), (-60, None)],
    )
    def test_it_holds_if_the_sidecar_was_alive_at_the_workload_s_end(self, beat: float, result: Result | None) -> None:
        found = of(hold=b.holder(b.said(beat=beat, final=False), code=137))
        assert getattr(found, "result", None) is result

    def test_a_frozen_sidecar_that_was_killed_is_no_success(self) -> None:
        """The kubelet stopped the workload for the sidecar's silence, and it trapped SIGTERM and exited 0."""
        probe = b.TIMING.probe
        end = 10 + (probe.threshold - 1) * probe.period  # the soonest, without any preStop
        found = undecided(
            phase="Failed",
            workload=b.ended(0, end),
            hold=b.holder(b.said(beat=10, final=False), code=137),
        )
        assert found.why not in NOT_YET

    def test_a_sidecar_that_lives_on_proves_it_for_every_timing(self) -> None:
        timing = b.Timing(duration=20, heartbeat=2, grace=5, pre_stop=0)
        hold = b.holder(b.said(beat=31.1, final=False), code=137)
        assert decided(timing=timing, workload=b.ended(0, 30.9), hold=hold).result is Result.COMPLETE

    @pytest.mark.parametrize(("duration", "heartbeat"), [(900, 60), (300, 30), (100, 10), (40, 5), (30, 3), (20, 2)])
    def test_for_no_timing_can_the_kubelet_stop_it_within_the_slack(self, duration: int, heartbeat: int) -> None:
        timing = b.Timing(duration=duration, heartbeat=heartbeat, grace=5, pre_stop=0)
        soonest = (timing.probe.threshold - 1) * timing.probe.period
        for thousandths in range(1, 1000, 37):
            beat = 10 + thousandths / 1000
            hold = b.holder(b.said(beat=beat, final=False), code=137)
            stopped = beat + soonest + 0.01
            assert isinstance(of(timing=timing, workload=b.ended(0, stopped), hold=hold), Undecided)

    @pytest.mark.parametrize("final", [False, True])
    def test_a_sidecar_whose_clock_is_ahead_proves_nothing(self, final: bool) -> None:
        """It was dead while the kubelet stopped the workload, which then exited 0; its last beat seems to be later."""
        said = b.said(beat=310, until=1000, final=final)
        found = undecided(workload=b.ended(0, 30), hold=b.holder(said, code=137, finished=10))
        assert found.why == "the sidecar's clock is not its kubelet's"

    def test_past_the_trust_deadline_it_does_not_hold(self) -> None:
        assert undecided(hold=b.holder(b.said(beat=30.5, until=29, final=False), code=137)).why not in NOT_YET

    def test_of_an_earlier_instance_of_a_restarted_sidecar(self) -> None:
        """A sidecar that was restarted alone got SIGTERM before the workload's end, and said so."""
        last = b.holder(b.said(beat=12, final=True))
        assert undecided(hold=b.holder("", code=137), hold_last=last).why not in NOT_YET
        recent = b.holder(b.said(beat=29.5, final=True))
        assert decided(hold=b.holder("", code=137), hold_last=recent).result is Result.COMPLETE


@pytest.mark.parametrize("wrong", [{"attempt": 2}, {"lease": b.lease_id_of(b.at(3600))}])
@pytest.mark.parametrize("seen", list(Seen))
def test_another_attempt_s_testimony_is_none(wrong: b.Json, seen: Seen) -> None:
    hold = b.holder(b.said(seen, outcome="complete" if seen is Seen.REPORTED else None, **wrong))
    assert undecided(hold=hold).why not in NOT_YET


def test_a_report_without_an_outcome_is_no_report() -> None:
    found = of(hold=b.holder(b.said(Seen.REPORTED)))
    assert getattr(found, "result", None) is not Result.COMPLETE


@pytest.mark.parametrize(
    "options",
    [
        {"phase": "Running", "workload": b.running(), "hold": b.running()},
        {"phase": "Running", "workload": b.ended(0, 30), "hold": b.running()},
        {"phase": "Running", "workload": {"main": b.ended(0, 30), "second": b.running()}, "hold": b.running()},
        {"phase": "Running"},  # everything has ended, but the kubelet has not said that the Pod has
        {"phase": "Pending", "workload": b.waiting(), "hold": b.running()},
        {"phase": "Unknown", "workload": b.running(), "hold": b.running()},
    ],
)
def test_nothing_is_decided_before_the_end(options: b.Json) -> None:
    assert undecided(**options).why in NOT_YET


def test_a_lost_node_proves_nothing() -> None:
    found = undecided(
        phase="Failed",
        workload=b.running(),
        hold=b.running(),
        disrupted=("DeletionByPodGC", 400),
        deleted=400,
        grace=0,
    )
    assert found.why not in NOT_YET


def test_one_of_two_containers_without_an_end_proves_nothing() -> None:
    found = undecided(phase="Failed", workload={"main": b.ended(0, 30), "second": b.running()})
    assert found.why not in NOT_YET


def test_a_container_that_was_lost_is_an_interruption_not_a_failure() -> None:
    found = decided(phase="Failed", workload=b.unknown())
    assert (found.result, found.reason) == (Result.RELEASE, "ContainerStatusUnknown")


def test_a_container_that_vanished_under_containerd_is_an_interruption_too() -> None:
    """After a crash of the node or of containerd; the same exit code with a kubelet's ordinary reason is a failure."""
    found = decided(phase="Failed", workload=b.ended(255, 30, reason="Unknown"))
    assert (found.result, found.reason) == (Result.RELEASE, "ContainerStatusUnknown")
    assert decided(phase="Failed", workload=b.ended(255, 30, reason="Error")).result is Result.FAIL


def test_a_container_that_was_lost_and_another_that_failed() -> None:
    found = decided(phase="Failed", workload={"main": b.unknown(), "second": b.ended(1, 30)})
    assert found.result is Result.RELEASE


# --- the user's other containers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [0, 1, 137, 143])
def test_a_user_s_native_sidecar_never_decides(code: int) -> None:
    assert decided(sidecars={"proxy": b.ended(code, 32)}).result is Result.COMPLETE
    assert decided(sidecars={"proxy": b.running()}).result is Result.COMPLETE


def test_a_user_s_init_container_that_failed_counts() -> None:
    found = decided(**NEVER_BEGAN, init={"ok": b.ended(0, 2), "fetch": b.ended(3, 4, message="404")})
    assert (found.result, found.reason) == (Result.FAIL, "InitContainerFailed")
    assert found.message == "init container fetch exited with 3: 404"


def test_a_user_s_init_container_that_was_stopped_is_an_interruption() -> None:
    found = decided(**NEVER_BEGAN, init={"fetch": b.ended(143, 12)}, deleted=10)
    assert (found.result, found.reason) == (Result.RELEASE, "Interrupted")


def test_a_user_s_own_probe_that_failed_counts() -> None:
    message = b.said(failed_probe="main", reason="the liveness probe of main failed: 500")
    found = decided(phase="Failed", workload=b.ended(0, 30), hold=b.holder(message))
    assert (found.result, found.reason) == (Result.FAIL, "LivenessProbeFailed")
    assert "500" in found.message
    stopped = decided(phase="Failed", workload=b.ended(0, 30), hold=b.holder(message), deleted=20)
    assert stopped.result is Result.RELEASE, "a stop comes first"


# --- never started ---------------------------------------------------------------------------------------------------


def test_a_stop_before_the_workload_began_is_an_interruption() -> None:
    """Also at the pending deadline: then the row says why, and that there is no further attempt."""
    found = decided(**NEVER_BEGAN, deleted=500)
    assert (found.result, found.reason) == (Result.RELEASE, "Interrupted")


def test_a_stopped_pod_whose_image_was_never_pulled_has_not_begun() -> None:
    """The kubelet writes an end for a container that it never made."""
    found = decided(workload=b.never_made(), phase="Failed", deleted=20)
    assert (found.result, found.message) == (Result.RELEASE, "stopped before the workload began")


def test_the_gate_refused() -> None:
    found = decided(**NEVER_BEGAN | {"gate": b.ended(75, 4, message="not leased")})
    assert (found.result, found.reason) == (Result.RELEASE, "NeverStarted")
    assert "not leased" in found.message


def test_fenced_before_the_start() -> None:
    found = decided(**NEVER_BEGAN, hold=b.holder(b.said(Seen.FENCED, reason="stop")), deleted=5)
    assert (found.result, found.reason) == (Result.RELEASE, "Fenced")


def test_evicted_before_the_start() -> None:
    found = decided(**NEVER_BEGAN, reason="Evicted", disrupted=("TerminationByKubelet", 9))
    assert found.result is Result.RELEASE


# --- words -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "reason", "message"),
    [
        (
            {
                "phase": "Pending",
                "conditions": [
                    {"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available", "reason": "U"}
                ],
            },
            "Unschedulable",
            "0/3 nodes are available",
        ),
        (
            {"phase": "Pending", "adopt": b.waiting("ErrImagePull", "sidecar image"), "workload": b.waiting()},
            "ErrImagePull",
            "sidecar image",
        ),
        (
            {"phase": "Pending", "hold": b.waiting("CrashLoopBackOff", "back-off 10s"), "workload": b.waiting()},
            "CrashLoopBackOff",
            "back-off 10s",
        ),
        (
            {"phase": "Pending", "workload": b.waiting("CreateContainerConfigError", 'configmap "x" not found')},
            "CreateContainerConfigError",
            'configmap "x" not found',
        ),
        (
            {"phase": "Pending", "sidecars": {"proxy": b.waiting("ImagePullBackOff", "p")}, "workload": b.waiting()},
            "ImagePullBackOff",
            "p",
        ),
        ({"phase": "Pending", "workload": b.waiting()}, "PodInitializing", ""),
        ({"phase": "Failed", "reason": "OutOfcpu", "message": "m", "workload": b.waiting()}, "OutOfcpu", "m"),
    ],
)
def test_why_a_pod_does_not_start(options: b.Json, reason: str, message: str) -> None:
    assert waiting_reason(b.facts(**{"hold": b.running()} | options)) == (reason, message)


def test_why_a_pod_without_statuses_does_not_start() -> None:
    assert waiting_reason(b.facts_of(b.pending_pod())) == ("Pending", "")


class TestAdoptionRefusal:
    def test_adopt_s_own_words(self) -> None:
        state = b.ended(protocol.EXIT_NOT_MINE, 3, message='{"adopt":"lost","message":"another attempt holds it"}')
        said = adoption_refusal(b.facts(**NEVER_BEGAN, adopt=state, hold=b.waiting()))
        assert said is not None
        assert "another attempt holds it" in said

    def test_another_exit_is_described(self) -> None:
        said = adoption_refusal(b.facts(**NEVER_BEGAN, adopt=b.ended(1, 3, message="Traceback"), hold=b.waiting()))
        assert said == "leasedjob-adopt exited with 1 Error: Traceback"

    @pytest.mark.parametrize("phase", ["Pending", "Running"])
    def test_not_before_the_pod_has_ended(self, phase: str) -> None:
        assert adoption_refusal(b.facts(phase=phase, adopt=b.ended(75, 3), workload=b.waiting())) is None

    def test_not_where_adopt_succeeded_or_did_not_run(self) -> None:
        assert adoption_refusal(b.facts()) is None
        assert adoption_refusal(b.facts_of(b.pending_pod(phase="Failed", reason="OutOfcpu"))) is None

    def test_it_is_bounded(self) -> None:
        said = adoption_refusal(b.facts(**NEVER_BEGAN, adopt=b.ended(75, 3, message="x" * 4096), hold=b.waiting()))
        assert said is not None
        assert len(said) <= 512


@pytest.mark.parametrize("size", [1, MESSAGE_LIMIT, MESSAGE_LIMIT + 1, 300 * 1024])
def test_huge_messages_are_cut_to_their_end(size: int) -> None:
    text = "x" * (size - 1) + "!"
    found = decided(phase="Failed", workload=b.ended(1, 30, message=text))
    assert found.result is Result.FAIL
    assert len(found.message) <= MESSAGE_LIMIT
    assert found.message.endswith("!"), "errors stand at the end"
    assert len(str(found.data)) < 500


@given(st.text(st.characters(codec=None), max_size=60), st.integers(2, 50))
def test_a_cut_text_is_bounded_storable_and_keeps_its_end(text: str, limit: int) -> None:
    short = cut(text, limit)
    assert len(short) <= limit
    assert "\x00" not in short
    assert short.encode().decode() == short, "a lone surrogate can't be stored"
    if len(text) <= limit:
        assert len(short) == len(text)


# --- everything at once ----------------------------------------------------------------------------------------------

STATES = st.sampled_from([*EXITS, b.running(), b.waiting(), b.waiting("ImagePullBackOff"), b.ended(0, 5)])
MESSAGES = st.one_of(
    st.just(""),
    st.builds(
        lambda seen, beat, until, final: b.said(
            seen, beat=beat, until=until, final=final, outcome="complete" if seen is Seen.REPORTED else None
        ),
        st.sampled_from(list(Seen)),
        st.floats(-100, 100),
        st.floats(-100, 1000),
        st.booleans(),
    ),
)


@given(
    phase=st.sampled_from(["Pending", "Running", "Succeeded", "Failed", "Unknown"]),
    states=st.dictionaries(st.sampled_from("abc"), STATES, min_size=1),
    message=MESSAGES,
    hold_runs=st.booleans(),
    deleted=st.none() | st.floats(0, 60),
    deadline=st.booleans(),
    stop=st.sampled_from(["Retry", "Success"]),
)
def test_no_success_without_its_proof(
    phase: str,
    states: b.Json,
    message: str,
    hold_runs: bool,
    deleted: float | None,
    deadline: bool,
    stop: str,
) -> None:
    found = of(
        phase=phase,
        workload=states,
        hold=b.running() if hold_runs else b.holder(message),
        deleted=deleted,
        reason="DeadlineExceeded" if deadline else "",
        stop=stop,
    )
    if isinstance(found, Undecided) or found.result is not Result.COMPLETE:
        return
    assert phase in ("Succeeded", "Failed")
    assert message
    assert not hold_runs
    seen = protocol.Testimony.from_json(message)
    assert seen is not None
    if seen.seen is Seen.REPORTED:
        return
    assert seen.seen is Seen.LEASED
    assert all(s["terminated"]["exitCode"] == 0 for s in states.values())
    assert not deadline
    last = max(s["terminated"]["finishedAt"] for s in states.values())
    assert seen.beat + 3 >= b.at(5).timestamp()
    assert stop == "Success" or deleted is None or b.rfc(deleted) > last
