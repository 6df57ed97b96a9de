"""docs/guide-workload.md, followed as a reader would: every block of Python, YAML and crontab is used."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from tests.queues import RedisServer

from leasedjob import http1
from leasedjob.api.v1alpha1 import LeasedJobSpec
from leasedjob.workload.kafka import KafkaProducer
from leasedjob.workload.phases import LIMITS

from .conftest import Database
from .test_queue_kafka import create
from .workload_parts import LONG, Processes, processes

pytestmark = pytest.mark.integration
GUIDE = (Path(__file__).parents[2] / "docs" / "guide-workload.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+) ?(\S*)\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)
FILES = {name: text for language, name, text in BLOCKS if language == "python"}
URL = "LEASEDJOB_DATABASE_URL"


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Processes]:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    yield from processes()


def test_the_guide_has_the_blocks_that_are_used() -> None:
    assert [language for language, _, _ in BLOCKS] == ["yaml", "crontab", *["python"] * len(FILES)]
    assert list(FILES) == [
        "import_orders.py",
        "service.py",
        "web.py",
        "scheduled.py",
        "resume.py",
        "queue_worker.py",
        "invoices.py",
        "outbox.py",
    ]


def test_the_manifest_is_accepted() -> None:
    (text,) = (text for language, _, text in BLOCKS if language == "yaml")
    manifest = yaml.safe_load(text)
    spec = LeasedJobSpec.model_validate(manifest["spec"])
    (container,) = spec.template["spec"]["containers"]
    assert container["command"][:3] == ["leasedjob", "exec", "--"]


def test_a_line_in_three_crontabs_executes_once(run: Processes, database: Database) -> None:
    (text,) = (text for language, _, text in BLOCKS if language == "crontab")
    command = text.strip().split(maxsplit=5)[5].replace(r"\%", "%")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    hosts = [run.start(["sh", "-c", command], {URL: database.dsn, "PATH": path}) for _ in range(3)]
    assert [host.wait() for host in hosts] == [0, 0, 0]
    (row,) = database.rows("SELECT code, run_key, status FROM leasedjob.job_scheduler")
    assert (row["code"], row["status"]) == ("nightly-report", "SUCCESS")
    assert sorted(line for host in hosts for line in host.out) == [f"report of {row['run_key']}"]


class TestImportOrders:
    def test_on_a_laptop(self, run: Processes, tmp_path: Path) -> None:
        process = run.start([sys.executable, str(tmp_path / "import_orders.py")])
        assert process.wait() == 0
        assert process.out == ["alone stand-alone 1"]
        assert "nothing is recorded" in process.err

    def test_with_a_database(self, run: Processes, tmp_path: Path, database: Database) -> None:
        env = {URL: database.dsn, "LEASEDJOB_CODE": "orders", "LEASEDJOB_RUN_KEY": "2026-07-20T03:00:00Z"}
        words = [sys.executable, str(tmp_path / "import_orders.py")]
        process = run.start(words, env)
        assert process.wait() == 0, process.err
        assert process.out == ["database orders 1"]
        (row,) = database.rows("SELECT status, data FROM leasedjob.job_scheduler")
        assert row == {"status": "SUCCESS", "data": {"orders": 1000}}
        again = run.start(words, env)
        assert again.wait() == 1
        assert "RunNotAcquiredError" in again.err

    def test_under_run_exclusive(self, run: Processes, tmp_path: Path, database: Database) -> None:
        words = ["run-exclusive", "--code", "orders", "--run-key", "2026-07-20T03:00:00Z", "--"]
        process = run.leasedjob(*words, sys.executable, str(tmp_path / "import_orders.py"), env={URL: database.dsn})
        assert process.wait() == 0
        assert process.out == ["command orders 1"]
        (row,) = database.rows("SELECT status FROM leasedjob.job_scheduler")
        assert row["status"] == "SUCCESS"


def test_the_service_finishes_its_iteration_and_closes_its_pool_last(
    run: Processes, tmp_path: Path, database: Database
) -> None:
    process = run.start([sys.executable, str(tmp_path / "service.py")], {URL: database.dsn})
    process.line("counted")
    process.signal(signal.SIGTERM)
    assert process.wait() == 0, process.err
    assert process.out[-1] == "intervals done pools done"


def test_the_scheduler_s_job_is_finished(run: Processes, tmp_path: Path) -> None:
    process = run.start([sys.executable, str(tmp_path / "scheduled.py")])
    process.line("began")
    process.signal(signal.SIGTERM)
    assert process.wait() == 0, process.err
    assert process.out == ["began", "ended"] * (len(process.out) // 2)


def test_the_server_answers_and_stops(run: Processes, tmp_path: Path) -> None:
    process = run.start([sys.executable, str(tmp_path / "web.py")])
    port = int(process.line("port").split()[1])
    assert http1.ask("127.0.0.1", port, "GET", "/", seconds=LONG) == (200, b"hello")
    assert http1.ask("127.0.0.1", port, "GET", "/readyz", seconds=LONG) == (200, b"ready")
    process.signal(signal.SIGTERM)
    assert process.wait() == 0, process.err


def test_the_next_attempt_goes_on_where_the_stopped_one_ended(
    run: Processes, tmp_path: Path, database: Database
) -> None:
    words = [sys.executable, str(tmp_path / "resume.py")]
    first = run.start(words, {URL: database.dsn})
    first.line("done 3")
    first.signal(signal.SIGTERM)
    assert first.wait() == 1
    assert "DrainingError: cascade: SIGTERM, after" in first.err
    second = run.start(words, {URL: database.dsn})
    assert second.wait() == 0, second.err
    assert first.out + second.out == [f"done {item}" for item in range(40)]
    (row,) = database.rows("SELECT status, attempt FROM leasedjob.job_scheduler")
    assert row == {"status": "SUCCESS", "attempt": 2}


def test_a_queue_s_worker_gets_a_key_once(run: Processes, tmp_path: Path, redis_server: RedisServer) -> None:
    text = FILES["queue_worker.py"].replace('"payments"', f'"payments-{tmp_path.name}"')
    process = run.start([sys.executable, "-c", text], {"REDIS_URL": redis_server.url})
    process.line("charged 7 charge/7")
    process.signal(signal.SIGTERM)
    assert process.wait() == 0, process.err
    assert process.out == ["charged 7 charge/7"]


async def test_a_consumer_sends_on_what_it_gets(run: Processes, kafka_servers: str, kafka_topic: str) -> None:
    text = re.sub('"(orders|invoices)"', rf'"{kafka_topic}-\1"', FILES["invoices.py"])
    sending = KafkaProducer(servers=kafka_servers)
    await sending.start()
    for topic in ("orders", "invoices"):
        await create(kafka_servers, f"{kafka_topic}-{topic}")
    await sending.send(f"{kafka_topic}-orders", b"order 7", idempotency_key="order/7")
    await sending.stop()
    process = run.start([sys.executable, "-c", text], {"KAFKA_SERVERS": kafka_servers})
    await asyncio.to_thread(process.line, "invoice for order 7")
    process.signal(signal.SIGTERM)
    assert await asyncio.to_thread(process.wait) == 0, process.err


def test_a_message_is_published_once_and_the_relay_ends_before_its_pool(
    run: Processes, tmp_path: Path, empty_database: Database
) -> None:
    process = run.start([sys.executable, str(tmp_path / "outbox.py")], {URL: empty_database.dsn})
    process.line("order-paid {'order': 7} order-7-paid")
    process.signal(signal.SIGTERM)
    assert process.wait() == 0, process.err
    assert sorted(process.out) == ["known", "new", "order-paid {'order': 7} order-7-paid"]
    (row,) = empty_database.rows("SELECT published_at IS NOT NULL AS marked FROM leasedjob_outbox")
    assert row["marked"], "the batch was finished"


def test_the_table_of_phases_has_the_limits() -> None:
    table = GUIDE.partition("## 5.")[2]
    for phase, limit in LIMITS.items():
        (line,) = (line for line in table.splitlines() if line.startswith("|") and f"`{phase}`" in line)
        assert f"| {limit:g} s |" in line
