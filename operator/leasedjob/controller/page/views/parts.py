"""What several pages are made of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any, Final

from leasedjob.api.v1alpha1 import RunOutcome
from leasedjob.controller.page.markup import Child, Html, el, join, path
from leasedjob.controller.page.model import (
    MEANINGS,
    TITLES,
    Job,
    Row,
    State,
)
from leasedjob.controller.page.query import Cut, Query
from leasedjob.controller.page.views.frame import Shown
from leasedjob.controller.page.words import NONE, span
from leasedjob.controller.status import after_failures, outcome_of
from leasedjob.lease.rows import JobSchedulerStatus, Run

LIBRARY: Final = "lease library"


_ICONS: Final = {
    State.NOT_READY: "M8 2 15 14H1ZM8 6v4M8 12v.5",
    State.FAILING: "M4 4l8 8M12 4l-8 8",
    State.HALTED: "M4 4h8v8H4Z",
    State.OVERDUE: "M8 1.5a6.5 6.5 0 1 0 .01 0ZM8 4.5V8l2.5 1.5",
    State.LATE: "M8 1.5a6.5 6.5 0 1 0 .01 0ZM8 4.5V8H5",
    State.RETRYING: "M13 8a5 5 0 1 1-1.5-3.5M13 2v3h-3",
    State.RUNNING: "M5 3l8 5-8 5Z",
    State.WAITING: "M3 8h.5M7.75 8h.5M12.5 8h.5",
    State.NEW: "M8 4.5a3.5 3.5 0 1 0 .01 0Z",
    State.OK: "M3 8.5 6.5 12 13 4.5",
    State.SUSPENDED: "M5.5 3.5v9M10.5 3.5v9",
}


def badge(state: State) -> Html:
    """A state as shape and word, so that colour is not needed."""
    drawn = el("path", d=_ICONS[state], fill="none", stroke="currentColor", stroke_width="2", stroke_linecap="round",
               stroke_linejoin="round")  # fmt: skip
    icon = el("svg", drawn, viewBox="0 0 16 16", width=14, height=14, aria_hidden="true")
    return el("span", icon, TITLES[state], class_=f"badge {state}", title=MEANINGS[state])


_OUTCOMES: Final = {
    RunOutcome.SUCCESS: State.OK,
    RunOutcome.RUNNING: State.RUNNING,
    RunOutcome.PENDING: State.WAITING,
    RunOutcome.RETRYING: State.RETRYING,
}


def outcome(run: Run, job: Job | None) -> Html:
    """How a run stands."""
    if run.status is JobSchedulerStatus.RUNNING and not run.job_uid:
        word = RunOutcome.RUNNING  # of the library: no Pod adopts it
    else:
        word = RunOutcome(job.shown(run).outcome or RunOutcome.FAILED) if job else _plain_outcome(run)
    state = _OUTCOMES.get(word, State.FAILING)
    kind = "unwanted" if run.stopped_as and run.terminal else str(state)
    icon = el(
        "svg",
        el("path", d=_ICONS[state], fill="none", stroke="currentColor", stroke_width="2", stroke_linecap="round",
           stroke_linejoin="round"),
        viewBox="0 0 16 16", width=14, height=14, aria_hidden="true",
    )  # fmt: skip
    return el("span", icon, str(word), class_=f"badge {kind}")


def _plain_outcome(run: Run) -> RunOutcome:

    return outcome_of(run)


def why(run: Run, job: Job | None) -> str:
    """A run's reason and message in a line; "" where there is nothing to say."""
    if job is not None:
        found = job.shown(run)
        return ": ".join(part for part in (found.reason, found.message) if part)
    return run.reason


def job_link(namespace: str, name: str, **more: Any) -> Html:
    return el("a", name, href=path("jobs", namespace, name), **more)


def key_of(run: Run) -> str:
    """A run's key as a person reads it."""
    key = run.identity.run_key
    if key is None:
        return "once"
    parts = key.split("/")
    return parts[2] if parts[0] == "manual" and len(parts) == 4 else key


def holder_of(run: Run) -> str:
    """Who has it; of a claim that no Pod has adopted yet, the cluster."""
    return run.holder or run.cluster or NONE


def took(run: Run, now: datetime) -> str:
    began = run.adopted_at or run.started_at
    return span(((run.finished_at or now) - began).total_seconds()) if began else NONE


def table(caption: str, headers: Sequence[Child], rows: Sequence[Html], *, key: str, empty: str) -> Html:
    """A table with a caption; a sentence instead where it has no rows. Roles stay where narrow screens show cards."""
    if not rows:
        return el("p", empty, class_="empty")
    cells = [head if isinstance(head, Html) else el("th", head, scope="col", role="columnheader") for head in headers]
    return el(
        "div",
        el(
            "table",
            el("caption", caption, class_="hidden"),
            el("thead", el("tr", cells, role="row"), role="rowgroup"),
            el("tbody", rows, role="rowgroup"),
            role="table",
            id=key,
        ),
        class_="scroll",
        role="region",
        aria_label=caption,
        tabindex="0",
    )


def row(*cells: Html, key: str, **attributes: Any) -> Html:
    return el("tr", cells, role="row", data_key=key, **attributes)


def cell(label: str, *children: Child, head: bool = False, **attributes: Any) -> Html:
    """A cell, with the name that its column has where rows are cards."""
    if head:
        return el("th", *children, scope="row", role="rowheader", **attributes)
    return el("td", *children, role="cell", data_label=label, **attributes)


def pager(place: Cut, query: Query, base: Sequence[str]) -> Html | None:
    """Links to the pages before and after."""
    if place.pages == 1:
        return None

    def to(page: int, name: str, rel: str) -> Html:
        if not 1 <= page <= place.pages:
            return el("span", name, class_="off", aria_disabled="true")
        return el("a", name, href=path(*base, **query.parameters(page=page)), rel=rel)

    return el(
        "nav",
        to(place.page - 1, "← Previous", "prev"),
        el("span", f"Page {place.page} of {place.pages}"),
        to(place.page + 1, "Next →", "next"),
        class_="pager",
        aria_label="Pages",
    )


def field(name: str, label: str, control: Html) -> Html:
    return el("div", el("label", label, for_=name), control, class_="field")


def choice(name: str, options: Iterable[tuple[str, str]], chosen: str) -> Html:
    return el(
        "select",
        [el("option", title, value=value, selected=value == chosen) for value, title in options],
        id=name,
        name=name,
    )


def filters(shown: Shown, *controls: Html) -> Html:
    """The form of a page's filters. It works without the script, by its button."""
    query = shown.query
    names = shown.snapshot.namespaces
    known = names if query.namespace in ("", *names) else (query.namespace, *names)
    return el(
        "form",
        field(
            "q",
            "Filter",
            el("input", type="search", id="q", name="q", value=query.text, maxlength=253, autocomplete="off",
               placeholder="name, schedule, holder"),
        ),
        field("ns", "Namespace", choice("ns", [("", "all"), *((n, n) for n in known)], query.namespace)),
        *controls,
        el("button", "Apply", type="submit", class_="apply"),
        el("a", "Clear", href=shown.base, class_="clear") if query.filters else None,
        class_="filters",
        role="search",
        method="get",
        action=shown.base,
    )  # fmt: skip


def counted(place: Cut, here: int, total: int, what: str) -> str:
    """How many rows there are, and which of them are shown."""
    if not place.total:
        return f"None of {total:,} {what}" if total else ""
    last = place.first + here - 1
    of = f"{place.total:,} {what}" if place.total == total else f"{place.total:,} of {total:,} {what}"
    return f"{place.first:,} to {last:,} of {of}" if place.pages > 1 else of


def where(run: Run, shown: Shown) -> Child:
    """A run's job, as a link where this cluster has it."""
    found = shown.snapshot.by_code.get(run.identity.code)
    if found is not None:
        seen = found.job.seen
        return join(job_link(seen.namespace, seen.name, class_="name"), " ", el("span", seen.namespace, class_="sub"))
    elsewhere = "not in this cluster" if run.cluster else LIBRARY
    return join(el("span", run.identity.code, class_="name"), " ", el("span", elsewhere, class_="sub"))


def short_reason(row_: Row) -> str:
    """Why a job needs attention, in a line; "" where it doesn't."""
    job, seen = row_.job, row_.job.seen
    match row_.state:
        case State.NOT_READY:
            return (
                f"{job.ready.get('reason', '')}: {job.ready.get('message', '')}"
                if not seen.problem
                else ": ".join(seen.problem)
            )
        case State.FAILING if job.ended is not None:
            return why(job.ended, job)
        case State.HALTED if seen.state is not None and seen.state.suspension is not None:
            return after_failures(seen.state.suspension)
        case State.OVERDUE if seen.times is not None and seen.times.deadline is not None:
            return f"a success was due by {seen.times.deadline:%Y-%m-%d %H:%M} UTC"
        case State.LATE if job.due is not None:
            return f"the tick of {job.due:%Y-%m-%d %H:%M:%S} UTC has not been decided"
        case State.WAITING | State.RETRYING:
            return why(job.active[0], job) if job.active else ""
    return ""
