"""The owner's node is lost: from the instant at which its lease expires until the next attempt is claimed.

No kubelet is needed for that: what a lost node does is that heartbeats stop. Each run's Pod is bound to a node that
nobody stands behind, adopts its lease, and is not heard of again. Both times are the database's.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, Final

from bench.database import database
from bench.measures.live import adopt_all
from bench.model import Aim, Result, Row, Scale
from bench.plane import JOBS, Plane, leased_job, percentile, until

LEASE: Final = 40  # seconds
# Kept before they expire: the next claim is written into the same row.
NOTED: Final = """
CREATE TABLE bench_expiry AS SELECT id, attempt, leasedjob.expires_at(modified_at, lease_ms) AS expires_at
FROM leasedjob.job_scheduler WHERE attempt = 1 AND pod_uid IS NOT NULL
"""
LATE: Final = """
SELECT extract(epoch FROM s.started_at - e.expires_at)::float8
FROM leasedjob.job_scheduler s JOIN bench_expiry e ON e.id = s.id WHERE s.attempt = 2
"""


def measure(scale: Scale) -> Result:
    """Seconds from expiry to claim, by the database's clock."""
    objects = scale.of(100, 3)
    with database() as base, tempfile.TemporaryDirectory() as folder, Plane(Path(folder)) as plane:
        namespace = plane.namespace("lost")
        operator = plane.operator(base, LEASEDJOB_NAMESPACES=namespace)
        with operator.running():
            until("the operator is ready", operator.ready)
            bodies = [
                leased_job(
                    f"job-{n}",
                    type="Initial",
                    lease={"durationSeconds": LEASE, "heartbeatSeconds": 5},
                    shutdown={"preStopSeconds": 0, "terminationGracePeriodSeconds": 5},
                )
                for n in range(objects)
            ]
            plane.post(JOBS.format(namespace), bodies, concurrency=20)
            claimed = "SELECT count(*) FROM leasedjob.job_scheduler"
            until("all are claimed", lambda: base.ask(claimed) == objects)
            until("all have their Pods", lambda: len(plane.pods(namespace)) == objects, every=0.5)
            adopt_all(plane, base, namespace, seconds=10.0 if objects > 10 else 1.0)
            base.execute(NOTED)
            again = "SELECT count(*) FROM leasedjob.job_scheduler WHERE attempt = 2"
            until("all are claimed again", lambda: base.ask(again) == objects, seconds=120, every=1.0)
            late = [row[0] for row in base.rows(LATE)]
        settings: dict[str, Any] = base.settings
    return Result(
        "lost",
        f"{objects} owners are lost: expiry of the lease to the claim of the next attempt (less is better)",
        (
            Row("p50", "s", (percentile(late, 0.5),)),
            Row("p99", "s", (percentile(late, 0.99),)),
            Row("the latest", "s", (max(late),)),
        ),
        (Aim("expiry to claim, s: the latest", max(late), 1.0),),
        {**settings, "lease": f"{LEASE} s", "expiries": "spread over 10 s", "nodes": "none: heartbeats just stop"},
    )
