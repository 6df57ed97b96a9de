"""From a seed: which jobs there are, and what is done to whom and when. Pure; the same seed gives the same plan.

Whom a fault hits is said as a number from 0 to 1, a place among those that are there when its time has come. So a
replay does the same things at the same times, to whoever stands in the same place.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from tests.chaos_cluster.manifests import Kind, Real, Timing

CLUSTERS: Final = ("chaos-a", "chaos-b")
JOBS: Final = 40
# Minutes between ticks, and how many of the jobs have them: as many Pods a minute as two cores bear.
SPREAD: Final = {1: 2, 2: 6, 5: 32}
# Twelve Pods at one instant take two cores half a minute, and the shortest leases run out: most start within a minute.
JITTER: Final = 50
TIMINGS: Final = (
    Timing(lease=30, heartbeat=3, grace=5),
    Timing(lease=40, heartbeat=4, grace=6),
    Timing(lease=60, heartbeat=6, grace=10),
)
QUIET: Final = 12.0  # seconds at the beginning and at the end in which nothing is begun
GAP: Final = (5.0, 12.0)  # seconds between the beginnings of two faults
# What is done, and for how long at least and at most, seconds; at a run's end everything is healed.
KINDS: Final[dict[str, tuple[float, float]]] = {
    "operator-kill": (0, 0),
    "operator-freeze": (5, 45),
    "operator-clock": (20, 90),
    "operator-cut-api": (15, 60),
    "sidecar-kill": (0, 0),
    "sidecar-freeze": (3, 50),
    "sidecar-clock": (10, 60),
    "workload-kill": (0, 0),
    "workload-freeze": (5, 50),
    "pod-delete": (0, 0),
    "pod-freeze": (20, 60),
    "kubelet-kill": (8, 50),
    "kubelet-freeze": (8, 50),
    "node-freeze": (8, 50),
    "node-drain": (10, 30),
    "cut-database": (10, 60),
    "postgres-restart": (0.5, 5),
    "postgres-promote": (0, 0),
    "holder-kill": (0, 0),
    "holder-freeze": (10, 50),
    "holder-cut": (10, 50),
}
SHORT: Final = 10.0  # minutes; in a run that is shorter nothing lasts longer than
SHORT_SECONDS: Final = 30.0
CLOCK_SHIFT: Final = 300  # seconds, ahead or behind


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Something that is to be done.

    Args:
        at: seconds from the beginning. seconds: how long it lasts.
        cluster: where, if it is done in one.
        place: of whom it hits, from 0 to 1.
        sign: of a clock's shift.
    """

    number: int
    kind: str
    at: float
    seconds: float
    cluster: str
    place: float
    sign: int


def faults(seed: int, minutes: float) -> list[Fault]:
    """In the order in which they begin."""
    dice = random.Random(f"faults {seed}")
    deck = _deck(dice)
    end = minutes * 60 - QUIET
    at, found = QUIET, list[Fault]()
    while at < end:
        kind = next(deck)
        shortest, longest = KINDS[kind]
        if minutes < SHORT:
            longest = min(longest, SHORT_SECONDS)
        seconds = min(dice.uniform(shortest, longest), max(0.0, end - at))
        fault = Fault(
            number=len(found) + 1,
            kind=kind,
            at=round(at, 1),
            seconds=round(seconds, 1),
            cluster="" if kind.startswith(("postgres", "holder")) else dice.choice(CLUSTERS),
            place=dice.random(),
            sign=dice.choice((-1, 1)),
        )
        found.append(fault)
        at += dice.uniform(*GAP)
    return found


def _deck(dice: random.Random) -> Iterator[str]:
    """Each kind comes once before any comes again."""
    while True:
        kinds = list(KINDS)
        dice.shuffle(kinds)
        yield from kinds


def jobs(seed: int, longest: float, count: int = JOBS) -> list[Real]:
    """Args:
    longest: seconds that a workload takes at most.
    """
    dice = random.Random(f"jobs {seed}")
    every = [minutes for minutes, share in SPREAD.items() for _ in range(share)]
    dice.shuffle(every)
    found = []
    for number in range(count):
        minutes = every[number % len(every)]
        kind = list(Kind)[number % 3]
        work = dice.choices([(1, 4), (6, 18), (longest / 2, longest)], weights=[3, 4, 3])[0]
        backoff = dice.choice((0, 1, 2))
        found.append(
            Real(
                name=f"job-{number:02}",
                kind=kind,
                policy=("Forbid", "Forbid", "Replace", "Allow")[number % 4],
                every=minutes,
                offset=dice.randrange(minutes),
                work=round(dice.uniform(*work), 1),
                timing=dice.choice(TIMINGS),
                backoff=backoff,
                fails=int(dice.random() < 0.2),
                deaf=kind is Kind.PLAIN and dice.random() < 0.25,
                deadline=40 if dice.random() < 0.15 else None,
                jitter=JITTER if number % 5 else 0,
                missed=dice.choices(("RunLatest", "RunAll", "Skip"), weights=[6, 2, 2])[0],
            )
        )
    return found
