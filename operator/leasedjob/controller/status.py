"""What `kubectl get leasedjobs` shows. It follows from rows, Pods and spec; it decides nothing.

One write per reconcile, only where something changed, under the resource version that it was computed for. A replica
whose rows are older than what stands there already doesn't write.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, Final, assert_never

from pydantic.alias_generators import to_camel

from leasedjob.api.structural import Shape
from leasedjob.api.v1alpha1 import (
    MAX_RANGES,
    MAX_RUNS,
    Condition,
    ConditionStatus,
    LeasedJobStatus,
    RunOutcome,
    RunStatus,
)
from leasedjob.controller import manual
from leasedjob.controller.cache import Entry
from leasedjob.controller.clock import DatabaseClock
from leasedjob.controller.conditions import condition
from leasedjob.controller.decide import manual_waits
from leasedjob.controller.explain import ledger_range
from leasedjob.controller.facts import PodFacts, parse_time
from leasedjob.controller.kube import Kube, KubeError
from leasedjob.controller.model import JobView, Policy
from leasedjob.controller.outcome import REPORTED, reported_error, waiting_reason
from leasedjob.identity import JobSchedulerType
from leasedjob.lease.rows import REASON_AFTER_FAILURES, REASON_RESTORED, CodeState, JobSchedulerStatus, Run, Suspension
from leasedjob.lease.trust import Timing

Json = Mapping[str, Any]
RUNS_SHOWN: Final = MAX_RUNS
READY: Final = "Ready"
SPEC_DIFFERS: Final = "SpecDiffers"
CORDONED: Final = "Cordoned"
CLUSTER_CORDONED: Final = "ClusterCordoned"  # its reason
OWN_CONDITIONS: Final = (READY, SPEC_DIFFERS, CORDONED)
PREVIEW: Final = 5
INSIST_AFTER: Final = (1.0, 300.0)  # seconds before the same is said again, first and longest
WRITES: Final = 16  # at a time: a Pod that is to be created meanwhile need not queue behind all of them
UNREAD: Final = timedelta(seconds=60)  # rows are read each second; what is older and missing is gone


class ReadyReason(StrEnum):
    """Reasons of the condition Ready, beside those of `leasedjob.api.problem.Reason`."""

    ACCEPTED = "Accepted"
    SUSPENDED = "Suspended"
    CODE_CONFLICT = "CodeConflict"
    AFTER_FAILURES = REASON_AFTER_FAILURES


def outcome_of(run: Run) -> RunOutcome:
    """One word for a person."""
    match run.status:
        case JobSchedulerStatus.SUCCESS:
            return RunOutcome.SUCCESS
        case JobSchedulerStatus.RUNNING:
            return RunOutcome.RUNNING if run.pod_uid else RunOutcome.PENDING
        case JobSchedulerStatus.FAIL:
            if run.retry_at is not None:
                return RunOutcome.RETRYING
            return RunOutcome(run.stopped_as) if run.stopped_as else RunOutcome.FAILED
        case _:
            assert_never(run.status)


def run_status(run: Run, pod: PodFacts | None) -> RunStatus:
    """One run as it is shown."""
    reason, _, message = run.reason.partition(": ")
    outcome = outcome_of(run)
    if run.status is JobSchedulerStatus.FAIL and not reason:  # an operator always gives one
        reason, message = REPORTED, reported_error(run.data)
    if run.status is JobSchedulerStatus.RUNNING:
        reason = message = ""
        if pod is not None and not pod.workload_complete:
            outcome = RunOutcome.PENDING
            reason, message = waiting_reason(pod)
    return RunStatus(
        run_key=run.identity.run_key or "",
        attempt=run.attempt,
        outcome=outcome,
        reason=reason or None,
        message=message or None,
        holder=run.holder or run.cluster or None,
        pod_name=run.pod_name or (pod.name if pod else None),
        scheduled_time=run.tick,
        start_time=run.started_at,
        completion_time=None if run.status is JobSchedulerStatus.RUNNING else run.finished_at,
    )


def _latest(old: Json, field: str, times: Iterable[datetime | None]) -> datetime | None:
    """The latest of these times; never earlier than what stands there already."""
    return max((t for t in (*times, parse_time(old.get(field))) if t is not None), default=None)


def job_status(entry: Entry, view: JobView, conflict: Entry | None) -> dict[str, Any]:
    """The whole status of a LeasedJob."""
    old: Json = entry.body.get("status") or {}
    generation = int(entry.body["metadata"].get("generation") or 1)
    newest = sorted(view.rows.values(), key=lambda r: (r.tick or r.created_at, r.created_at), reverse=True)
    active = [r for r in newest if not r.terminal]
    shown = (active + [r for r in newest if r.terminal])[:RUNS_SHOWN]
    pods = {(p.lease_id, p.attempt): p for p in view.pods}
    runs = {r.id: run_status(r, pods.get((str(r.id), r.attempt))) for r in shown}
    held = [r for r in active if r.status is JobSchedulerStatus.RUNNING]
    last = newest[0] if newest else None
    holder = held[0] if held else last
    policy = entry.policy
    suspended = view.suspended or (policy is not None and policy.suspend)
    scheduled = policy and policy.schedule and not suspended and entry.problem is None and conflict is None
    ahead = list(policy.schedule.ahead(view.now, PREVIEW)) if scheduled and policy and policy.schedule else []
    successes = [r.finished_at for r in newest if r.status is JobSchedulerStatus.SUCCESS]
    failures = [r.finished_at for r in newest if r.status is JobSchedulerStatus.FAIL and not r.stopped_as]
    status = LeasedJobStatus(
        observed_generation=generation,
        code=entry.code or None,
        conditions=_conditions(entry, old, conflict, generation, view.now, view.cordoned),
        next_schedule_time=ahead[0] if ahead else None,
        next_schedule_times=ahead or None,
        last_schedule_time=_latest(old, "lastScheduleTime", [r.tick for r in newest if not r.manual]),
        last_successful_time=_latest(old, "lastSuccessfulTime", successes),
        last_failure_time=_latest(old, "lastFailureTime", failures),
        last_result=(runs[last.id].outcome if last.id in runs else outcome_of(last)) if last else None,
        active_count=len(held),
        holder=(holder.holder or holder.cluster or None) if holder else None,
        active=[runs[r.id] for r in active if r.id in runs],
        recent_runs=[runs[r.id] for r in shown],
        **_not_run(entry.state, old),
    )
    whole = status.model_dump(mode="json", by_alias=True, exclude_none=True)
    # The list is a map by type: what another controller says in it stays.
    whole["conditions"] += [c for c in old.get("conditions") or [] if c.get("type") not in OWN_CONDITIONS]
    return with_what_others_know(old, whole)


def _not_run(state: CodeState | None, old: Json) -> dict[str, Any]:
    """Counts and ranges of ticks that did not run. Counts only ever grow, and what another replica has read since
    stays: ranges were deleted, or the code is another object's."""
    counts = {
        f"{kind}_ticks": (state.counts if state else {}).get(kind, 0) for kind in ("skipped", "missed", "dropped")
    }
    before = {name: int(old.get(to_camel(name)) or 0) for name in counts}
    found: dict[str, Any] = {name: max(counts[name], before[name]) or None for name in counts}
    if state is None or any(before[name] > counts[name] for name in counts):
        return {**found, "ledger": old.get("ledger")}
    return {**found, "ledger": [ledger_range(entry) for entry in state.ledger[:MAX_RANGES]] or None}


def after_failures(s: Suspension) -> str:
    """What the condition says of a suspension after failures."""
    return (
        f"{s.runs} failed runs in a row suspended the schedule, in every cluster with this code; the last: "
        f"{s.reason or 'a run without a reason'}. `kubectl leasedjob resume`, or a LeasedJobRun with action Resume, "
        "ends that"
    )


def with_what_others_know(old: Json, new: dict[str, Any]) -> dict[str, Any]:
    """`new`, and of `old` what only a later version of the operator can have written. While two versions work side by
    side they would else take it away and put it back for as long as that lasts."""
    for name in ("active", "recentRuns"):
        before = {(r.get("runKey"), r.get("attempt")): r for r in old.get(name) or []}
        for run in new.get(name) or []:
            theirs = before.get((run.get("runKey"), run.get("attempt"))) or {}
            run.update({k: v for k, v in theirs.items() if k not in _RUN_FIELDS})
    return {**new, **{k: v for k, v in old.items() if k not in _JOB_FIELDS}}


def gist(status: Json) -> bytes:
    """Tells statuses apart that differ in more than the times at which their conditions changed."""
    conditions = [{k: v for k, v in c.items() if k != "lastTransitionTime"} for c in status.get("conditions") or []]
    text = json.dumps({**status, "conditions": conditions}, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _wire_names(model: type[Shape]) -> frozenset[str]:
    return frozenset(f.alias or name for name, f in model.model_fields.items())


_JOB_FIELDS: Final = _wire_names(LeasedJobStatus)
_RUN_FIELDS: Final = _wire_names(RunStatus)


def _conditions(
    entry: Entry, old: Json, conflict: Entry | None, generation: int, now: datetime, cordoned: str
) -> list[Condition]:
    def of(kind: str, truth: bool, reason: str, message: str) -> Condition:
        return condition(
            old, kind, ConditionStatus.TRUE if truth else ConditionStatus.FALSE, reason, message, generation, now
        )

    if conflict is not None:
        message = f"code {entry.code} belongs to the older LeasedJob {conflict.namespace}/{conflict.name}"
        found = [of(READY, False, ReadyReason.CODE_CONFLICT, message)]
    elif entry.problem is not None:
        found = [of(READY, False, *entry.problem)]
    elif entry.state is not None and entry.state.suspension is not None:
        found = [of(READY, False, ReadyReason.AFTER_FAILURES, after_failures(entry.state.suspension))]
    elif entry.policy is not None and entry.policy.suspend:
        found = [of(READY, True, ReadyReason.SUSPENDED, "accepted; suspended, so no tick starts a run")]
    else:
        found = [of(READY, True, ReadyReason.ACCEPTED, "accepted and scheduled")]
    if entry.spec_differs:
        found.append(of(SPEC_DIFFERS, True, SPEC_DIFFERS, "another cluster has this code with another spec"))
    if cordoned:
        found.append(of(CORDONED, True, CLUSTER_CORDONED, cordoned))
    return found


def _progress(run: Json) -> tuple[int, int]:
    """How far a shown run is: an attempt's outcome only ever goes forward."""
    try:
        return run.get("attempt") or 0, RunOutcome(run.get("outcome") or "").progress
    except ValueError:  # a word of another version
        return run.get("attempt") or 0, 0


def behind(old: Json, new: Json, now: datetime) -> bool:
    """Whether `new` was computed from older rows than `old`: a run that stands there is further than here, or began a
    moment ago and has not been read here yet."""
    mine = {r.get("runKey"): r for r in new.get("recentRuns") or []}
    newest = max((t for r in mine.values() if (t := parse_time(r.get("startTime")))), default=None)
    for run in old.get("recentRuns") or []:
        other = mine.get(run.get("runKey"))
        if other is not None:
            # A database that was restored has really gone back, and says so.
            if _progress(run) > _progress(other) and other.get("reason") != REASON_RESTORED:
                return True
            continue
        began = parse_time(run.get("startTime"))
        if began is not None and (newest is None or began > newest) and abs(now - began) < UNREAD:
            return True
    return False


def waiting_of(run: Run | None, pods: Sequence[PodFacts]) -> tuple[str, str] | None:
    """Why the workload of a held run's Pod doesn't run yet; None if it does, or there is no such Pod."""
    if run is None or run.status is not JobSchedulerStatus.RUNNING:
        return None
    pod = next((p for p in pods if p.lease_id == str(run.id) and p.attempt == run.attempt), None)
    return None if pod is None or pod.finished or pod.workload_complete else waiting_reason(pod)


def _insists(entry: Entry, status: Json) -> bool:
    """Whether to wait before saying the same again: somebody, perhaps an operator of another version or with other
    settings, puts something else in its place each time, and two that insist would keep the API server busy."""
    if entry.said != gist(status):
        entry.contradicted = 0
        return False
    wait = min(INSIST_AFTER[1], INSIST_AFTER[0] * 2.0**entry.contradicted)
    if time.monotonic() - entry.said_at < wait:
        return True
    entry.contradicted += 1
    return False


class StatusWriter:
    """Writes statuses that differ from what stands there."""

    no_policy: Final = Policy(type=JobSchedulerType.SCHEDULE, timing=Timing(900, 60, 60, 10), suspend=True)

    def __init__(self, kube: Kube, clock: DatabaseClock) -> None:
        self._kube = kube
        self._clock = clock
        self._writes = asyncio.Semaphore(WRITES)

    async def write(self, entry: Entry, view: JobView, runs: Sequence[Json], conflict: Entry | None) -> bool:
        """Status of the LeasedJob, then of its LeasedJobRuns. False: one was changed elsewhere meanwhile; its event, or
        another look, leads to the next try."""
        settled = True
        status = job_status(entry, view, conflict)
        old: Json = entry.body.get("status") or {}
        if status != old and not behind(old, status, view.now):
            if _insists(entry, status):
                settled = False
            else:
                body, settled = await self._patch("leasedjobs", entry.body, status, old)
                if body is not None:
                    entry.renew(body)
                    entry.said, entry.said_at = gist(status), time.monotonic()
                    settled &= entry.generation >= 0
        problem = f"LeasedJob {entry.name} is not Ready" if entry.problem or conflict else ""
        waits = ""
        if not problem and view.cordoned:
            waits = f"{manual.RequestReason.CORDONED}: {view.cordoned}"
        elif not problem and manual_waits(view):
            waits = manual.note_of(manual.RequestReason.OVERLAP)
        runs = [body for body in runs if manual.asks_for_one_run(body)]
        rows = {r.lock_key: r for r in view.rows.values()}
        requests = {r.uid: r for r in manual.requests(entry.code, runs, entry.policy)}
        entry.started &= requests.keys()
        for body in runs:
            request = requests.get(body["metadata"]["uid"])
            key = request.lock_key if request else ""
            note = (request.refusal if request else "") or entry.notes.get(key, "") or waits
            waiting = waiting_of(rows.get(key), view.pods)
            mine = request is not None and request.uid in entry.started
            settled &= await self.write_run(body, entry.code, rows.get(key), problem, note, waiting, mine)
        return settled

    async def write_run(
        self,
        body: Json,
        code: str,
        run: Run | None,
        problem: str,
        note: str = "",
        waiting: tuple[str, str] | None = None,
        mine: bool = False,
    ) -> bool:
        """Status of one LeasedJobRun; see `manual.status`. False as for `write`."""
        if manual.phase_of(body) in manual.FINAL:
            return True
        now = self._clock.now()
        status = manual.status(
            body, code=code, run=run, problem=problem, note=note, now=now, waiting=waiting, mine=mine
        )
        before: Json = body.get("status") or {}
        if status != before and not manual.behind(before, status):
            _, settled = await self._patch("leasedjobruns", body, status, before)
            return settled
        return True

    async def write_answer(self, body: Json, status: dict[str, Any]) -> bool:
        """Status of one LeasedJobRun that asks for something else than a run. False as for `write`."""
        before: Json = body.get("status") or {}
        if status == before:
            return True
        _, settled = await self._patch("leasedjobruns", body, status, before)
        return settled

    async def _patch(self, plural: str, body: Json, status: dict[str, Any], old: Json) -> tuple[Json | None, bool]:
        """A merge patch only adds and replaces, so what is no longer true is set to null.

        The new body, None if nothing was written; False if the object was changed meanwhile.
        """
        meta = body["metadata"]
        patch = {**{k: None for k in old if k not in status}, **status}
        try:
            async with self._writes:
                written = await self._kube.patch_status(
                    plural, meta["namespace"], meta["name"], patch, meta.get("resourceVersion", "")
                )
        except KubeError as e:
            if e.status in (404, 409):
                return None, e.status == 404
            raise
        return written, True
