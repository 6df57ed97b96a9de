"""Where a crew and its faults meet: a database with judges in it, and what the judge needs to know afterwards."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final

import psycopg
from psycopg.rows import dict_row

from tests.chaos.crew import Layer, Plan
from tests.chaos.history import Change, Effect, History
from tests.chaos.sink import Notes

DRAIN_SECONDS: Final = 120  # within which every run that began has to end once the faults are over
_ROOT: Final = Path(__file__).parents[2]
_JUDGES: Final = (Path(__file__).parent / "arena.sql").read_text()

Harm = Callable[["Crew", float], None]  # until this time of time.monotonic()


class Crew:
    """The processes of a run, from outside."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        self._folder = folder
        self._plan = plan

    def pids(self) -> list[int]:
        """The living workers' process ids, by worker."""
        found: dict[int, int] = {}
        with contextlib.suppress(FileNotFoundError):
            for line in (self._folder / "pids").read_text().splitlines():
                number, pid = line.split()
                found[int(number)] = int(pid)
        return [found[number] for number in sorted(found)]

    def signal(self, pids: Sequence[int], sign: signal.Signals) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, sign)


def install_judges(connection: psycopg.Connection[Any]) -> None:
    """The trigger and the sink, in a database that has the schema."""
    connection.execute(_JUDGES.encode())


def run(plan: Plan, dsn: str, harm: Harm, seconds: float, *, at_least: int = 10, to_the_end: bool = True) -> History:
    """Lets a crew work for so many seconds while `harm` is done to it, then waits until every begun run has ended.

    Args:
        dsn: of the database itself.
        seconds: counted from when the crew is at work.
        at_least: so many runs begin, if it takes longer than that, too.
        to_the_end: else it is stopped at once, and its runs stay open.

    Raises:
        AssertionError: a worker crashed, or runs stay open.
    """
    with tempfile.TemporaryDirectory(prefix="leasedjob-chaos-") as name:
        folder = Path(name)
        plan.save(folder)
        crew = Crew(folder, plan)
        process = subprocess.Popen([sys.executable, "-m", "tests.chaos.crew", str(folder)], cwd=_ROOT)
        try:
            _until(lambda: len(crew.pids()) == plan.processes, 60, "every worker was started")
            _until(lambda: _runs(dsn) > 0, 60, "the first run began")
            harm(crew, time.monotonic() + seconds)
            _until(lambda: _runs(dsn) >= at_least, 120, f"{at_least} runs began")
            if not to_the_end:
                process.send_signal(signal.SIGTERM)
                process.wait(30)
                return history(dsn, plan, folder)
            (folder / "drain").touch()
            try:
                code = process.wait(DRAIN_SECONDS)
            except subprocess.TimeoutExpired:
                raise AssertionError(f"runs are still open: {_open_runs(dsn)}") from None
            crashes = "\n".join(path.read_text() for path in folder.glob("crash-*"))
            assert code == 0, crashes
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                process.wait(30)
        return history(dsn, plan, folder)


def history(dsn: str, plan: Plan, folder: Path) -> History:
    """The records that a run has left."""
    with psycopg.connect(dsn, autocommit=True, row_factory=dict_row) as connection:
        changes = [
            Change(**row)
            for row in connection.execute(
                """SELECT seq, key, code AS "group", status, token, attempt, owner::text AS owner, adopted,
                          (extract(epoch FROM modified_at) * 1000000)::bigint AS modified,
                          (extract(epoch FROM modified_at) * 1000000)::bigint + lease_ms * 1000 AS until
                     FROM chaos.change"""
            )
        ]
        effects = [
            Effect(**row)
            for row in connection.execute(
                "SELECT seq, key, token, accepted, (extract(epoch FROM at) * 1000000)::bigint AS at FROM chaos.effect"
            )
        ]
    forbids = plan.layer is Layer.OPERATOR and plan.forbid
    return History(changes=changes, effects=effects, told=Notes.read(folder), exclusive=forbids)


def _runs(dsn: str) -> int:
    with psycopg.connect(dsn, autocommit=True) as connection:
        row = connection.execute("SELECT count(*) FROM leasedjob.job_scheduler").fetchone()
    return 0 if row is None else int(row[0])


def _open_runs(dsn: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(dsn, autocommit=True) as connection:
        return connection.execute(
            "SELECT code, run_key, status, attempt, retry_at, clock_timestamp() - modified_at"
            "  FROM leasedjob.job_scheduler WHERE status <> 'SUCCESS' LIMIT 10"
        ).fetchall()


def _until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not in time: {what}"
        time.sleep(0.02)


# --- harm ------------------------------------------------------------------------------------------------------------


def peace(crew: Crew, until: float) -> None:
    """Nothing happens to anybody."""
    time.sleep(max(0.0, until - time.monotonic()))


def freezing(seconds: float, share: float = 1 / 3) -> Harm:
    """This share of the workers at a time stands still for so long, after half as long in peace."""

    def harm(crew: Crew, until: float) -> None:
        while time.monotonic() < until:
            time.sleep(seconds / 2)
            frozen = random.sample(pids := crew.pids(), k=max(1, round(len(pids) * share)))
            crew.signal(frozen, signal.SIGSTOP)
            try:
                time.sleep(seconds)
            finally:
                crew.signal(frozen, signal.SIGCONT)
        time.sleep(seconds / 4)  # the last ones do what they had in mind

    return harm


def killing(every: float) -> Harm:
    """One worker after the other is killed; another takes its place."""

    def harm(crew: Crew, until: float) -> None:
        while time.monotonic() < until:
            crew.signal([random.choice(crew.pids())], signal.SIGKILL)
            time.sleep(every)

    return harm


def by_turns(*faults: Callable[[], AbstractContextManager[None]], each: float) -> Harm:
    """Faults one after the other, each for so long and then healed for a third of that."""

    def harm(crew: Crew, until: float) -> None:
        while time.monotonic() < until:
            for fault in faults:
                with fault():
                    time.sleep(each)
                time.sleep(each / 3)

    return harm


def together(*harms: Harm) -> Harm:
    """Several at once."""

    def harm(crew: Crew, until: float) -> None:
        with ThreadPoolExecutor(len(harms)) as pool:
            for done in [pool.submit(one, crew, until) for one in harms]:
                done.result()

    return harm
