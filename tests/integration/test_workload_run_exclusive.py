"""`leasedjob run-exclusive` as real processes on a real PostgreSQL: one of many runs the command; its end is kept."""

from __future__ import annotations

import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from leasedjob.identity import RunIdentity

from .conftest import Database
from .test_workload_exec import NOTES
from .workload_parts import Process, Processes, processes

pytestmark = pytest.mark.integration

KEY = "2026-07-20T03:00:00Z"
URL = "LEASEDJOB_DATABASE_URL"


@pytest.fixture
def run() -> Iterator[Processes]:
    yield from processes()


class Hosts:
    """Processes that ask for the same run, each as the crontab of its own host would."""

    def __init__(self, run: Processes, database: Database) -> None:
        self._run, self.database = run, database

    def start(self, *command: str, options: tuple[str, ...] = (), key: str = KEY) -> Process:
        words = ["run-exclusive", "--code", "nightly", "--run-key", key, *options, "--", *command]
        return self._run.leasedjob(*words, env={URL: self.database.dsn})

    def row(self, key: str = KEY) -> dict[str, Any]:
        (row,) = self.database.rows("SELECT * FROM leasedjob.job_scheduler WHERE run_key = %s", key)
        return row


@pytest.fixture
def hosts(run: Processes, database: Database) -> Hosts:
    return Hosts(run, database)


@pytest.mark.parametrize("words", [["migrate"], ["run-exclusive", "--code", "a", "--run-key", "k", "--", "true"]])
def test_without_a_database_it_says_how_to_name_one(run: Processes, words: list[str]) -> None:
    process = run.leasedjob(*words)
    assert process.wait() not in (0, 1)
    assert "no such directory; $LEASEDJOB_DATABASE_URL or --database-url names another database" in process.err


def test_three_hosts_and_one_execution(hosts: Hosts, tmp_path: Path) -> None:
    log = tmp_path / "log"
    line = f"echo $$ >> {log}; sleep 1"
    three = [hosts.start("sh", "-c", line) for _ in range(3)]
    assert [process.wait() for process in three] == [0, 0, 0]
    assert len(log.read_text().splitlines()) == 1
    said = [process.err for process in three if "another process has or had this run" in process.err]
    assert len(said) == 2
    assert "nightly 2026-07-20T03:00:00Z" in said[0]
    row = hosts.row()
    assert (row["status"], row["attempt"], row["lock_key"]) == (
        "SUCCESS",
        1,
        RunIdentity.of(code="nightly", run_key=KEY).lock_key,
    )
    late = hosts.start("sh", "-c", line, options=("--not-acquired", "42"))
    assert late.wait() == 42
    assert len(log.read_text().splitlines()) == 1
    other = hosts.start("sh", "-c", line, key="2026-07-21T03:00:00Z")
    assert other.wait() == 0
    assert len(log.read_text().splitlines()) == 2


def test_the_command_knows_its_run(hosts: Hosts) -> None:
    process = hosts.start("sh", "-c", "env | grep ^LEASEDJOB_ | grep -v DATABASE | sort")
    assert process.wait() == 0
    row = hosts.row()
    assert process.out == [
        "LEASEDJOB_ATTEMPT=1",
        "LEASEDJOB_CODE=nightly",
        f"LEASEDJOB_FENCING_TOKEN={row['fencing_token']}",
        f"LEASEDJOB_IDEMPOTENCY_KEY={row['lock_key']}",
        f"LEASEDJOB_RUN_KEY={KEY}",
        f"LEASEDJOB_SCHEDULED_TIME={KEY}",
        "LEASEDJOB_SIDECAR_URL=",
        "LEASEDJOB_TYPE=SCHEDULE",
    ]


def test_a_failure_keeps_its_code_and_the_next_one_tries_again(hosts: Hosts) -> None:
    process = hosts.start("sh", "-c", "echo no such table >&2; exit 3")
    assert process.wait() == 3
    row = hosts.row()
    assert (row["status"], row["outcome"]) == ("FAIL", "fail")
    assert row["data"]["error"].startswith("the command exited with 3: no such table")
    assert hosts.start("true").wait() == 0
    row = hosts.row()
    assert (row["status"], row["attempt"]) == ("SUCCESS", 2)


@pytest.mark.parametrize(("command", "code"), [("no-such-command", 127), ("/etc/passwd", 126)])
def test_a_command_that_can_t_be_started_has_failed(hosts: Hosts, command: str, code: int) -> None:
    assert hosts.start(command).wait() == code
    assert hosts.row()["outcome"] == "fail"


@pytest.mark.parametrize(
    ("code", "options", "status"),
    [(0, (), "FAIL"), (7, (), "FAIL"), (0, ("--exit-zero-on-stop", "success"), "SUCCESS")],
)
def test_a_stop_gives_the_run_back(
    hosts: Hosts, tmp_path: Path, code: int, options: tuple[str, ...], status: str
) -> None:
    process = hosts.start(sys.executable, "-c", NOTES, str(tmp_path / "end"), str(code), options=options)
    process.line("ready")
    for _ in range(3):
        process.signal(signal.SIGTERM)
    process.line("got SIGTERM")
    assert hosts.row()["status"] == "RUNNING", "the lease is held until the command has ended"
    (tmp_path / "end").touch()
    assert process.wait() == code
    assert process.out.count("got SIGTERM") == 1
    row = hosts.row()
    assert (row["status"], row["data"]) == (status, {"released": True} if status == "FAIL" else None)


def test_a_lost_lease_stops_the_command(hosts: Hosts, tmp_path: Path) -> None:
    options = ("--lease", "20", "--heartbeat", "0.2")
    process = hosts.start(sys.executable, "-c", NOTES, str(tmp_path / "end"), "0", options=options)
    process.line("ready")
    hosts.database.rows("UPDATE leasedjob.job_scheduler SET owner_token = gen_random_uuid()")
    process.line("got SIGTERM")
    (tmp_path / "end").touch()
    assert process.wait() == 75, "exit 0, but nothing of it could be recorded"
    assert "lease lost" in process.err
    assert hosts.row()["status"] == "RUNNING", "the other owner's"


DEAF = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: print("got SIGTERM", flush=True))
print("ready", flush=True)
while True:
    with open(sys.argv[1], "w") as file:
        file.write(str(time.time()))
    time.sleep(0.02)
"""


def test_what_loses_its_lease_in_silence_has_ended_before_the_next_one_may_begin(hosts: Hosts, tmp_path: Path) -> None:
    """The command is deaf to SIGTERM, and its grace period is longer than the lease."""
    process = hosts.start(sys.executable, "-c", DEAF, str(tmp_path / "alive"), options=("--lease", "15"))
    process.line("ready")
    with psycopg.connect(hosts.database.dsn) as stranger:  # no heartbeat gets through
        row = stranger.execute("SELECT modified_at FROM leasedjob.job_scheduler FOR UPDATE").fetchone()
        assert row is not None
        process.line("got SIGTERM")
        assert process.wait() == 128 + signal.SIGKILL
    assert float((tmp_path / "alive").read_text() or 0) < row[0].timestamp() + 15
    assert hosts.row()["attempt"] == 1


def test_a_lost_lease_keeps_a_code_of_its_own(hosts: Hosts, tmp_path: Path) -> None:
    options = ("--lease", "20", "--heartbeat", "0.2")
    process = hosts.start(sys.executable, "-c", NOTES, str(tmp_path / "end"), "9", options=options)
    process.line("ready")
    hosts.database.rows("UPDATE leasedjob.job_scheduler SET owner_token = gen_random_uuid()")
    process.line("got SIGTERM")
    (tmp_path / "end").touch()
    assert process.wait() == 9


def test_heartbeats_keep_the_lease_while_the_command_runs(hosts: Hosts, tmp_path: Path) -> None:
    options = ("--lease", "2", "--heartbeat", "0.5")
    process = hosts.start("sh", "-c", "echo ready; sleep 5", options=options)
    process.line("ready")
    assert process.wait() == 0, "two leases and a half"
    assert hosts.row()["status"] == "SUCCESS"


def test_without_a_database_the_command_is_not_started(run: Processes, tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"postgresql://127.0.0.1:{closed.getsockname()[1]}/nothing"
        words = ["run-exclusive", "--code", "a", "--run-key", "b", "--database-url", url]
        process = run.leasedjob(*words, "--", "touch", str(tmp_path / "ran"))
        assert process.wait() == 125
    assert not (tmp_path / "ran").exists()
    assert len(process.err.splitlines()) == 1


def test_a_stop_while_the_database_does_not_answer(run: Processes, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"postgresql://127.0.0.1:{silent.getsockname()[1]}/x?connect_timeout=2"
        words = ["run-exclusive", "--code", "a", "--run-key", "b", "--", "touch", str(tmp_path / "ran")]
        process = run.leasedjob(*words, env={URL: url})
        asking, _ = silent.accept()
        with asking:
            process.signal(signal.SIGTERM)
            assert process.wait() == 143
    assert not (tmp_path / "ran").exists()
    assert "a stop came first; the command was not started" in process.err


def test_a_database_without_the_schema_is_named(run: Processes, empty_database: Database) -> None:
    words = ["run-exclusive", "--code", "a", "--run-key", "b", "--database-url", empty_database.dsn, "--", "true"]
    process = run.leasedjob(*words)
    assert process.wait() == 125
    assert "leasedjob migrate" in process.err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--code", "a"], "run_key is required"),
        (["--code", " ", "--run-key", "b"], "code must not be blank"),
        (["--code", "a", "--run-key", "b", "--type", "INITIAL"], "run_key is forbidden"),
        (["--code", "a", "--run-key", "b", "--lease", "10", "--heartbeat", "5"], "less than half the lease"),
        (["--code", "a", "--run-key", "b", "--lease", "soon"], "number of seconds"),
        (["--run-key", "b"], "--code"),
    ],
)
def test_a_wrong_call_asks_no_database(run: Processes, options: list[str], said: str) -> None:
    process = run.leasedjob("run-exclusive", *options, "--", "true")
    assert process.wait() == 2
    assert said in process.err


def test_initial_runs_once_ever(run: Processes, database: Database) -> None:
    words = ["run-exclusive", "--code", "seed", "--type", "INITIAL", "--", "echo", "ran"]
    outs = []
    for _ in range(2):
        process = run.leasedjob(*words, env={URL: database.dsn})
        assert process.wait() == 0
        outs.append(process.out)
    assert outs == [["ran"], []]
