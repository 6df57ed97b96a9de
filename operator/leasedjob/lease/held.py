"""What a run's Pod and the lease tables say to each other. Pure; by itself, because each Pod waits for its import."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

MAX_DATA_BYTES: Final = 256 * 1024


class Outcome(StrEnum):
    """How an attempt ended: SUCCESS, FAIL that counts as failed work, FAIL that doesn't (`{released: true}`)."""

    COMPLETE = "complete"
    FAIL = "fail"
    RELEASE = "release"


class AdoptVerdict(StrEnum):
    """The answer to adopt."""

    ADOPTED = "adopted"
    LOST = "lost"  # no such claim: reclaimed, ended, or the token is wrong
    EXPIRED = "expired"  # the claim ran out before this Pod came
    TAKEN = "taken"  # another Pod has adopted it
    REFUSED = "refused"  # the database role is not one of this run's tenant
    BUSY = "busy"  # the row is locked elsewhere: ask again


@dataclass(frozen=True, slots=True, kw_only=True)
class Adoption:
    """The answer to adopt; numbers are set where the verdict is ADOPTED."""

    verdict: AdoptVerdict
    reason: str = ""
    lease_ms: int | None = None
    attempt: int | None = None
    fencing_token: int | None = None
    lock_key: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """The answer to heartbeat.

    Args:
        held: the lease was extended. False and not busy: it is lost for good.
        stop_requested: the run was asked to stop; the lease was still extended.
        busy: the row is locked elsewhere: ask again.
    """

    held: bool
    stop_requested: bool
    busy: bool
