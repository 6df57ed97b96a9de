"""Whose turn it is: what many owners wait for is given round, one each, so that an owner of many holds nobody up."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import Generic, TypeVar

Owner = TypeVar("Owner", bound=Hashable)
Item = TypeVar("Item")


class Turns(Generic[Owner, Item]):
    """A queue with a line for each owner. Owners take turns in the order in which they first came; within a line, first
    in is first out. Adding and taking cost the same however many wait."""

    def __init__(self) -> None:
        self._lines: dict[Owner, deque[Item]] = {}
        self._order: deque[Owner] = deque()  # of the owners that have a line
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, owner: Owner, item: Item) -> None:
        line = self._lines.get(owner)
        if line is None:
            self._lines[owner] = line = deque()
            self._order.append(owner)
        line.append(item)
        self._count += 1

    def take(self) -> Item:
        """The next one's. Raises IndexError where nobody waits."""
        owner = self._order.popleft()
        line = self._lines[owner]
        item = line.popleft()
        self._count -= 1
        if line:
            self._order.append(owner)
        else:
            del self._lines[owner]
        return item
