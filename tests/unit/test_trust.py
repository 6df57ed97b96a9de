"""The trust window and the fence budget."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leasedjob.lease.trust import (
    MAX_DETECTION_SECONDS,
    MIN_LEASE_SECONDS,
    Timing,
    default_heartbeat,
    probe_for,
)


def test_the_defaults_trust_797_of_900_seconds() -> None:
    timing = Timing(duration=900, heartbeat=60, grace=60, pre_stop=10)
    assert (timing.probe.detection, timing.fence_budget, timing.trust) == (20, 85, 797)
    assert timing.problem() is None


def test_each_workload_container_may_take_a_grace_period() -> None:
    """The kubelet stops them one after the other if their probes don't fail at the same moment."""
    timing = Timing(duration=900, heartbeat=60, grace=60, pre_stop=10, containers=3)
    assert (timing.fence_budget, timing.trust) == (205, 677)
    assert Timing.from_json(timing.to_json()) == timing
    assert Timing(250, 50, 60, 10, containers=2).problem() is None
    assert "2 x grace period 60" in str(Timing(250, 51, 60, 10, containers=2).problem())


@given(st.integers(min_value=MIN_LEASE_SECONDS, max_value=86_400))
def test_detection_is_within_its_budget_and_kubernetes_limits(duration: int) -> None:
    probe = probe_for(duration)
    assert min(probe.period, probe.threshold, probe.timeout) >= 1
    assert probe.detection <= min(MAX_DETECTION_SECONDS, duration / 10)


@given(st.integers(min_value=40, max_value=86_400))
def test_one_slow_answer_does_not_decide(duration: int) -> None:
    assert probe_for(duration).threshold == 3


@pytest.mark.parametrize(("duration", "heartbeat"), [(900, 60), (90, 30), (180, 60), (20, 6), (2, 1), (1, 1)])
def test_default_heartbeat(duration: int, heartbeat: int) -> None:
    assert default_heartbeat(duration) == heartbeat


@given(
    st.integers(min_value=MIN_LEASE_SECONDS, max_value=86_400),
    st.integers(min_value=1, max_value=600),
    st.integers(min_value=0, max_value=3_600),
    st.integers(min_value=0, max_value=3_600),
    st.integers(min_value=1, max_value=4),
)
def test_an_accepted_timing_stops_the_workload_before_the_lease_ends(
    duration: int, heartbeat: int, grace: int, pre_stop: int, containers: int
) -> None:
    timing = Timing(duration, heartbeat, grace, pre_stop, containers)
    if timing.problem() is not None:
        return
    # A database clock that runs two percent fast, against the holder's.
    stopped = timing.trust + timing.probe.detection + containers * grace
    assert stopped / 0.98 < duration
    assert timing.trust >= 2 * heartbeat
    assert pre_stop < grace


@pytest.mark.parametrize(
    ("timing", "field"),
    [
        (Timing(duration=100, heartbeat=30, grace=60, pre_stop=10), "lease.durationSeconds"),
        (Timing(duration=900, heartbeat=400, grace=60, pre_stop=10), "lease.heartbeatSeconds"),
        (Timing(duration=900, heartbeat=60, grace=900, pre_stop=10), "shutdown.terminationGracePeriodSeconds"),
        (Timing(duration=900, heartbeat=60, grace=60, pre_stop=56), "shutdown.preStopSeconds"),
    ],
)
def test_a_refusal_names_the_field(timing: Timing, field: str) -> None:
    assert field in (timing.problem() or "")


def test_timing_survives_its_json() -> None:
    timing = Timing(900, 60, 60, 10)
    assert Timing.from_json(timing.to_json()) == timing
