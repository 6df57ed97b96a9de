"""What is held now, in all clusters, and for how long still; and the clusters."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from leasedjob.controller.page.markup import Child, Html, el, join, path
from leasedjob.controller.page.model import (
    Leases,
)
from leasedjob.controller.page.query import cut
from leasedjob.controller.page.views.frame import Shown, frame
from leasedjob.controller.page.views.parts import (
    LIBRARY,
    badge_text,
    cell,
    choice,
    counted,
    field,
    filters,
    holder_of,
    key_of,
    outcome,
    pager,
    row,
    table,
    where,
)
from leasedjob.controller.page.words import left, when
from leasedjob.lease.rows import Run


def draw(shown: Shown, found: Leases | None) -> str:
    """What is held now, in all clusters, and for how long still."""
    query = shown.query
    words = query.text.casefold().split()
    held = found.held if found else ()
    chosen = [
        run
        for run in held
        if (not query.namespace or run.namespace == query.namespace)
        and (not query.cluster or run.cluster == query.cluster)
        and all(w in f"{run.identity.code}\n{run.holder}\n{run.name}".casefold() for w in words)
    ]
    rows, place = cut(chosen, query.page)
    total = found.total if found else 0
    heading = "Leases are not known yet" if found is None else _held_sentence(total)
    partial = (
        el("p", f"The {len(held):,} that end first are looked through.", class_="lead") if total > len(held) else None
    )
    main = join(
        el("h1", heading),
        el("p", "Of all clusters, and of the lease library. A heartbeat begins the time anew; one that runs out "
           "makes the run claimable again.", class_="lead"),
        partial,
        filters(shown, _cluster_choice(shown, found)),
        el("p", counted(place, len(rows), len(held), "leases"), class_="counted", id="counted"),
        table(
            "Leases that are held",
            ["Run", "State", "Time left", "Holder", "Attempt", "Since", "Token"],
            [_lease_row(run, shown) for run in rows],
            key="leases",
            empty="Nothing is held." if found else "The database has not said.",
        ),
        pager(place, query, ["leases"]),
    )  # fmt: skip
    return frame("Leases", main, shown=shown, here="leases")


def _held_sentence(total: int) -> str:
    return "No lease is held" if not total else "One lease is held" if total == 1 else f"{total:,} leases are held"


def _cluster_choice(shown: Shown, found: Leases | None) -> Html:
    names = sorted({c.cluster for c in found.clusters} | {r.cluster for r in found.held if r.cluster}) if found else []
    chosen = shown.query.cluster
    known = names if chosen in ("", *names) else [chosen, *names]
    return field("cluster", "Cluster", choice("cluster", [("", "all"), *((n, n) for n in known)], chosen))


def _lease_row(run: Run, shown: Shown) -> Html:
    found = shown.snapshot.by_code.get(run.identity.code)
    lost = run.expires_at < shown.now
    return row(
        cell("Run", where(run, shown), el("span", key_of(run), class_="sub"), head=True),
        cell("State", outcome(run, found.job if found else None)),
        cell("Time left", left(run.expires_at, shown.now), " ", _gauge(run, shown.now)),
        cell("Holder", el("span", holder_of(run), class_="clip", title=holder_of(run)), " ",
             el("span", run.cluster or LIBRARY, class_="sub")),
        cell("Attempt", str(run.attempt)),
        cell("Since", when(run.adopted_at or run.started_at, shown.now)),
        cell("Token", str(run.fencing_token)),
        key=f"lease-{run.id}",
        class_="attention" if lost else None,
    )  # fmt: skip


def _gauge(run: Run, now: datetime) -> Html:
    """What is left of the lease, as a bar; the words beside it say the same."""
    whole = max(run.lease_ms / 1000, 1.0)
    part = min(1.0, max(0.0, (run.expires_at - now).total_seconds() / whole))
    return el(
        "svg",
        el("rect", x=0, y=0, width="100%", height="100%", class_="track"),
        el("rect", x=0, y=0, width=f"{100 * part:.1f}%", height="100%", class_="fill"),
        class_="gauge low" if part < 0.25 else "gauge",
        aria_hidden="true",
        data_until=f"{run.expires_at.timestamp():.3f}",
        data_whole=f"{whole:.3f}",
    )


def clusters(shown: Shown, found: Leases | None, cordons: Iterable[tuple[str, str, datetime | None]] = ()) -> str:
    """The clusters that share this database.

    Args:
        cordons: cluster, why, and since when, of those that start nothing.
    """
    cordoned = {name: (reason, since) for name, reason, since in cordons}
    held: dict[str, int] = {}
    for run in found.held if found else ():
        held[run.cluster] = held.get(run.cluster, 0) + 1
    known = {c.cluster: c for c in found.clusters} if found else {}
    names = sorted((known.keys() | held.keys() | cordoned.keys() | {shown.snapshot.cluster}) - {""})
    rows = []
    for name in names:
        summary = known.get(name)
        mine = " this one" if name == shown.snapshot.cluster else ""
        state: Child = "Active"
        if name in cordoned:
            reason, since = cordoned[name]
            state = join(badge_text("Cordoned", "late"), " ", el("span", reason, class_="why"), when(since, shown.now))
        rows.append(
            row(
                cell("Cluster", el("code", name), el("span", mine, class_="sub"), head=True),
                cell("State", state),
                cell("Jobs", f"{summary.jobs:,}" if summary else "0"),
                cell("Suspended", f"{summary.suspended:,}" if summary else "0"),
                cell("Leases held", el("a", f"{held.get(name, 0):,}", href=path("leases", cluster=name))),
                key=f"cluster-{name}",
            )
        )  # fmt: skip
    main = join(
        el("h1", "Clusters"),
        el("p", "Clusters whose operators share this database. Jobs of the same namespace and name share their runs.",
           class_="lead"),
        table("Clusters", ["Cluster", "State", "Jobs", "Suspended", "Leases held"], rows, key="clusters",
              empty="The database has not said."),
        el("p", f"{held['']:,} more are held by the lease library alone.") if held.get("") else None,
    )  # fmt: skip
    return frame("Clusters", main, shown=shown, here="clusters")
