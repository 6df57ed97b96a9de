"""A worker that uses the lease as a Python program does: `JobSchedulerService.run_exclusive`."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from leasedjob.errors import LeasedJobError
from leasedjob.identity import RunIdentity
from leasedjob.lease import JobAcquireOptions, JobExecutionLease, JobSchedulerService
from leasedjob.lease.core import NotAcquired
from leasedjob.lease.database import Credentials, Pool
from tests.chaos.crew import Plan
from tests.chaos.history import SUCCESS, What
from tests.chaos.sink import EffectRefusedError, Notes, Sink

CODE = "chaos"


class GaveUpError(Exception):
    """The work fails, as work does."""


def keys(plan: Plan) -> list[str]:
    """The lock keys of all runs, in order."""
    return [RunIdentity.of(code=CODE, run_key=str(n)).lock_key for n in range(plan.keys)]


async def work(plan: Plan, folder: Path, number: int) -> None:
    """One process: `plan.tasks` runs at a time."""
    leases = Pool(Credentials.from_conninfo(plan.dsns[number % len(plan.dsns)]), max_size=2, timeout=2)
    async with Pool(Credentials.from_conninfo(plan.sink), max_size=2) as direct, leases:
        worker = _Worker(
            plan, JobSchedulerService(leases.connection, timeout=plan.timeout), Sink(direct), Notes(folder, str(number))
        )
        begin, draining = itertools.count(), (folder / "drain").exists
        await asyncio.gather(*(worker.begin_runs(begin, draining) for _ in range(plan.tasks)))
        await worker.end_runs()


class _Worker:
    def __init__(self, plan: Plan, service: JobSchedulerService, sink: Sink, notes: Notes) -> None:
        self._plan, self._service, self._sink, self._notes = plan, service, sink, notes

    async def begin_runs(self, numbers: Iterator[int], draining: Callable[[], bool]) -> None:
        """Goes through the keys in their order, which all processes share; some come up again."""
        passed: list[str] = []
        while not draining():
            if passed and random.random() < 0.2:
                await self._run(passed.pop(random.randrange(len(passed))))
                continue
            if (n := next(numbers)) >= self._plan.keys:
                return
            if not await self._run(str(n)):
                passed.append(str(n))

    async def end_runs(self) -> None:
        """Until every run that began has succeeded."""
        while (left := await self._sink.open_runs()) != []:
            for _, key in random.sample(left or [], k=min(len(left or []), 5)):
                await self._run(key)
            await asyncio.sleep(0.1)

    async def _run(self, run_key: str) -> bool:
        """True if this run needs no more of us."""
        options = JobAcquireOptions(
            code=CODE,
            run_key=run_key,
            lease_ms=round(self._plan.lease * 1000),
            heartbeat_ms=round(self._plan.heartbeat * 1000),
        )
        by_hand = self._plan.work == 0 or random.random() < self._plan.stubborn
        with suppress(LeasedJobError, EffectRefusedError, GaveUpError):
            return await (self._run_by_hand(options) if by_hand else self._run_exclusive(options))
        return False

    async def _run_by_hand(self, options: JobAcquireOptions) -> bool:
        """The manual API, used stubbornly: it looks at no clock, and where it is told that its lease is lost it still
        goes on. What protects others from it is the database and the sink."""
        acquired = await self._service.acquire(options)
        if not acquired.acquired:
            return acquired.reason is NotAcquired.COMPLETED
        lease, key, token = acquired.lease, acquired.idempotency_key, acquired.fencing_token
        self._notes.told(What.ACQUIRED, key, token)
        loop = asyncio.get_running_loop()
        ends = loop.time() + random.uniform(0, self._plan.work)
        while True:
            with suppress(EffectRefusedError):
                await self._sink.act(key, token)
            if loop.time() >= ends:
                break
            await asyncio.sleep(self._plan.heartbeat)
            with suppress(LeasedJobError):
                if await self._service.heartbeat(lease):
                    self._notes.told(What.BEAT, key, token)
        if await self._service.complete(lease, {"by": self._notes.client}):
            self._notes.told(What.ENDED, key, token, SUCCESS)
            return True
        return False

    async def _run_exclusive(self, options: JobAcquireOptions) -> bool:
        given: list[JobExecutionLease] = []

        async def act(lease: JobExecutionLease) -> None:
            given.append(lease)
            self._notes.told(What.ACQUIRED, lease.idempotency_key, lease.fencing_token)
            loop = asyncio.get_running_loop()
            ends = loop.time() + random.uniform(0, self._plan.work)
            while True:
                lease.raise_if_lost()
                await self._sink.act(lease.idempotency_key, lease.fencing_token)
                if loop.time() >= ends:
                    break
                await asyncio.sleep(random.uniform(0, self._plan.lease / 2))
            if lease.attempt == 1 and random.random() < self._plan.giving_up:
                raise GaveUpError

        outcome = await self._service.run_exclusive(options, act)
        if outcome.acquired:
            (lease,) = given
            self._notes.told(What.ENDED, lease.idempotency_key, lease.fencing_token, SUCCESS)
        return outcome.acquired
