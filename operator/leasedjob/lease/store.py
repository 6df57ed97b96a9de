"""What an operator and a sidecar do to the lease tables: one method, one statement, one round trip.

`OperatorStore` is asynchronous and runs with the role that owns the schema. `SidecarStore` is synchronous, runs with a
tenant's role and can do four things only. Neither keeps session state, so both work through PgBouncer in transaction
mode. Connections are in autocommit, so each method is one transaction.

Every method raises DatabaseUnavailableError, DatabaseRefusedError or SchemaMissingError where the database can't
answer (`leasedjob.lease.database.classify`).
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from psycopg.rows import DictRow, args_row, dict_row

from leasedjob.errors import DatabaseRefusedError, DatabaseUnavailableError, SchemaMissingError
from leasedjob.identity import JobSchedulerType, RunIdentity
from leasedjob.lease import jsonsafe
from leasedjob.lease.clusters import CordonAnswer, ForgetAnswer, Greeting, Identity, KnownCluster, Standing
from leasedjob.lease.database import Connections, FaultKind, translated, within
from leasedjob.lease.holder import SidecarStore as SidecarStore
from leasedjob.lease.rows import (
    DEFAULT_BACKOFF,
    Asked,
    AuditLine,
    BackfillState,
    BackfillStep,
    ClaimRequest,
    ClaimResult,
    ClaimVerdict,
    CodeState,
    JobSchedulerStatus,
    LedgerEntry,
    Outcome,
    Passed,
    Recorded,
    Registered,
    RegisteredBy,
    Registration,
    Released,
    Run,
    Suspension,
    Transition,
    TransitionKind,
)
from leasedjob.lease.statements import statement
from leasedjob.protocol import PhaseEnd

if TYPE_CHECKING:
    from leasedjob.schedule.due import TickRange
    from leasedjob.schedule.inforce import InForce

Observer = Callable[[str, float, str], None]


class OperatorStore:
    """The operator's side.

    Args:
        connection: gives a connection for one statement: a pool's `connection`
            (`database.operator_pool`), or `database.connections(credentials)`.
        timeout: seconds that one statement may take, connecting included; default 30.
        observe: told of each statement: its name, the seconds that it took, and the FaultKind that it failed with or
            "". A lock that somebody else holds is no failure.
    """

    def __init__(self, connection: Connections, *, timeout: float = 30.0, observe: Observer | None = None) -> None:
        self._connection = connection
        self._timeout = timeout
        self._observe = observe

    @contextlib.contextmanager
    def _talking(self, name: str) -> Iterator[None]:
        """Around one statement: its faults are LeasedJob's own, and somebody is told of it."""
        began, fault = time.monotonic(), ""
        try:
            with translated():
                yield
        except (DatabaseUnavailableError, DatabaseRefusedError) as e:
            fault = "" if e.kind == FaultKind.BUSY else str(e.kind)
            raise
        except SchemaMissingError:
            fault = str(FaultKind.MISSING_SCHEMA)
            raise
        finally:
            if self._observe is not None:
                self._observe(name, time.monotonic() - began, fault)

    async def _rows(self, name: str, **parameters: Any) -> list[DictRow]:
        with self._talking(name):
            async with (
                within(self._timeout, self._connection, name) as connection,
                connection.cursor(row_factory=dict_row) as cursor,
            ):
                await cursor.execute(statement(name), parameters)
                return await cursor.fetchall()

    async def _value(self, name: str, **parameters: Any) -> Any:
        (row,) = await self._rows(name, **parameters)
        (value,) = row.values()
        return value

    async def check_schema(self) -> None:
        """Nothing if this version can work with the database's schema.

        Raises:
            SchemaMissingError, MigrationChangedError, SchemaAheadError: see `leasedjob.lease.migrate.check`.
        """
        from leasedjob.lease.migrate import check_async  # not the sidecar's concern, which starts with every run

        with self._talking("check_schema"):
            async with within(self._timeout, self._connection, "for its schema") as connection:
                await check_async(connection)

    # --- registration --------------------------------------------------------------------------------------------

    async def register_jobs(
        self, cluster: str, jobs: Sequence[Registration], passed: Mapping[str, Passed] | None = None
    ) -> list[Registered]:
        """Registers or refreshes these jobs; one answer per job, in the order given.

        Of several jobs with one code the first counts. What it does to the watermark: a new code begins at its
        object's creation; an edit of the schedule, or a resume, moves it to now; an object created anew moves it to
        its creation. It never moves back, and stays while another cluster has the code active. Whether or not it moves,
        ticks of a schedule count from when it came into force (`CodeState.schedules`).

        Args:
            passed: by code, the ticks that an edit, a resume or a new object leaves behind; busy where they were
                computed from an older watermark or other schedules, or where they are needed and missing.
        """
        if not jobs:
            return []
        raw = [
            {
                "ordinal": ordinal,
                "code": job.code,
                "uid": job.uid,
                "namespace": job.namespace,
                "name": job.name,
                "created_at": job.created_at.isoformat(),
                "schedule_hash": job.schedule_hash,
                "spec_hash": job.spec_hash,
                "policy": job.policy,
                "suspended": job.suspended,
                "schedule": None if job.schedule is None else json.loads(job.schedule),
                **_passed_json((passed or {}).get(job.code)),
            }
            for ordinal, job in enumerate(jobs)
        ]
        rows = await self._rows("register_jobs", cluster=cluster, jobs=json.dumps(raw))
        by_code = {row["code"]: Registered(**row) for row in rows}
        return [by_code[job.code] for job in jobs]

    async def unregister_objects(self, cluster: str, objects: Mapping[str, str]) -> set[str]:
        """Forgets objects of this cluster; the codes that are done (the others were busy: ask again).

        Their unadopted claims are given back, and where no other cluster has the code, no run gets another attempt. A
        code that is registered for another object by now is left alone, and done.

        Args:
            objects: the uid of the object that is gone, by code.
        """
        if not objects:
            return set()
        codes = sorted(objects)
        uids = [objects[code] for code in codes]
        return set(await self._value("unregister_objects", cluster=cluster, codes=codes, uids=uids))

    # --- claims --------------------------------------------------------------------------------------------------

    async def claim_runs(self, cluster: str, requests: Sequence[ClaimRequest]) -> list[ClaimResult]:
        """Asks for all these runs in one round trip; one answer per request, in the order given.

        Ticks that a person asks for by name take a round trip more: what the watermark says of the others, only the
        marks of retention say of them.
        """
        if not requests:
            return []
        pruned = await self._pruned([r.identity for r in requests if r.manual and r.tick is not None])
        asked = [r for r in requests if not (r.manual and r.identity in pruned)]
        answers = iter(await self._claim(cluster, asked) if asked else ())
        return [pruned[r.identity] if r.manual and r.identity in pruned else next(answers) for r in requests]

    async def _claim(self, cluster: str, requests: Sequence[ClaimRequest]) -> list[ClaimResult]:
        with self._talking("claim_runs"):
            async with (
                within(self._timeout, self._connection, "claim_runs") as connection,
                connection.cursor(row_factory=args_row(_claim_result)) as cursor,
            ):
                await cursor.execute(statement("claim_runs"), {"cluster": cluster, **claims_document(requests)})
                answers = await cursor.fetchall()
        if answers:
            return answers
        now = await self.database_now()
        return [ClaimResult(verdict=ClaimVerdict.CORDONED, db_now=now) for _ in requests]

    async def _pruned(self, identities: Sequence[RunIdentity]) -> dict[RunIdentity, ClaimResult]:
        """Those of them whose time is pruned. (A mark that moves after this look is seen where the row is inserted.)"""
        if not identities:
            return {}
        rows = await self._rows(
            "pruned_keys",
            codes=[i.code for i in identities],
            run_keys=[i.run_key for i in identities],
            lock_keys=[i.lock_key for i in identities],
        )
        found = {row["lock_key"]: ClaimResult(verdict=ClaimVerdict.PRUNED, db_now=row["db_now"]) for row in rows}
        return {i: found[i.lock_key] for i in identities if i.lock_key in found}

    async def record_ticks(
        self, cluster: str, code: str, through: datetime, ranges: Sequence[TickRange], *, version: int | None = None
    ) -> Recorded:
        """Writes tick ranges to the ledger and moves the watermark to `through`, where nothing is to be claimed.

        Args:
            version: `CodeState.version` that the ranges were computed from; None: not judged.
        """
        written = json.dumps(_ranges_json(ranges))
        (row,) = await self._rows(
            "record_ticks", cluster=cluster, code=code, through=through, ranges=written, version=version
        )
        return Recorded(**row)

    async def record_suspended(
        self, cluster: str, code: str, through: datetime, ranges: Sequence[TickRange], *, version: int | None = None
    ) -> Recorded:
        """As `record_ticks`, for a suspended object: nothing where another cluster is active with the code."""
        written = json.dumps(_ranges_json(ranges))
        (row,) = await self._rows(
            "record_suspended", cluster=cluster, code=code, through=through, ranges=written, version=version
        )
        return Recorded(**row)

    # --- suspended after failures --------------------------------------------------------------------------------

    async def suspend_failing(self, cluster: str, code: str, limit: int) -> tuple[bool, bool]:
        """Suspends the schedule, in all clusters, if its last `limit` runs have failed.

        Runs that the schedule started count; what was cancelled, replaced or deleted has not failed.

        Returns:
            (busy, suspended): busy: ask again; suspended: by this call.
        """
        (row,) = await self._rows("suspend_failing", cluster=cluster, code=code, limit=limit)
        return bool(row["busy"]), bool(row["suspended"])

    async def resume_code(self, code: str, passed: Passed, asked: Asked) -> tuple[bool, bool, datetime | None]:
        """Ends a suspension after failures; ticks count from `passed.at`.

        Returns:
            (busy, resumed, watermark): busy: look again, and ask again; not resumed: it was not suspended.
        """
        (row,) = await self._rows(
            "resume_code",
            code=code,
            at=passed.at,
            ranges=json.dumps(_ranges_json(passed.ranges)),
            version=passed.version,
            audit=_audit_json(asked),
        )
        return bool(row["busy"]), bool(row["resumed"]), row["watermark"]

    # --- what a person does to a run -----------------------------------------------------------------------------

    async def cancel_run(self, id: UUID, *, reason: str, asked: Asked) -> bool:
        """As `request_stop` of one run, with an audit line; False: locked elsewhere, ask again."""
        return bool(await self._value("cancel_run", id=id, reason=reason, audit=_audit_json(asked)))

    async def release_run(self, id: UUID, attempt: int, *, force: bool, asked: Asked) -> Released:
        """Takes the lease away from an attempt, so that the next one may begin; see Released.

        Args:
            force: somebody has made sure that the workload has stopped: the lease ends at once.

        Raises:
            DatabaseUnavailableError: with kind "busy" where the row is locked elsewhere: ask again.
        """
        did = await self._value("release_run", id=id, attempt=attempt, force=force, audit=_audit_json(asked))
        return Released(did)

    async def forget_run(self, id: UUID, *, asked: Asked) -> bool:
        """Forgets that a run has failed: claimable at once, its failures counted from zero. False: it is no FAIL.

        Raises:
            DatabaseUnavailableError: with kind "busy" where the row is locked elsewhere: ask again.
        """
        return bool(await self._value("forget_run", id=id, audit=_audit_json(asked)))

    async def write_audit(self, id: UUID, did: str, *, asked: Asked) -> None:
        """An audit line about a run, for what was not done by one of the above; once for each request."""
        await self._rows("write_audit", id=id, did=did, audit=_audit_json(asked))

    async def audit(self, code: str, *, limit: int = 100) -> list[AuditLine]:
        """What was done to runs of the code because somebody asked for it, newest first."""
        return [AuditLine(**row) for row in await self._rows("audit", code=code, limit=limit)]

    # --- backfills -----------------------------------------------------------------------------------------------

    async def begin_backfill(
        self, cluster: str, uid: str, code: str, *, through: datetime, ticks: int, planned: int
    ) -> None:
        """Remembers the plan of a backfill; nothing if another replica has. `through`: before its first tick."""
        with self._talking("begin_backfill"):
            async with within(self._timeout, self._connection, "begin_backfill") as connection:
                await connection.execute(
                    statement("begin_backfill"),
                    {
                        "cluster": cluster,
                        "uid": uid,
                        "code": code,
                        "through": through,
                        "ticks": ticks,
                        "planned": planned,
                    },
                )

    async def look_at_backfill(self, uid: str) -> BackfillState | None:
        """How far a backfill is; None if it has not been planned."""
        for row in await self._rows("look_at_backfill", uid=uid):
            active = tuple(zip(row.pop("ids"), row.pop("run_keys"), strict=True))
            return BackfillState(active=active, **row)
        return None

    async def step_backfill(
        self,
        cluster: str,
        uid: str,
        *,
        after: datetime,
        through: datetime,
        skipped: int,
        limit: int,
        request: ClaimRequest | None,
    ) -> tuple[BackfillStep, ClaimResult | None]:
        """Goes on from `after` to `through`: `skipped` ticks are left as they are, and a run of the last is asked for.

        Args:
            limit: how many runs of the backfill may be active.
            request: None: no run. Its tick is `through`.

        Returns:
            the claim's answer where one was asked for; only CLAIMED has moved the backfill on.
        """
        asked = None if request is None else json.dumps(_claim_json(0, request))
        arguments = {"cluster": cluster, "uid": uid, "from": after, "through": through, "skipped": skipped}
        rows = await self._rows("step_backfill", limit=limit, request=asked, **arguments)
        if not rows:  # the cluster takes no new runs
            return BackfillStep.BUSY, None
        (row,) = rows
        step = BackfillStep(row.pop("said"))
        return step, _claim_result(**row) if step is BackfillStep.ASKED else None

    async def renew_claims(self, cluster: str, ids: Collection[UUID]) -> set[UUID]:
        """Extends unadopted claims of this cluster; the ids that were extended."""
        return set(await self._value("renew_claims", cluster=cluster, ids=list(ids))) if ids else set()

    async def release_claim(self, id: UUID, claim_token: UUID, *, reason: str, retry_ms: int | None = 0) -> bool:
        """Gives an unadopted claim back: FAIL `{released: true}`, claimable again after `retry_ms` (None: never).

        False: it is no longer an unadopted claim with this token.

        Raises:
            DatabaseUnavailableError: with kind "busy" where the row is locked elsewhere: ask again.
        """
        return bool(await self._value("release_claim", id=id, token=claim_token, reason=reason, retry_ms=retry_ms))

    # --- ends ----------------------------------------------------------------------------------------------------

    async def end_attempt(
        self,
        id: UUID,
        attempt: int,
        pod_uid: str | None,
        outcome: Outcome,
        *,
        counts: bool,
        reason: str,
        retry_ms: int | None = DEFAULT_BACKOFF,
        data: Mapping[str, Any] | None = None,
    ) -> bool:
        """Records how an attempt ended; True if this call changed the row.

        Accepted after expiry as long as nobody reclaimed. No further attempt follows where a stop was requested or
        the code isn't registered any more, whatever `retry_ms` says.

        Args:
            pod_uid: the Pod that holds the lease; None for a claim that no Pod adopted.
            counts: a failure counts against the backoff limit; anything else of an adopted attempt that isn't
                COMPLETE counts as an interruption.
            retry_ms: milliseconds until the next attempt; None: no more; DEFAULT_BACKOFF: the run's own rule.
            data: kept with the row, at most 256 KiB (`jsonsafe`).

        Raises:
            DatabaseUnavailableError: with kind "busy" where the row is locked elsewhere: ask again.
        """
        return bool(
            await self._value(
                "end_attempt",
                id=id,
                attempt=attempt,
                pod_uid=pod_uid,
                outcome=outcome.value,
                counts=counts,
                retry_ms=retry_ms,
                reason=jsonsafe.text(reason),
                data=None if data is None else jsonsafe.dumps(data),
            )
        )

    async def request_stop(self, ids: Collection[UUID], *, reason: str) -> set[UUID]:
        """Asks RUNNING runs to stop for good (cancelled or replaced): their sidecars see it at the next heartbeat.

        However such an attempt then ends, there is no further one. An unadopted claim ends at once, and a run that
        waits for its retry gets none. The ids that are stopping or have ended are returned; others were locked
        elsewhere: ask again.
        """
        return set(await self._value("request_stop", ids=list(ids), reason=reason)) if ids else set()

    # --- what is there -------------------------------------------------------------------------------------------

    async def active_rows(self, cluster: str) -> list[Run]:
        """Every non-terminal row (RUNNING, or FAIL with a retry left) of codes that this cluster registered."""
        return [_run(row, cluster) for row in await self._rows("active_rows", cluster=cluster)]

    async def changed_since(self, cluster: str, since: datetime) -> list[Run]:
        """Rows of registered codes with `changed_at` >= since, oldest change first.

        Transactions may commit in another order than they read the clock: ask with an overlap of some seconds. As in
        the other lists, data of more than 4 KiB reads `{"truncated": true}`; `runs_by_id` has it whole.
        """
        return [_run(row, cluster) for row in await self._rows("changed_since", cluster=cluster, since=since)]

    async def recent_runs(self, cluster: str, codes: Collection[str], limit: int) -> dict[str, list[Run]]:
        """The last `limit` rows of each code, newest first; `cluster` only decides `held_here`."""
        found: dict[str, list[Run]] = {code: [] for code in codes}
        if found:
            for row in await self._rows("recent_runs", codes=list(found), limit=limit):
                found[row["code"]].append(_run(row, cluster))
        return found

    async def runs_by_id(self, cluster: str, ids: Collection[UUID]) -> dict[UUID, Run]:
        """These rows, where they exist; `cluster` only decides `held_here`."""
        return {row["id"]: _run(row, cluster) for row in await self._rows("runs_by_id", ids=list(ids))} if ids else {}

    async def ledger(self, code: str, *, limit: int = 100) -> list[LedgerEntry]:
        """What did not run, newest first."""
        rows = await self._rows("ledger", code=code, limit=limit)
        return [LedgerEntry(count_is_exact=row.pop("exact"), **row) for row in rows]

    async def ledger_at(self, code: str, at: datetime) -> LedgerEntry | None:
        """The range of the ledger that this instant is in, if there is one."""
        for row in await self._rows("ledger_at", code=code, at=at):
            return LedgerEntry(count_is_exact=row.pop("exact"), **row)
        return None

    async def schedules_at(self, code: str, at: datetime) -> tuple[InForce, ...]:
        """The schedules of the code that were in force at that instant, as far as that is still known."""
        return tuple(_in_force(row) for row in await self._rows("schedules_at", code=code, at=at))

    async def runs_by_key(self, cluster: str, lock_keys: Collection[str]) -> dict[str, Run]:
        """The rows of these lock keys, where they exist; `cluster` only decides `held_here`."""
        if not lock_keys:
            return {}
        rows = await self._rows("runs_by_key", lock_keys=list(lock_keys))
        return {row["lock_key"]: _run(row, cluster) for row in rows}

    async def code_states(self, cluster: str, codes: Collection[str], *, ranges: int = 10) -> dict[str, CodeState]:
        """What is known of these codes, with the latest `ranges` of their ledgers; unknown codes are left out."""
        if not codes:
            return {}
        rows = await self._rows("code_states", cluster=cluster, codes=list(codes), limit=ranges)
        return {row["code"]: _code_state(row) for row in rows}

    async def codes_with_news(self, cluster: str, since: datetime) -> dict[str, datetime]:
        """Codes of this cluster whose ledger or suspension changed at or after `since`, and when it did."""
        return {row["code"]: row["at"] for row in await self._rows("codes_with_news", cluster=cluster, since=since)}

    # --- clusters ------------------------------------------------------------------------------------------------

    async def greet_cluster(
        self, identity: Identity, *, version: str, by_values: bool, new: bool, take_over: str = ""
    ) -> Greeting:
        """Says who an operator is; see the function in the database.

        Args:
            by_values: its release's values cordon the cluster.
            new: the process has just started.
            take_over: the UID of a cluster whose name is taken over however lately it was seen.
        """
        (row,) = await self._rows(
            "greet_cluster",
            cluster=identity.cluster,
            uid=identity.uid,
            release=identity.release,
            version=version,
            by_values=by_values,
            new=new,
            take_over=take_over,
        )
        return Greeting(verdict=Standing(row.pop("verdict")), **row)

    async def cordon_cluster(self, name: str, cordon: bool, *, reason: str, asked: Asked) -> CordonAnswer:
        """The cluster takes no new runs, or takes them again."""
        audit = _audit_json(asked)
        (row,) = await self._rows(
            "cordon_cluster", cluster=name, cordon=cordon, reason=jsonsafe.text(reason), audit=audit
        )
        return CordonAnswer(**row)

    async def forget_cluster(self, name: str, *, silence: timedelta, reason: str, asked: Asked) -> ForgetAnswer:
        """A cluster that is gone for good counts no more, neither by its schedules nor by its policy; as if its objects
        had been deleted.

        Args:
            silence: for how long it must not have been seen.
        """
        (row,) = await self._rows(
            "forget_cluster", cluster=name, silence=silence, reason=jsonsafe.text(reason), audit=_audit_json(asked)
        )
        return ForgetAnswer(**row)

    async def known_clusters(self) -> list[KnownCluster]:
        """The clusters that have worked on this database, by name."""
        return [KnownCluster(**row) for row in await self._rows("known_clusters")]

    # --- for people to look at -----------------------------------------------------------------------------------

    async def held_leases(self, cluster: str, *, limit: int) -> tuple[list[Run], int]:
        """RUNNING rows of all clusters and of the library, those whose leases end first; and how many there are in all.
        `cluster` only decides `held_here`."""
        rows = await self._rows("held_leases", limit=limit)
        return [_run(row, cluster) for row in rows], rows[0]["total"] if rows else 0

    async def runs_since(self, cluster: str, since: datetime, *, limit: int) -> list[Run]:
        """Rows of all clusters with `changed_at` >= since, the latest change first; `cluster` only decides
        `held_here`."""
        return [_run(row, cluster) for row in await self._rows("runs_since", since=since, limit=limit)]

    async def registered_by(self, code: str) -> list[RegisteredBy]:
        """Which clusters have registered the code, by name."""
        return [RegisteredBy(**row) for row in await self._rows("registered_by", code=code)]

    async def take_shutdown_reports(self, cluster: str, *, limit: int = 500) -> list[tuple[PhaseEnd, ...]]:
        """How programs of this cluster's Pods have stopped; each is given to one caller, once. What can't be read is
        left out."""
        found = []
        for row in await self._rows("take_shutdown_reports", cluster=cluster, limit=limit):
            with contextlib.suppress(ValueError):  # a tenant's role writes them
                found.append(PhaseEnd.parse(row["phases"]))
        return found

    async def take_transitions(
        self, cluster: str, *, limit: int = 500, apart: timedelta = timedelta(seconds=7)
    ) -> list[Transition]:
        """What has become of runs that this cluster holds; each is given to one caller, once, in order.

        Args:
            apart: for how long after a start whatever follows it for the same run is left in place: for whoever took
                the start.
        """
        rows = await self._rows("take_transitions", cluster=cluster, limit=limit, apart=apart)
        return [_transition(row) for row in rows]

    async def database_now(self) -> datetime:
        """The database's clock."""
        now: datetime = await self._value("database_now")
        return now

    async def registrations(self, cluster: str) -> dict[str, tuple[str, str]]:
        """The codes that this cluster registered, each with the namespace and the uid of its object."""
        rows = await self._rows("registrations", cluster=cluster)
        return {row["code"]: (row["namespace"], row["uid"]) for row in rows}


# --- between rows and values -----------------------------------------------------------------------------------------

_VERDICTS = {verdict.value: verdict for verdict in ClaimVerdict}


def _claim_result(
    ordinal: int,
    verdict: str,
    id: UUID | None,
    owner_token: UUID | None,
    attempt: int | None,
    fencing_token: int | None,
    expires_at: datetime | None,
    db_now: datetime,
    watermark: datetime | None,
    reason: str,
    retry_at: datetime | None,
) -> ClaimResult:
    return ClaimResult(
        verdict=_VERDICTS[verdict],
        db_now=db_now,
        id=id,
        owner_token=owner_token,
        attempt=attempt,
        fencing_token=fencing_token,
        expires_at=expires_at,
        watermark=watermark,
        reason=reason,
        retry_at=retry_at,
    )


def _ranges_json(ranges: Sequence[TickRange]) -> list[dict[str, Any]]:
    return [
        {
            "first": item.first.isoformat(),
            "last": item.last.isoformat(),
            "count": item.count,
            "exact": item.count_is_exact,
            "kind": item.reason.kind,
            "reason": str(item.reason),
        }
        for item in ranges
    ]


def _passed_json(passed: Passed | None) -> dict[str, Any]:
    if passed is None:
        return {}
    return {
        "passed_at": passed.at.isoformat(),
        "passed": _ranges_json(passed.ranges),
        "version": passed.version,
    }


def _audit_json(asked: Asked) -> str:
    return json.dumps(
        {
            "cluster": asked.cluster,
            "action": asked.action,
            "asked_by": asked.by,
            "request": asked.request,
            "why": jsonsafe.text(asked.why),
        }
    )


def _code_state(row: DictRow) -> CodeState:
    since, by = row.pop("suspended_at"), row.pop("suspended_by")
    runs, reason = row.pop("suspended_runs"), row.pop("suspended_reason")
    return CodeState(
        suspension=None if since is None else Suspension(since=since, by=by, runs=runs, reason=reason),
        counts=row.pop("counts") or {},
        ledger=tuple(_ledger_entry(entry) for entry in row.pop("ledger") or ()),
        schedules=tuple(_in_force(entry) for entry in row.pop("schedules") or ()),
        **row,
    )


def _in_force(raw: Mapping[str, Any]) -> InForce:
    """A row of code_schedule, as JSON or as it is."""
    from leasedjob.schedule.inforce import InForce  # not the sidecar's concern, which starts with every run

    since, until = (datetime.fromisoformat(t) if isinstance(t, str) else t for t in (raw["since"], raw["until"]))
    text = None if raw["schedule"] is None else json.dumps(raw["schedule"], sort_keys=True)
    return InForce.of(raw["schedule_hash"], text, raw["code"], since, until)


def _ledger_entry(raw: Mapping[str, Any]) -> LedgerEntry:
    """One that the database gave as JSON."""
    return LedgerEntry(
        code=raw["code"],
        first=datetime.fromisoformat(raw["first"]),
        last=datetime.fromisoformat(raw["last"]),
        count=raw["count"],
        count_is_exact=raw["exact"],
        kind=raw["kind"],
        reason=raw["reason"],
        decided_by=raw["decided_by"],
        decided_at=datetime.fromisoformat(raw["decided_at"]),
    )


def _transition(row: DictRow) -> Transition:
    values = {name: row[name] for name in Transition.__dataclass_fields__ if name not in ("kind", "outcome")}
    outcome = None if row["outcome"] is None else Outcome(row["outcome"])
    return Transition(kind=TransitionKind(row["kind"]), outcome=outcome, **values)


# What the requests of one tick mostly have in common.
_COMMON: Final = attrgetter(
    "identity.type",
    "identity.run_key",
    "tick",
    "namespace",
    "tenant",
    "lease_ms",
    "run_lease_ms",
    "on_overlap",
    "starting_deadline_ms",
    "backoff_limit",
    "interruption_limit",
    "manual",
    "reopen",
    "dropped",
)


def claims_document(requests: Sequence[ClaimRequest]) -> dict[str, str]:
    """What `claim_runs` is asked, as JSON: what a request is unless it says otherwise, and the requests."""
    shared, common = _claim_json(0, requests[0]), _COMMON(requests[0])
    each = [
        _own_json(ordinal, request)
        if _COMMON(request) == common
        else {name: value for name, value in _claim_json(ordinal, request).items() if value != shared[name]}
        for ordinal, request in enumerate(requests)
    ]
    return {"shared": json.dumps(shared), "requests": json.dumps(each)}


def _own_json(ordinal: int, request: ClaimRequest) -> dict[str, Any]:
    return {
        "ordinal": ordinal,
        "code": request.identity.code,
        "lock_key": request.identity.lock_key,
        "name": request.name,
        "job_name": request.job_name,
        "job_uid": request.job_uid,
        "version": request.version,
    }


def _claim_json(ordinal: int, request: ClaimRequest) -> dict[str, Any]:
    return {
        **_own_json(ordinal, request),
        "type": request.identity.type.value,
        "run_key": request.identity.run_key,
        "tick": None if request.tick is None else request.tick.isoformat(),
        "namespace": request.namespace,
        "tenant": request.tenant,
        "lease_ms": request.lease_ms,
        "run_lease_ms": request.run_lease_ms,
        "on_overlap": request.on_overlap.value,
        "starting_deadline_ms": request.starting_deadline_ms,
        "backoff_limit": request.backoff_limit,
        "interruption_limit": request.interruption_limit,
        "manual": request.manual,
        "reopen": request.reopen,
        "dropped": _ranges_json(request.dropped),
    }


def _run(row: DictRow, cluster: str) -> Run:
    status = JobSchedulerStatus(row["status"])
    try:
        expires_at = row["modified_at"] + timedelta(milliseconds=row["lease_ms"])
    except OverflowError:  # a lease beyond the year 9999
        expires_at = datetime.max.replace(tzinfo=UTC)
    running = status is JobSchedulerStatus.RUNNING
    return Run(
        identity=RunIdentity(JobSchedulerType(row["type"]), row["code"], row["run_key"]),
        status=status,
        outcome=None if row["outcome"] is None else Outcome(row["outcome"]),
        claim_token=row["owner_token"] if running and row["pod_uid"] is None else None,
        expires_at=expires_at,
        held_here=running and row["cluster"] == cluster and expires_at >= row["db_now"],
        **{name: row[name] for name in _RUN_FIELDS},
    )


# The fields of Run that are columns under the same name.
_RUN_FIELDS = tuple(
    name
    for name in Run.__dataclass_fields__
    if name not in {"identity", "status", "outcome", "claim_token", "expires_at", "held_here"}
)
