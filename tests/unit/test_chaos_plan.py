"""The plan of `make chaos` follows from its seed, and leaves nothing out."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from pydantic import ValidationError
from tests.chaos_cluster.arena import CODES, HOLDERS, PROCESSES
from tests.chaos_cluster.holders import Holding
from tests.chaos_cluster.manifests import Kind, manifest
from tests.chaos_cluster.plan import KINDS, QUIET, faults, jobs

from leasedjob.api.v1alpha1 import LeasedJobSpec
from leasedjob.lease.trust import Timing


@pytest.mark.parametrize("minutes", [3, 20])
def test_a_seed_says_what_is_done_and_when(minutes: int) -> None:
    plan = faults(7, minutes)
    assert plan == faults(7, minutes)
    assert plan != faults(8, minutes)
    assert [fault.at for fault in plan] == sorted(fault.at for fault in plan)
    assert all(QUIET <= fault.at <= minutes * 60 - QUIET for fault in plan)
    assert all(fault.at + fault.seconds <= minutes * 60 - QUIET + 0.2 for fault in plan), "healed by the end"
    counted = Counter(fault.kind for fault in plan)
    assert len(counted) == min(len(plan), len(KINDS)), "no kind twice before each has come once"
    assert max(counted.values()) - min(counted.values()) <= 1
    assert len(plan) >= 5 * minutes


def test_jobs_are_spread_over_what_there_is() -> None:
    found = jobs(7, 60)
    assert found == jobs(7, 60)
    assert found != jobs(8, 60)
    assert len({job.name for job in found}) == 40
    assert {job.policy for job in found} == {"Forbid", "Replace", "Allow"}
    assert {job.kind for job in found} == set(Kind)
    assert {job.every for job in found} == {1, 2, 5}


def test_holders_of_one_code_share_neither_process_nor_way_to_the_database(tmp_path: Path) -> None:
    holding = Holding(
        dsns=["1", "2", "3", "4"], recorder=("127.0.0.1", 1), first=0, lease=15.0, heartbeat=3.0, work=25.0,
        processes=PROCESSES, holders=HOLDERS, codes=CODES, failing=0.1, seed=7,
    )  # fmt: skip
    holding.save(tmp_path)
    assert Holding.load(tmp_path) == holding
    of: dict[str, set[int]] = {}
    for holder in range(HOLDERS):
        of.setdefault(holding.code(holder), set()).add(holding.process(holder))
    assert len(of) == CODES
    for processes in of.values():
        assert len(processes) == HOLDERS // CODES > 1
        assert len({process % len(holding.dsns) for process in processes}) > 1


@pytest.mark.parametrize("seed", range(5))
def test_each_job_is_one_that_the_api_accepts(seed: int) -> None:
    for job in jobs(seed, 60):
        made = manifest(job, recorder=("10.99.0.1", 5000), image="docker.io/leasedjob/operator:test")
        try:
            LeasedJobSpec.model_validate(made["spec"])
        except ValidationError as error:
            raise AssertionError(made) from error
        timing = job.timing
        assert Timing(timing.lease, timing.heartbeat, timing.grace, 0).problem() is None
