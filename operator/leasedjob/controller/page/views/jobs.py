"""The first page: what is wrong, and all jobs."""

from __future__ import annotations

from datetime import datetime
from typing import Final

from leasedjob.controller.page.markup import NOTHING, Child, Html, el, join, path
from leasedjob.controller.page.model import (
    ATTENTION,
    TITLES,
    Job,
    Row,
    Snapshot,
    State,
)
from leasedjob.controller.page.query import ATTENTION as ALL_ATTENTION
from leasedjob.controller.page.query import Query, Sort, cut, select
from leasedjob.controller.page.views.frame import Shown, frame
from leasedjob.controller.page.views.parts import (
    badge,
    cell,
    choice,
    counted,
    field,
    filters,
    holder_of,
    job_link,
    outcome,
    pager,
    row,
    short_reason,
    table,
)
from leasedjob.controller.page.words import NONE, span, when


def draw(shown: Shown) -> str:
    """The first page: what is wrong, and all jobs."""
    snapshot, query = shown.snapshot, shown.query
    found = select(snapshot.rows, query)
    rows, place = cut(found, query.page)
    states = [("", "any"), (ALL_ATTENTION, "need attention"), *((str(s), TITLES[s].lower()) for s in State)]
    main = join(
        el("h1", _sentence(snapshot)),
        _tiles(shown),
        el("h2", "Jobs", id="jobs-title", class_="hidden"),
        filters(
            shown,
            field("state", "State", choice("state", states, query.state)),
            el("input", type="hidden", name="sort", value=query.sort) if query.sort is not Sort.STATE else NOTHING,
            el("input", type="hidden", name="order", value="desc") if query.descending else NOTHING,
        ),
        el("p", counted(place, len(rows), len(snapshot.rows), "jobs"), class_="counted", id="counted"),
        table(
            "LeasedJobs",
            [
                _sortable("State", Sort.STATE, query),
                _sortable("Job", Sort.NAME, query),
                "Schedule",
                _sortable("Next run", Sort.NEXT, query),
                _sortable("Last run", Sort.LAST, query),
                "Now",
            ],
            [_job_row(row, shown.now) for row in rows],
            key="jobs",
            empty="No job is as the filter asks for." if snapshot.rows else "There are no LeasedJobs.",
        ),
        pager(place, query, [""]),
    )
    return frame("Jobs", main, shown=shown, here="")


def _sentence(snapshot: Snapshot) -> str:
    total = len(snapshot.rows)
    if not total:
        return "No jobs yet"
    if not snapshot.attention:
        return "The one job is in order" if total == 1 else f"All {total:,} jobs are in order"
    return f"{snapshot.attention:,} of {total:,} jobs {'needs' if snapshot.attention == 1 else 'need'} attention"


_TILES: Final = (*ATTENTION, State.RUNNING, State.WAITING, State.RETRYING, State.SUSPENDED)


def _tiles(shown: Shown) -> Html:
    """Counts by state, each a link to those jobs."""

    def tile(state: State) -> Html:
        count = shown.snapshot.counts.get(state, 0)
        chosen = shown.query.state == state
        to = shown.query.parameters(state="" if chosen else str(state))
        classes = f"tile {state}{'' if count else ' zero'}{' chosen' if chosen else ''}"
        link = el(
            "a",
            el("span", f"{count:,}", class_="count"),
            badge(state),
            href=path("", **to),
            aria_current="true" if chosen else None,
        )
        return el("li", link, class_=classes, data_key=f"tile-{state}")

    return el("ul", [tile(state) for state in _TILES], class_="tiles", aria_label="Jobs by state")


def _sortable(title: str, sort: Sort, query: Query) -> Html:
    chosen = query.sort is sort
    turned = chosen and not query.descending
    direction = ("descending" if query.descending else "ascending") if chosen else None
    arrow = el("span", "↓" if query.descending else "↑", aria_hidden="true") if chosen else None
    to = query.parameters(sort=sort, descending=turned)
    return el("th", el("a", title, arrow, href=path("", **to)), scope="col", role="columnheader", aria_sort=direction)


def _job_row(row_: Row, now: datetime) -> Html:
    job, seen = row_.job, row_.job.seen
    ended = job.ended
    last: Child = el("span", NONE, class_="none")
    if ended is not None:
        at = ended.finished_at or ended.changed_at
        last = join(outcome(ended, job), " ", when(at, now, job.zone))
    others = [s for s in sorted(row_.states, key=list(State).index) if s in ATTENTION and s is not row_.state]
    reason = short_reason(row_)
    return row(
        cell(
            "State",
            badge(row_.state),
            [el("span", f" {TITLES[s].lower()}", class_="sub also") for s in others],
        ),
        cell(
            "Job",
            job_link(seen.namespace, seen.name, class_="name"),
            " ",
            el("span", seen.namespace, class_="sub"),
            el("span", reason, class_="why", title=reason) if reason else None,
            head=True,
        ),
        cell("Schedule", el("code", job.schedule), " ", el("span", job.zone, class_="sub")),
        cell("Next run", when(row_.next_start, now, job.zone)),
        cell("Last run", last),
        cell("Now", _now_of(job, now)),
        key=f"job-{seen.namespace}/{seen.name}",
        class_="attention" if row_.needs_attention else None,
    )


def _now_of(job: Job, now: datetime) -> Child:
    if not job.active:
        return el("span", NONE, class_="none")
    run = job.active[0]
    more = f" and {len(job.active) - 1} more" if len(job.active) > 1 else ""
    since = f"for {span((now - run.started_at).total_seconds())}{more}"
    return join(outcome(run, job), " ", el("span", since, class_="sub"), " ",
                el("span", holder_of(run), class_="sub clip", title=holder_of(run)))  # fmt: skip
