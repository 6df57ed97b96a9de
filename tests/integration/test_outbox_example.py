"""examples/05-outbox-relay, run as its README says, on a real PostgreSQL and with a real webhook."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from leasedjob.workload import parked_messages

from .conftest import Database
from .workload_parts import Process, Processes, processes

pytestmark = pytest.mark.integration
FOLDER = Path(__file__).parents[2] / "examples" / "05-outbox-relay"
ORDERS = 120


@pytest.fixture
def run() -> Iterator[Processes]:
    yield from processes()


def test_each_order_is_told_once_over_a_stop(run: Processes, empty_database: Database) -> None:
    (statement,) = re.findall(r"^```sql\n(.*?)^```$", (FOLDER / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    empty_database.rows(statement)
    env = {"DATABASE_URL": empty_database.dsn}

    def start(program: str, *words: str) -> Process:
        return run.start([sys.executable, str(FOLDER / program), *words], env)

    webhook = start("webhook.py")
    env["WEBHOOK_URL"] = webhook.line("http://")
    for _ in range(2):
        assert start("orders.py", f"{ORDERS}").wait() == 0
    assert empty_database.rows("SELECT count(*) AS n FROM leasedjob_outbox") == [{"n": ORDERS}]

    first = start("relay.py")
    for _ in range(3):
        webhook.line("took")
    first.signal(signal.SIGTERM)
    assert first.wait() == 0, first.err
    assert len(_published(empty_database)) < ORDERS - 17, "stopped in the middle"

    second = start("relay.py")
    assert second.wait() == 0, second.err
    assert "was refused, and is tried again in 1 s: HTTP 422: unknown order" in first.err + second.err
    with empty_database.connect() as connection:
        connection.execute("UPDATE leasedjob_outbox SET tries = 9, next_try_at = now() WHERE tries > 0")
    third = start("relay.py")
    assert third.wait() == 0, third.err
    (parked,) = parked_messages(empty_database.connect())
    assert (parked.idempotency_key, parked.error) == ("order-13-paid", "HTTP 422: unknown order")
    assert third.out[-1].endswith("parked 1")

    webhook.signal(signal.SIGKILL)
    webhook.wait()
    took = [line.removeprefix("took order-").removesuffix("-paid") for line in webhook.out[1:]]
    assert sorted(map(int, took)) == [n for n in range(1, ORDERS + 1) if n != 13], "each once, none again"
    for customer in range(7):
        of_one = [number for text in took if (number := int(text)) % 7 == customer]
        assert of_one == sorted(of_one)

    assert start("orders.py", f"{ORDERS + 1}").wait() == 0
    fourth = start("relay.py")
    assert fourth.wait() == 1
    assert "the webhook is unavailable: the next run goes on" in fourth.err
    assert empty_database.rows("SELECT tries FROM leasedjob_outbox WHERE published_at IS NULL ORDER BY id") == [
        {"tries": 10},
        {"tries": 0},
    ]


def _published(database: Database) -> list[dict[str, object]]:
    return database.rows("SELECT id FROM leasedjob_outbox WHERE published_at IS NOT NULL")
