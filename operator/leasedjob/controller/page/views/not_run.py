"""Ticks that did not run, each with its why."""

from __future__ import annotations

from collections.abc import Sequence

from leasedjob.controller.explain import SAID
from leasedjob.controller.page.markup import Child, Html, el, join
from leasedjob.controller.page.query import cut
from leasedjob.controller.page.views.frame import Shown, frame
from leasedjob.controller.page.views.parts import (
    cell,
    counted,
    filters,
    job_link,
    pager,
    row,
    table,
)
from leasedjob.controller.page.words import moment, when
from leasedjob.lease.rows import LedgerEntry


def draw(shown: Shown) -> str:
    """Ticks of all jobs that did not run, the latest first, each with its why."""
    query = shown.query
    words = query.text.casefold().split()
    entries = [
        entry
        for found in shown.snapshot.rows
        if (not query.namespace or found.job.seen.namespace == query.namespace) and found.job.seen.state is not None
        for entry in found.job.seen.state.ledger
        if all(w in f"{found.job.search}\n{entry.kind}\n{entry.reason.casefold()}" for w in words)
    ]
    entries.sort(key=lambda e: (e.last, e.code), reverse=True)
    rows, place = cut(entries, query.page)
    main = join(
        el("h1", "Ticks that did not run"),
        el("p", "Skipped, missed or left behind by an edit: the latest ten ranges of each job. ",
           "A tick that is neither here nor among the runs: ask on its job's page.", class_="lead"),
        filters(shown),
        el("p", counted(place, len(rows), len(entries), "ranges"), class_="counted", id="counted"),
        ledger_table(rows, shown, with_job=True, empty="Every tick that is known of has run."),
        pager(place, query, ["not-run"]),
    )  # fmt: skip
    return frame("Ticks that did not run", main, shown=shown, here="not-run")


def ledger_table(entries: Sequence[LedgerEntry], shown: Shown, *, with_job: bool, empty: str) -> Html:
    headers = [*(["Job"] if with_job else []), "Ticks", "What", "Why", "Decided by"]
    return table(
        "Ticks that did not run",
        headers,
        [_ledger_row(entry, shown, with_job=with_job) for entry in entries],
        key="ledger-table",
        empty=empty,
    )


def _ledger_row(entry: LedgerEntry, shown: Shown, *, with_job: bool) -> Html:
    found = shown.snapshot.by_code.get(entry.code)
    zone = found.job.zone if found else ""
    which: Child = moment(entry.last, zone)
    if entry.count > 1:
        which = join(f"{'' if entry.count_is_exact else 'at least '}{entry.count:,} from ", moment(entry.first, zone),
                     " to ", moment(entry.last, zone))  # fmt: skip
    name: Child = entry.code
    if found is not None:
        seen = found.job.seen
        name = join(job_link(seen.namespace, seen.name, class_="name"), " ", el("span", seen.namespace, class_="sub"))
    first = cell("Ticks", which, head=not with_job)
    return row(
        *([cell("Job", name, head=True)] if with_job else []),
        first,
        cell("What", el("span", entry.kind.capitalize(), class_=f"tag {entry.kind}")),
        cell("Why", el("strong", entry.reason), " ", el("span", SAID.get(entry.reason, ""), class_="why")),
        cell("Decided by", el("code", entry.decided_by), " ", when(entry.decided_at, shown.now)),
        key=f"ledger-{entry.code}-{entry.first.timestamp():.0f}-{entry.kind}",
    )
