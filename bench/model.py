"""What a measure returns, and how figures that belong together are taken. Pure but for the clock of its callers.

Machines are noisy, and often shared. So every figure is taken several times, turn by turn with its peer, and a ratio is
the median of the ratios *within* a turn: what slows a whole turn down slows both sides of it. Half of the ratios lie
within the range that is shown beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Any


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured.

    Args:
        quick: so little that it takes seconds: it shows that the measure works, and its figures mean nothing.
    """

    quick: bool = False

    def of(self, full: int, quick: int) -> int:
        """The number for this scale."""
        return quick if self.quick else full


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table.

    Args:
        values: one for each turn, in `unit`.
        ratios: to the peer, one for each turn, where the line has a peer.
        peer: the name of that line.
    """

    what: str
    unit: str
    values: tuple[float, ...]
    ratios: tuple[float, ...] = ()
    peer: str = ""

    @property
    def median(self) -> float:
        return median(self.values)

    @property
    def spread(self) -> tuple[float, float]:
        """Between which two ratios the middle half of them lies."""
        if len(self.ratios) < 2:
            return self.ratios[0], self.ratios[0]
        low, _, high = quantiles(self.ratios, n=4, method="inclusive")
        return low, high


@dataclass(frozen=True, slots=True)
class Aim:
    """What is aimed at, and what came out."""

    text: str
    value: float
    limit: float
    at_least: bool = False

    @property
    def met(self) -> bool:
        return self.value >= self.limit if self.at_least else self.value <= self.limit


@dataclass(frozen=True, slots=True)
class Result:
    """One measure: its table, what it aims at, and under which settings it was taken."""

    name: str
    title: str
    rows: tuple[Row, ...]
    aims: tuple[Aim, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)


def turns(sides: Mapping[str, Callable[[], float]], rounds: int, *, warm_up: bool = True) -> dict[str, list[float]]:
    """Calls every side once a round, in an order that turns round each time.

    Args:
        sides: name -> takes one figure.
        warm_up: a first round is taken and thrown away.
    """
    found: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(-1 if warm_up else 0, rounds):
        for name in list(sides)[:: 1 if number % 2 == 0 else -1]:
            value = sides[name]()
            if number >= 0:
                found[name].append(value)
    return found


def ratios(values: Sequence[float], peer: Sequence[float]) -> tuple[float, ...]:
    """The ratio within each turn."""
    return tuple(mine / theirs for mine, theirs in zip(values, peer, strict=True))


def ratio(values: Sequence[float], peer: Sequence[float]) -> float:
    """The median of the ratios within a turn."""
    return median(ratios(values, peer))


def difference(values: Sequence[float], peer: Sequence[float]) -> float:
    """The median of the differences within a turn."""
    return median(mine - theirs for mine, theirs in zip(values, peer, strict=True))


def rows(found: Mapping[str, Sequence[float]], unit: str, peers: Mapping[str, str]) -> tuple[Row, ...]:
    """The lines of a table. `peers`: name -> the peer that it is compared with, if it has one."""
    return tuple(
        Row(name, unit, tuple(values), ratios(values, found[peers[name]]), peers[name])
        if name in peers
        else Row(name, unit, tuple(values))
        for name, values in found.items()
    )
