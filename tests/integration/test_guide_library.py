"""docs/guide-library.md, followed as a reader would: every block of Python and shell is run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from .conftest import Database

pytestmark = pytest.mark.integration
GUIDE = (Path(__file__).parents[2] / "docs" / "guide-library.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+) ?(\S*)\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)
FILES = {name: text for language, name, text in BLOCKS if language == "python"}
COMMANDS = [line for language, _, text in BLOCKS if language == "sh" for line in text.splitlines()]


class Host:
    """Where the reader's files are, and an environment that names the database."""

    def __init__(self, folder: Path, database: Database) -> None:
        self.folder = folder
        for name, text in FILES.items():
            (folder / name).write_text(text, encoding="utf-8")
        programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self.environment = {**os.environ, "PATH": programs, "LEASEDJOB_DATABASE_URL": database.dsn}

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            words, cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False, timeout=120
        )

    def python(self, *words: str) -> str:
        done = self.run(sys.executable, "-W", "error", *words)
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture
def host(tmp_path: Path, empty_database: Database) -> Host:
    """After the first step of the guide."""
    found = Host(tmp_path, empty_database)
    done = found.run("sh", "-ec", COMMANDS[0])
    assert done.returncode == 0, done.stderr
    assert "the schema is current" in done.stdout
    return found


def test_the_guide_has_the_blocks_that_are_run() -> None:
    assert list(FILES) == ["nightly.py", "outbox.py", "service.py", "by_hand.py", "test_nightly.py"]
    assert [command.split()[1] for command in COMMANDS] == ["migrate", "prune"]


def test_a_cron_script_on_three_hosts_runs_once(host: Host, empty_database: Database) -> None:
    with ThreadPoolExecutor(3) as hosts:
        outputs = list(hosts.map(host.python, ["nightly.py"] * 3))
    assert sorted(outputs) == ["", "", "reported 14 lines\n"]
    assert host.python("nightly.py") == ""
    (row,) = empty_database.rows("SELECT code, status, attempt FROM leasedjob.job_scheduler")
    assert row == {"code": "nightly-report", "status": "SUCCESS", "attempt": 1}


def test_the_crontab_says_what_the_script_says() -> None:
    (crontab,) = (text for language, _, text in BLOCKS if language == "crontab")
    schedule, zone = re.search(r'Schedule\.parse\("(.+?)", "(.+?)"\)', FILES["nightly.py"]).groups()  # type: ignore[union-attr]
    assert f"CRON_TZ={zone}\n{schedule} " in crontab


def test_the_other_programs(host: Host, empty_database: Database) -> None:
    assert host.python("outbox.py") == "RunExclusiveResult(acquired=True, result=True)\n"
    assert host.python("outbox.py") == "RunExclusiveResult(acquired=False, result=None)\n"
    (row,) = empty_database.rows("SELECT key FROM outbox")
    assert row["key"].startswith("v2:")
    assert host.python("service.py").splitlines() == [
        "RunExclusiveResult(acquired=True, result='2026-07-20T03:00:00Z, attempt 1')",
        "RunExclusiveResult(acquired=False, result=None)",
    ]
    assert host.python("by_hand.py") == ""
    assert host.python("by_hand.py") == "completed\n"
    assert "1 passed" in host.python("-m", "pytest", "-q", "-p", "no:asyncio", "test_nightly.py")
    done = host.run("sh", "-ec", COMMANDS[1])
    assert (done.returncode, done.stdout.splitlines()) == (
        0,
        ["would delete 0 runs of 0 codes", "would delete 0 records of ticks that did not run"],
    )


def test_the_types_of_its_programs_are_right(host: Host) -> None:
    done = host.run(sys.executable, "-m", "mypy", "--config-file", "", "--no-error-summary", *FILES)
    assert done.stdout == ""
