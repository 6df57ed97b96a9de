"""3,000 runs live at once: how late their heartbeats are, what the database uses, and how many connections there are.

The operator has started them: 3,000 LeasedJobs with a claim, a Pod and a lease each, all of which it goes on watching.
Sidecars are simulated, as they are: each heartbeat opens a connection of the namespace's role with its password, sends
the sidecar's own statement, and closes it; the next one is due an interval later, up to a tenth of it sooner at random.
A beat is late by the time from then until its answer is there.
"""

from __future__ import annotations

import asyncio
import base64
import multiprocessing
import random
import tempfile
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psycopg
from psycopg import conninfo

from bench.database import Database, database
from bench.model import Aim, Result, Row, Scale
from bench.plane import JOBS, Plane, leased_job, percentile, until
from bench.proc import processor_seconds
from leasedjob import protocol
from leasedjob.lease.rows import AdoptVerdict
from leasedjob.lease.store import SidecarStore

SECRET: Final = "leasedjob-sidecar"
INTERVAL: Final = 60.0
SESSIONS: Final = (
    "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
)


@dataclass(frozen=True, slots=True)
class Held:
    """One adopted lease."""

    id: str
    token: str


def tenant_dsn(plane: Plane, namespace: str) -> str:
    """How a sidecar of this namespace connects."""
    secret = plane.call("GET", f"/api/v1/namespaces/{namespace}/secrets/{SECRET}")
    values = {name: base64.b64decode(value).decode() for name, value in secret["data"].items()}
    names = ("host", "port", "dbname", "user", "password")
    return conninfo.make_conninfo(**{name: values[name] for name in names})


def adopt_all(plane: Plane, base: Database, namespace: str, *, seconds: float) -> list[Held]:
    """Each Pod of the namespace takes its lease over, spread over so many seconds."""
    held: list[Held] = []
    pods = plane.pods(namespace)
    with psycopg.connect(tenant_dsn(plane, namespace), autocommit=True, prepare_threshold=None) as connection:
        store = SidecarStore(connection)
        began = time.monotonic()
        for number, pod in enumerate(pods):
            meta = pod["metadata"]
            adopt = next(c for c in pod["spec"]["initContainers"] if c["name"] == protocol.CONTAINER_ADOPT)
            env = {e["name"]: e.get("value") for e in adopt["env"]}
            lease, token = uuid.UUID(meta["annotations"][protocol.ANNOTATION_LEASE]), uuid.uuid4()
            claim = uuid.UUID(env[protocol.ENV_CLAIM_TOKEN])
            answer = store.adopt(lease, claim, token, pod_uid=meta["uid"], pod_name=meta["name"])
            assert answer.verdict is AdoptVerdict.ADOPTED, answer
            held.append(Held(str(lease), str(token)))
            time.sleep(max(0.0, began + seconds * (number + 1) / len(pods) - time.monotonic()))
    return held


def _beats(dsn: str, held: list[Held], interval: float, seconds: float, into: Any) -> None:
    """One process with the sidecars of these leases."""
    late: list[float] = []
    lost: list[str] = []
    now = time.monotonic()
    ends = now + seconds

    async def beat(lease: Held, place: int) -> None:
        due = now + interval * (place + 1) / len(held)
        while due < ends:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            sent = time.monotonic()
            async with await psycopg.AsyncConnection.connect(dsn, autocommit=True, prepare_threshold=None) as c:
                cursor = await c.execute(
                    b"SELECT held FROM leasedjob.heartbeat(%s, %s)", (uuid.UUID(lease.id), uuid.UUID(lease.token))
                )
                row = await cursor.fetchone()
            late.append(time.monotonic() - due)
            if row is None or not row[0]:
                lost.append(lease.id)
                return
            due = sent + interval * random.uniform(0.9, 1.0)

    async def all_of_them() -> None:
        await asyncio.gather(*(beat(lease, place) for place, lease in enumerate(held)))

    asyncio.run(all_of_them())
    into.put((late, lost))


def _database_seconds(base: Database) -> float:
    """Processor seconds of the server and all its sessions so far, ended ones included."""
    postmaster = int((base.server.directory / "data" / "postmaster.pid").read_text().split()[0])
    fields = Path(f"/proc/{postmaster}/stat").read_text().rpartition(")")[2].split()
    ticks = sum(map(int, fields[11:15]))  # its own, and of its children that have ended
    children = Path(f"/proc/{postmaster}/task/{postmaster}/children").read_text().split()
    living = 0.0
    for child in children:
        try:
            living += processor_seconds(int(child))
        except OSError:
            continue  # it has ended meanwhile, and counts to its parent
    return ticks / 100 + living


def measure(scale: Scale) -> Result:
    """Milliseconds by which heartbeats are late."""
    count, seconds = scale.of(3000, 20), scale.of(150, 6)
    interval = INTERVAL if count > 20 else 3.0
    with database() as base, tempfile.TemporaryDirectory() as folder, Plane(Path(folder)) as plane:
        namespace = plane.namespace("live")
        operator = plane.operator(base, LEASEDJOB_NAMESPACES=namespace)
        with operator.running():
            until("the operator is ready", operator.ready)
            bodies = [leased_job(f"job-{n}", type="Initial") for n in range(count)]
            plane.post(JOBS.format(namespace), bodies, concurrency=20)
            until("all have their Pods", lambda: len(plane.pods(namespace)) == count, seconds=400, every=2.0)
            held = adopt_all(plane, base, namespace, seconds=count / 200)
            dsn = tenant_dsn(plane, namespace)
            answers: Any = multiprocessing.get_context("spawn").Queue()
            process = multiprocessing.get_context("spawn").Process(
                target=_beats, args=(dsn, held, interval, seconds, answers)
            )
            used, sessions, began = _database_seconds(base), [], time.monotonic()
            process.start()
            while process.is_alive() and answers.empty():
                sessions.append(float(base.ask(SESSIONS)))
                time.sleep(0.25)
            late, lost = answers.get()
            process.join()
            share = (_database_seconds(base) - used) / (time.monotonic() - began) * 100
            assert not lost, f"{len(lost)} leases were lost"
        settings: dict[str, Any] = base.settings
    over = [max(0.0, value) for value in late]
    return Result(
        "live",
        f"{count:,} runs live at once, each with a sidecar that connects for every heartbeat (less is better)",
        (
            Row("heartbeats, half of them", "ms late", (percentile(over, 0.5) * 1000,)),
            Row("heartbeats, 99 of 100", "ms late", (percentile(over, 0.99) * 1000,)),
            Row("heartbeats, the latest", "ms late", (max(over) * 1000,)),
            Row("database, processor", "% of a core", (share,)),
            Row("connections", "", tuple(sessions)),
        ),
        (
            Aim("the latest heartbeat / interval", max(over) / interval, 0.1),
            Aim("connections at most", max(sessions), 50),
        ),
        {
            **settings,
            "interval": f"{interval:g} s",
            "watched for": f"{seconds} s",
            "beats": len(late),
            "password": "SCRAM, anew for each connection",
            "operator": "one, with all of them in its cache",
        },
    )
