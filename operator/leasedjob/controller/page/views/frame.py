"""What is around every page: views, how fresh it is, and what it can't vouch for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from leasedjob import __version__
from leasedjob.controller.page.markup import Html, document, el, join, path
from leasedjob.controller.page.model import (
    PAGE,
    Snapshot,
    Source,
)
from leasedjob.controller.page.query import Query
from leasedjob.controller.page.words import span

REFRESH_SECONDS: Final = 5


@dataclass(frozen=True, slots=True)
class Shown:
    """What all pages are drawn from.

    Args:
        base: the path of this page, without its query.
        taken_ago: seconds since the snapshot was taken.
    """

    snapshot: Snapshot
    query: Query
    sources: tuple[Source, ...]
    taken_ago: float
    base: str = "/"

    @property
    def now(self) -> datetime:
        return self.snapshot.now


_NAV: Final = (
    ("Jobs", "", ""),
    ("Timeline", "timeline", "timeline"),
    ("Not run", "not-run", "not-run"),
    ("Leases", "leases", "leases"),
    ("Clusters", "clusters", "clusters"),
)


def frame(title: str, main: Html, *, shown: Shown | None = None, here: str | None = None) -> str:
    """A whole page around `main`."""
    attention = shown.snapshot.attention if shown else 0
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", name="color-scheme", content="light dark"),
        el("title", f"{f'({attention}) ' if attention else ''}{title} · LeasedJob"),
        el("link", rel="icon", href="/static/icon.svg", type="image/svg+xml"),
        el("link", rel="stylesheet", href="/static/page.css"),
        el("script", src="/static/page.js", defer=True),
    )
    query = shown.query if shown else Query()
    links = [
        el(
            "li",
            el(
                "a",
                name,
                href=path(where, ns=query.namespace) if where else path("", ns=query.namespace),
                aria_current="page" if key == here else None,
            ),
        )
        for name, where, key in _NAV
    ]
    cluster = shown.snapshot.cluster if shown else ""
    body = el(
        "body",
        el("a", "Skip to content", href="#main", class_="skip"),
        el(
            "header",
            el("a", _logo(), el("span", "LeasedJob"), href="/", class_="brand"),
            el("nav", el("ul", links), aria_label="Views"),
            el("div", *_live(shown), class_="live") if shown else None,
            class_="bar",
        ),
        el("div", _notices(shown) if shown else None, id="notices", role="status"),
        el("main", main, id="main", tabindex="-1"),
        el(
            "footer",
            el("p", "Cluster ", el("code", cluster), " as ", el("code", shown.snapshot.identity), " sees it. ")
            if shown
            else None,
            el("p", _freshness(shown)) if shown else None,
            el("p", f"LeasedJob {__version__}. Times are UTC, by the database's clock. This page only reads."),
        ),
        data_now=f"{shown.now.timestamp():.3f}" if shown else None,
        data_refresh=REFRESH_SECONDS if shown else None,
        data_attention=attention,
    )
    return document(head, body)


def _logo() -> Html:
    ring = el("circle", cx=12, cy=12, r="9", fill="none", stroke="currentColor", stroke_width="2.5")
    hand = el("path", d="M12 7v5l3.5 2", fill="none", stroke="currentColor", stroke_width="2.5", stroke_linecap="round")
    return el("svg", ring, hand, viewBox="0 0 24 24", width=22, height=22, aria_hidden="true")


def _live(shown: Shown) -> Iterable[Html]:
    stale = any(source.stale for source in shown.sources)
    yield el(
        "span",
        el("span", class_="dot", aria_hidden="true"),
        el("span", "Stale" if stale else "Current", data_state=True),
        el("span", f", {span(shown.taken_ago)} old", class_="age", data_age=f"{shown.taken_ago:.1f}"),
        class_="pulse stale" if stale else "pulse",
        id="pulse",
    )
    yield el("button", "Pause", type="button", id="pause", aria_pressed="false", hidden=True, data_keep=True)


def _notices(shown: Shown) -> list[Html]:
    """What the page can't vouch for."""
    found = []
    for source in shown.sources:
        if not source.stale:
            continue
        verb = "is not brought up to date" if source.name == PAGE else "does not answer"
        since = "It has not answered yet." if source.age is None else f"It last answered {span(source.age)} ago."
        found.append(
            el(
                "div",
                el("strong", f"{source.name} {verb}. "),
                since,
                " What is shown of it may be out of date. ",
                el("code", source.fault) if source.fault else None,
                class_="notice",
                data_key=f"notice-{source.name}",
            )
        )
    waits, why = not shown.snapshot.fresh, shown.snapshot.waits
    if waits or why:
        heading = "The operator waits. " if waits else "The operator is not ready. "
        text = "Nothing new starts here until that is over. " if waits else ""
        said = el("code", why) if why else None
        found.append(el("div", el("strong", heading), text, said, class_="notice", data_key="notice-operator"))
    return found


def _freshness(shown: Shown) -> str:
    parts = [f"Taken {span(shown.taken_ago)} ago"]
    parts += [
        f"{source.name} answered {'never yet' if source.age is None else span(source.age) + ' ago'}"
        for source in shown.sources
    ]
    return "; ".join(parts) + "."


def problem(title: str, text: str) -> str:
    """A page that says why there is no other one."""
    return frame(
        title, join(el("h1", title), el("p", text, class_="lead"), el("p", el("a", "All jobs", href=path(""))))
    )
