"""Deleting old runs for good, without any of them running again. A conversation, like those of `core`.

    mark ──► (committed) ──► wait ──► delete, some rows at a time

The mark of a code says up to which tick a run that has no row is refused. A transaction that has looked before the mark
was committed could still insert a run afterwards, so nothing is deleted before every such transaction has ended: those
that can be seen are waited for, and for the others there is a wait that is longer than any statement may take.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from leasedjob.errors import DatabaseUnavailableError
from leasedjob.lease.core import Ask, Pause, Talk
from leasedjob.lease.lost import Clock

SETTLE_SECONDS: Final = 60.0  # twice what a statement may take
PATIENCE_SECONDS: Final = 600.0  # for a transaction that doesn't end
KEEP_LAST: Final = 10  # what a LeasedJob's status shows
BATCH: Final = 1_000


@dataclass(frozen=True, slots=True)
class Pruned:
    """What was deleted of one code, or would be.

    Args:
        through: runs of ticks up to this one, inclusive, can't be claimed any more unless they have a row.
    """

    code: str
    rows: int
    through: datetime


def prune(
    older_than: timedelta,
    keep_last: int,
    *,
    dry_run: bool,
    settle: float,
    clock: Clock,
    patience: float = PATIENCE_SECONDS,
    batch: int = BATCH,
) -> Talk[list[Pruned]]:
    """See JobSchedulerService.prune."""
    if older_than <= timedelta(0):
        raise ValueError(f"older_than must be more than nothing, not {older_than}")
    if keep_last < 0:
        raise ValueError(f"keep_last must not be negative, but is {keep_last}")
    what = {"age": older_than, "keep": keep_last}
    if dry_run:
        return [Pruned(**row) for row in (yield Ask("prunable", what, long=True))]
    rows = yield Ask("mark_pruned", what, long=True)
    if not rows:
        return []
    yield from _settled(max(row["marked_at"] for row in rows), settle, patience, clock)
    done = []
    for row in rows:
        gone = 0
        while True:
            (answer,) = yield Ask(
                "delete_pruned", {**what, "code": row["code"], "through": row["through"], "limit": batch}, long=True
            )
            gone += answer["gone"]
            if answer["gone"] < batch:
                break
        done.append(Pruned(row["code"], gone, row["through"]))
    return done


def prune_ledger(older_than: timedelta, *, dry_run: bool, batch: int = BATCH) -> Talk[int]:
    """See JobSchedulerService.prune_ledger."""
    if older_than <= timedelta(0):
        raise ValueError(f"older_than must be more than nothing, not {older_than}")
    if dry_run:
        (answer,) = yield Ask("prunable_ledger", {"age": older_than}, long=True)
        return int(answer["gone"])
    total: int = 0
    while True:
        (answer,) = yield Ask("prune_ledger", {"age": older_than, "limit": batch}, long=True)
        total += int(answer["gone"])
        if answer["gone"] < batch:
            return total


def _settled(marked_at: datetime, settle: float, patience: float, clock: Clock) -> Talk[None]:
    began = clock()
    yield Pause(settle)
    while True:
        (answer,) = yield Ask("open_since", {"marked_at": marked_at})
        if not answer["transactions"]:
            return
        if clock() - began > settle + patience:
            raise DatabaseUnavailableError(
                f"{answer['transactions']} transactions that began before {marked_at:%H:%M:%S} are open: nothing was "
                "deleted, prune again when they have ended"
            )
        yield Pause(1.0)
