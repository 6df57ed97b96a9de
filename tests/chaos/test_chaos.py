"""32 processes, 10,000 run keys, and everything that can happen to them: exactly one owner at a time, and no run lost.

Each test lets a crew work for some seconds while harm is done to it, heals, waits until every run that began has ended,
and asks the judge. The short form is part of `make test`, the long one of `make soak`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace

import psycopg
import pytest

from leasedjob.lease.database import Credentials, connections
from leasedjob.lease.store import OperatorStore
from tests.chaos import library, operators
from tests.chaos.arena import Crew, Harm, by_turns, freezing, killing, peace, run, together
from tests.chaos.conftest import OWNER, PASSWORD, Arena
from tests.chaos.crew import Layer, Plan
from tests.chaos.history import History, What
from tests.chaos.proxy import Fault, FaultyProxy
from tests.pooler import PGBOUNCER, pooled

pytestmark = pytest.mark.integration
PROCESSES = 32
KEYS = 10_000
LEASE = 1.0  # seconds

SHORT = 4.0  # of harm; with start and end about eight
LONG = 60.0
lengths = pytest.mark.parametrize("seconds", [SHORT, pytest.param(LONG, marks=pytest.mark.soak)], ids=["short", "long"])
layers = pytest.mark.parametrize("layer", list(Layer))


def plan(arena: Arena, layer: Layer, *dsns: str, **other: object) -> Plan:
    values: dict[str, object] = {
        "layer": layer,
        "processes": PROCESSES,
        "dsns": list(dsns) or [arena.dsn],
        "sink": arena.dsn,
        "keys": KEYS,
        "lease": LEASE,
        "heartbeat": LEASE * 0.3,
        "base": round(time.time()) - 2 * KEYS,
    }
    made = Plan(**{**values, **other})  # type: ignore[arg-type]
    if layer is Layer.OPERATOR:
        asyncio.run(operators.register(made, OperatorStore(connections(Credentials.from_conninfo(arena.dsn)))))
    return made


def judged(made: Plan, arena: Arena, harm: Harm, seconds: float, at_least: int = 10) -> History:
    """The history of a run in which nothing was broken."""
    history = run(made, arena.dsn, harm, seconds, at_least=at_least)
    print(history.summary())
    violations = history.violations()
    assert not violations, "\n".join(map(str, violations[:20]))
    return history


# --- exactly one winner ----------------------------------------------------------------------------------------------


def winners(history: History) -> Counter[str]:
    """How often each run was given to somebody."""
    return Counter(told.key for told in history.told if told.what is What.ACQUIRED)


@lengths
def test_each_run_has_one_winner_in_the_library(arena: Arena, seconds: float) -> None:
    """All processes go through the same keys in the same order, as fast as they can."""
    made = plan(arena, Layer.LIBRARY, work=0, giving_up=0, tasks=2, lease=60)
    history = judged(made, arena, peace, seconds, at_least=100)
    won = winners(history)
    assert set(won.values()) == {1}
    assert len(won) == len({change.key for change in history.changes})
    assert {change.attempt for change in history.changes} == {1}
    assert len({told.client for told in history.told}) >= 4  # not one that was faster than all others


def until_all_began(arena: Arena) -> Harm:
    """No harm; as long as there are runs that nobody has begun."""

    def wait(crew: Crew, until: float) -> None:
        with psycopg.connect(arena.dsn, autocommit=True) as connection:
            while time.monotonic() < until:
                row = connection.execute("SELECT count(*) FROM leasedjob.job_scheduler").fetchone()
                if row == (KEYS,):
                    return
                time.sleep(0.1)

    return wait


@pytest.mark.soak
def test_each_of_ten_thousand_runs_has_one_winner_in_the_library(arena: Arena) -> None:
    made = plan(arena, Layer.LIBRARY, work=0, giving_up=0, tasks=2, lease=60)
    history = judged(made, arena, until_all_began(arena), 900, at_least=KEYS)
    assert winners(history) == Counter(library.keys(made))


def test_each_of_ten_thousand_runs_has_one_winner_among_operators(arena: Arena) -> None:
    """32 replicas of four clusters, and each of them asks for each of the 10,000 runs."""
    made = plan(arena, Layer.OPERATOR, work=0, forbid=False, codes=500, batch=500, lease=600, timeout=20)
    history = run(made, arena.dsn, until_all_began(arena), 120)
    print(history.summary())
    assert winners(history) == Counter(operators.keys(made))
    assert replace(history, complete=False, expected=operators.keys(made)).violations() == []
    assert {change.attempt for change in history.changes} == {1}


# --- processes -------------------------------------------------------------------------------------------------------


@lengths
@layers
def test_frozen_and_killed(arena: Arena, layer: Layer, seconds: float) -> None:
    """A third of the processes stands still for two leases at a time, and comes back believing; others are killed."""
    made = plan(arena, layer, tasks=1 if layer is Layer.OPERATOR else 2)
    history = judged(made, arena, together(freezing(2 * LEASE), killing(0.5)), seconds, at_least=20)
    # The attack was one: owners were lost, and there was something for the sink to do.
    assert max(change.attempt for change in history.changes) > 1


# --- the network -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def broken(proxies: list[FaultyProxy], shift: int) -> Iterator[None]:
    """Each proxy has another fault."""
    faults = [fault for fault in Fault if fault is not Fault.NONE]
    for n, proxy in enumerate(proxies):
        proxy.breaks(faults[(n + shift) % len(faults)])
    try:
        yield
    finally:
        for proxy in proxies:
            proxy.breaks(Fault.NONE)


@lengths
@layers
def test_cut_off(arena: Arena, layer: Layer, seconds: float) -> None:
    """Four groups of processes, each behind a network with a fault of its own, one fault after the other; the fifth
    group's network is sound."""
    with ExitStack() as stack:
        proxies = [
            stack.enter_context(FaultyProxy(arena.server.address, arena.server.port, delay=LEASE / 2)) for _ in range(4)
        ]

        def fault(shift: int) -> AbstractContextManager[None]:
            return broken(proxies, shift)

        harms = [lambda shift=shift: fault(shift) for shift in range(4)]
        made = plan(
            arena, layer, arena.dsn, *(arena.through(proxy.port) for proxy in proxies), processes=10, tasks=4, timeout=1
        )
        judged(made, arena, by_turns(*harms, each=1.2 * LEASE), seconds)


# --- the database ----------------------------------------------------------------------------------------------------


@lengths
@layers
def test_the_server_crashes_and_comes_back(arena: Arena, layer: Layer, seconds: float) -> None:
    @contextlib.contextmanager
    def away() -> Iterator[None]:
        arena.server.kill()
        try:
            yield
        finally:
            arena.server.start()

    judged(plan(arena, layer, processes=10, tasks=4), arena, by_turns(away, each=LEASE), seconds)


@pytest.mark.parametrize(
    ("layer", "seconds"),
    [
        pytest.param(Layer.LIBRARY, SHORT, id="library-short"),
        pytest.param(Layer.LIBRARY, LONG, marks=pytest.mark.soak, id="library-long"),
        pytest.param(Layer.OPERATOR, LONG, marks=pytest.mark.soak, id="operator-long"),
    ],
)
@pytest.mark.skipif(PGBOUNCER is None, reason="PgBouncer is not installed")
def test_behind_a_pooler(arena: Arena, layer: Layer, seconds: float) -> None:
    """In transaction mode with few server connections; processes are killed in the middle of their statements."""
    with pooled(arena.server, arena.name, {OWNER: PASSWORD}, size=8) as port:
        judged(plan(arena, layer, arena.through(port), processes=16), arena, killing(0.3), seconds)
