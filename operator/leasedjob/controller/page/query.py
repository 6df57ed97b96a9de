"""What a URL asks for, and which rows that is. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any, Final, TypeVar

from leasedjob.controller.page.model import SEVERITY, Row, State

PAGE_ROWS: Final = 100
MAX_TEXT: Final = 253  # of a filter; no name in Kubernetes is longer
MAX_PAGE: Final = 100_000
ATTENTION: Final = "attention"
T = TypeVar("T")
E = TypeVar("E", bound=StrEnum)


class BadQuery(ValueError):
    """A parameter that can't be used; the message names it."""


class Sort(StrEnum):
    STATE = "state"
    NAME = "name"
    NEXT = "next"
    LAST = "last"


class Window(StrEnum):
    """How far back the timeline goes."""

    HOUR = "1h"
    SIX_HOURS = "6h"
    DAY = "24h"
    WEEK = "7d"

    @property
    def length(self) -> timedelta:
        hours = {Window.HOUR: 1, Window.SIX_HOURS: 6, Window.DAY: 24, Window.WEEK: 168}
        return timedelta(hours=hours[self])


@dataclass(frozen=True, slots=True)
class Query:
    """The parameters of all views; each view uses some.

    Args:
        text: looked for in names, schedules and holders, without regard to case.
        namespace, cluster: "" for all.
        state: a State's value, `attention` for all that need it, or "".
        page: from 1.
    """

    text: str = ""
    namespace: str = ""
    cluster: str = ""
    state: str = ""
    sort: Sort = Sort.STATE
    descending: bool = False
    page: int = 1
    window: Window = Window.SIX_HOURS
    tick: datetime | None = None

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> Query:
        """Raises BadQuery for a value that can't be used. Unknown parameters are left alone."""

        def words(name: str) -> str:
            value = given.get(name, "").strip()
            if len(value) > MAX_TEXT:
                raise BadQuery(f"{name} has more than {MAX_TEXT} characters")
            return value

        def one_of(name: str, kind: type[E], default: E) -> E:
            value = words(name)
            try:
                return kind(value) if value else default
            except ValueError:
                raise BadQuery(f"{name} must be one of {', '.join(kind)}, not {value!r}") from None

        page = words("page") or "1"
        if not (page.isascii() and page.isdecimal() and 1 <= int(page) <= MAX_PAGE):
            raise BadQuery(f"page must be a number from 1 to {MAX_PAGE}, not {page!r}")
        state = words("state")
        if state and state != ATTENTION and state not in State.__members__.values():
            raise BadQuery(f"state must be one of {', '.join((ATTENTION, *State))}, not {state!r}")
        order = words("order")
        if order not in ("", "asc", "desc"):
            raise BadQuery(f"order must be asc or desc, not {order!r}")
        return cls(
            text=words("q"),
            namespace=words("ns"),
            cluster=words("cluster"),
            state=state,
            sort=one_of("sort", Sort, Sort.STATE),
            descending=order == "desc",
            page=int(page),
            window=one_of("window", Window, Window.SIX_HOURS),
            tick=_tick(words("tick")),
        )

    @property
    def filters(self) -> bool:
        """Whether something is left out."""
        return bool(self.text or self.namespace or self.cluster or self.state)

    def parameters(self, **changes: Any) -> dict[str, str | int | None]:
        """As they stand in a link; what is left at its default is left out. A change of the filter begins at page 1."""
        to = replace(self, **{"page": 1, **changes})
        return {
            "q": to.text,
            "ns": to.namespace,
            "cluster": to.cluster,
            "state": to.state,
            "sort": None if to.sort is Sort.STATE else to.sort,
            "order": "desc" if to.descending else None,
            "page": None if to.page == 1 else to.page,
            "window": None if to.window is Window.SIX_HOURS else to.window,
        }


def _tick(text: str) -> datetime | None:
    if not text:
        return None
    try:
        at = datetime.fromisoformat(text.upper()).astimezone(UTC)
    except (ValueError, OverflowError):
        at = None
    if at is None or at.microsecond or "T" not in text.upper() or not text.upper().endswith("Z"):
        raise BadQuery(f"tick must be an instant in UTC such as 2026-07-20T03:00:00Z, not {text!r}")
    return at


@dataclass(frozen=True, slots=True)
class Cut:
    """One page of many rows."""

    page: int
    pages: int
    total: int
    first: int  # number of the first row that is shown, from 1; 0 if none is


def cut(items: Sequence[T], page: int, size: int = PAGE_ROWS) -> tuple[Sequence[T], Cut]:
    """The rows of a page; of the last one where there are fewer."""
    pages = max(1, -(-len(items) // size))
    page = min(page, pages)
    begin = (page - 1) * size
    return items[begin : begin + size], Cut(page, pages, len(items), begin + 1 if items else 0)


def select(rows: Iterable[Row], query: Query) -> list[Row]:
    """The rows that the query asks for, in its order."""
    found = _filtered(rows, query)
    key = _KEYS[query.sort]
    found.sort(key=lambda row: row.job.seen.key)
    found.sort(key=key, reverse=query.descending)
    return found


def _filtered(rows: Iterable[Row], query: Query) -> list[Row]:
    words = query.text.casefold().split()
    state = State(query.state) if query.state and query.state != ATTENTION else None
    return [
        row
        for row in rows
        if (not query.namespace or row.job.seen.namespace == query.namespace)
        and (state is None or row.counts_for(state))
        and (query.state != ATTENTION or row.needs_attention)
        and all(word in row.job.search for word in words)
    ]


def _by_next(row: Row) -> tuple[bool, float]:
    return row.next_start is None, row.next_start.timestamp() if row.next_start else 0.0


def _by_last(row: Row) -> tuple[bool, float]:
    run = row.job.ended
    at = (run.finished_at or run.changed_at) if run else None
    return at is None, -at.timestamp() if at else 0.0


_KEYS: Final[dict[Sort, Callable[[Row], Any]]] = {
    Sort.STATE: lambda row: SEVERITY[row.state],
    Sort.NAME: lambda row: row.job.seen.key,
    Sort.NEXT: _by_next,
    Sort.LAST: _by_last,
}
