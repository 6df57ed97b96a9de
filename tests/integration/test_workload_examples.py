"""The examples of the workload SDK, run as their READMEs say, on a real PostgreSQL."""

from __future__ import annotations

import re
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path

import pytest

from leasedjob import http1, protocol
from leasedjob.lease.store import OperatorStore
from leasedjob.lease.trust import Timing

from .conftest import Database
from .sidecar_parts import Pods, pods_for
from .workload_parts import LONG, Process, Processes, processes

pytestmark = pytest.mark.integration
EXAMPLES = Path(__file__).parents[2] / "examples"
KEY = {"LEASEDJOB_RUN_KEY": "2026-07-20T03:00:00Z"}


@pytest.fixture
def run() -> Iterator[Processes]:
    yield from processes()


@pytest.fixture
def pods(tmp_path: Path, database: Database, store: OperatorStore) -> Iterator[Pods]:
    yield from pods_for(tmp_path, database, store)


class Example:
    """An example's folder, its tables, and how its program is started."""

    def __init__(self, run: Processes, folder: str, database: Database) -> None:
        self._run, self._folder, self._url = run, EXAMPLES / folder, database.dsn
        readme = (self._folder / "README.md").read_text()
        (statements,) = re.findall(r"^```sql\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
        with database.connect(autocommit=True) as connection:
            connection.execute(statements)

    def start(self, *words: str, **env: str) -> Process:
        program, *more = words
        return self._run.start([sys.executable, str(self._folder / program), *more], {"DATABASE_URL": self._url, **env})


def stopped_and_gone_on_with(example: Example, *words: str, done: str, env: dict[str, str]) -> list[str]:
    """What two attempts have done together; the first one is stopped in the middle."""
    first = example.start(*words, **env)
    for _ in range(3):
        first.line(done)
    first.signal(signal.SIGTERM)
    assert first.wait() == 0, first.err
    assert "the next attempt goes on" in first.out[-1]
    second = example.start(*words, **env)
    assert second.wait() == 0, second.err
    assert sum(line.startswith(done) for line in second.out) > 0
    return [line for line in first.out + second.out if line.startswith(done)]


def test_the_cascade_goes_on_where_it_has_stopped(run: Processes, empty_database: Database) -> None:
    example = Example(run, "10-cascade", empty_database)
    done = stopped_and_gone_on_with(example, "sync.py", done="synced", env=KEY)
    assert done == [f"synced sku-{n:03}" for n in range(1, 61)]
    (row,) = empty_database.rows("SELECT (SELECT count(*) FROM product) AS p, (SELECT count(*) FROM search_index) AS s")
    assert row == {"p": 60, "s": 60}
    again = example.start("sync.py", **KEY)
    assert again.wait() == 0, again.err
    assert again.out == ["goes on"], "there is nothing left"


def test_the_django_command_goes_on_where_it_has_stopped(run: Processes, empty_database: Database) -> None:
    example = Example(run, "11-django-command", empty_database)
    done = stopped_and_gone_on_with(example, "manage.py", "remind", done="reminded", env=KEY)
    assert done == [f"reminded c{n}@example.org" for n in range(1, 41)]
    assert empty_database.rows("SELECT count(*), count(DISTINCT customer_id) AS all FROM reminder") == [
        {"count": 40, "all": 40}
    ]


def test_the_service_finishes_its_requests_and_its_sum(run: Processes, empty_database: Database) -> None:
    example = Example(run, "09-fastapi-interval", empty_database)
    first = example.start("service.py", PORT="0", SUM_SECONDS="0.1")
    port = int(first.line("serves").split()[-1])

    def put(number: int) -> int:
        return http1.ask("127.0.0.1", port, "PUT", f"/prices/{number}?cents=10", seconds=LONG)[0]

    assert http1.ask("127.0.0.1", port, "GET", "/readyz", seconds=LONG) == (200, b"ready")
    with ThreadPoolExecutor(3) as clients:
        assert list(clients.map(put, range(5))) == [200] * 5
        with empty_database.connect(autocommit=False) as holding:  # the request waits for this row
            holding.execute("INSERT INTO price (id, cents) VALUES ('5', 10)")
            last = clients.submit(put, 5)
            until = time.monotonic() + LONG
            while not empty_database.rows("SELECT pid FROM pg_locks WHERE NOT granted"):
                assert time.monotonic() < until
            first.signal(signal.SIGTERM)
            time.sleep(0.3)
            assert not first.ended()
            holding.rollback()
        assert last.result() == 200
    assert first.wait() == 0, first.err
    assert "closed" not in first.out
    for phase in ("http", "intervals", "pools"):
        assert f"shutdown: {phase}: done" in first.err
    (row,) = empty_database.rows(
        "SELECT (SELECT count(*) FROM price) AS n,"
        "       (SELECT sum(prices) FROM total) = (SELECT count(*) FROM price WHERE summed) AS agree"
    )
    assert row == {"n": 6, "agree": True}
    second = example.start("service.py", PORT="0", SUM_SECONDS="0.1", SERVE_SECONDS="0.5")
    assert second.wait() == 0, second.err
    assert second.out[-1] == "closed"


class TestPlainScript:
    WORDS = ("exec", "--", sys.executable, str(EXAMPLES / "12-plain-script" / "report.py"))

    async def test_in_a_pod(self, run: Processes, pods: Pods, minute: datetime) -> None:
        pod = await pods.pod(minute, Timing(duration=120, heartbeat=2, grace=5, pre_stop=0))
        pod.adopt_and_hold()
        env = {protocol.ENV_SIDECAR_URL: f"http://127.0.0.1:{pod.report_port}", protocol.ENV_CONTAINERS: "1", **KEY}
        process = run.leasedjob(*self.WORDS, env=env)
        assert process.wait() == 0, process.err
        assert process.out[-1] == "2026-07-20T03:00:00Z: done"
        assert pod.row()["status"] == "SUCCESS"

    async def test_its_failure_is_told(self, run: Processes, pods: Pods, minute: datetime) -> None:
        pod = await pods.pod(minute, Timing(duration=120, heartbeat=2, grace=5, pre_stop=0))
        pod.adopt_and_hold()
        env = {protocol.ENV_SIDECAR_URL: f"http://127.0.0.1:{pod.report_port}", protocol.ENV_CONTAINERS: "1"}
        process = run.leasedjob(*self.WORDS, env={**env, "PAGES": "0"})
        assert process.wait() == 1
        pod.end()
        row = pod.row()
        assert row["status"] == "FAIL"
        assert "there is nothing to report" in row["data"]["error"]

    def test_on_three_hosts(self, run: Processes, database: Database) -> None:
        words = ("run-exclusive", "--code", "nightly-report", "--run-key", "2026-07-20", *self.WORDS[1:])
        hosts = [run.leasedjob(*words, env={"LEASEDJOB_DATABASE_URL": database.dsn}) for _ in range(3)]
        assert [host.wait() for host in hosts] == [0, 0, 0]
        assert sorted(line for host in hosts for line in host.out)[0] == "2026-07-20: done"
        assert sum("2026-07-20: done" in host.out for host in hosts) == 1
