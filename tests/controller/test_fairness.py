"""Creations are rate limited, and an object with many due runs holds nobody up."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta

from leasedjob import protocol
from tests.controller.control_plane import Bench, wait_until

MANY = 100
RATE = 5


def _of(bench: Bench, job: str) -> int:
    return sum(p["metadata"]["annotations"][protocol.ANNOTATION_JOB] == job for p in bench.pods())


def test_many_due_runs_of_one_object_hold_no_other_up(bench: Bench) -> None:
    """An object owes a hundred runs, which may all run at once. Another one's run is asked for after them, and starts
    long before the last of them."""
    latest = datetime.now(UTC).replace(second=0, microsecond=0) - timedelta(minutes=20)  # the next one: in 40 minutes
    hourly = f"{latest.minute} * * * *"
    bench.apply("many", schedule=hourly, missedRunPolicy="RunAll", concurrencyPolicy="Allow")
    bench.apply("one", schedule=hourly, suspend=True)
    first = bench.operator("before")
    for job in ("many", "one"):
        wait_until(f"{job} is registered", lambda job=job: bench.ready_condition(job).get("status") == "True", 60)
    first.stop()
    owed = latest - timedelta(hours=MANY)
    bench.sql("UPDATE leasedjob.job_code SET watermark = %s WHERE code = %s", owed, f"{bench.namespace}/many")

    began = time.monotonic()
    operator = bench.operator("after", LEASEDJOB_PODS_PER_SECOND=str(RATE))
    wait_until("the first of the many", lambda: _of(bench, "many"), 60)
    bench.run_now("one")
    bench.pod_for("one", seconds=60)
    before = _of(bench, "many")
    taken = time.monotonic() - began
    claimed = bench.sql("SELECT count(*) FROM leasedjob.job_scheduler WHERE job_name = 'many'")[0][0]
    assert claimed == MANY, "all of them wait for nothing but their Pods"
    assert before < MANY - 2 * RATE, f"it was started after {before} of {MANY}"
    assert before + 1 <= RATE * (taken + 1) + 1, f"{before} Pods within {taken:.1f} s are more than {RATE} a second"
    assert operator.ready()
