"""The values that cross the border between Python and the lease tables. Pure: no psycopg here.

One row of `leasedjob.job_scheduler` is one logical run; its status, and what each status means:

    RUNNING   owned by `owner_token` until `modified_at + lease_ms` by the database's clock.
              pod_uid is None: a claim, made by an operator before a Pod exists. Else: adopted by that Pod.
    SUCCESS   final, for ever.
    FAIL      retry_at set: another attempt may claim it from then on. retry_at None: no more attempts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from leasedjob.identity import JobSchedulerType, RunIdentity
from leasedjob.lease.held import MAX_DATA_BYTES as MAX_DATA_BYTES
from leasedjob.lease.held import Adoption as Adoption
from leasedjob.lease.held import AdoptVerdict as AdoptVerdict
from leasedjob.lease.held import Beat as Beat
from leasedjob.lease.held import Outcome as Outcome

if TYPE_CHECKING:
    from datetime import datetime
    from uuid import UUID

    from leasedjob.schedule.due import TickRange
    from leasedjob.schedule.inforce import InForce

CLAIM_LEASE_MS: Final = 60_000
INTERRUPTION_LIMIT: Final = 20
DEFAULT_BACKOFF: Final = -1  # as `retry_ms`: the database applies the run's own backoff rule and limits

# Values of `reason` that the database itself writes.
REASON_INTERRUPTION_LIMIT: Final = "InterruptionLimit"
REASON_JOB_DELETED: Final = "JobDeleted"
REASON_REPLACED: Final = "Replaced"
REASON_CANCELLED: Final = "Cancelled"  # given by the operator, as why a run is to stop
REASON_OVERLAP: Final = "Overlap"
REASON_STARTING_DEADLINE: Final = "StartingDeadline"
REASON_AFTER_FAILURES: Final = "SuspendedAfterFailures"
REASON_RELEASED: Final = "Released"
REASON_FORGOTTEN: Final = "Forgotten"
REASON_RESTORED: Final = "Restored"
BUSY_SCHEDULES_CHANGED: Final = "the schedules changed"  # why a claim is busy


class JobSchedulerStatus(StrEnum):
    """The state of a lease row."""

    RUNNING = "RUNNING"
    SUCCESS = "SUCCESS"
    FAIL = "FAIL"


class OverlapRule(StrEnum):
    """What a claim does while another run of its code is active.

    Active is a run that is RUNNING and unexpired, or FAIL with a retry left.
    """

    ALLOW = "allow"  # claim anyway
    SKIP = "skip"  # record the tick as skipped (Forbid)
    WAIT = "wait"  # write nothing; ask again later
    REPLACE = "replace"  # ask the active runs to stop, and wait


class ClaimVerdict(StrEnum):
    """The answer to one claim request."""

    CLAIMED = "claimed"  # ours: launch the Pod
    HELD = "held"  # RUNNING and unexpired, whoever holds it
    COMPLETED = "completed"  # SUCCESS: never again
    EXHAUSTED = "exhausted"  # FAIL without a retry left
    BACKOFF = "backoff"  # FAIL; `retry_at` says from when
    FUTURE = "future"  # the tick has not come yet by the database's clock
    PAST = "past"  # no row, and the tick is not after the watermark: decided before, or never to run
    PRUNED = "pruned"  # a tick that was asked for by name, at or below its code's mark of retention: never again
    MISSED = "missed"  # the starting deadline had passed; recorded in the ledger
    OVERLAP_SKIPPED = "overlap_skipped"  # another run is active; recorded in the ledger
    OVERLAP_WAIT = "overlap_wait"  # another run is active; nothing recorded, ask again
    BUSY = "busy"  # a lock is held elsewhere, or the watermark moved: nothing decided, ask again
    CORDONED = "cordoned"  # this cluster takes no new runs; nothing decided
    UNREGISTERED = "unregistered"  # this cluster has not registered the code with this object uid


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """One LeasedJob as its cluster registers it; the unit that `register_jobs` takes.

    Args:
        code: the job's code.
        uid: the object's uid; another uid than before means that the object was created anew.
        created_at: the object's creationTimestamp, aware.
        schedule_hash: of all that decides which instants are ticks: another value is an edit of the schedule.
        spec_hash: of what must agree between clusters.
        policy: the concurrencyPolicy: Forbid, Allow or Replace. The strictest of all clusters wins.
        schedule: what `schedule_hash` is of, as `leasedjob.schedule.written` has it: whoever registers another one
            later can say what this one left. None: not said, as releases before this one did.
    """

    code: str
    uid: str
    namespace: str
    name: str
    created_at: datetime
    schedule_hash: str
    spec_hash: str
    policy: str
    suspended: bool = False
    schedule: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Passed:
    """Ticks that a registration leaves behind: by an edit of the schedule, a resume, or an object created anew.

    Args:
        at: the instant, by the database's clock, up to which the ticks after the watermark are in `ranges`.
        ranges: where the registration moves the watermark they are written to the ledger.
        version: `CodeState.version` that they were computed from. None: not judged.
    """

    at: datetime
    ranges: tuple[TickRange, ...]
    version: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """The database's answer to one registration.

    Args:
        busy: the code's row was locked elsewhere; nothing was written, ask again.
        watermark: ticks up to and including this instant are decided. None only if busy.
        spec_differs: another cluster has registered this code with another spec_hash or schedule_hash.
    """

    code: str
    busy: bool
    watermark: datetime | None
    spec_differs: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimRequest:
    """One run that is due, as an operator asks for it.

    Requests of one code in one batch are decided in their order; ticks must come oldest first.

    Args:
        tick: the tick, aware; None for INITIAL and for a manual run without a tick.
        name: for people.
        job_uid: uid of the LeasedJob; it must be the registered one.
        tenant: `tenants.tenant_of(cluster, namespace)`: whose sidecars may adopt.
        run_lease_ms: lease.durationSeconds in milliseconds; what adopt sets.
        on_overlap: see OverlapRule.
        lease_ms: how long the claim itself lives unless renewed.
        starting_deadline_ms: judges the first claim of a tick; None is no deadline. Not applied to manual runs.
        backoff_limit: failed attempts that may be repeated.
        interruption_limit: interrupted attempts that may be repeated.
        manual: a person asked: the watermark is neither judged nor moved.
        reopen: with `manual`: an exhausted or waiting FAIL row may be claimed again. SUCCESS never.
        dropped: tick ranges to record when the watermark moves past them.
        version: `CodeState.version` that they were computed from: busy, if the code's schedules have changed since.
            None: not judged.
    """

    identity: RunIdentity
    tick: datetime | None
    name: str
    namespace: str
    job_name: str
    job_uid: str
    tenant: str
    run_lease_ms: int
    on_overlap: OverlapRule
    lease_ms: int = CLAIM_LEASE_MS
    starting_deadline_ms: int | None = None
    backoff_limit: int = 0
    interruption_limit: int = INTERRUPTION_LIMIT
    manual: bool = False
    reopen: bool = False
    dropped: tuple[TickRange, ...] = ()
    version: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimResult:
    """The answer to the request at the same position of the batch.

    Args:
        id: the row, where one exists (also for HELD, BACKOFF, ...).
        owner_token: the claim token; only for CLAIMED.
        expires_at: until when the claim, or the lease that stands in its way, holds.
        db_now: the database's clock when it decided.
        watermark: the code's watermark after the decision; None if unknown.
        reason: for people, where the verdict alone doesn't say it.
    """

    verdict: ClaimVerdict
    db_now: datetime
    id: UUID | None = None
    owner_token: UUID | None = None
    attempt: int | None = None
    fencing_token: int | None = None
    expires_at: datetime | None = None
    watermark: datetime | None = None
    reason: str = ""
    retry_at: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A lease row as the operator sees it.

    Args:
        claim_token: the owner token while the row is an unadopted claim, to launch its Pod; else None.
        cluster, holder: who claimed it; "" for rows of the library alone.
        started_at: of this attempt (its claim). adopted_at, finished_at: of this attempt, or None.
        retry_at: see the module's text.
        stop_reason: why a stop was asked for, `<Reason>` or `<Reason>: <message>`; "" if none was.
        expires_at: modified_at + lease_ms, for RUNNING rows; judged by `db_now`.
        db_now: the database's clock when this row was read.
        held_here: RUNNING, unexpired, and claimed by the cluster that asked.
    """

    id: UUID
    lock_key: str
    identity: RunIdentity
    name: str
    status: JobSchedulerStatus
    outcome: Outcome | None
    attempt: int
    failures: int
    interruptions: int
    backoff_limit: int
    interruption_limit: int
    fencing_token: int
    lease_ms: int
    run_lease_ms: int
    cluster: str
    namespace: str
    job_name: str
    job_uid: str
    tenant: str
    holder: str
    pod_name: str | None
    pod_uid: str | None
    claim_token: UUID | None
    tick: datetime | None
    manual: bool
    created_at: datetime
    started_at: datetime
    adopted_at: datetime | None
    finished_at: datetime | None
    stop_requested_at: datetime | None
    stop_reason: str = ""
    retry_at: datetime | None
    reason: str
    data: Any = field(compare=False)
    modified_at: datetime
    changed_at: datetime
    expires_at: datetime
    db_now: datetime
    held_here: bool

    @property
    def expired(self) -> bool:
        """RUNNING, and the lease had run out by the database's clock when the row was read."""
        return self.status is JobSchedulerStatus.RUNNING and self.expires_at < self.db_now

    @property
    def stopped_as(self) -> str:
        """The word for a run that ended, or is to end, because it was not wanted any more: Cancelled or Replaced; ""
        for every other one."""
        word = (self.reason if self.terminal else self.stop_reason).partition(":")[0]
        wanted = self.status is not JobSchedulerStatus.SUCCESS and word in (REASON_CANCELLED, REASON_REPLACED)
        return word if wanted else ""

    @property
    def terminal(self) -> bool:
        """No further attempt will come."""
        return self.status is JobSchedulerStatus.SUCCESS or (
            self.status is JobSchedulerStatus.FAIL and self.retry_at is None
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEntry:
    """Ticks that did not run, and why.

    Args:
        kind: "skipped" (overlap, suspended), "missed" (deadline, policy or limit) or "dropped" (by an edit).
        count_is_exact: False where counting stopped at its bound.
    """

    code: str
    first: datetime
    last: datetime
    count: int
    count_is_exact: bool
    kind: str
    reason: str
    decided_by: str
    decided_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """The answer to `record_ticks`.

    Args:
        recorded: False: the code was busy, unregistered, its schedules had changed, or the watermark had moved into the
            range. Look again.
        watermark: where it stands now; None if the code is unknown.
    """

    recorded: bool
    watermark: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspension:
    """A schedule that is suspended after failures.

    Args:
        since: by the database's clock.
        by: the cluster whose operator found the failures.
        runs: how many failed in a row.
        reason: the latest of them, as `<run key>: <reason>`.
    """

    since: datetime
    by: str
    runs: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeState:
    """What the database knows of a code beside its runs.

    Args:
        watermark: ticks up to and including this instant are decided.
        created_at: since when the database knows the code.
        counts: ticks that did not run, ever, by kind of the ledger.
        ledger: its latest ranges, newest first.
        suspension: None: not suspended after failures.
        ledger_through, pruned_through: up to which ticks ranges of the ledger, and runs, were deleted.
        registered_uid, registered_suspended, registered_schedule: the asking cluster's registration; None: it has none.
        active_elsewhere: another cluster is active with the code.
        schedules: those that are in force, and those that were later than the watermark.
        version: of them; another one if they have changed.
    """

    code: str
    watermark: datetime
    created_at: datetime
    counts: dict[str, int]
    ledger: tuple[LedgerEntry, ...]
    suspension: Suspension | None
    ledger_through: datetime | None
    pruned_through: datetime | None
    registered_uid: str | None
    registered_suspended: bool | None
    registered_schedule: str | None
    active_elsewhere: bool
    db_now: datetime
    schedules: tuple[InForce, ...] = ()
    version: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredBy:
    """One cluster's object that stands for a code."""

    cluster: str
    namespace: str
    name: str
    policy: str
    suspended: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Who asks for something to be done to a run; what the audit line says.

    Args:
        by: the object that asks, as namespace/name.
        request: its uid: several replicas carry one request out, and write one line.
        why: in its own words.
    """

    cluster: str
    action: str
    by: str
    request: str
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditLine:
    """What was done to a run, or to a code's schedule, because somebody asked for it."""

    at: datetime
    cluster: str
    code: str
    run_key: str | None
    attempt: int | None
    action: str
    did: str
    asked_by: str
    why: str


class Released(StrEnum):
    """What `release_run` did."""

    GIVEN_BACK = "GivenBack"  # no Pod had adopted the claim: nothing ran
    FENCED = "Fenced"  # the lease can't be extended any more; it runs out
    ENDED = "Ended"  # by force, at once
    NOTHING = ""  # the attempt isn't the present one any more, or has ended


@dataclass(frozen=True, slots=True, kw_only=True)
class BackfillState:
    """How far a backfill is.

    Args:
        through: every tick up to here is decided.
        ticks, planned: of the whole range, and those that were to be run when it was planned.
        active: ids and run keys of the runs that it has started and that have not ended, the oldest tick first.
    """

    through: datetime
    ticks: int
    planned: int
    skipped: int
    succeeded: int
    failed: int
    active: tuple[tuple[UUID, str], ...]


class BackfillStep(StrEnum):
    """What became of a step of a backfill."""

    ASKED = "asked"  # the claim was asked for; its verdict says the rest
    SKIPPED = "skipped"  # it went on without a run
    MOVED = "moved"  # another replica was faster: look again
    FULL = "full"  # as many runs are active as may be
    BUSY = "busy"  # locked by another replica: ask again


class TransitionKind(StrEnum):
    """What became of a run."""

    STARTED = "started"  # a Pod adopted the lease
    ENDED = "ended"  # an attempt did
    TAKEN_OVER = "taken_over"  # the next attempt found the lease expired
    GIVEN_UP = "given_up"  # it waited for its next attempt, and gets none


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """A change of a run that one operator of its cluster is told of, whoever made it.

    Args:
        outcome: of the attempt that ended; None where none did.
        counted: the end counts against the backoff limit.
        final: the run gets no further attempt.
        expired: the lease had run out by then.
        adopted: a Pod had adopted it.
        from_cluster: whose lease it was before.
        reason: `<Reason>` or `<Reason>: <message>`; "" where the workload itself reported the outcome.
        happened_at: by the database's clock.
    """

    kind: TransitionKind
    cluster: str
    run_id: UUID
    namespace: str
    job_name: str
    job_uid: str
    run_key: str | None
    tick: datetime | None
    attempt: int
    outcome: Outcome | None
    counted: bool
    final: bool
    expired: bool
    adopted: bool
    from_cluster: str
    reason: str
    happened_at: datetime

    @property
    def succeeded(self) -> bool:
        return self.outcome is Outcome.COMPLETE


__all__ = [
    "CLAIM_LEASE_MS",
    "DEFAULT_BACKOFF",
    "INTERRUPTION_LIMIT",
    "MAX_DATA_BYTES",
    "AdoptVerdict",
    "Adoption",
    "Asked",
    "AuditLine",
    "BackfillState",
    "BackfillStep",
    "Beat",
    "ClaimRequest",
    "ClaimResult",
    "ClaimVerdict",
    "CodeState",
    "JobSchedulerStatus",
    "JobSchedulerType",
    "LedgerEntry",
    "Outcome",
    "OverlapRule",
    "Passed",
    "Recorded",
    "Registered",
    "Registration",
    "Released",
    "Run",
    "RunIdentity",
    "Suspension",
]
