"""The same runs wanted by many at the same time: what the database must never let happen."""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import random
from collections import Counter
from collections.abc import AsyncIterator
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest

from leasedjob.errors import DatabaseUnavailableError
from leasedjob.lease.database import Credentials, Pool, connections, operator_pool
from leasedjob.lease.rows import ClaimRequest, ClaimResult, ClaimVerdict, Outcome, OverlapRule
from leasedjob.lease.statements import statement
from leasedjob.lease.store import OperatorStore, SidecarStore

from .conftest import CLUSTER, CODE, UID, Database, claimed, registered, registration, request, warm

pytestmark = pytest.mark.integration
CLAIMERS = 10
SECOND = timedelta(seconds=1)


@pytest.fixture
async def pool(database: Database) -> AsyncIterator[Pool]:
    """One open connection for each claimer: the server decides who comes first."""
    async with operator_pool(database.credentials, max_size=CLAIMERS) as pool:
        await warm(pool, CLAIMERS)
        yield pool


@pytest.fixture
def store(pool: Pool) -> OperatorStore:
    return OperatorStore(pool.connection)


async def until_decided(store: OperatorStore, cluster: str, requests: list[ClaimRequest]) -> list[ClaimResult]:
    """As an operator does: what is busy is asked again, and ticks of one code stay together and in order."""
    decided: dict[int, ClaimResult] = {}
    while len(decided) < len(requests):
        open_ones = [n for n in range(len(requests)) if n not in decided]
        results = await store.claim_runs(cluster, [requests[n] for n in open_ones])
        decided |= {
            n: result for n, result in zip(open_ones, results, strict=True) if result.verdict is not ClaimVerdict.BUSY
        }
        await asyncio.sleep(random.uniform(0, 0.01))
    return [decided[n] for n in range(len(requests))]


@pytest.mark.parametrize("claimers", [2, CLAIMERS])
async def test_each_run_is_claimed_by_exactly_one(
    store: OperatorStore, database: Database, minute: datetime, claimers: int
) -> None:
    codes = [f"shop/job-{n}" for n in range(5)]
    clusters = [f"cluster-{n}" for n in range(claimers)]
    for cluster in clusters:
        await registered(store, *codes, cluster=cluster, policy="Allow")
    rounds = 20
    for n in range(rounds):
        tick = minute + n * SECOND
        answers = await asyncio.gather(
            *(
                until_decided(
                    store,
                    cluster,
                    [
                        request(tick, code, on_overlap=OverlapRule.ALLOW)
                        for code in random.sample(codes, k=len(codes))  # each asks in an order of its own
                    ],
                )
                for cluster in clusters
            )
        )
        won = [result for results in answers for result in results if result.verdict is ClaimVerdict.CLAIMED]
        lost = [result for results in answers for result in results if result.verdict is not ClaimVerdict.CLAIMED]
        assert len({result.id for result in won}) == len(won) == len(codes)
        assert {result.verdict for result in lost} == {ClaimVerdict.HELD}
    rows = database.rows("SELECT lock_key, attempt, fencing_token FROM leasedjob.job_scheduler")
    assert len(rows) == rounds * len(codes)
    assert {row["attempt"] for row in rows} == {1}
    assert len({row["fencing_token"] for row in rows}) == len(rows)


async def test_an_expired_run_is_reclaimed_by_exactly_one(
    store: OperatorStore, database: Database, minute: datetime
) -> None:
    clusters = [f"cluster-{n}" for n in range(CLAIMERS)]
    for cluster in clusters:
        await registered(store, cluster=cluster)
    first = await claimed(store, minute, cluster=clusters[0])
    tokens = [first.fencing_token]
    for attempt in range(2, 22):
        database.age(first.id, 61)
        answers = await asyncio.gather(*(until_decided(store, cluster, [request(minute)]) for cluster in clusters))
        won = [results[0] for results in answers if results[0].verdict is ClaimVerdict.CLAIMED]
        assert [result.attempt for result in won] == [attempt]
        tokens.append(won[0].fencing_token)
    assert tokens == sorted(set(tokens))  # type: ignore[type-var]


async def test_forbid_is_never_violated(store: OperatorStore, database: Database, minute: datetime) -> None:
    """Many ticks of one code, wanted by many at once: the times during which runs are owned don't overlap."""
    clusters = [f"cluster-{n}" for n in range(CLAIMERS)]
    for cluster in clusters:
        await registered(store, cluster=cluster)
    ticks = itertools.count()

    async def work(cluster: str) -> Counter[ClaimVerdict]:
        seen: Counter[ClaimVerdict] = Counter()
        for _ in range(25):
            (result,) = await store.claim_runs(cluster, [request(minute + next(ticks) * SECOND)])
            seen[result.verdict] += 1
            if result.verdict is ClaimVerdict.CLAIMED:
                assert result.id is not None
                await asyncio.sleep(random.uniform(0, 0.005))
                assert await store.end_attempt(result.id, 1, None, Outcome.COMPLETE, counts=False, reason="")
        return seen

    seen: Counter[ClaimVerdict] = sum(await asyncio.gather(*map(work, clusters)), Counter())
    assert seen[ClaimVerdict.CLAIMED] >= 5
    owned = database.rows("SELECT started_at, finished_at FROM leasedjob.job_scheduler ORDER BY started_at")
    assert len(owned) == seen[ClaimVerdict.CLAIMED]
    for earlier, later in itertools.pairwise(owned):
        assert earlier["finished_at"] <= later["started_at"]
    # No tick is lost: each one ran, is in the ledger, or lies before the watermark because it came after a later one.
    ranges = [(first, last) for _, _, first, last, _ in database.ledger()]
    ran = {row["tick"] for row in database.rows("SELECT tick FROM leasedjob.job_scheduler")}
    assert not [tick for tick in ran for first, last in ranges if first <= tick <= last]
    assert sum(count for *_, count in database.ledger()) == seen[ClaimVerdict.OVERLAP_SKIPPED]


async def test_a_heartbeat_that_has_not_committed_yet_still_counts_for_overlap(
    store: OperatorStore, database: Database, minute: datetime
) -> None:
    """The beat came in time, but its transaction ends late: by then the row that others see looks expired."""
    await registered(store)
    first = await claimed(store, minute, run_lease_ms=300)
    assert first.id is not None
    assert first.owner_token is not None
    token = uuid4()
    holder = database.connect()
    SidecarStore(holder).adopt(first.id, first.owner_token, token, pod_uid="p", pod_name="p")
    with holder.transaction():
        holder.execute("SELECT pg_sleep(0.2)")
        assert SidecarStore(holder).heartbeat(first.id, token).held
        database.connect().execute("SELECT pg_sleep(0.15)")
        wanted = request(minute + SECOND, on_overlap=OverlapRule.WAIT)
        (result,) = await store.claim_runs(CLUSTER, [wanted])
        assert result.verdict is ClaimVerdict.OVERLAP_WAIT
    holder.execute("SELECT pg_sleep(0.35)")
    (result,) = await store.claim_runs(CLUSTER, [wanted])
    assert result.verdict is ClaimVerdict.CLAIMED
    assert not SidecarStore(holder).heartbeat(first.id, token).held


async def test_two_batches_in_opposite_order_do_not_deadlock(
    store: OperatorStore, database: Database, minute: datetime
) -> None:
    codes = [f"shop/job-{n:03d}" for n in range(100)]
    await registered(store, *codes)
    for n in range(5):
        forwards = [request(minute + n * SECOND, code, on_overlap=OverlapRule.ALLOW) for code in codes]
        answers = await asyncio.gather(
            store.claim_runs(CLUSTER, forwards),
            store.claim_runs(CLUSTER, forwards[::-1]),
            store.register_jobs(CLUSTER, [registration(code) for code in codes[::-1]]),
        )
        verdicts = Counter(result.verdict for results in answers[:2] for result in results)
        assert verdicts[ClaimVerdict.CLAIMED] <= len(codes)
        assert set(verdicts) <= {ClaimVerdict.CLAIMED, ClaimVerdict.HELD, ClaimVerdict.BUSY}


async def test_a_heartbeat_and_a_reclaim_are_never_both_right(
    store: OperatorStore, database: Database, pool: Pool, minute: datetime
) -> None:
    """Leases of 40 ms are beaten and reclaimed around their end; after a reclaim, the old owner never beats again."""
    await registered(store)

    async def beat(id: UUID, token: UUID) -> int:
        async with pool.connection() as connection:
            held = 0
            while True:
                cursor = await connection.execute(statement("heartbeat"), {"id": id, "token": token})
                row = await cursor.fetchone()
                assert row is not None
                if not row["held"] and not row["busy"]:
                    return held
                held += row["held"]
                await asyncio.sleep(random.uniform(0, 0.06))

    async def reclaim() -> ClaimResult:
        while True:
            (result,) = await store.claim_runs(CLUSTER, [request(minute, run_lease_ms=40)])
            if result.verdict is ClaimVerdict.CLAIMED:
                return result
            assert result.verdict in (ClaimVerdict.HELD, ClaimVerdict.BUSY)

    result = await claimed(store, minute, run_lease_ms=40)
    assert result.id is not None
    beats = 0
    for attempt in range(1, 16):
        token = uuid4()
        async with pool.connection() as connection:
            await connection.execute(
                statement("adopt"),
                {
                    "id": result.id,
                    "claim_token": result.owner_token,
                    "new_token": token,
                    "pod_uid": f"p{attempt}",
                    "pod_name": "p",
                },
            )
        beating = asyncio.create_task(beat(result.id, token))
        result = await reclaim()
        assert result.attempt == attempt + 1
        row = database.row(result.id)
        beats += await beating
        # The old owner's beats after the reclaim touched nothing.
        assert database.row(result.id) == row
    assert beats > 0


async def test_everything_at_once_ends_in_a_sound_state(
    store: OperatorStore, database: Database, minute: datetime
) -> None:
    """Claims, renewals, ends, stops and registrations of few codes by many: no deadlock, no broken rule."""
    codes = [f"shop/job-{n}" for n in range(4)]
    clusters = [f"cluster-{n}" for n in range(3)]
    for cluster in clusters:
        await registered(store, *codes, cluster=cluster, policy="Allow")
    rng = random.Random(7)

    async def act(cluster: str) -> Counter[str]:
        done: Counter[str] = Counter()
        mine: dict[UUID, ClaimResult] = {}
        for _ in range(80):
            what = rng.choice(["claim"] * 5 + ["renew", "end", "end", "stop", "register", "unregister", "release"])
            try:
                match what:
                    case "claim":
                        rule = rng.choice(list(OverlapRule))
                        wanted = [
                            request(minute + rng.randrange(30) * SECOND, code, on_overlap=rule, backoff_limit=1)
                            for code in rng.sample(codes, k=2)
                        ]
                        for result in await store.claim_runs(cluster, wanted):
                            done[result.verdict] += 1
                            if result.verdict is ClaimVerdict.CLAIMED and result.id:
                                mine[result.id] = result
                    case "renew":
                        await store.renew_claims(cluster, mine)
                    case "end" if mine:
                        id, result = mine.popitem()
                        assert result.attempt is not None
                        outcome = rng.choice(list(Outcome))
                        await store.end_attempt(
                            id, result.attempt, None, outcome, counts=outcome is Outcome.FAIL, reason="x", retry_ms=0
                        )
                    case "release" if mine:
                        id, result = mine.popitem()
                        assert result.owner_token is not None
                        await store.release_claim(id, result.owner_token, reason="x")
                    case "stop" if mine:
                        await store.request_stop(list(mine), reason="Cancelled")
                    case "register":
                        await store.register_jobs(cluster, [registration(code, policy="Allow") for code in codes])
                    case "unregister":
                        await store.unregister_objects(cluster, dict.fromkeys(rng.sample(codes, k=1), UID))
                        await store.register_jobs(cluster, [registration(code, policy="Allow") for code in codes])
                    case _:
                        pass
            except DatabaseUnavailableError as error:
                if error.kind != "busy":  # a deadlock, for one
                    raise
        return done

    done: Counter[str] = sum(await asyncio.gather(*(act(c) for c in clusters for _ in range(3))), Counter())
    assert done[ClaimVerdict.CLAIMED] >= 5
    rows = database.rows("SELECT * FROM leasedjob.job_scheduler")
    assert len({row["lock_key"] for row in rows}) == len(rows)
    assert len({row["fencing_token"] for row in rows}) == len(rows)
    for row in rows:
        assert (row["finished_at"] is None) == (row["status"] == "RUNNING")
        assert row["status"] == "FAIL" or row["retry_at"] is None
    ledger = database.rows("SELECT code, first FROM leasedjob.tick_ledger")
    ran = {(row["code"], row["tick"]) for row in rows}
    assert not {(row["code"], row["first"]) for row in ledger} & ran


def _claim_in_process(dsn: str, cluster: str, ticks: list[datetime], results: Any) -> None:
    async def main() -> list[str]:
        store = OperatorStore(connections(Credentials.from_conninfo(dsn)))
        requests = [request(tick, on_overlap=OverlapRule.ALLOW) for tick in ticks]
        return [result.verdict.value for result in await until_decided(store, cluster, requests)]

    results.put(asyncio.run(main()))


async def test_processes_share_the_runs_out(store: OperatorStore, database: Database, minute: datetime) -> None:
    clusters = [f"cluster-{n}" for n in range(4)]
    for cluster in clusters:
        await registered(store, cluster=cluster, policy="Allow")
    ticks = [minute + n * SECOND for n in range(60)]
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    workers = [
        context.Process(target=_claim_in_process, args=(database.dsn, cluster, ticks, results)) for cluster in clusters
    ]
    for worker in workers:
        worker.start()
    verdicts = [await asyncio.to_thread(results.get, timeout=60) for _ in workers]
    for worker in workers:
        worker.join()
    for n in range(len(ticks)):
        of_tick = Counter(answers[n] for answers in verdicts)
        assert of_tick["claimed"] <= 1
    assert sum(answers.count("claimed") for answers in verdicts) == len(ticks)
    assert len(database.rows("SELECT id FROM leasedjob.job_scheduler WHERE code = %s", CODE)) == len(ticks)
