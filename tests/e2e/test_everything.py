"""A drained Pod with HTTP, an interval, a relay, a cascade and a consumer together, on a real kubelet.

The image is the operator's, which has the package; uvicorn and psycopg_pool come in an archive beside the program. Pods
of the test cluster reach no Redis and no Kafka: the relay publishes into the sink itself, the consumer takes records
from a table. What queues and brokers of their own do is tested against real ones in tests/integration.
"""

from __future__ import annotations

import base64
import importlib.metadata
import io
import json
import subprocess
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.cluster.database import Database
from tests.e2e.conftest import Measured
from tests.e2e.jobs import NEVER, container, leased_job, run_of
from tests.e2e.kube import Kubectl
from tests.e2e.test_path import pods, succeeded
from tests.e2e.test_workload import image

__all__ = ["image"]  # the fixture

PROGRAM = Path(__file__).with_name("everything.py")
KINDS = ("request", "iteration", "item", "message", "record")
STAGE_1 = ("http", "intervals", "cascade", "outbox")


def archive() -> bytes:
    """What the program needs beside the operator's image: pure Python, importable from the archive."""
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w", zipfile.ZIP_DEFLATED) as zipped:
        for name in ("uvicorn", "h11", "click", "psycopg-pool", "typing_extensions"):
            for file in importlib.metadata.files(name) or ():
                if file.suffix == ".py" or file.name == "METADATA":
                    zipped.write(file.locate(), str(file))
    return written.getvalue()


@pytest.fixture
def work(postgres: Database, namespace: str) -> Iterator[str]:
    """A database for the work, with a sink that takes each effect once, and its connection string."""
    name = f"work_{namespace.replace('-', '_')}"
    with psycopg.connect(postgres.conninfo(), autocommit=True) as admin:
        admin.execute(f"CREATE DATABASE {name}".encode())
        conninfo = postgres.conninfo(name)
        with psycopg.connect(conninfo) as connection:
            connection.execute("CREATE TABLE effect (kind text, name text, what text, PRIMARY KEY (kind, name, what))")
            connection.execute("CREATE TABLE inbox AS SELECT n AS id FROM generate_series(1, 100000) AS n")
            connection.execute("CREATE INDEX ON inbox (id)")
        yield conninfo
        admin.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())


def test_a_drained_pod_ends_within_its_minute_and_the_next_attempt_finishes_the_cascade(
    kubectl: Kubectl, namespace: str, db: psycopg.Connection, work: str, image: str, measured: Measured
) -> None:
    config: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "work"},
        "data": {"everything.py": PROGRAM.read_text()},
        "binaryData": {"deps.zip": base64.b64encode(archive()).decode()},
    }
    main = container("", image=image, command=["python3", "-u", "/work/everything.py"])
    main["env"] = [{"name": "WORK_DATABASE_URL", "value": work}, {"name": "PYTHONPATH", "value": "/work/deps.zip"}]
    main["volumeMounts"] = [{"name": "work", "mountPath": "/work", "readOnly": True}]
    job = leased_job(
        "everything",
        containers=[main],
        schedule=NEVER,
        lease={"durationSeconds": 180, "heartbeatSeconds": 10},
        shutdown={"preStopSeconds": 10, "terminationGracePeriodSeconds": 60},
        pod={"volumes": [{"name": "work", "configMap": {"name": "work"}}]},
    )
    kubectl("create", "-f", "-", text=json.dumps(config))  # too large for the annotation that apply would make
    kubectl.apply(job, run_of("everything", "now"))
    name = kubectl.wait("its Pod", lambda: pods(kubectl, "everything"), timeout=60)[0]["metadata"]["name"]
    with psycopg.connect(work, autocommit=True) as sink:

        def seen() -> bool:
            row = sink.execute("SELECT count(DISTINCT kind) = 5 FROM effect WHERE what = 'ended'").fetchone()
            return row == (True,)

        kubectl.wait("work of each kind", seen, timeout=90)
        argv = kubectl.argv("logs", "-f", name, "-c", "main")
        with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as follow:
            asked = time.time()
            kubectl("delete", "pod", name, "--wait=true", timeout=90)
            gone = time.time() - asked
            out, _ = follow.communicate(timeout=60)
        lines = [line.split() for line in out.splitlines()]
        at = {" ".join(words[1:]): float(words[0]) - asked for words in lines}

        for part in (*STAGE_1, "consumer", "database"):
            assert at[f"stops {part}"] <= at[f"stopped {part}"], out
            begins, ends = at[f"stops {part}"], at[f"stopped {part}"]
            measured(f"drained Pod: {part:9} {begins:5.1f} s to {ends:5.1f} s after the deletion")
        measured(
            f"drained Pod: notice {at['notice']:.1f} s, SIGTERM {at['sigterm']:.1f} s, the program ends"
            f" {at['ends']:.1f} s, the Pod is gone {gone:.1f} s after the deletion"
        )
        assert gone < 60
        assert at["notice"] < at["sigterm"], "the first moment is the notice"
        assert at["sigterm"] >= 9.5, "preStop is 10 s"
        # What had something in hand when the notice came; between two units a part has nothing.
        busy = [part for part in STAGE_1 if at[f"stopped {part}"] - at[f"stops {part}"] > 1]
        assert len(busy) >= 3, out
        assert max(at[f"stops {part}"] for part in STAGE_1) < min(at[f"stopped {part}"] for part in busy), (
            "side by side"
        )
        assert at["stops consumer"] >= max(at[f"stopped {part}"] for part in STAGE_1)
        assert at["stops database"] >= at["stopped consumer"], "the pool closes last"
        ended = {words[2]: words[3] for words in lines if words[1:2] == ["phase"]}
        assert ended == dict.fromkeys(("http", "intervals", "background", "consumers", "pools"), "done")
        said = {words[1]: words[2:] for words in lines if words[1:2] in (["answers"], ["late"])}
        assert said["answers"] == ["200"]
        assert said["late"] == ["503", "200"], "unready at once, and a request between notice and SIGTERM is served"

        row = kubectl.wait(
            "it succeeded", lambda: next(iter(succeeded(db, namespace, "everything")), None), timeout=120
        )
        assert (row["attempt"], row["interruptions"], row["failures"]) == (2, 1, 0)
        assert row["data"] == {"items": 200}
        halves = sink.execute("SELECT kind, name FROM effect GROUP BY kind, name HAVING count(*) <> 2").fetchall()
        assert halves == [], "0 lost; that nothing is doubled is the sink's key"
        counted = dict(sink.execute("SELECT kind, count(*) / 2 FROM effect GROUP BY kind").fetchall())
        assert counted["item"] == 200
        assert set(counted) == set(KINDS)
        measured(f"drained Pod: {', '.join(f'{counted[kind]} {kind}s' for kind in KINDS)}; 0 lost, 0 doubled")

    def exported() -> bool:
        """By one of the operators, as app_shutdown_duration_seconds."""
        found = db.execute(
            "SELECT attempt FROM shutdown_report WHERE run_id = %s AND exported_at IS NOT NULL", (row["id"],)
        ).fetchall()
        return {attempt for (attempt,) in found} == {1, 2}

    kubectl.wait("the operator has exported both", exported, timeout=60)
