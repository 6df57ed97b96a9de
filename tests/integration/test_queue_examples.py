"""The examples of queues, run as their READMEs say, on a real Redis, a real Kafka broker and a real PostgreSQL."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from tests.queues import RedisServer

from .conftest import Database
from .test_queue_kafka import create
from .workload_parts import Process, Processes, processes

pytestmark = pytest.mark.integration
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def run() -> Iterator[Processes]:
    yield from processes()


class Example:
    """An example's folder, and what its programs are told."""

    def __init__(
        self, run: Processes, folder: str, database: Database, env: dict[str, str], names: Mapping[str, str]
    ) -> None:
        self._run, self._folder = run, folder
        self._env = {"DATABASE_URL": database.dsn, "IDLE_SECONDS": "1", **env}
        readme = (EXAMPLES / folder / "README.md").read_text()
        (statement,) = re.findall(r"^```sql\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
        database.rows(statement)
        self._names = {f'"{name}"': f'"{own}"' for name, own in names.items()}

    def start(self, program: str, *words: str) -> Process:
        text = (EXAMPLES / self._folder / program).read_text()
        for name, own in self._names.items():
            text = text.replace(name, own)
        return self._run.start([sys.executable, "-c", text, *words], self._env)

    def done(self, program: str, *words: str) -> Process:
        process = self.start(program, *words)
        assert process.wait() == 0, process.err
        return process


def test_the_bullmq_worker_charges_each_order_once_over_a_stop(
    run: Processes, redis_server: RedisServer, empty_database: Database, tmp_path: Path
) -> None:
    env = {"REDIS_URL": redis_server.url}
    example = Example(run, "07-bullmq-worker", empty_database, env, {"payments": f"payments-{tmp_path.name}"})
    example.done("add.py", "60")
    example.done("add.py", "60")
    first = example.start("worker.py")
    first.line("charged")
    first.signal(signal.SIGTERM)
    assert first.wait() == 0, first.err
    assert "nothing left to charge" not in first.out
    assert "shutdown: pools: done" in first.err
    second = example.done("worker.py")
    assert second.out[-1] == "nothing left to charge"
    charged = [line for line in first.out + second.out if line.startswith("charged")]
    assert len(charged) == len(set(charged)) == 60
    assert empty_database.rows("SELECT count(*) FROM charge") == [{"count": 60}]


async def test_the_kafka_consumer_writes_each_invoice_once_over_a_stop(
    run: Processes, kafka_servers: str, kafka_topic: str, empty_database: Database
) -> None:
    names = {name: f"{kafka_topic}-{name}" for name in ("orders", "orders-aside", "invoices")}
    for name in ("orders", "orders-aside"):
        await create(kafka_servers, names[name])
    example = Example(run, "08-kafka-consumer", empty_database, {"KAFKA_SERVERS": kafka_servers}, names)
    example.done("send.py", "60")
    first = example.start("consumer.py")
    first.line("invoice")
    first.signal(signal.SIGTERM)
    assert first.wait() == 0, first.err
    assert "an invoice for each order" not in first.out
    assert "shutdown: pools: done" in first.err
    second = example.done("consumer.py")
    assert second.out[-1] == "an invoice for each order"
    written = [line for line in first.out + second.out if line.startswith("invoice")]
    assert len(written) == len(set(written)) == 60
    assert empty_database.rows("SELECT count(*) FROM invoice") == [{"count": 60}]
