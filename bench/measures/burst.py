"""1,000 objects due at one tick on a cluster whose nodes are cordoned: from the tick until each Pod is there.

Beside it, on the same control plane and in the same run: Kubernetes' CronJob controller with its own flags, the same
with raised ones, and a bare client that does nothing but POST as many Pods, 100 at a time; once those of the CronJobs,
and once those of the LeasedJobs, which have three containers more.
"""

from __future__ import annotations

import tempfile
import time
import uuid
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

from bench.database import Database, database
from bench.model import Aim, Result, Row, Scale, ratio, ratios
from bench.plane import JOBS, Json, Plane, leased_job, now, percentile, until, workload
from leasedjob.controller.pods import Attempt, Owner, Sidecar, build_pod
from leasedjob.controller.settings import Settings
from leasedjob.identity import RunIdentity, run_key_for
from leasedjob.lease.trust import Timing

RAISED: Final = (
    "--kube-api-qps=1000",
    "--kube-api-burst=2000",
    "--concurrent-cron-job-syncs=50",
    "--concurrent-job-syncs=50",
)
AHEAD: Final = 20.0  # seconds that everybody has to settle before the tick
OURS, BARE, BARE_OURS = "LeasedJob", "bare client", "bare client, Pods of LeasedJobs"
NATIVE, NATIVE_RAISED = "CronJob, default flags", "CronJob, raised flags"


def next_tick(ahead: float) -> datetime:
    """The next full minute that is at least so many seconds away."""
    return (now() + timedelta(seconds=ahead + 60)).replace(second=0, microsecond=0)


def from_then_on(tick: datetime, minutes: int = 5) -> str:
    """A schedule that is due each minute from this one on, and not before."""
    hours: dict[int, list[int]] = {}
    for n in range(minutes):
        at = tick + timedelta(minutes=n)
        hours.setdefault(at.hour, []).append(at.minute)
    if len(hours) > 1:  # such a schedule can't be said in five fields: the first hour's minutes are enough
        hours = {tick.hour: hours[tick.hour]}
    ((hour, at_minutes),) = hours.items()
    return f"{','.join(map(str, at_minutes))} {hour} * * *"


def sleep_until(at: datetime) -> None:
    time.sleep(max(0.0, (at - now()).total_seconds()))


def cron_job(name: str, schedule: str) -> Json:
    template = {"spec": {**workload(), "restartPolicy": "Never"}}
    return {
        "apiVersion": "batch/v1",
        "kind": "CronJob",
        "metadata": {"name": name},
        "spec": {
            "schedule": schedule,
            "timeZone": "Etc/UTC",
            "concurrencyPolicy": "Forbid",
            "jobTemplate": {"spec": {"template": template}},
        },
    }


def bare_pod(number: int, namespace: str) -> Json:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": f"bare-{number}", "namespace": namespace},
        "spec": {**workload(), "restartPolicy": "Never"},
    }


def our_pod(number: int, namespace: str) -> Json:
    """A Pod as the operator builds it."""
    settings, tick = Settings(), datetime(2026, 1, 1, tzinfo=UTC)
    identity = RunIdentity.of(code=f"{namespace}/job-{number}", run_key=run_key_for(tick))
    return build_pod(
        owner=Owner(f"job-{number}", namespace, str(uuid.uuid4())),
        template={"spec": workload()},
        attempt=Attempt(
            str(uuid.uuid4()), str(uuid.uuid4()), identity.lock_key, "SCHEDULE", identity.code, identity.run_key, tick,
            1, number,
        ),
        timing=Timing(duration=900, heartbeat=60, grace=60, pre_stop=10),
        sidecar=Sidecar("leasedjob/sidecar", "IfNotPresent", settings.sidecar_resources, (), "leasedjob-sidecar"),
        cluster="bench",
        active_deadline_seconds=None,
        finish_policy="{}",
    )  # fmt: skip


class Burst:
    """Each side in a namespace of its own; the seconds after its tick at which each Pod was there."""

    def __init__(self, plane: Plane, base: Database, count: int, window: float) -> None:
        self.plane, self.base, self.count, self.window = plane, base, count, window
        self.prefix = "burst"
        self._number = 0

    def _namespace(self) -> str:
        self._number += 1
        return self.plane.namespace(f"{self.prefix}-{self._number}")

    def _late(self, namespace: str, tick: datetime) -> list[float]:
        """Until all are there, or the window is over."""
        end = tick + timedelta(seconds=self.window)
        while True:
            made = self.plane.pods_made(namespace, tick - timedelta(seconds=5))
            if len(made) >= self.count or now() > end:
                return [(at - tick).total_seconds() for at in made if at <= end]
            time.sleep(1.0)

    def bare(self, pod: Callable[[int, str], Json]) -> list[float]:
        namespace = self._namespace()
        bodies = [pod(n, namespace) for n in range(self.count)]
        began = now()
        self.plane.post(f"/api/v1/namespaces/{namespace}/pods", bodies)
        since = began - timedelta(seconds=1)
        made = self.plane.pods_made(namespace, since)
        self.plane.clear(f"/api/v1/namespaces/{namespace}/pods")
        return [(at - began).total_seconds() for at in made]

    def ours(self, profile: Path | None = None, **environment: str) -> list[float]:
        namespace = self._namespace()
        operator = self.plane.operator(self.base, LEASEDJOB_NAMESPACES=namespace, **environment)
        if profile is not None:
            operator.profiled(profile)
        with operator.running():
            until("the operator is ready", operator.ready)
            tick = next_tick(AHEAD + self.count / 100)
            schedule = from_then_on(tick)
            bodies = [leased_job(f"job-{n}", schedule=schedule) for n in range(self.count)]
            self.plane.post(JOBS.format(namespace), bodies, concurrency=20)
            registered = "SELECT count(*) FROM leasedjob.job_registration WHERE namespace = %s AND cluster = 'bench'"
            until("all are registered", lambda: self.base.ask(registered, namespace) == self.count, every=1.0)
            assert now() < tick - timedelta(seconds=5), "the objects came too late"
            sleep_until(tick + timedelta(seconds=2))
            late = self._late(namespace, tick)
            time.sleep(3 if profile is None else 10)  # statuses and Events are still written
        self.plane.clear(JOBS.format(namespace))
        self.plane.clear(f"/api/v1/namespaces/{namespace}/pods")
        return late

    def native(self, *flags: str) -> list[float]:
        namespace = self._namespace()
        path = f"/apis/batch/v1/namespaces/{namespace}"
        with self.plane.controllers(*flags):
            tick = next_tick(AHEAD + self.count / 200)
            schedule = from_then_on(tick)
            self.plane.post(
                f"{path}/cronjobs", [cron_job(f"job-{n}", schedule) for n in range(self.count)], concurrency=20
            )
            assert now() < tick - timedelta(seconds=5), "the objects came too late"
            sleep_until(tick + timedelta(seconds=2))
            late = self._late(namespace, tick)
        self.plane.clear(f"{path}/cronjobs")
        self.plane.clear(f"{path}/jobs")
        self.plane.clear(f"/api/v1/namespaces/{namespace}/pods")
        return late


def told(name: str, late: list[float]) -> list[float]:
    """Says at once what came out: the whole takes minutes."""
    print(f"  burst: {name}: {len(late)} Pods, the last after {max(late):.2f} s", flush=True)
    return late


def measure(scale: Scale) -> Result:
    """Seconds from the tick (bare client: from its start)."""
    count, rounds, window = scale.of(1000, 20), scale.of(2, 1), scale.of(60, 20)
    late: dict[str, list[list[float]]] = {}
    with database() as base, tempfile.TemporaryDirectory() as folder, Plane(Path(folder)) as plane:
        burst = Burst(plane, base, count, window)
        sides: dict[str, Callable[[], list[float]]] = {
            BARE: lambda: burst.bare(bare_pod),
            BARE_OURS: lambda: burst.bare(our_pod),
            OURS: burst.ours,
            NATIVE_RAISED: lambda: burst.native(*RAISED),
        }
        burst.bare(bare_pod)  # warms the API server up
        for turn in range(rounds):
            for name in list(sides)[:: 1 if turn % 2 == 0 else -1]:
                late.setdefault(name, []).append(told(name, sides[name]()))
        late[NATIVE] = [told(NATIVE, burst.native())]
        settings: dict[str, Any] = base.settings
    return result(late, count, window, settings)


def result(late: dict[str, list[list[float]]], count: int, window: float, settings: dict[str, Any]) -> Result:
    total = {name: [max(turn) for turn in turns] for name, turns in late.items()}
    table: list[Row] = []
    for name, turns in late.items():
        table.append(Row(f"{name}: created", "Pods", tuple(float(len(turn)) for turn in turns)))
        for what, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0)):
            values = tuple(percentile(turn, share) for turn in turns)
            if what == "p50" or name in (BARE, NATIVE):
                table.append(Row(f"{name}: {what}", "s", values))
            else:
                table.append(Row(f"{name}: {what}", "s", values, ratios(values, total[BARE]), "bare client's total"))
    p99 = [percentile(turn, 0.99) for turn in late[OURS]]
    raised = [percentile(turn, 0.99) for turn in late[NATIVE_RAISED]]
    return Result(
        "burst",
        f"{count:,} objects due at one tick, no node takes Pods: tick to Pod created (less is better)",
        tuple(table),
        (
            Aim("LeasedJob: created, of each tick", min(len(turn) for turn in late[OURS]), count, at_least=True),
            Aim("LeasedJob's p99 / bare client's total", ratio(p99, total[BARE]), 1.5),
            Aim("LeasedJob's p99 / total of the bare client with the same Pods", ratio(p99, total[BARE_OURS]), 1.5),
            Aim("p99 of CronJob with raised flags / LeasedJob's", ratio(raised, p99), 2.0, at_least=True),
        ),
        {
            **settings,
            "times": "of the API server's audit log",
            "window": f"{window:g} s after the tick; what comes later isn't counted",
            "raised flags": " ".join(RAISED),
            "bare client": "aiohttp, 100 POSTs at a time",
            "etcd": "without fsync",
            "nodes": "none that takes Pods",
        },
    )
