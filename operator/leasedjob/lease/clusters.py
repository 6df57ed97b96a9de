"""Clusters as the database knows them: whose name is whose, and which of them take no new runs."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum


class Standing(StrEnum):
    """Whether a cluster's name is an operator's own; see `greet_cluster`."""

    MINE = "mine"
    TAKEN = "taken"  # another cluster, or another release of this one, works under the name
    WAITS = "waits"  # the release's former name still has live runs, which end there
    SUCCEEDED = "succeeded"  # this release has another name by now


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who an operator is.

    Args:
        cluster: the name, as runs and Pods carry it.
        uid: what tells the cluster from every other one: the UID of its namespace kube-system, or `namespace/` and that
            of the release's own where the former can't be read; "" where neither can.
        release: the release, as namespace/name; "" where it is no release.
    """

    cluster: str
    uid: str = ""
    release: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Greeting:
    """What the database answers to an operator that says who it is.

    Args:
        other: the name in question: the own one where it is taken, else the former or the later one.
        other_uid, other_release: who works under it.
        seen_ago: how long ago they did.
        live: runs that the former name holds.
        cordoned_at: since when the cluster takes no new runs because somebody asked for it; None: nobody did.
    """

    verdict: Standing
    other: str | None
    other_uid: str | None
    other_release: str | None
    seen_ago: timedelta | None
    live: int
    cordoned_at: datetime | None
    cordoned_by: str
    cordon_reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownCluster:
    """One cluster.

    Args:
        last_seen_at: when an operator of it last asked the database; None: none of a version that says so.
        by_values: its release's values cordon it.
        cordoned_at: since when it is cordoned because somebody asked for it.
        runs: that it holds now.
        jobs: LeasedJobs that it has registered.
    """

    name: str
    uid: str
    release: str
    version: str
    first_seen_at: datetime | None
    last_seen_at: datetime | None
    by_values: bool
    cordoned_at: datetime | None
    cordoned_by: str
    cordon_reason: str
    runs: int
    jobs: int
    db_now: datetime

    @property
    def cordoned(self) -> bool:
        return self.by_values or self.cordoned_at is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class CordonAnswer:
    """What became of a request to cordon a cluster, or to end that.

    Args:
        known: there is such a cluster.
        changed: by this request.
        by_values: its release's values cordon it, whatever is asked for.
        clusters: the names that there are.
    """

    known: bool
    changed: bool
    by_values: bool
    clusters: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetAnswer:
    """What became of a request to forget a cluster.

    Args:
        known: there is such a cluster.
        forgotten: by this request.
        busy: rows of it are locked by somebody; ask again.
        seen_ago: how long ago it was seen; None: never, its operators were too old to say anything.
        live: runs that it holds.
        jobs: LeasedJobs that it had registered.
        clusters: the names that there are.
    """

    known: bool
    forgotten: bool
    busy: bool
    seen_ago: timedelta | None
    live: int
    jobs: int
    clusters: list[str]
