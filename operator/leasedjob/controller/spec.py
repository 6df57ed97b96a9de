"""From a LeasedJob's object to what decisions are made from, once for each generation of its spec."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Final

from leasedjob import __version__
from leasedjob.api import deep
from leasedjob.api.fields import unknown_in_spec
from leasedjob.api.problem import Problem, Reason, reason_for
from leasedjob.api.v1alpha1 import LeasedJobSpec, MonitoringSpec, parse_job
from leasedjob.controller import own
from leasedjob.controller.cache import Entry, Packed
from leasedjob.controller.model import Monitoring, Policy
from leasedjob.controller.settings import Settings
from leasedjob.errors import InvalidJobIdentityOptionsError, InvalidScheduleError
from leasedjob.identity import JobSchedulerType, RunIdentity, job_code
from leasedjob.lease.rows import Registration
from leasedjob.schedule import written

UNKNOWN_FIELD: Final = "UnknownField"


def _hash(*parts: Any) -> str:
    text = json.dumps(parts, sort_keys=True, default=str, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _schedule_hash(spec: LeasedJobSpec) -> str:
    """Changes with the instants that are ticks, and so moves the watermark. Jitter moves none of them: a tick whose
    start is still to come would be lost."""
    own = spec.schedule, spec.time_zone, spec.clock_change_policy
    later = spec.schedules, spec.not_before, spec.not_after
    # As before those fields existed, so that an upgrade moves no watermark.
    return _hash(*own) if later == (None, None, None) else _hash(*own, *later)


def derive(entry: Entry, settings: Settings) -> None:
    """Fills in the entry's derived fields if its spec has changed."""
    generation = int(entry.body["metadata"].get("generation") or 1)
    if entry.generation == generation:
        return
    entry.generation = generation
    entry.problem, entry.warning = None, ""
    stored = entry.body.get("spec")
    spec: Any = stored.whole if isinstance(stored, Packed) else stored
    if deep.too_deep(spec, deep.MAX_LEVELS):
        entry.policy = entry.registration = None
        text = f"is nested more than {deep.MAX_LEVELS} levels deep"
        entry.problem = Reason.INVALID_SPEC.value, str(Problem("spec", Reason.INVALID_SPEC, text))
        entry.code = _code(entry, _raw_code(entry.body), settings) or entry.code
        return
    parsed = parse_job({**entry.body, "spec": spec})
    if not isinstance(parsed, LeasedJobSpec):
        entry.policy = entry.registration = None
        reasons = {p.reason for p in parsed}
        reason = parsed[0].reason if len(reasons) == 1 else Reason.INVALID_SPEC
        entry.problem = reason.value, "; ".join(str(p) for p in parsed[:8])
        entry.code = _code(entry, _raw_code(entry.body), settings) or entry.code
        return
    code = _code(entry, parsed.code, settings)
    if code is None:
        entry.policy = entry.registration = None
        return
    entry.code = code
    if later := unknown_in_spec(spec):
        # Only a definition that is newer than this operator lets one through. Its user relies on it.
        entry.policy = entry.registration = None
        named = ", ".join(later[:8])
        entry.problem = UNKNOWN_FIELD, f"{named}: not known to this version of the operator, {__version__}; upgrade it"
        return
    if taken := own.problems(entry.namespace, spec["template"], settings):
        entry.policy = entry.registration = None
        entry.problem = Reason.INVALID_TEMPLATE.value, "; ".join(str(p) for p in taken[:8])
        return
    try:
        policy = policy_of(parsed, code)
    except InvalidScheduleError as e:
        entry.policy = entry.registration = None
        problem = Problem(f"spec.{e.field}", reason_for(e.field), e.message)
        entry.problem = problem.reason.value, str(problem)
        return
    entry.policy = policy
    entry.warning = "; ".join(policy.schedule.warnings) if policy.schedule else ""
    sidecar = parsed.sidecar
    entry.pull_secrets = tuple(s.name for s in (sidecar.image_pull_secrets if sidecar else None) or ())
    entry.sidecar_resources = (spec.get("sidecar") or {}).get("resources")
    entry.initial_lock_key = RunIdentity.of(type=JobSchedulerType.INITIAL, code=code).lock_key
    entry.registration = Registration(
        code=code,
        uid=entry.uid,
        namespace=entry.namespace,
        name=entry.name,
        created_at=entry.created_at,
        schedule_hash=_schedule_hash(parsed),
        spec_hash=_hash({k: v for k, v in spec.items() if k not in ("suspend", "sidecar", "monitoring")}),
        policy=policy.concurrency.value,
        suspended=policy.suspend,
        schedule=written(policy.schedule),
    )


def _raw_code(body: Mapping[str, Any]) -> str | None:
    spec = body.get("spec")
    code = spec.get("code") if isinstance(spec, Mapping) else None
    return code if isinstance(code, str) else None


def _code(entry: Entry, spec_code: str | None, settings: Settings) -> str | None:
    try:
        return job_code(entry.namespace, entry.name, spec_code, settings.shared_codes)
    except InvalidJobIdentityOptionsError as e:
        problem = Problem("spec.code", Reason.INVALID_CODE, str(e))
        entry.problem = entry.problem or (problem.reason.value, str(problem))
        return None


def policy_of(spec: LeasedJobSpec, code: str) -> Policy:
    """The policy that a checked spec asks for. Raises InvalidScheduleError, which names the field."""
    return Policy(
        type=spec.type.scheduler_type,
        timing=spec.timing,
        schedule=spec.schedule_for(code),
        suspend=spec.suspend,
        starting_deadline=spec.starting_deadline_seconds,
        concurrency=spec.concurrency_policy,
        missed=spec.missed_run_policy,
        missed_limit=spec.missed_run_limit,
        suspend_after=spec.suspend_after_failures,
        backoff_limit=spec.backoff_limit,
        pending_deadline=spec.pending_deadline_seconds,
        active_deadline=spec.active_deadline_seconds,
        exit_zero_on_stop=spec.shutdown.exit_zero_on_stop,
        keep_successful=spec.successful_runs_history_limit,
        keep_failed=spec.failed_runs_history_limit,
        monitoring=_monitoring(spec.monitoring),
    )


def _monitoring(spec: MonitoringSpec | None) -> Monitoring:
    if spec is None:
        return Monitoring()
    grace = None if spec.grace_seconds is None else timedelta(seconds=spec.grace_seconds)
    return Monitoring(spec.ping_url, spec.ping_url_key, grace)
