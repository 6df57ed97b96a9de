"""The in-memory store of the simulated year beside PostgreSQL: the same histories leave the same rows behind.

What the simulation says rests on that store. The clock of this PostgreSQL stands where the simulation puts it; whatever
an operator, a Pod or a person does is done to both.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import fields
from datetime import timedelta
from typing import Any

import pytest
from tests.properties.test_simulated_year import BEGIN, Change, a_spec, simulate
from tests.simulation.postgres import PostgresStore
from tests.simulation.store import MemoryStore, Store
from tests.simulation.world import Dice, World

from leasedjob.lease.rows import Run

from .conftest import Database

pytestmark = pytest.mark.integration
# Much of everything, in little time.
WILD = Dice(
    stale=0.3, crash=0.03, node_lost=0.05, fails=0.3, long=0.3, skewed=0.1,
    edits=2.0, suspends=2.0, asleep=0.1, deletes=1.0, alone=0.3, outages=4.0, dark=1.0,
)  # fmt: skip
EVERY = {"sim/often": 12, "sim/hourly": 60, "sim/now-and-then": 240}
# What nobody could tell beforehand, or the other store has no use for.
OWN = {
    "id",
    "claim_token",
    "pod_uid",
    "pod_name",
    "holder",
    "name",
    "namespace",
    "job_name",
    "tenant",
    "db_now",
    "held_here",
    "data",
}


@pytest.fixture
def postgres(empty_database: Database) -> Iterator[Callable[[], PostgresStore]]:
    opened: list[PostgresStore] = []

    def opening() -> PostgresStore:
        opened.append(PostgresStore(empty_database.dsn, BEGIN))
        return opened[-1]

    yield opening
    for store in opened:
        store.close()


def lived(store: Store, seed: int, days: float) -> World:
    chance = random.Random(seed)
    specs = {code: a_spec(chance, every) for code, every in EVERY.items()}
    world = World(
        store, specs, Change(EVERY), seed=seed, begin=BEGIN, end=BEGIN + timedelta(days=days),
        settle=timedelta(days=days / 4), dice=WILD,
    )  # fmt: skip
    world.run()
    return world


def told(run: Run) -> dict[str, Any]:
    return {f.name: getattr(run, f.name) for f in fields(run) if f.name not in OWN}


@pytest.mark.parametrize("seed", [84, 8, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(100, 160))])
def test_the_same_history_leaves_the_same_behind(postgres: Callable[[], PostgresStore], seed: int) -> None:
    real, memory = postgres(), MemoryStore(BEGIN)
    one, two = lived(real, seed, 2), lived(memory, seed, 2)
    assert one.looks == two.looks
    for code in EVERY:
        assert one.history[code] == two.history[code], code
        assert real.watermark(code) == memory.watermark(code), code
        assert real.ledger(code) == memory.ledger(code), code
        rows = [
            sorted((told(run) for run in store.all_rows(code)), key=lambda r: r["lock_key"]) for store in (real, memory)
        ]
        assert rows[0] == rows[1], code
    assert sum(len(real.all_rows(code)) for code in EVERY) > 40


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_a_busy_month_on_postgresql(postgres: Callable[[], PostgresStore]) -> None:
    """The account, with nothing in between: PostgreSQL's own rows and ranges."""
    seed = random.SystemRandom().randrange(10**9)
    total = simulate(
        postgres(), seed, {"sim/a": 5, "sim/b": 10, "sim/c": 60, "sim/d": 1440}, timedelta(days=90), Dice()
    )
    assert total.problems == [], total.problems[:20]
    assert total.runs > 2_000
