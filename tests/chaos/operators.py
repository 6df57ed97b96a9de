"""A worker that uses the lease as operators and their Pods do.

Each process is a replica of one of a few clusters: it claims in batches, and "launches Pods", which adopt the claim,
beat, act and finish on connections of their own. Some Pods end without a word, and the replica records their end.
"""

from __future__ import annotations

import asyncio
import os
import random
import socket
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, TypeVar
from uuid import uuid4

import psycopg

from leasedjob.errors import LeasedJobError
from leasedjob.identity import RunIdentity, run_key_for
from leasedjob.lease.database import Credentials, Pool, connect_sync
from leasedjob.lease.rows import (
    AdoptVerdict,
    ClaimRequest,
    ClaimResult,
    ClaimVerdict,
    Outcome,
    OverlapRule,
    Registration,
)
from leasedjob.lease.store import OperatorStore, SidecarStore
from leasedjob.lease.tenants import tenant_of
from leasedjob.lease.trust import CLOCK_RATE
from leasedjob.sidecar.clock import boottime
from tests.chaos.crew import Plan
from tests.chaos.history import SUCCESS, What
from tests.chaos.sink import EffectRefusedError, Notes, Sink

NAMESPACE: Final = "chaos"
MANUAL: Final = "manual/"
CLUSTERS: Final = 4
UID: Final = "7c5b1d1e-0000-4000-8000-00000000cafe"
DECIDED: Final = {ClaimVerdict.COMPLETED, ClaimVerdict.HELD, ClaimVerdict.CLAIMED}
T = TypeVar("T")


def codes(plan: Plan) -> list[str]:
    return [f"{NAMESPACE}/job-{n:04}" for n in range(plan.codes)]


def identity(plan: Plan, code: str, n: int) -> tuple[RunIdentity, datetime]:
    """The n-th run of a job, and its tick."""
    tick = datetime.fromtimestamp(plan.base + n, UTC)
    return RunIdentity.of(code=code, run_key=run_key_for(tick)), tick


def number_of(plan: Plan, run_key: str) -> int | None:
    """Which of a job's scheduled runs this is; None for a run that a person asked for."""
    if run_key.startswith(MANUAL):
        return None
    return round(datetime.fromisoformat(run_key).timestamp()) - plan.base


def keys(plan: Plan) -> list[str]:
    """The lock keys of all runs."""
    return [identity(plan, code, n)[0].lock_key for code in codes(plan) for n in range(plan.keys // plan.codes)]


async def register(plan: Plan, store: OperatorStore) -> None:
    """All clusters, all jobs."""
    for number in range(CLUSTERS):
        await store.register_jobs(
            f"cluster-{number}",
            [
                Registration(
                    code=code,
                    uid=UID,
                    namespace=NAMESPACE,
                    name=code.rpartition("/")[2],
                    created_at=datetime.fromtimestamp(plan.base, UTC) - timedelta(hours=1),
                    schedule_hash="s",
                    spec_hash="s",
                    policy="Forbid" if plan.forbid else "Allow",
                )
                for code in codes(plan)
            ],
        )


async def work(plan: Plan, folder: Path, number: int) -> None:
    """One process: a replica, and the Pods that it launched."""
    dsn = plan.dsns[number % len(plan.dsns)]
    leases = Pool(Credentials.from_conninfo(dsn), max_size=2, timeout=2)
    async with Pool(Credentials.from_conninfo(plan.sink), max_size=2) as direct, leases:
        store = OperatorStore(leases.connection, timeout=plan.timeout * 2)
        notes, sink = Notes(folder, str(number)), Sink(direct)
        replica = _Replica(plan, f"cluster-{number % CLUSTERS}", store, sink, notes, Credentials.from_conninfo(dsn))
        draining = (folder / "drain").exists
        await (replica.until_drained(draining) if plan.work else replica.claim_everything(draining))


class _Replica:
    def __init__(
        self, plan: Plan, cluster: str, store: OperatorStore, sink: Sink, notes: Notes, credentials: Credentials
    ) -> None:
        self._plan, self._cluster, self._store, self._sink, self._notes = plan, cluster, store, sink, notes
        self._credentials = credentials
        self._pods: set[asyncio.Task[None]] = set()
        self._next = dict.fromkeys(codes(plan), 0)  # the oldest tick of which we don't know that it succeeded

    def _request(self, code: str, n: int | None, manual: str = "") -> ClaimRequest:
        """The n-th tick of a job; or a run that a person asked for, which competes with the ticks."""
        run, tick = (RunIdentity.of(code=code, run_key=manual), None) if n is None else identity(self._plan, code, n)
        return ClaimRequest(
            identity=run,
            tick=tick,
            manual=n is None,
            name=code,
            namespace=NAMESPACE,
            job_name=code.rpartition("/")[2],
            job_uid=UID,
            tenant=tenant_of(self._cluster, NAMESPACE),
            run_lease_ms=round(self._plan.lease * 1000),
            lease_ms=round(self._plan.lease * 1000),
            on_overlap=OverlapRule.WAIT if self._plan.forbid else OverlapRule.ALLOW,
            backoff_limit=1_000_000,
            interruption_limit=1_000_000,
        )

    # --- every run is wanted by every process, and done at once -------------------------------------------------------

    async def claim_everything(self, draining: Callable[[], bool]) -> None:
        """Asks for all runs, tick by tick, until each is decided."""
        count = self._plan.keys // self._plan.codes
        for n in range(count):
            left = [self._request(code, n) for code in self._next]
            random.shuffle(left)
            while left and not draining():
                batch, left = left[: self._plan.batch], left[self._plan.batch :]
                left += await self._claim_batch(batch)

    async def _claim_batch(self, batch: list[ClaimRequest]) -> list[ClaimRequest]:
        """What is to be asked again."""
        with suppress(LeasedJobError):
            answers = await self._store.claim_runs(self._cluster, batch)
            for wanted, answer in zip(batch, answers, strict=True):
                if answer.verdict is ClaimVerdict.CLAIMED:
                    assert answer.fencing_token is not None
                    self._notes.told(What.ACQUIRED, wanted.identity.lock_key, answer.fencing_token)
            return [w for w, a in zip(batch, answers, strict=True) if a.verdict not in DECIDED]
        await asyncio.sleep(0.05)
        return batch

    # --- runs that take their time ------------------------------------------------------------------------------------

    async def until_drained(self, draining: Callable[[], bool]) -> None:
        """Claims the oldest open tick of each job, launches Pods for what it gets; at the end begins nothing new."""
        most = self._plan.keys // self._plan.codes
        while True:
            if draining():
                left = await self._sink.open_runs()
                if left == [] and not self._pods:
                    return
                wanted = [self._request(code, number_of(self._plan, key), key) for code, key in left or []]
            else:
                wanted = [self._request(code, n) for code, n in self._next.items() if n < most]
                wanted += [
                    self._request(code, None, f"{MANUAL}{uuid4()}") for code in self._next if random.random() < 0.3
                ]
            room = self._plan.tasks - len(self._pods)
            if room > 0 and wanted:
                await self._claim(random.sample(wanted, k=min(len(wanted), 3 * room, self._plan.batch)))
            await asyncio.sleep(random.uniform(0, 0.1))

    async def _claim(self, batch: list[ClaimRequest]) -> None:
        try:
            answers = await self._store.claim_runs(self._cluster, batch)
        except LeasedJobError:
            return
        for wanted, answer in zip(batch, answers, strict=True):
            if answer.verdict is ClaimVerdict.COMPLETED and not wanted.manual:
                self._next[wanted.identity.code] += 1
            elif answer.verdict is ClaimVerdict.CLAIMED:
                assert answer.fencing_token is not None
                self._notes.told(What.ACQUIRED, wanted.identity.lock_key, answer.fencing_token)
                pod = asyncio.create_task(self._pod(wanted, answer))
                self._pods.add(pod)
                pod.add_done_callback(self._pods.discard)

    async def _pod(self, wanted: ClaimRequest, claim: ClaimResult) -> None:
        pod = _Pod(self._plan, self._credentials, claim, wanted.identity.lock_key, self._sink, self._notes)
        await asyncio.sleep(random.uniform(0, self._plan.lease / 3))  # the Pod is being created
        if random.random() < 0.2:
            with suppress(LeasedJobError):
                await self._store.renew_claims(self._cluster, [claim.id] if claim.id else [])
        if claim.attempt == 1 and random.random() < self._plan.giving_up:
            with suppress(LeasedJobError):
                assert claim.id is not None
                assert claim.owner_token is not None
                await self._store.release_claim(claim.id, claim.owner_token, reason="Quota")
            return
        silent = random.random() < 0.2
        try:
            worked = await pod.live(silent=silent)
        except (LeasedJobError, LostError, EffectRefusedError):
            return
        if worked and silent:  # the operator saw it end well
            await self._record(pod, claim)

    async def _record(self, pod: _Pod, claim: ClaimResult) -> None:
        assert claim.id is not None
        assert claim.attempt is not None
        for _ in range(5):
            with suppress(LeasedJobError):
                if await self._store.end_attempt(
                    claim.id, claim.attempt, pod.uid, Outcome.COMPLETE, counts=False, reason=""
                ):
                    pod.told(What.ENDED, SUCCESS)
                return
            await asyncio.sleep(0.2)


class LostError(Exception):
    """The lease is lost, or not to be trusted any more."""


class _Pod:
    """adopt, hold and the workload of one attempt."""

    def __init__(
        self, plan: Plan, credentials: Credentials, claim: ClaimResult, key: str, sink: Sink, notes: Notes
    ) -> None:
        assert claim.id is not None
        assert claim.owner_token is not None
        assert claim.fencing_token is not None
        self._plan, self._credentials, self._key, self._sink, self._notes = plan, credentials, key, sink, notes
        self._id, self._claim_token, self._fencing_token = claim.id, claim.owner_token, claim.fencing_token
        self._token = uuid4()
        self.uid = str(uuid4())
        self._connection: psycopg.Connection[Any] | None = None
        self._until = 0.0  # of trust
        self._stubborn = random.random() < plan.stubborn

    def told(self, what: What, detail: str = "") -> None:
        self._notes.told(what, self._key, self._fencing_token, detail)

    async def live(self, *, silent: bool) -> bool:
        """True if the work was done.

        Args:
            silent: the outcome is not recorded here.

        Raises:
            LostError: it stopped, for its lease was lost.
            EffectRefusedError: as the sink says.
        """
        try:
            await self._adopt()
            return await self._hold(silent)
        finally:
            if self._connection is not None:
                self._connection.close()

    async def _adopt(self) -> None:
        for _ in range(10):
            sent = boottime()
            with suppress(LeasedJobError):
                answer = await self._ask(
                    lambda store: store.adopt(
                        self._id, self._claim_token, self._token, pod_uid=self.uid, pod_name="pod"
                    )
                )
                if answer.verdict is AdoptVerdict.ADOPTED:
                    self._until = sent + CLOCK_RATE * self._plan.lease
                    return
                if answer.verdict is not AdoptVerdict.BUSY:
                    raise LostError(answer.reason)
            await asyncio.sleep(0.05)
        raise LostError("not adopted")

    async def _hold(self, silent: bool) -> bool:
        ends = boottime() + random.uniform(0, self._plan.work)
        beat_at = boottime() + self._plan.heartbeat
        while True:
            now = boottime()
            if now >= self._until and not self._stubborn:
                raise LostError("no heartbeat reached the database in time")
            if now >= beat_at:
                beat_at = now + self._plan.heartbeat
                await self._beat(now)
                continue
            await self._act()
            if now >= ends:
                break
            await asyncio.sleep(random.uniform(0, self._plan.heartbeat))
        if silent:
            return True
        for _ in range(5):
            with suppress(LeasedJobError):
                if await self._ask(lambda store: store.finish(self._id, self._token, Outcome.COMPLETE)):
                    self.told(What.ENDED, SUCCESS)
                return True
            await asyncio.sleep(0.1)
        return False

    async def _act(self) -> None:
        try:
            await self._sink.act(self._key, self._fencing_token)
        except EffectRefusedError:
            if not self._stubborn:
                raise

    async def _beat(self, sent: float) -> None:
        try:
            beat = await self._ask(lambda store: store.heartbeat(self._id, self._token))
        except LeasedJobError:
            return
        if beat.held:
            self.told(What.BEAT)
            self._until = sent + CLOCK_RATE * self._plan.lease
        elif not beat.busy and not self._stubborn:
            raise LostError("the run was reclaimed, or its lease had expired")

    async def _ask(self, call: Callable[[SidecarStore], T]) -> T:
        """In a thread, and given up where no answer comes: as `hold` does."""

        def asked() -> T:
            if self._connection is None or self._connection.closed:
                self._connection = connect_sync(self._credentials, timeout=2)
            return call(SidecarStore(self._connection))

        thread = asyncio.ensure_future(asyncio.to_thread(asked))
        done, _ = await asyncio.wait([thread], timeout=self._plan.timeout)
        if not done and self._connection is not None:
            _shut(self._connection)
        return await thread


def _shut(connection: psycopg.Connection[Any]) -> None:
    """Wakes the thread that waits for an answer that doesn't come."""
    with suppress(OSError, psycopg.Error), socket.socket(fileno=os.dup(connection.fileno())) as copy:
        copy.shutdown(socket.SHUT_RDWR)
