"""The rules of the lease tables in memory, on a clock that only its owner moves.

As much of them as an operator and a Pod need for ticks: registration, claims, ticks that don't run, adoption,
heartbeat, the end of an attempt. Nobody else holds a lock here, so nothing is ever busy for that reason. What it
answers is compared with PostgreSQL's own functions in tests/integration/test_simulated_store.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from itertools import count
from typing import Protocol
from uuid import UUID

from leasedjob.identity import RunIdentity
from leasedjob.lease.rows import (
    BUSY_SCHEDULES_CHANGED,
    ClaimRequest,
    ClaimResult,
    ClaimVerdict,
    CodeState,
    JobSchedulerStatus,
    Outcome,
    OverlapRule,
    Passed,
    Recorded,
    Registered,
    Registration,
    Run,
)
from leasedjob.schedule import InForce, TickRange

RUNNING, SUCCESS, FAIL = JobSchedulerStatus.RUNNING, JobSchedulerStatus.SUCCESS, JobSchedulerStatus.FAIL
MILLISECOND = timedelta(milliseconds=1)
RECENT = 4  # ended runs that an operator keeps in memory


@dataclass(frozen=True)
class Range:
    """A line of the ledger."""

    first: datetime
    last: datetime
    count: int
    exact: bool
    kind: str
    reason: str


class Store(Protocol):
    """What world and account need."""

    now: datetime

    def register(self, cluster: str, job: Registration, passed: Passed | None) -> Registered: ...

    def unregister(self, cluster: str, code: str) -> None: ...

    def state(self, cluster: str, code: str) -> CodeState | None: ...

    def claim(self, cluster: str, requests: Sequence[ClaimRequest]) -> list[ClaimResult]: ...

    def record(
        self,
        cluster: str,
        code: str,
        through: datetime,
        ranges: Sequence[TickRange],
        *,
        suspended: bool,
        version: int | None,
    ) -> Recorded: ...

    def rows(self, cluster: str, code: str) -> list[Run]: ...

    def all_rows(self, code: str) -> list[Run]: ...

    def adopt(self, id: UUID, claim_token: UUID, token: UUID, pod: str) -> bool: ...

    def beat(self, id: UUID, token: UUID) -> tuple[bool, bool]: ...

    def finish(self, id: UUID, token: UUID, outcome: Outcome) -> bool: ...

    def stop(self, id: UUID, reason: str) -> None: ...

    def ledger(self, code: str) -> list[Range]: ...

    def watermark(self, code: str) -> datetime: ...


@dataclass(slots=True)
class Row:
    id: UUID
    identity: RunIdentity
    lock_key: str
    token: UUID
    tick: datetime | None
    manual: bool
    cluster: str
    job_uid: str
    lease_ms: int
    run_lease_ms: int
    backoff_limit: int
    interruption_limit: int
    fencing_token: int
    created_at: datetime
    started_at: datetime
    modified_at: datetime
    changed_at: datetime
    status: JobSchedulerStatus = RUNNING
    outcome: Outcome | None = None
    attempt: int = 1
    failures: int = 0
    interruptions: int = 0
    pod: str | None = None
    adopted_at: datetime | None = None
    finished_at: datetime | None = None
    stop_requested_at: datetime | None = None
    stop_reason: str = ""
    retry_at: datetime | None = None
    reason: str = ""
    shown: dict[str, tuple[object, Run]] = field(default_factory=dict)  # as each cluster was last given it

    @property
    def expires_at(self) -> datetime:
        return self.modified_at + timedelta(milliseconds=self.lease_ms)

    @property
    def active(self) -> bool:
        return self.status is RUNNING or self.retry_at is not None


@dataclass(slots=True)
class Code:
    watermark: datetime
    registrations: dict[str, Registration] = field(default_factory=dict)
    schedules: list[InForce] = field(default_factory=list)
    version: int = 0
    ledger: list[Range] = field(default_factory=list)
    rows: dict[str, Row] = field(default_factory=dict)  # by lock key, oldest first
    active: dict[str, Row] = field(default_factory=dict)  # RUNNING, or with a retry left


class MemoryStore:
    """See the module."""

    def __init__(self, now: datetime) -> None:
        self.now = now
        self._codes: dict[str, Code] = {}
        self._by_id: dict[UUID, Row] = {}
        self._numbers = count(1)
        self._tokens = count(1)

    def _uuid(self) -> UUID:
        return UUID(int=next(self._numbers))

    def _expired(self, row: Row) -> bool:
        return row.expires_at < self.now

    # --- registration -------------------------------------------------------------------------------------------------

    def register(self, cluster: str, job: Registration, passed: Passed | None) -> Registered:
        code = self._codes.get(job.code)
        if code is None:
            code = self._codes[job.code] = Code(min(job.created_at, self.now))
        others = [g for name, g in code.registrations.items() if name != cluster]
        mine = code.registrations.get(cluster)
        active = any(not g.suspended for g in others)
        anew = mine is None or mine.uid != job.uid
        if anew and not active:
            at = max(code.watermark, min(job.created_at, self.now))
        else:
            at = self.now if passed is None else passed.at
        moves = not active and (anew or mine.suspended > job.suspended or mine.schedule_hash != job.schedule_hash)  # type: ignore[union-attr]
        if passed is None:
            busy = moves and at > code.watermark and any(_pending(s, code.watermark) for s in code.schedules)
        else:
            busy = passed.at > self.now or passed.version != code.version or _stale(code.watermark, passed.ranges)
        if busy:
            return Registered(code=job.code, busy=True, watermark=None, spec_differs=self._differs(code, cluster, job))
        if anew and not others:
            for row in [r for r in code.active.values() if r.status is FAIL]:
                row.retry_at, row.reason, row.changed_at = None, "JobDeleted", self.now
                self._settle(code, row)
        if moves and at > code.watermark:
            if passed is not None:
                self._write(code, passed.ranges)
            code.watermark = at
        code.registrations[cluster] = job
        self._put_in_force(code, at)
        return Registered(
            code=job.code,
            busy=False,
            watermark=code.watermark,
            spec_differs=self._differs(code, cluster, job),
        )

    def unregister(self, cluster: str, code: str) -> None:
        state = self._codes.get(code)
        if state is None:
            return
        state.registrations.pop(cluster, None)
        self._put_in_force(state, self.now)
        for row in list(state.active.values()):
            if row.status is RUNNING and row.pod is None and row.cluster == cluster:
                self._close(row, Outcome.RELEASE, counts=False, retry_ms=0, reason="JobDeleted")
            elif row.status is FAIL and not state.registrations:
                row.retry_at, row.reason, row.changed_at = None, "JobDeleted", self.now
                self._settle(state, row)

    def _put_in_force(self, code: Code, at: datetime) -> None:
        """Of clusters where it isn't suspended, or of all."""
        registered = code.registrations.values()
        active = [g for g in registered if not g.suspended] or list(registered)
        wanted = {g.schedule_hash: g for g in active}
        kept = []
        for s in code.schedules:
            if s.until is None and s.key not in wanted:
                kept.append(replace(s, until=max(at, s.since)))
            elif s.until is None or s.until > code.watermark:
                kept.append(s)
        there = {s.key for s in kept if s.until is None}
        kept += [InForce.of(key, g.schedule, g.code, at, None) for key, g in sorted(wanted.items()) if key not in there]
        changed = [s for s in kept if s not in code.schedules]
        code.version += bool(changed)
        code.schedules = kept

    def state(self, cluster: str, code: str) -> CodeState | None:
        state = self._codes.get(code)
        if state is None:
            return None
        mine = state.registrations.get(cluster)
        return CodeState(
            code=code,
            watermark=state.watermark,
            created_at=state.watermark,
            counts={},
            ledger=(),
            suspension=None,
            ledger_through=None,
            pruned_through=None,
            registered_uid=None if mine is None else mine.uid,
            registered_suspended=None if mine is None else mine.suspended,
            registered_schedule=None if mine is None else mine.schedule_hash,
            active_elsewhere=any(not g.suspended for name, g in state.registrations.items() if name != cluster),
            db_now=self.now,
            schedules=tuple(s for s in state.schedules if _pending(s, state.watermark)),
            version=state.version,
        )

    def _differs(self, code: Code, cluster: str, job: Registration) -> bool:
        return any(
            (g.spec_hash, g.schedule_hash, g.policy) != (job.spec_hash, job.schedule_hash, job.policy)
            for name, g in code.registrations.items()
            if name != cluster
        )

    # --- the ledger ---------------------------------------------------------------------------------------------------

    def _write(self, code: Code, ranges: Iterable[TickRange | Range]) -> None:
        end = code.watermark
        for r in sorted((r for r in ranges if r.first > code.watermark), key=lambda r: r.first):
            new = r if isinstance(r, Range) else Range(
                r.first, r.last, r.count, r.count_is_exact, r.reason.kind, r.reason.value
            )  # fmt: skip
            latest = code.ledger[-1] if code.ledger else None
            if latest and latest.last == end and (latest.kind, latest.reason) == (new.kind, new.reason):
                code.ledger[-1] = Range(
                    latest.first, new.last, latest.count + new.count, latest.exact and new.exact, new.kind, new.reason
                )
            else:
                code.ledger.append(new)
            end = new.last

    def record(
        self,
        cluster: str,
        code: str,
        through: datetime,
        ranges: Sequence[TickRange],
        *,
        suspended: bool,
        version: int | None,
    ) -> Recorded:
        state = self._codes.get(code)
        if state is None:
            return Recorded(recorded=False, watermark=None)
        elsewhere = any(not g.suspended for name, g in state.registrations.items() if name != cluster)
        unknown = cluster not in state.registrations
        stale = through > self.now or version != state.version or _stale(state.watermark, ranges)
        if (suspended and elsewhere) or unknown or stale:
            return Recorded(recorded=False, watermark=state.watermark)
        self._write(state, ranges)
        state.watermark = max(state.watermark, through)
        return Recorded(recorded=True, watermark=state.watermark)

    # --- claims -------------------------------------------------------------------------------------------------------

    def claim(self, cluster: str, requests: Sequence[ClaimRequest]) -> list[ClaimResult]:
        waiting: set[str] = set()
        return [self._claim(cluster, request, waiting) for request in requests]

    def _claim(self, cluster: str, request: ClaimRequest, waiting: set[str]) -> ClaimResult:
        state = self._codes.get(request.identity.code)
        verdict, row = self._verdict(cluster, request, state, waiting)
        if verdict == "replace":
            assert state is not None
            self._stop(list(state.active.values()), "Replaced")
            verdict, row = self._verdict(cluster, request, state, waiting)
            verdict = "overlap_wait" if verdict == "replace" else verdict
        code = request.identity.code
        if not request.manual and row is None and verdict in ("overlap_wait", "future", "busy"):
            waiting.add(code)
        if state is None:
            return ClaimResult(verdict=ClaimVerdict(verdict), db_now=self.now)
        if verdict == "end":
            assert row is not None
            reason = row.stop_reason if row.stop_requested_at is not None else "InterruptionLimit"
            self._close(row, Outcome.RELEASE, counts=False, retry_ms=None, reason=reason)
            return ClaimResult(
                verdict=ClaimVerdict.EXHAUSTED, db_now=self.now, id=row.id, attempt=row.attempt,
                fencing_token=row.fencing_token, watermark=state.watermark, reason=reason,
            )  # fmt: skip
        if verdict in ("insert", "reclaim"):
            row = self._take(cluster, request, state, row)
            verdict = "claimed"
        moves = not request.manual and request.tick is not None and request.tick > state.watermark
        if moves and verdict in ("claimed", "missed", "overlap_skipped"):
            assert request.tick is not None
            ranges: list[TickRange | Range] = list(request.dropped)
            if verdict != "claimed":
                kind, reason = ("missed", "StartingDeadline") if verdict == "missed" else ("skipped", "Overlap")
                ranges.append(Range(request.tick, request.tick, 1, True, kind, reason))
            self._write(state, ranges)
            state.watermark = request.tick
        claimed = verdict == "claimed"
        return ClaimResult(
            verdict=ClaimVerdict(verdict),
            db_now=self.now,
            id=None if row is None else row.id,
            owner_token=row.token if row is not None and claimed else None,
            attempt=None if row is None else row.attempt,
            fencing_token=None if row is None else row.fencing_token,
            expires_at=row.expires_at if row is not None and row.status is RUNNING else None,
            watermark=state.watermark,
            reason=self._reason(verdict, row, request, state),
            retry_at=None if row is None or claimed else row.retry_at,
        )

    def _reason(self, verdict: str, row: Row | None, request: ClaimRequest, state: Code) -> str:
        if verdict == "claimed":
            return ""
        if verdict == "busy":
            return BUSY_SCHEDULES_CHANGED if request.version != state.version else "the watermark moved"
        return "" if row is None else row.reason

    def _verdict(
        self, cluster: str, request: ClaimRequest, state: Code | None, waiting: set[str]
    ) -> tuple[str, Row | None]:
        row = None if state is None else state.rows.get(request.identity.lock_key)
        if row is not None:
            if row.status is SUCCESS:
                return "completed", row
            if row.status is RUNNING and not self._expired(row):
                return "held", row
            reopened = request.manual and request.reopen
            if row.status is FAIL and row.retry_at is None and not reopened:
                return "exhausted", row
            if row.retry_at is not None and row.retry_at > self.now and not reopened:
                return "backoff", row
        mine = None if state is None else state.registrations.get(cluster)
        if state is None or mine is None or mine.uid != request.job_uid:
            return "unregistered", row
        others = [r for r in state.active.values() if r.lock_key != request.identity.lock_key]
        rule = self._overlap(cluster, request, state)
        running = 0 if rule == "allow" else sum(r.status is RUNNING and not self._expired(r) for r in others)
        retrying = 0 if rule == "allow" else sum(r.status is FAIL for r in others)
        if row is None:
            return self._fresh(request, state, waiting, rule, running + retrying), None
        if row.status is RUNNING and row.stop_requested_at is not None:
            return "end", row
        if row.status is RUNNING and row.pod is not None and row.interruptions >= request.interruption_limit:
            return "end", row
        return ("overlap_wait" if running else "reclaim"), row

    def _fresh(self, request: ClaimRequest, state: Code, waiting: set[str], rule: str, active: int) -> str:
        tick, scheduled = request.tick, not request.manual
        if tick is not None and tick > self.now:
            return "future"
        if scheduled and tick is not None and tick <= state.watermark:
            return "past"
        if scheduled and request.version != state.version:
            return "busy"
        if scheduled and request.identity.code in waiting:
            return "overlap_wait"
        if request.dropped and _stale(state.watermark, request.dropped):
            return "busy"
        deadline = request.starting_deadline_ms
        if scheduled and tick is not None and deadline is not None and tick + deadline * MILLISECOND < self.now:
            return "missed"
        if active:
            if rule == "skip" and scheduled and tick is not None:
                return "overlap_skipped"
            return "replace" if rule == "replace" else "overlap_wait"
        return "insert"

    def _overlap(self, cluster: str, request: ClaimRequest, state: Code) -> str:
        if request.on_overlap in (OverlapRule.SKIP, OverlapRule.WAIT):
            return request.on_overlap.value
        others = {g.policy for name, g in state.registrations.items() if name != cluster and not g.suspended}
        if "Forbid" in others:
            return "wait" if request.manual else "skip"
        return "replace" if "Replace" in others else request.on_overlap.value

    def _take(self, cluster: str, request: ClaimRequest, state: Code, row: Row | None) -> Row:
        if row is None:
            row = Row(
                id=self._uuid(), identity=request.identity, lock_key=request.identity.lock_key, token=self._uuid(),
                tick=request.tick, manual=request.manual, cluster=cluster, job_uid=request.job_uid,
                lease_ms=request.lease_ms, run_lease_ms=request.run_lease_ms, backoff_limit=request.backoff_limit,
                interruption_limit=request.interruption_limit, fencing_token=next(self._tokens), created_at=self.now,
                started_at=self.now, modified_at=self.now, changed_at=self.now,
            )  # fmt: skip
            state.rows[row.lock_key] = state.active[row.lock_key] = row
            self._by_id[row.id] = row
            return row
        row.interruptions += row.status is RUNNING and row.pod is not None
        row.status, row.outcome, row.token, row.attempt = RUNNING, None, self._uuid(), row.attempt + 1
        row.fencing_token, row.cluster, row.job_uid, row.manual = (
            next(self._tokens), cluster, request.job_uid, request.manual,
        )  # fmt: skip
        row.backoff_limit, row.interruption_limit = request.backoff_limit, request.interruption_limit
        row.lease_ms, row.run_lease_ms = request.lease_ms, request.run_lease_ms
        row.pod = row.adopted_at = row.finished_at = row.stop_requested_at = row.retry_at = None
        row.stop_reason = row.reason = ""
        row.started_at = row.modified_at = row.changed_at = self.now
        self._settle(state, row)
        return row

    def _settle(self, state: Code, row: Row) -> None:
        if row.active:
            state.active[row.lock_key] = row
        else:
            state.active.pop(row.lock_key, None)

    def _stop(self, rows: Sequence[Row], reason: str) -> None:
        for row in rows:
            if row.status is RUNNING and row.stop_requested_at is None:
                row.stop_requested_at, row.stop_reason, row.changed_at = self.now, reason, self.now
            if row.status is RUNNING and row.pod is None:
                self._close(row, Outcome.RELEASE, counts=False, retry_ms=None, reason=reason)
            elif row.status is FAIL and row.retry_at is not None:
                row.retry_at, row.reason, row.changed_at = None, reason, self.now
                self._settle(self._codes[row.identity.code], row)

    def _close(self, row: Row, outcome: Outcome, *, counts: bool, retry_ms: int | None, reason: str) -> None:
        failed = outcome is Outcome.FAIL and counts
        interrupted = outcome is not Outcome.COMPLETE and not counts
        state = self._codes[row.identity.code]
        retry: datetime | None = None
        if outcome is Outcome.COMPLETE or row.stop_requested_at is not None or not state.registrations:
            retry = None
        elif retry_ms is None or retry_ms >= 0:
            retry = None if retry_ms is None else self.now + timedelta(milliseconds=retry_ms)
        elif failed:
            if row.failures < row.backoff_limit:
                retry = self.now + timedelta(seconds=min(10 * 2 ** min(row.failures, 9), 360))
        elif row.pod is None or row.interruptions < row.interruption_limit:
            retry = self.now
        at_limit = row.pod is not None and row.interruptions >= row.interruption_limit
        if outcome is not Outcome.COMPLETE and row.stop_requested_at is not None and row.stop_reason:
            row.reason = row.stop_reason
        elif outcome is not Outcome.COMPLETE and retry_ms is not None and retry_ms < 0 and not failed and at_limit:
            row.reason = "InterruptionLimit"
        else:
            row.reason = reason
        row.status, row.outcome = (SUCCESS if outcome is Outcome.COMPLETE else FAIL), outcome
        row.failures += failed
        row.interruptions += interrupted and row.pod is not None
        row.retry_at = retry
        row.finished_at = row.modified_at = row.changed_at = self.now
        self._settle(state, row)

    # --- Pods ---------------------------------------------------------------------------------------------------------

    def adopt(self, id: UUID, claim_token: UUID, token: UUID, pod: str) -> bool:
        row = self._by_id[id]
        mine = row.status is RUNNING and row.token == claim_token and row.pod is None
        if not mine or row.stop_requested_at is not None or self._expired(row):
            return False
        row.token, row.pod, row.adopted_at = token, pod, self.now
        row.lease_ms, row.modified_at, row.changed_at = row.run_lease_ms, self.now, self.now
        return True

    def beat(self, id: UUID, token: UUID) -> tuple[bool, bool]:
        row = self._by_id[id]
        if row.status is not RUNNING or row.token != token or self._expired(row):
            return False, False
        row.modified_at = self.now
        return True, row.stop_requested_at is not None

    def finish(self, id: UUID, token: UUID, outcome: Outcome) -> bool:
        row = self._by_id[id]
        if row.token != token:
            return False
        if row.status is not RUNNING:
            return row.outcome == outcome
        self._close(row, outcome, counts=outcome is Outcome.FAIL, retry_ms=-1, reason="")
        return True

    def stop(self, id: UUID, reason: str) -> None:
        self._stop([self._by_id[id]], reason)

    # --- what is there ------------------------------------------------------------------------------------------------

    def rows(self, cluster: str, code: str) -> list[Run]:
        state = self._codes.get(code)
        if state is None:
            return []
        found = dict(state.active)
        for key in self._latest(state):
            found.setdefault(key, state.rows[key])
        return [self._run(row, cluster) for row in found.values()]

    def _latest(self, state: Code) -> Iterator[str]:
        newest = reversed(state.rows)
        for _, key in zip(range(RECENT), newest, strict=False):
            yield key

    def all_rows(self, code: str) -> list[Run]:
        return [self._run(row, "") for row in self._codes[code].rows.values()] if code in self._codes else []

    def ledger(self, code: str) -> list[Range]:
        return list(self._codes[code].ledger) if code in self._codes else []

    def watermark(self, code: str) -> datetime:
        return self._codes[code].watermark

    def _run(self, row: Row, cluster: str) -> Run:
        held = row.status is RUNNING and not self._expired(row)
        version = (
            held, row.modified_at, row.changed_at, row.attempt, row.status, row.retry_at,
            row.stop_requested_at, row.reason, row.pod, row.token,
        )  # fmt: skip
        shown = row.shown.get(cluster)
        if shown is not None and shown[0] == version:
            return shown[1]
        run = Run(
            id=row.id, lock_key=row.lock_key, identity=row.identity, name=row.identity.code, status=row.status,
            outcome=row.outcome, attempt=row.attempt, failures=row.failures, interruptions=row.interruptions,
            backoff_limit=row.backoff_limit, interruption_limit=row.interruption_limit,
            fencing_token=row.fencing_token, lease_ms=row.lease_ms, run_lease_ms=row.run_lease_ms, cluster=row.cluster,
            namespace="sim", job_name=row.identity.code, job_uid=row.job_uid, tenant="", holder="", pod_name=row.pod,
            pod_uid=row.pod, tick=row.tick,
            claim_token=row.token if row.status is RUNNING and row.pod is None else None,
            manual=row.manual, created_at=row.created_at, started_at=row.started_at, adopted_at=row.adopted_at,
            finished_at=row.finished_at, stop_requested_at=row.stop_requested_at, stop_reason=row.stop_reason,
            retry_at=row.retry_at, reason=row.reason, data=None, modified_at=row.modified_at,
            changed_at=row.changed_at, expires_at=row.expires_at, db_now=self.now,
            held_here=held and row.cluster == cluster,
        )  # fmt: skip
        row.shown[cluster] = (version, run)
        return run


def _pending(schedule: InForce, watermark: datetime) -> bool:
    return schedule.until is None or schedule.until > watermark


def _stale(watermark: datetime, ranges: Iterable[TickRange]) -> bool:
    return any(r.first <= watermark < r.last for r in ranges)
