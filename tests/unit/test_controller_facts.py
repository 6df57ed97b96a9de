"""What a Pod's object proves, on the shapes that kubelet, API server and Pod garbage collector write."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit import controller_builders as b

from leasedjob import protocol
from leasedjob.controller.facts import parse_time, pod_facts
from leasedjob.protocol import Seen


def test_a_pod_that_ran_to_its_end() -> None:
    p = b.facts(attempt=3)
    assert (p.lease_id, p.attempt, p.run_key) == (str(b.lease_id_of()), 3, "2026-07-20T03:00:00Z")
    assert (p.job_name, p.job_uid, p.namespace) == (b.JOB, b.JOB_UID, b.NAMESPACE)
    assert p.finished
    assert p.workload_ended
    assert p.workload_started
    assert p.sidecar_ended
    assert p.testimony is not None
    assert p.testimony.seen is Seen.LEASED
    assert p.adopt is not None
    assert p.hold is not None
    assert p.gate is not None
    assert (p.user_init, p.user_sidecars) == ((), ())
    assert p.workload[0].end is not None
    assert p.workload[0].end.finished_at == b.at(30)
    assert p.stop_requested_at is None


def test_a_pod_that_runs() -> None:
    p = b.facts_of(b.running_pod())
    assert p.workload_started
    assert (p.finished, p.workload_ended, p.sidecar_ended) == (False, False, False)
    assert p.testimony is None


def test_a_pod_without_any_status() -> None:
    body = b.pending_pod(conditions=[{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}])
    p = b.facts_of(body)
    assert (p.phase, p.node, p.unschedulable) == ("Pending", "", "Unschedulable")
    assert (p.adopt, p.hold, p.gate, p.workload) == (None, None, None, ())
    assert (p.workload_started, p.workload_ended) == (False, False)
    del body["status"]
    assert b.facts_of(body).phase == "Pending"


@pytest.mark.parametrize(
    ("annotations", "why"),
    [
        (None, "no annotations at all"),
        ({protocol.ANNOTATION_LEASE: "x"}, "no attempt"),
        ({protocol.ANNOTATION_ATTEMPT: "1"}, "no lease"),
        ({protocol.ANNOTATION_LEASE: "x", protocol.ANNOTATION_ATTEMPT: "one"}, "not a number"),
        ({protocol.ANNOTATION_LEASE: "x", protocol.ANNOTATION_ATTEMPT: "-1"}, "negative"),
        ({protocol.ANNOTATION_LEASE: "x", protocol.ANNOTATION_ATTEMPT: ""}, "empty"),
        ({protocol.ANNOTATION_LEASE: "x", protocol.ANNOTATION_ATTEMPT: "9" * 5000}, "more digits than int() takes"),
    ],
)
def test_what_is_no_run_s_pod(annotations: Any, why: str) -> None:
    body = b.pod()
    body["metadata"]["annotations"] = annotations
    assert pod_facts(body) is None, why
    assert pod_facts({}) is None


class TestStops:
    def test_the_deletion_was_asked_for_one_grace_period_before_its_timestamp(self) -> None:
        p = b.facts(deleted=20, grace=60)
        assert p.deleting
        assert p.stop_requested_at == b.at(20)

    def test_a_forced_deletion(self) -> None:
        assert b.facts(deleted=20, grace=0).stop_requested_at == b.at(20)

    @pytest.mark.parametrize(
        "reason", ["EvictionByEvictionAPI", "PreemptionByScheduler", "DeletionByTaintManager", "TerminationByKubelet"]
    )
    def test_a_disruption(self, reason: str) -> None:
        p = b.facts(disrupted=(reason, 12))
        assert (p.disrupted, p.stop_requested_at, p.deleting) == (reason, b.at(12), False)

    def test_the_earlier_of_both(self) -> None:
        assert b.facts(disrupted=("X", 12), deleted=11).stop_requested_at == b.at(11)
        assert b.facts(disrupted=("X", 12), deleted=13).stop_requested_at == b.at(12)

    def test_a_disruption_that_is_not_true(self) -> None:
        p = b.facts(conditions=[{"type": "DisruptionTarget", "status": "False", "lastTransitionTime": b.rfc(5)}])
        assert (p.disrupted, p.stop_requested_at) == ("", None)


class TestEnds:
    def test_out_of_memory(self) -> None:
        p = b.facts(phase="Failed", workload=b.ended(137, 30, reason="OOMKilled"))
        end = p.workload[0].end
        assert end is not None
        assert (end.exit_code, end.reason) == (137, "OOMKilled")
        assert p.workload_started

    def test_container_status_unknown_is_an_end_and_the_id_tells_whether_it_ran(self) -> None:
        made = b.facts(phase="Failed", workload=b.unknown())
        assert (made.workload_ended, made.workload_started) == (True, True)
        p = b.facts(phase="Failed", workload=b.never_made())
        assert p.workload_ended
        assert not p.workload_started
        assert p.workload[0].end is not None
        assert p.workload[0].end.finished_at is None

    def test_a_lost_node_leaves_running_states_under_phase_failed(self) -> None:
        """What the Pod garbage collector writes: the phase, and nothing about the containers."""
        p = b.facts(
            phase="Failed", workload=b.running(), hold=b.running(), disrupted=("DeletionByPodGC", 500), deleted=500
        )
        assert p.finished
        assert not p.workload_ended
        assert not p.sidecar_ended

    def test_an_eviction_by_the_kubelet(self) -> None:
        p = b.facts(
            phase="Failed",
            workload=b.ended(137, 30),
            reason="Evicted",
            message="The node was low on resource: memory.",
            disrupted=("TerminationByKubelet", 28),
        )
        assert (p.reason, p.disrupted, p.stop_requested_at) == ("Evicted", "TerminationByKubelet", b.at(28))

    def test_an_eviction_before_any_container(self) -> None:
        p = b.facts_of(b.pending_pod(phase="Failed", reason="Evicted"))
        assert p.finished
        assert p.sidecar_ended
        assert not p.workload_started

    def test_every_workload_container_must_have_ended(self) -> None:
        one = b.facts(workload={"main": b.ended(), "second": b.running()})
        assert not one.workload_ended
        assert one.workload_started
        missing = b.facts(workload={"main": b.ended()}, containers=["main", "second"])
        assert not missing.workload_ended, "a container without a status has not ended"
        assert b.facts(workload={"main": b.ended(), "second": b.ended()}).workload_ended

    def test_a_container_that_only_waits_has_not_started(self) -> None:
        p = b.facts(phase="Pending", workload=b.waiting("ImagePullBackOff", "no such image"), hold=b.running())
        assert not p.workload_started
        assert (p.workload[0].waiting, p.workload[0].waiting_message) == ("ImagePullBackOff", "no such image")

    def test_a_restarted_container_has_started(self) -> None:
        body = b.pod(phase="Running")
        body["status"]["containerStatuses"] = [
            b.status("main", b.waiting("CrashLoopBackOff"), last=b.ended(1, 20), restarts=1)
        ]
        p = b.facts_of(body)
        assert p.workload_started
        assert p.workload[0].restarts == 1

    def test_the_sidecar_has_ended_if_it_never_began(self) -> None:
        p = b.facts(phase="Failed", workload=b.waiting(), hold=b.waiting(), adopt=b.ended(75, 1), gate=b.waiting())
        assert p.sidecar_ended
        assert p.testimony is None


class TestInitContainers:
    def test_ours_the_user_s_own_and_native_sidecars(self) -> None:
        p = b.facts(init={"fetch": b.ended(0, 2)}, sidecars={"proxy": b.ended(143, 32)})
        assert [c.name for c in p.user_init] == ["fetch"]
        assert [c.name for c in p.user_sidecars] == ["proxy"]

    def test_ours_are_ours_whatever_the_spec_says(self) -> None:
        assert {c.name for c in b.facts().user_sidecars} == set(), "leasedjob-hold has restartPolicy Always"

    def test_a_container_that_a_webhook_injected_is_part_of_the_workload(self) -> None:
        p = b.facts(workload={"main": b.ended(), "mesh": b.running()})
        assert p.workload_count == 2
        assert not p.workload_ended


class TestTestimony:
    def test_the_state_comes_before_the_last_state(self) -> None:
        p = b.facts(hold=b.holder(b.said(Seen.FENCED)), hold_last=b.holder(b.said(Seen.LEASED)), phase="Failed")
        assert p.testimony is not None
        assert p.testimony.seen is Seen.FENCED

    @pytest.mark.parametrize("state", [b.running(), b.waiting("CrashLoopBackOff"), b.holder("")])
    def test_a_restarted_sidecar_s_last_one_counts(self, state: b.Json) -> None:
        p = b.facts(hold=state, hold_last=b.holder(b.said(beat=12, final=False)))
        assert p.testimony is not None
        assert p.testimony.beat == b.at(12).timestamp()

    @pytest.mark.parametrize(
        "message",
        [
            "",
            "panic: out of memory",
            "{}",
            "[]",
            "null",
            "17",
            '"leased"',
            '{"seen":"leased"}',
            '{"lease_id":"x","attempt":1,"seen":"perhaps","beat":1,"until":2}',
            '{"lease_id":"x","attempt":1,"seen":"leased","beat":"soon","until":2}',
            '{"lease_id":"x","attempt":1,"seen":"leased","beat":1,"until":null}',
            '{"lease_id":"x","attempt":1,"seen":"leased","beat":NaN,"until":2}',
            '{"lease_id":"x","attempt":1,"seen":"leased","beat":1,"until":Infinity}',
            '{"lease_id":"x","attempt":1,"seen":"leased","beat":true,"until":2}',
            '{"lease_id":"x","attempt":1,"seen":"leased","beat":1,"until":2,"final":"yes"}',
            '{"lease_id":"x","attempt":1,"seen":"leased","beat":1,"until":2,"reason":17}',
            '{"lease_id":"x","attempt":1,"seen":"leased","beat":1,"until":2,"reason":null}',
            '{"lease_id":17,"attempt":1,"seen":"leased","beat":1,"until":2}',
            '{"lease_id":"x","attempt":"1","seen":"leased","beat":1,"until":2}',
            '{"lease_id":"x","attempt":1,"seen":"leased","beat":1,"until":2,"fenced_at":"x"}',
            '{"lease_id":"x","attempt":1,"seen":"reported","beat":1,"until":2,"outcome":"ended"}',
            '{"lease_id":"x","attempt":1,"seen":"reported","beat":1,"until":2,"outcome":["complete"]}',
            "x" * 4096,
        ],
    )
    def test_what_can_t_be_read_proves_nothing(self, message: str) -> None:
        assert b.facts(hold=b.holder(message)).testimony is None

    @given(st.text(max_size=200) | st.recursive(st.none() | st.floats() | st.text(), st.lists).map(str))
    def test_no_message_breaks_the_reader(self, message: str) -> None:
        assert pod_facts(b.pod(hold=b.holder(message))) is not None

    @pytest.mark.parametrize("outcome", ["complete", "fail", "release"])
    def test_a_report(self, outcome: str) -> None:
        p = b.facts(hold=b.holder(b.said(Seen.REPORTED, outcome=outcome, recorded=False)))
        assert p.testimony is not None
        assert (p.testimony.outcome, p.testimony.recorded) == (outcome, False)


class TestSoonestStop:
    """After how long a silence of the sidecar the kubelet may stop the workload, by the Pod's own probes."""

    @pytest.mark.parametrize(
        ("duration", "heartbeat", "seconds"), [(900, 60, 10), (100, 20, 4), (40, 5, 2), (20, 2, 0)]
    )
    def test_by_the_probe(self, duration: int, heartbeat: int, seconds: float) -> None:
        timing = b.Timing(duration=duration, heartbeat=heartbeat, grace=5, pre_stop=0)
        probe = timing.probe
        assert b.facts(timing=timing).soonest_stop == (probe.threshold - 1) * probe.period == seconds

    def test_the_shortest_of_several_and_no_probe(self) -> None:
        body = b.pod(workload={"main": b.ended(), "second": b.ended()})
        body["spec"]["containers"][1]["livenessProbe"] |= {"periodSeconds": 1}
        assert b.facts_of(body).soonest_stop == 2
        for container in body["spec"]["containers"]:
            del container["livenessProbe"]
        assert b.facts_of(body).soonest_stop == 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2026-07-20T03:00:00Z", b.T0),
        ("2026-07-20T03:00:00.5Z", b.at(0.5)),
        ("2026-07-20T05:00:00+02:00", b.T0),
        (None, None),
        ("", None),
        ("yesterday", None),
        ("2026-07-20T03:00:00", None),
        ("2026-07-20", None),
        ("0001-01-01T00:00:00+14:00", None),
    ],
)
def test_times(text: str | None, expected: object) -> None:
    assert parse_time(text) == expected
