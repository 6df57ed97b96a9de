"""A status page over a real database, with jobs and runs of three clusters that a test or a picture asks for.

It is the operator's own page, engine and store, in a thread of its own; only the watch is missing: objects are handed
to the cache as it would do it, and nothing is reconciled, so that everything stays as it was put.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Coroutine, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar
from uuid import UUID, uuid4, uuid5

import psycopg

from leasedjob.controller.act import Actor
from leasedjob.controller.cache import Cache
from leasedjob.controller.clock import DatabaseClock
from leasedjob.controller.engine import RECENT, Engine
from leasedjob.controller.events import Recorder
from leasedjob.controller.gauges import Gauges
from leasedjob.controller.kube import Kube
from leasedjob.controller.loops import Health
from leasedjob.controller.metrics import Metrics
from leasedjob.controller.page.server import serve
from leasedjob.controller.settings import Settings
from leasedjob.controller.spec import derive
from leasedjob.controller.status import StatusWriter
from leasedjob.controller.tenants import TenantSecrets
from leasedjob.identity import JobSchedulerType, RunIdentity, job_code, run_key_for
from leasedjob.lease.database import Credentials, operator_pool
from leasedjob.lease.store import OperatorStore
from leasedjob.schedule import Timetable

T = TypeVar("T")
Json = dict[str, Any]
HERE, THERE, FAR = "eu-west", "eu-central", "us-east"
NAMES = UUID("2c4b8e0a-5a5f-4d6c-9a57-5a1e0fd7c001")
TEMPLATE: Json = {"spec": {"containers": [{"name": "main", "image": "registry.example/job:1"}]}}


class Scene:
    """The page, and what is behind it.

    Args:
        dsn: of a database with the schema.
    """

    def __init__(self, dsn: str, **settings: Any) -> None:
        self.dsn = dsn
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.now = datetime.now(UTC).replace(microsecond=0)
        self._settings = Settings(
            cluster=HERE, identity="leasedjob-7c9f8d6b5-x2x7q", page_port=self.port, compare_seconds=3600, **settings
        )
        self.asked: list[str] = []  # statements, in their order
        self._loop = asyncio.new_event_loop()
        self._stop: asyncio.Event
        self._ready = threading.Event()
        self._version = 0
        self._sql = psycopg.connect(dsn, autocommit=True)
        self._thread = threading.Thread(target=self._run, name="page-scene", daemon=True)

    # --- life --------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()
        assert self._ready.wait(60)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)
        self._loop.close()
        self._sql.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        async with contextlib.AsyncExitStack() as stack:
            metrics, clock = Metrics(), DatabaseClock()
            kube = Kube()
            kube.answered_at = time.monotonic()
            pool = operator_pool(Credentials.from_conninfo(self.dsn), max_size=3)
            await stack.enter_async_context(pool)
            store = OperatorStore(pool.connection, observe=lambda name, _seconds, _fault: self.asked.append(name))
            settings = self._settings
            actor = Actor(
                settings, kube, store, TenantSecrets(settings, kube, metrics), Recorder(kube, "x"), clock, metrics
            )
            self.engine = Engine(settings, kube, store, actor, clock, metrics, StatusWriter(kube, clock))
            self.engine.cache = actor.cache = Cache(lambda _key: None)
            self.engine.fresh = True
            self.health = Health(listed=True, unread="", definitions="", schema="", cluster="", database="")
            self.health.database_at = time.monotonic() + 3600
            self.gauges = Gauges(self.engine)
            await stack.enter_async_context(serve(self.engine, self.health, self.gauges))
            self._ready.set()
            await self._stop.wait()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Something in the page's own loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    # --- what is put there -------------------------------------------------------------------------------------------

    def sql(self, statement: str, *parameters: Any) -> None:
        self._sql.execute(statement, parameters)  # type: ignore[arg-type]

    def ago(self, **spans: float) -> datetime:
        return self.now - timedelta(**spans)

    def job(
        self,
        namespace: str,
        name: str,
        schedule: str | None = "0 * * * *",
        *,
        age: float = 40,
        status: Json | None = None,
        clusters: tuple[str, ...] = (HERE,),
        **spec: Any,
    ) -> str:
        """A LeasedJob of this cluster, registered by these; its code. `age`: in days."""
        self._version += 1
        created = self.ago(days=age)
        uid = str(uuid5(NAMES, f"{namespace}/{name}"))
        body = {
            "metadata": {
                "namespace": namespace,
                "name": name,
                "uid": uid,
                "resourceVersion": str(self._version),
                "generation": 1,
                "creationTimestamp": f"{created:%Y-%m-%dT%H:%M:%SZ}",
            },
            "spec": {**({"schedule": schedule} if schedule else {}), "template": TEMPLATE, **spec},
            "status": status or {"conditions": [_ready(created)]},
        }

        self.call(self._put(body))
        code = job_code(namespace, name, None)
        self.sql(
            "INSERT INTO leasedjob.job_code (code, watermark) VALUES (%s, %s) ON CONFLICT DO NOTHING", code, self.now
        )
        for cluster in clusters:
            self.sql(
                "INSERT INTO leasedjob.job_registration (code, cluster, namespace, name, uid, created_at,"
                " schedule_hash, spec_hash, policy, suspended) VALUES (%s, %s, %s, %s, %s, %s, '', '', %s, %s)"
                " ON CONFLICT DO NOTHING",
                code,
                cluster,
                namespace,
                name,
                uid,
                created,
                spec.get("concurrencyPolicy", "Forbid"),
                spec.get("suspend", False),
            )
        return code

    def ticks(self, code: str, schedule: str, zone: str, count: int) -> list[datetime]:
        """The last ticks of a schedule, the latest first."""
        table, found, at = Timetable.of([schedule], zone, code=code), [], self.now
        while len(found) < count and (before := table.previous(at)) is not None:
            found.append(before)
            at = before - timedelta(seconds=1)
        return found

    def run(
        self,
        code: str,
        tick: datetime | None,
        *,
        status: str = "SUCCESS",
        cluster: str = HERE,
        took: float = 40,
        waited: float = 2,
        attempt: int = 1,
        late: float = 0.2,
        **more: Any,
    ) -> UUID:
        """A row. `late`, `waited`, `took`: seconds from tick to claim, to adoption, to the end."""
        namespace, _, name = code.partition("/")
        key = more.pop("run_key", None) or (run_key_for(tick) if tick else None)
        identity = RunIdentity.of(type=JobSchedulerType.SCHEDULE, code=code, run_key=key)
        started = (tick or self.now) + timedelta(seconds=late)
        adopted = started + timedelta(seconds=waited)
        over = status != "RUNNING"
        ended = adopted + timedelta(seconds=took) if over else None
        values: Json = {
            "id": uuid4(),
            "lock_key": identity.lock_key,
            "type": "SCHEDULE",
            "code": code,
            "run_key": key,
            "name": name,
            "status": status,
            "attempt": attempt,
            "lease_ms": 900_000,
            "run_lease_ms": 900_000,
            "cluster": cluster,
            "namespace": namespace,
            "job_name": name,
            "job_uid": str(uuid5(NAMES, code)),
            "tenant": f"{cluster}/{namespace}",
            "holder": f"{cluster}/{namespace}/{name}-{str(uuid4())[:5]}",
            "pod_name": f"{name}-{str(uuid4())[:5]}",
            "pod_uid": str(uuid4()),
            "tick": tick,
            "created_at": started,
            "started_at": started,
            "adopted_at": adopted,
            "finished_at": ended,
            "modified_at": ended or self.now,
            "changed_at": ended or adopted,
            "outcome": {"SUCCESS": "complete", "FAIL": "fail"}.get(status),
            **more,
        }
        data = values.pop("data", None)
        values["data"] = None if data is None else json.dumps(data)
        columns = ", ".join(values)
        self.sql(
            f"INSERT INTO leasedjob.job_scheduler ({columns}) VALUES ({', '.join(['%s'] * len(values))})",
            *values.values(),
        )
        found: UUID = values["id"]
        return found

    def ledger(
        self, code: str, first: datetime, last: datetime, count: int, kind: str, reason: str, by: str = HERE
    ) -> None:
        self.sql(
            "INSERT INTO leasedjob.tick_ledger (code, first, last, count, kind, reason, decided_by, decided_at)"
            " VALUES (%s, %s, %s, %s, %s, %s, %s, %s)",
            code,
            first,
            last,
            count,
            kind,
            reason,
            by,
            last,
        )

    def many(self, count: int) -> None:
        """So many jobs, with four runs each; a tenth of them failing, some held, some skipped."""
        bodies = [
            {
                "metadata": {
                    "namespace": f"ns-{number % 50}", "name": f"job-{number}", "uid": str(uuid5(NAMES, str(number))),
                    "resourceVersion": str(self._version + 1 + number), "generation": 1,
                    "creationTimestamp": f"{self.ago(days=9):%Y-%m-%dT%H:%M:%SZ}",
                },
                "spec": {"schedule": f"{number % 60} * * * *", "template": TEMPLATE},
                "status": {"conditions": [_ready(self.now)]},
            }
            for number in range(count)
        ]  # fmt: skip
        self._version += count
        self.call(self._put(*bodies))
        self.call(self._derive_alike())
        self.sql(
            "INSERT INTO leasedjob.job_code (code, watermark)"
            " SELECT format('ns-%%s/job-%%s', n %% 50, n), clock_timestamp() FROM generate_series(0, %s) n", count - 1
        )  # fmt: skip
        self.sql(
            "INSERT INTO leasedjob.job_registration (code, cluster, namespace, name, uid, created_at, schedule_hash,"
            " spec_hash, policy, suspended)"
            " SELECT c.code, k.name, '', '', '', clock_timestamp(), '', '', 'Forbid', false"
            " FROM leasedjob.job_code c, unnest(%s::text[]) k (name)", [HERE, THERE, FAR]
        )  # fmt: skip
        self.sql(
            "INSERT INTO leasedjob.job_scheduler (lock_key, type, code, run_key, name, status, outcome, lease_ms,"
            " run_lease_ms, cluster, namespace, job_name, job_uid, holder, pod_uid, tick, created_at, started_at,"
            " adopted_at, finished_at, changed_at, reason)"
            " SELECT gen_random_uuid()::text, 'SCHEDULE', format('ns-%%s/job-%%s', n %% 50, n), format('k%%s', r),"
            " 'job', s::leasedjob.job_scheduler_status, CASE s WHEN 'SUCCESS' THEN 'complete'"
            " WHEN 'FAIL' THEN 'fail' END,"
            " 900000, 900000, (ARRAY[%s, %s, %s])[1 + n %% 3], format('ns-%%s', n %% 50), format('job-%%s', n), 'u',"
            " format('holder/%%s', n), 'p', t, t, t, t, CASE WHEN s <> 'RUNNING' THEN t + interval '1 minute' END,"
            " t, CASE s WHEN 'FAIL' THEN 'Error: it exited with 1' ELSE '' END"
            " FROM generate_series(0, %s) n, generate_series(0, 3) r,"
            " LATERAL (SELECT date_trunc('hour', clock_timestamp()) - r * interval '1 hour' AS t) i,"
            " LATERAL (SELECT CASE WHEN r = 0 AND n %% 25 = 0 THEN 'RUNNING' WHEN r < 2 AND n %% 10 = 0 THEN 'FAIL'"
            " ELSE 'SUCCESS' END AS s) o",
            HERE, THERE, FAR, count - 1,
        )  # fmt: skip
        self.sql(
            "INSERT INTO leasedjob.tick_ledger (code, first, last, count, kind, reason, decided_by)"
            " SELECT c.code, clock_timestamp() - r * interval '1 hour', clock_timestamp() - r * interval '1 hour', 1,"
            " 'skipped', 'Overlap', %s FROM leasedjob.job_code c, generate_series(1, 3) r", HERE
        )  # fmt: skip
        self.sql("ANALYZE")
        self.read()

    async def _derive_alike(self) -> None:
        """What follows from a spec, worked out once for each schedule: reading ten thousand takes its time."""
        known: Json = {}
        for entry in self.engine.cache.jobs.values():
            schedule = entry.body["spec"]["schedule"]
            if schedule not in known:
                derive(entry, self.engine.settings)
                known[schedule] = entry.policy
            entry.generation, entry.policy, entry.code = 1, known[schedule], f"{entry.namespace}/{entry.name}"

    async def _put(self, *bodies: Json) -> None:
        for body in bodies:
            self.engine.cache.job_seen(body)

    def read(self) -> None:
        """Lets the engine know what is in the database, as its reconciles do."""
        self.call(self._read())

    async def _read(self) -> None:
        engine = self.engine
        entries = list(engine.cache.jobs.values())
        for entry in entries:
            derive(entry, engine.settings)
            engine.cache.index_code(entry, "")
        codes = [entry.code for entry in entries if entry.code]
        runs = await engine.store.recent_runs(HERE, codes, 2 * RECENT)
        states = await engine.store.code_states(HERE, codes)
        for entry in entries:
            entry.rows = {run.id: run for run in runs.get(entry.code, ())}
            entry.rows_loaded, entry.state = True, states.get(entry.code)
            entry.watermark = entry.state.watermark if entry.state else None
        await self.gauges.step()

    def silence(self, fault: str) -> None:
        """The database does not answer any more, or again with ""."""

        async def put() -> None:
            self.health.database = fault
            self.health.database_at = time.monotonic() - (120 if fault else -3600)

        self.call(put())

    def hold(self, why: str) -> None:
        """The operator does nothing new."""

        async def put() -> None:
            self.health.unread = why
            self.engine.hold()

        self.call(put())


def _ready(since: datetime, **more: Any) -> Json:
    return {
        "type": "Ready",
        "status": "True",
        "reason": "Accepted",
        "message": "accepted and scheduled",
        "lastTransitionTime": f"{since:%Y-%m-%dT%H:%M:%SZ}",
        **more,
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def scene(dsn: str, **settings: Any) -> Iterator[Scene]:
    """A scene that is served meanwhile."""
    made = Scene(dsn, **settings)
    made.start()
    try:
        yield made
    finally:
        made.close()


def night(stage: Scene) -> None:
    """A night at a shop with three clusters: most of it is well."""
    hour = stage.now.replace(minute=0, second=0, microsecond=0)
    everywhere = (HERE, THERE, FAR)

    for namespace, name, schedule, took, more in (
        ("billing", "invoices", "0 * * * *", 340, {}),
        ("billing", "dunning", "30 2 * * *", 900, {"timeZone": "Europe/Berlin"}),
        ("shop", "sync-orders", "*/15 * * * *", 95, {"concurrencyPolicy": "Forbid"}),
        ("shop", "rebuild-search", "15 */3 * * *", 1500, {}),
        ("shop", "expire-carts", "*/10 * * * *", 20, {}),
        ("media", "transcode-backlog", "*/30 * * * *", 700, {"concurrencyPolicy": "Allow"}),
        ("media", "thumbnails", "5,35 * * * *", 120, {}),
        ("platform", "rotate-keys", "0 4 * * *", 12, {}),
        ("platform", "vacuum", "H 1 * * *", 640, {}),
        ("data", "daily-report", "0 6 * * *", 1800, {"timeZone": "America/New_York"}),
        ("data", "ingest-clicks", "*/5 * * * *", 150, {}),
    ):
        code = stage.job(namespace, name, schedule, clusters=everywhere, **more)
        for number, tick in enumerate(stage.ticks(code, schedule, more.get("timeZone", "Etc/UTC"), 14)):
            cluster = everywhere[(number * 7 + len(name)) % 3]
            if stage.now - tick < timedelta(seconds=took * 1.3):
                stage.run(code, tick, status="RUNNING", cluster=cluster, modified_at=stage.now - timedelta(seconds=9))
                continue
            stage.run(code, tick, cluster=cluster, took=took * (0.8 + (number * 37 % 10) / 25), waited=2 + number % 4)

    for cluster, seen, cordoned in ((HERE, 1, False), (THERE, 2, False), (FAR, 4, True)):
        stage.sql(
            "INSERT INTO leasedjob.cluster (name, uid, release, version, first_seen_at, last_seen_at, cordoned_at,"
            " cordoned_by, cordon_reason) VALUES (%s, %s, 'leasedjob-system/leasedjob', '0.1.0', %s, %s, %s, %s, %s)",
            cluster, cluster, stage.ago(days=40), stage.ago(seconds=seen), stage.ago(minutes=50) if cordoned else None,
            "ops/cordon-us-east" if cordoned else "",
            "the network provider works there until 06:00" if cordoned else "",
        )  # fmt: skip

    # what goes wrong
    code = stage.job("billing", "settle-payments", "*/30 * * * *", clusters=everywhere, backoffLimit=2)
    _, failed, *before = stage.ticks(code, "*/30 * * * *", "Etc/UTC", 10)
    for number, tick in enumerate(before):
        stage.run(code, tick, took=130, cluster=everywhere[number % 3])
    began, over = failed + timedelta(minutes=9), failed + timedelta(minutes=13)
    stage.run(
        code, failed, status="FAIL", attempt=3, failures=3, created_at=failed, started_at=began,
        adopted_at=began + timedelta(seconds=10), finished_at=over, changed_at=over,
        reason="Error: container main exited with 1: connection to ledger.example refused (3 of 3 attempts)",
    )  # fmt: skip
    stage.sql(
        "INSERT INTO leasedjob.audit (at, cluster, code, run_key, attempt, action, did, asked_by, request, why)"
        " VALUES (%s, %s, %s, %s, 2, 'Release', 'PodDeleted', 'billing/settle-payments-9xk2', 'r1',"
        " 'hung on the ledger since the deploy')",
        failed + timedelta(minutes=8), HERE, code, run_key_for(failed),
    )  # fmt: skip

    code = stage.job("data", "train-model", "0 */6 * * *", suspendAfterFailures=3)
    for number in range(1, 4):
        stage.run(code, hour - timedelta(hours=6 * number), status="FAIL", took=300, reason="OOMKilled: container main")
    stage.sql(
        "UPDATE leasedjob.job_code SET suspended_at = %s, suspended_by = %s, suspended_runs = 3, suspended_reason = %s"
        " WHERE code = %s",
        hour - timedelta(hours=5), HERE, "OOMKilled: container main exceeded 8Gi", code,
    )  # fmt: skip

    code = stage.job("media", "purge-uploads", "0 3 * * *", age=30, monitoring={"graceSeconds": 3600})
    stage.run(code, hour - timedelta(days=3), took=60)
    stage.ledger(code, hour - timedelta(days=2), hour - timedelta(days=1), 2, "missed", "StartingDeadline")

    message = 'spec.schedule: "0 0 30 2 *" names dates that never come'
    stage.job(
        "platform", "month-end", "0 0 30 2 *", age=0.2,
        status={"conditions": [_ready(hour, status="False", reason="InvalidSchedule", message=message)]},
    )  # fmt: skip

    # what runs
    code = stage.job("data", "export-warehouse", "0 * * * *", clusters=everywhere)
    for number in range(3, 7):
        stage.run(code, hour - timedelta(hours=number), took=2900, cluster=everywhere[number % 3])
    stage.run(
        code, hour - timedelta(hours=2), status="RUNNING", waited=9, modified_at=stage.now - timedelta(seconds=20)
    )
    stage.ledger(code, hour - timedelta(hours=1), hour, 2, "skipped", "Overlap")
    code = stage.job("shop", "price-feeds", "*/15 * * * *", clusters=everywhere)
    latest, *before = stage.ticks(code, "*/15 * * * *", "Etc/UTC", 9)
    for tick in before:
        stage.run(code, tick, took=400, cluster=THERE)
    stage.run(code, latest, status="RUNNING", cluster=THERE, waited=4, modified_at=stage.now - timedelta(seconds=50))
    stage.ledger(
        code, hour - timedelta(hours=5), hour - timedelta(hours=3), 9, "skipped", "Suspended", f"{HERE}, {THERE}"
    )
    code = stage.job("media", "render-previews", "0 * * * *")
    stage.run(code, hour - timedelta(hours=1), took=700)
    stage.run(
        code, hour, status="RUNNING", pod_uid=None, adopted_at=None, holder="", lease_ms=60_000, modified_at=stage.now
    )
    code = stage.job("shop", "refund-batch", "20 * * * *", backoffLimit=3)
    latest, *before = stage.ticks(code, "20 * * * *", "Etc/UTC", 5)
    for tick in before:
        stage.run(code, tick, took=90)
    stage.run(
        code, latest, status="FAIL", took=30, failures=1, retry_at=stage.now + timedelta(minutes=4),
        reason="Error: container main exited with 2",
    )  # fmt: skip
    # what is suspended, new, or runs once
    code = stage.job("platform", "load-test", "0 22 * * 1-5", suspend=True)
    stage.run(code, hour - timedelta(days=4), took=3000)
    stage.job("data", "backfill-2019", None, type="Initial", age=0.05)
    # what other clusters hold, and the library
    stage.run("billing/eu-only", hour, status="RUNNING", cluster=FAR, modified_at=stage.now - timedelta(seconds=700))
    stage.run(
        "cache-warmer", None, status="RUNNING", run_key="warm", cluster="", namespace="", job_name="", job_uid="",
        holder="web-6d5f-1", pod_uid=None, adopted_at=None, modified_at=stage.now - timedelta(seconds=100),
    )  # fmt: skip
    stage.read()
