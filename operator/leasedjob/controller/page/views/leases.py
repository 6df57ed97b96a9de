"""What is held now, in all clusters, and for how long still; and the clusters."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Final

from leasedjob.controller.page.markup import Child, Html, el, join, path
from leasedjob.controller.page.model import Leases
from leasedjob.controller.page.query import cut
from leasedjob.controller.page.views.frame import Shown, frame
from leasedjob.controller.page.views.parts import (
    LIBRARY,
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
from leasedjob.controller.page.words import NONE, left, when
from leasedjob.lease.clusters import KnownCluster
from leasedjob.lease.rows import Run

SILENT_AFTER: Final = timedelta(minutes=2)  # an operator says every few seconds that it is there


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
    names = sorted({c.name for c in found.clusters} | {r.cluster for r in found.held if r.cluster}) if found else []
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


def clusters(shown: Shown, found: Leases | None) -> str:
    """The clusters that share this database."""
    known = found.clusters if found else ()
    library = sum(not run.cluster for run in found.held) if found else 0
    cordoned = sum(cluster.cordoned for cluster in known)
    main = join(
        el("h1", "Clusters"),
        el(
            "p",
            "Clusters whose operators share this database. Jobs of the same namespace and name share their runs.",
            class_="lead",
        ),
        el("p", f"{cordoned} of {len(known)} start nothing new.", class_="notice") if cordoned else None,
        table(
            "Clusters",
            ["Cluster", "State", "Last seen", "Version", "Jobs", "Runs held"],
            [_cluster_row(cluster, shown) for cluster in known],
            key="clusters",
            empty="No cluster is known yet." if found else "The database has not said.",
        ),
        el("p", f"{library:,} more leases are held by the lease library alone.") if library else None,
    )
    return frame("Clusters", main, shown=shown, here="clusters")


def _cluster_row(cluster: KnownCluster, shown: Shown) -> Html:
    mine = " this one" if cluster.name == shown.snapshot.cluster else ""
    return row(
        cell("Cluster", el("code", cluster.name), el("span", mine, class_="sub"), head=True),
        cell("State", _standing(cluster, shown)),
        cell("Last seen", when(cluster.last_seen_at, shown.now)),
        cell("Version", cluster.version or NONE, " ", el("span", cluster.release, class_="sub")),
        cell("Jobs", f"{cluster.jobs:,}"),
        cell("Runs held", el("a", f"{cluster.runs:,}", href=path("leases", cluster=cluster.name))),
        key=f"cluster-{cluster.name}",
        class_="attention" if cluster.cordoned else None,
    )


def _standing(cluster: KnownCluster, shown: Shown) -> Child:
    """Whether it takes new runs, as far as is known."""
    if not cluster.cordoned:
        seen = cluster.last_seen_at
        silent = seen is not None and shown.now - seen > SILENT_AFTER
        return el("span", "Silent", class_="badge late") if silent else "Active"
    who = f"by {cluster.cordoned_by}" if cluster.cordoned_by else "by its release's values" if cluster.by_values else ""
    return join(
        el("span", "Cordoned", class_="badge late"),
        el("span", ": ".join(part for part in (who, cluster.cordon_reason) if part), class_="why"),
        when(cluster.cordoned_at, shown.now) if cluster.cordoned_at else None,
    )
