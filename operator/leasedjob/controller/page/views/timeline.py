"""Runs of all clusters on a line of time, and the same as a table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from leasedjob.controller.explain import SAID
from leasedjob.controller.page import lanes
from leasedjob.controller.page.markup import Child, Html, el, join
from leasedjob.controller.page.query import Window, cut
from leasedjob.controller.page.views.frame import Shown, frame
from leasedjob.controller.page.views.parts import (
    LIBRARY,
    cell,
    choice,
    field,
    filters,
    holder_of,
    job_link,
    key_of,
    outcome,
    pager,
    row,
    table,
    took,
    where,
    why,
)
from leasedjob.controller.page.words import when
from leasedjob.lease.rows import Run

_BARS: Final = {
    lanes.Kind.GOOD: "succeeded",
    lanes.Kind.BAD: "failed",
    lanes.Kind.UNWANTED: "cancelled or replaced",
    lanes.Kind.RUNNING: "running",
    lanes.Kind.WAITING: "waiting to begin",
    lanes.Kind.RETRYING: "waiting for the next attempt",
    lanes.Kind.LOST: "lease ran out",
}
FAILED: Final = (lanes.Kind.BAD, lanes.Kind.LOST)
TRACKS_SHOWN: Final = 50
RUNS_LISTED: Final = 100
_LEVEL: Final = 14  # pixels from one bar to the one below


def draw(shown: Shown, runs: Sequence[Run], *, partial: bool, recalled: bool) -> str:
    """Runs of all clusters on a line of time.

    Args:
        partial: there are more than were read.
        recalled: the database doesn't answer; the runs are those that this process remembers.
    """
    query, now = shown.query, shown.now
    words = query.text.casefold().split()
    on = lanes.axis(now, query.window.length)

    def wanted(code: str, namespace: str, cluster: str | None) -> bool:
        if query.namespace and namespace != query.namespace:
            return False
        if query.cluster and cluster is not None and cluster != query.cluster:
            return False
        known = shown.snapshot.by_code.get(code)
        text = code.casefold() + (known.job.search if known else "")
        return all(word in text for word in words)

    if query.filters and not recalled:
        # Of the jobs that are looked for also what memory has: in the window there may be many others' runs.
        known = {run.id for run in runs}
        more = (row for row in shown.snapshot.rows if wanted(row.job.seen.code, row.job.seen.namespace, None))
        runs = [*runs, *(run for row in more for run in row.job.seen.rows if run.id not in known)]
    chosen = [run for run in runs if wanted(run.identity.code, run.namespace, run.cluster)]
    entries = [
        entry
        for found in shown.snapshot.rows
        if found.job.seen.state is not None
        and found.job.seen.state.ledger
        and wanted(found.job.seen.code, found.job.seen.namespace, None)
        for entry in found.job.seen.state.ledger
    ]
    there = lanes.in_window(chosen, entries, on, now)
    some, place = cut(there, query.page, TRACKS_SHOWN)
    tracks = [lanes.track(job, on, now) for job in some]
    listed = sorted((run for job in some for run in job.runs), key=lambda run: run.started_at, reverse=True)
    total = sum(len(job.runs) for job in there)
    names = sorted({run.cluster for run in runs if run.cluster})
    listed_names = names if query.cluster in ("", *names) else [query.cluster, *names]
    options = [("", "all"), *((name, name) for name in listed_names)]
    main = join(
        el("h1", "Timeline"),
        el("p", "The database does not answer: these are the runs that the operator remembers, at most twenty of each "
           "job.", class_="notice") if recalled else None,
        el("p", "There are more: of all runs those are shown that changed last.", class_="notice") if partial
        else None,
        filters(
            shown,
            field("cluster", "Cluster", choice("cluster", options, query.cluster)),
            field("window", "Back", choice("window", [(w, w) for w in Window], query.window)),
        ),
        el("p", f"{total:,} runs of {place.total:,} jobs", class_="counted", id="counted"),
        _legend(),
        _drawing(tracks, on, shown) if tracks else el("p", "Nothing ran, and nothing was to run.", class_="empty"),
        pager(place, query, ["timeline"]),
        _listed(listed, shown),
    )  # fmt: skip
    return frame("Timeline", main, shown=shown, here="timeline")


def _listed(runs: Sequence[Run], shown: Shown) -> Html:
    """What the drawing shows, for whoever can't see it, or wants to know more of one run."""
    more = el("p", f"The latest {RUNS_LISTED} of {len(runs):,}.", class_="sub") if len(runs) > RUNS_LISTED else None
    return el(
        "details",
        el("summary", "The same as a table"),
        table(
            "Runs in the window",
            ["Run", "Outcome", "Cluster and holder", "Attempt", "Began", "Took", "Reason"],
            [_listed_row(run, shown) for run in runs[:RUNS_LISTED]],
            key="timeline-table",
            empty="No run.",
        ),
        more,
        id="table",
    )


def _legend() -> Html:
    def sample(kind: str, words: str) -> Html:
        end = el("line", x1=19, x2=19, y1=0, y2=12, class_="end") if kind in FAILED else None
        drawn = el("rect", x=1, y=2, width=18, height=8, rx=2, class_=f"run {kind}")
        return el("li", el("svg", drawn, end, width=20, height=12, aria_hidden="true"), words)

    kinds = [sample(str(kind), words) for kind, words in _BARS.items()]
    return el(
        "ul",
        kinds,
        sample("tick skipped", "skipped ticks"),
        sample("tick missed", "missed or dropped ticks"),
        class_="legend",
        aria_label="Legend",
    )


def _drawing(tracks: Sequence[lanes.Track], on: lanes.Axis, shown: Shown) -> Html:
    labels = [
        el("text", words, x=f"{at}%", y=12, text_anchor="middle" if 4 < at < 96 else "start" if at <= 4 else "end")
        for at, words in on.labels
    ]
    scale = el("svg", labels, class_="scale", width="100%", height=16, aria_hidden="true")
    return el(
        "div",
        el("div", el("span", "UTC", class_="sub"), scale, class_="track-row axis"),
        [_track(track, on, shown) for track in tracks],
        class_="timeline",
        role="list",
        aria_label="Runs over time",
    )


def _track(track: lanes.Track, on: lanes.Axis, shown: Shown) -> Html:
    found = shown.snapshot.by_code.get(track.code)
    name: Child = el("span", track.name or track.code, class_="name")
    if found is not None:
        name = job_link(found.job.seen.namespace, found.job.seen.name, class_="name")
    lanes = [_lane(lane, track, on, shown) for lane in track.lanes]
    if track.marks:
        lanes.append(_marks(track, on))
    return el(
        "div",
        el("div", name, " ", el("span", track.namespace, class_="sub"), class_="track-name"),
        el("div", lanes, class_="lanes"),
        class_="track-row",
        role="listitem",
        data_key=f"track-{track.code}",
    )


def _grid(on: lanes.Axis, height: int) -> list[Html]:
    return [el("line", x1=f"{at}%", x2=f"{at}%", y1=0, y2=height, class_="grid") for at, _ in on.labels]


def _lane(lane: lanes.Lane, track: lanes.Track, on: lanes.Axis, shown: Shown) -> Html:
    height = lane.levels * _LEVEL + 2
    where = lane.cluster or LIBRARY
    bad = sum(bar.kind in FAILED for bar in lane.bars)
    label = f"{track.code} in {where}: {len(lane.bars)} runs" + (f", {bad} of them failed" if bad else "")
    drawn = [part for bar in lane.bars for part in _bar(bar, shown)]
    return el(
        "div",
        el("span", where, class_="sub clip lane-name", title=where),
        el("svg", _grid(on, height), drawn, width="100%", height=height, role="img", aria_label=label, class_="lane"),
        class_="lane-row",
        data_key=f"lane-{track.code}-{lane.cluster}",
    )


def _bar(bar: lanes.Bar, shown: Shown) -> Iterable[Html]:
    run = bar.run
    top = bar.level * _LEVEL + 2
    height = _LEVEL - 4
    said = f"{key_of(run)}: {_BARS[bar.kind]}, attempt {run.attempt}, {holder_of(run)}, took {took(run, shown.now)}"
    if run.reason:
        said += f", {run.reason[:200]}"
    tip = el("title", said)
    if bar.begin - bar.earlier >= lanes.LEAST:
        middle = top + height / 2
        yield el("line", x1=f"{bar.earlier}%", x2=f"{bar.begin}%", y1=str(middle), y2=str(middle), class_="earlier")
    waited = bar.end if bar.worked is None else min(bar.worked, bar.end)
    if bar.worked is not None and waited - bar.begin >= lanes.LEAST:
        yield el("rect", x=f"{bar.begin}%", y=top, width=f"{waited - bar.begin:.2f}%", height=height, rx=2,
                 class_="run waiting")  # fmt: skip
    else:
        waited = bar.begin
    yield el("rect", tip, x=f"{waited}%", y=top, width=f"{max(bar.end - waited, lanes.LEAST):.2f}%", height=height,
             rx=2, class_=f"run {bar.kind}")  # fmt: skip
    if bar.kind in FAILED:  # a shape of its own, not only a colour
        at = f"{bar.end}%"
        yield el("line", x1=at, x2=at, y1=top - 2, y2=top + height + 2, class_="end")


def _marks(track: lanes.Track, on: lanes.Axis) -> Html:
    drawn = []
    for mark in track.marks:
        kind = "skipped" if mark.entry.kind == "skipped" else "missed"
        count = f"{mark.entry.count:,} ticks" if mark.entry.count > 1 else "one tick"
        said = f"{count} {mark.entry.kind}: {mark.entry.reason}, {SAID.get(mark.entry.reason, '')}"
        drawn.append(
            el("rect", el("title", said), x=f"{mark.begin}%", y=3, width=f"{max(mark.end - mark.begin, 0.5):.2f}%",
               height=6, rx=1, class_=f"run tick {kind}")
        )  # fmt: skip
    total = sum(mark.entry.count for mark in track.marks)
    svg = el("svg", _grid(on, 12), drawn, width="100%", height=12, role="img", class_="lane",
             aria_label=f"{track.code}: at least {total:,} ticks did not run" if len(drawn) > 9
             else f"{track.code}: {total:,} ticks did not run")  # fmt: skip
    return el("div", el("span", "not run", class_="sub clip lane-name"), svg, class_="lane-row")


def _listed_row(run: Run, shown: Shown) -> Html:
    found = shown.snapshot.by_code.get(run.identity.code)
    job = found.job if found else None
    reason = why(run, job)
    return row(
        cell("Run", where(run, shown), el("span", key_of(run), class_="sub"), head=True),
        cell("Outcome", outcome(run, job)),
        cell("Cluster and holder", el("code", run.cluster or LIBRARY), " ",
             el("span", holder_of(run), class_="sub clip", title=holder_of(run))),
        cell("Attempt", str(run.attempt)),
        cell("Began", when(run.adopted_at or run.started_at, shown.now)),
        cell("Took", el("span", took(run, shown.now), class_="took")),
        cell("Reason", el("span", reason, class_="why")),
        key=f"listed-{run.id}",
    )  # fmt: skip
