"""Simulated holders: programs that want each tick of their code and use the lease library for it, many in one process.

    python -m tests.chaos_cluster.holders FOLDER NUMBER

FOLDER/holders.json says what they do. Several holders in different processes want each code, so that when one is
killed, frozen or cut off, another one takes over. A file FOLDER/last holds the last tick, once it is known: when all
ticks up to it have succeeded, the process ends.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from leasedjob.errors import LeasedJobError
from leasedjob.lease import JobAcquireOptions, JobExecutionLease, JobSchedulerService
from leasedjob.lease.database import Credentials, Pool, translated
from tests.chaos_cluster.tether import tether

MINUTE: Final = 60
STOPPING: Final = 5.0  # seconds that the work may need to stop


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """What all holders do.

    Args:
        dsns: ways to the database; process n takes the n-th, and begins anew at the end.
        recorder: host and port.
        first: the first tick, seconds since the epoch.
        codes: how many codes there are; each of `holders` wants one, so that neighbours want different ones.
        lease, heartbeat: seconds. work: seconds at most.
        failing: share of the first attempts that fail.
    """

    dsns: list[str]
    recorder: tuple[str, int]
    first: int
    processes: int
    holders: int
    codes: int
    lease: float
    heartbeat: float
    work: float
    failing: float
    seed: int

    def code(self, holder: int) -> str:
        return f"holders/{holder % self.codes:03}"

    def process(self, holder: int) -> int:
        """Those of one code are in different processes."""
        return (holder + holder // self.codes) % self.processes

    def save(self, folder: Path) -> None:
        (folder / "holders.json").write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, folder: Path) -> Holding:
        values = json.loads((folder / "holders.json").read_text())
        return cls(**{**values, "recorder": tuple(values["recorder"])})


class RefusedError(Exception):
    """The recorder has heard of a newer token."""


class FailedError(Exception):
    """The work fails, as work does."""


class _Told:
    """A connection to the recorder, from a workload's start to its end."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def say(self, what: str, **more: str | int) -> None:
        self._writer.write((json.dumps({"what": what, **more}) + "\n").encode())
        await self._writer.drain()
        if await self._reader.readline() != b"1\n":
            raise RefusedError

    async def close(self) -> None:
        self._writer.close()
        with suppress(OSError):
            await self._writer.wait_closed()


class Holder:
    """Wants the ticks of one code, the oldest first."""

    def __init__(self, holding: Holding, folder: Path, number: int, name: str, pool: Pool) -> None:
        self._holding, self._last, self._name, self._pool = holding, folder / "last", name, pool
        self._service = JobSchedulerService(pool.connection, timeout=5, stopping=STOPPING)
        self._code = holding.code(number)
        self._dice = random.Random(f"{holding.seed} {number} {time.time()}")
        self._next = holding.first

    async def live(self) -> None:
        """Until all ticks have succeeded."""
        while True:
            if self._next > (last := self._limit()):
                return
            if (ahead := self._next - time.time()) > 0:
                await asyncio.sleep(min(ahead, 1.0))
                continue
            if await self._run(self._next):
                self._next += MINUTE
            elif last < float("inf") or self._dice.random() < 0.9:
                await asyncio.sleep(self._dice.uniform(0.5, 3.0))

    def _limit(self) -> float:
        try:
            return float(self._last.read_text() or "inf")
        except FileNotFoundError:
            return float("inf")

    async def _run(self, tick: int) -> bool:
        """True if this tick needs no more of us."""
        options = JobAcquireOptions(
            code=self._code,
            run_key=f"{datetime.fromtimestamp(tick, UTC):%Y-%m-%dT%H:%M:%SZ}",
            lease_ms=round(self._holding.lease * 1000),
            heartbeat_ms=round(self._holding.heartbeat * 1000),
        )
        with suppress(LeasedJobError, RefusedError, FailedError, OSError):
            outcome = await self._service.run_exclusive(options, self._work)
            return outcome.acquired or await self._succeeded(str(options.run_key))
        return False

    async def _succeeded(self, run_key: str) -> bool:
        with translated():
            async with self._pool.connection() as connection:
                cursor = await connection.execute(
                    "SELECT FROM leasedjob.job_scheduler WHERE code = %s AND run_key = %s AND status = 'SUCCESS'",
                    (self._code, run_key),
                )
                return await cursor.fetchone() is not None

    async def _work(self, lease: JobExecutionLease) -> None:
        told = _Told(*await asyncio.open_connection(*self._holding.recorder))
        try:
            await told.say(
                "start",
                key=lease.idempotency_key,
                code=self._code,
                token=lease.fencing_token,
                attempt=lease.attempt,
                pod=self._name,
            )
            end = time.monotonic() + self._dice.uniform(0.2, self._holding.work)
            while (left := end - time.monotonic()) > 0:
                await asyncio.sleep(min(left, 1.0))
                await told.say("effect")
            if lease.attempt == 1 and self._dice.random() < self._holding.failing:
                raise FailedError
            await told.say("done")
        finally:
            await told.close()


def name_of(process: int) -> str:
    return f"holders-{process}"


async def main(folder: Path, number: int) -> None:
    holding = Holding.load(folder)
    mine = [holder for holder in range(holding.holders) if holding.process(holder) == number]
    credentials = Credentials.from_conninfo(holding.dsns[number % len(holding.dsns)])
    async with Pool(credentials, max_size=4, timeout=5) as pool:
        holders = [Holder(holding, folder, holder, name_of(number), pool) for holder in mine]
        await asyncio.gather(*(holder.live() for holder in holders))


def run() -> None:
    tether()
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))


if __name__ == "__main__":
    run()
