"""A CronJob (Kubernetes 1.37) as a LeasedJob, with each difference named, or the reasons why there is none. Pure.

Three kinds of answer to a field:
    the same       it is carried over, and where the defaults differ CronJob's default is written out
    a difference   it is carried over as near as can be, and a warning says what is no longer so
    refused        a LeasedJob can't do it, and leaving it out would change what the job does

A field that is not known here is refused: what it means can't be told.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, Final

from leasedjob.api import verdict
from leasedjob.api.v1alpha1 import MAX_GRACE_SECONDS, MIN_GRACE_SECONDS
from leasedjob.cli import gitops
from leasedjob.errors import InvalidScheduleError
from leasedjob.protocol import GROUP, VERSION
from leasedjob.schedule import DEFAULT_ZONE, ClockChangePolicy, clock_changes, load_zone

Object = dict[str, Any]

API_VERSIONS: Final = ("batch/v1", "batch/v1beta1")
# CronJob's and Job's own defaults, and the API server's for a Pod.
JOB_BACKOFF_LIMIT: Final = 6
POD_GRACE_SECONDS: Final = 30
SUCCESSFUL_HISTORY: Final = 3
FAILED_HISTORY: Final = 1
JOB_CONTROLLER: Final = "kubernetes.io/job-controller"

MIN_STARTING_DEADLINE: Final = 10
MAX_HISTORY: Final = 1000
_YEARS_AHEAD: Final = timedelta(days=3653)
_LAST_APPLIED: Final = "kubectl.kubernetes.io/last-applied-configuration"
_OF_A_JOB: Final = frozenset(
    {
        "job-name",
        "controller-uid",
        "batch.kubernetes.io/job-name",
        "batch.kubernetes.io/controller-uid",
        "batch.kubernetes.io/job-completion-index",
        "batch.kubernetes.io/cronjob-scheduled-timestamp",
    }
)
_FIELD_PATH: Final = re.compile(r"^metadata\.(?:labels|annotations)\['([^']+)'\]$")
_SERVER_METADATA: Final = frozenset(
    {"uid", "resourceVersion", "generation", "creationTimestamp", "selfLink", "managedFields"}
)
# What the API server writes into every Pod template; left out of what was read from a cluster.
_POD_DEFAULTS: Final[Mapping[str, object]] = {
    "dnsPolicy": "ClusterFirst",
    "schedulerName": "default-scheduler",
    "securityContext": {},
}
_CONTAINER_DEFAULTS: Final[Mapping[str, object]] = {
    "terminationMessagePath": "/dev/termination-log",
    "terminationMessagePolicy": "File",
    "resources": {},
}

# Differences that every CronJob meets, whatever stands in it.
NOTES: Final = (
    "where several clusters share a database, each tick runs once in all of them, not once in each",
    "there is no Job: Pods belong to the LeasedJob, without the labels job-name and controller-uid, and with three "
    "small containers more; a liveness probe asks for the lease, and stops the Pod when it is lost",
    "an eviction or a node drain repeats the attempt and doesn't count as a failure (at most 20 of them in a run)",
    "a Pod that has not started within pendingDeadlineSeconds (900) is given up and tried again later",
)


class Severity(StrEnum):
    """What a finding means for the conversion."""

    ERROR = "error"
    WARNING = "warning"


@dataclass(frozen=True, slots=True)
class Finding:
    """One difference. field: its path in the CronJob."""

    severity: Severity
    field: str
    message: str

    def __str__(self) -> str:
        return f"{self.field}: {self.message}"


@dataclass(frozen=True, slots=True)
class Conversion:
    """job: the LeasedJob, None if anything is an error."""

    job: Object | None
    findings: tuple[Finding, ...]


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the user adds. zone: where a CronJob without timeZone has its clock. not_before: from when ticks count."""

    zone: str | None = None
    not_before: str | None = None


NO_WISHES: Final = Wishes()


def convert(cron: Mapping[str, Any], now: datetime, wishes: Wishes = NO_WISHES) -> Conversion:
    """Convert one CronJob, given as a dict of any origin: a manifest, or as the API server sends it.

    Args:
        now: clock changes of the zone are looked for from here on.
    """
    reader = _Reader()
    try:
        job = _job(reader, cron, now, wishes)
    except _ShapeError as error:
        reader.error(error.field, error.message)
        job = None
    if job is not None:
        for field, message in _refused_in_a_leasedjob(reader, job):
            reader.error(field, message)
    return Conversion(None if reader.failed else job, tuple(reader.findings))


def _refused_in_a_leasedjob(reader: _Reader, job: Object) -> list[tuple[str, str]]:
    """What a LeasedJob can't have, by the rules of a LeasedJob, beside what was said already."""
    told = {finding.field for finding in reader.findings if finding.severity is Severity.ERROR}
    trial = copy.deepcopy(job)
    # One fault must not hide the others behind it.
    if told & {"spec.schedule", "spec.timeZone"}:
        trial["spec"] |= {"schedule": "@daily", "timeZone": DEFAULT_ZONE}
    if f"{_TEMPLATE}.spec.restartPolicy" in told:
        trial["spec"]["template"]["spec"].pop("restartPolicy", None)
    return [(_as_in_a_cronjob(p.field), p.message) for p in verdict(trial) if _as_in_a_cronjob(p.field) not in told]


# --- reading ----------------------------------------------------------------------------------------------------------


class _ShapeError(Exception):
    """The CronJob is not one: nothing more can be read."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field, self.message = field, message


@dataclass(slots=True)
class _Reader:
    findings: list[Finding] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        return any(finding.severity is Severity.ERROR for finding in self.findings)

    def error(self, field: str, message: str) -> None:
        self.findings.append(Finding(Severity.ERROR, field, message))

    def warn(self, field: str, message: str) -> None:
        self.findings.append(Finding(Severity.WARNING, field, message))

    def unknown(self, part: Mapping[str, Any], known: frozenset[str], path: str) -> None:
        for key in part:
            if key not in known:
                self.error(f"{path}.{key}", "is not known here, so what it would change can't be told")


def _part(parent: Mapping[str, Any], key: str, path: str, *, required: bool = False) -> Object:
    value = parent.get(key)
    if value is None and not required:
        return {}
    if not isinstance(value, dict):
        raise _ShapeError(f"{path}{key}", "is required" if value is None else "must be an object")
    return value


def _integer(parent: Mapping[str, Any], key: str, path: str, minimum: int = 0) -> int | None:
    value = parent.get(key)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool):
        raise _ShapeError(f"{path}.{key}", f"is {value!r}, but must be a whole number")
    if value < minimum:
        raise _ShapeError(f"{path}.{key}", f"is {value}, but must be at least {minimum}")
    return value


def _boolean(parent: Mapping[str, Any], key: str, path: str) -> bool:
    value = parent.get(key)
    if value is not None and not isinstance(value, bool):
        raise _ShapeError(f"{path}.{key}", f"is {value!r}, but must be true or false")
    return bool(value)


def _text(parent: Mapping[str, Any], key: str, path: str) -> str | None:
    value = parent.get(key)
    if value is not None and not isinstance(value, str):
        raise _ShapeError(f"{path}.{key}", f"is {value!r}, but must be text")
    return value


# --- the parts --------------------------------------------------------------------------------------------------------


def _job(reader: _Reader, cron: Mapping[str, Any], now: datetime, wishes: Wishes) -> Object:
    if cron.get("apiVersion") not in API_VERSIONS:
        raise _ShapeError("apiVersion", f"is {cron.get('apiVersion')!r}, but must be {API_VERSIONS[0]}")
    spec = _part(cron, "spec", "", required=True)
    reader.unknown(spec, _CRON_FIELDS, "spec")
    job_template = _part(spec, "jobTemplate", "spec.", required=True)
    job = _part(job_template, "spec", "spec.jobTemplate.", required=True)
    template = _part(job, "template", f"{_JOB}.", required=True)
    live = bool(_part(cron, "metadata", "").get("uid"))

    converted: Object = {}
    converted.update(_schedule(reader, spec, now, wishes))
    converted.update(_policies(reader, spec, job))
    converted.update(_budget(reader, template))
    converted.update(_history(reader, spec, job))
    _only_one_pod(reader, job)
    _job_metadata(reader, job_template)
    converted["template"] = _template(reader, template, live=live)
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": "LeasedJob",
        "metadata": _metadata(reader, cron, live=live),
        "spec": converted,
    }


_CRON_FIELDS: Final = frozenset(
    {
        "schedule",
        "timeZone",
        "startingDeadlineSeconds",
        "concurrencyPolicy",
        "suspend",
        "jobTemplate",
        "successfulJobsHistoryLimit",
        "failedJobsHistoryLimit",
    }
)
_JOB: Final = "spec.jobTemplate.spec"
_TEMPLATE: Final = f"{_JOB}.template"


def _as_in_a_cronjob(field: str) -> str:
    """Where a problem of the LeasedJob stands in the CronJob."""
    if field.startswith("spec.template"):
        return f"{_JOB}.{field.removeprefix('spec.')}"
    return field


def _metadata(reader: _Reader, cron: Mapping[str, Any], *, live: bool) -> Object:
    given = _part(cron, "metadata", "", required=True)
    name = _text(given, "name", "metadata")
    if not name:
        reader.error(
            "metadata.name",
            "is required: the name is the identity of the runs, so it must not be made up at each apply",
        )
    kept: Object = {"name": name}
    if given.get("namespace") is not None:
        kept["namespace"] = _text(given, "namespace", "metadata")
    for kind in ("labels", "annotations"):
        values = _part(given, kind, "metadata.")
        left_out = [key for key in values if live and gitops.is_mark(key)]
        for key in left_out:
            reader.warn(
                f"metadata.{kind}[{key}]",
                "is left out: the tool that set it would take the LeasedJob for its own, and might delete it",
            )
        values = {key: value for key, value in values.items() if key not in left_out and key != _LAST_APPLIED}
        if values:
            kept[kind] = values
    for key in ("ownerReferences", "finalizers"):
        if given.get(key):
            reader.warn(f"metadata.{key}", "is left out: it ties the CronJob, not the LeasedJob, to somebody else")
    known = _SERVER_METADATA | {"name", "namespace", "labels", "annotations", "ownerReferences", "finalizers"}
    reader.unknown(given, known | {"generateName", "deletionTimestamp", "deletionGracePeriodSeconds"}, "metadata")
    return kept


def _schedule(reader: _Reader, spec: Mapping[str, Any], now: datetime, wishes: Wishes) -> Object:
    written = _text(spec, "schedule", "spec")
    if written is None:
        raise _ShapeError("spec.schedule", "is required")
    zone = _text(spec, "timeZone", "spec")
    schedule, prefix = _without_prefix(written)
    if prefix is not None and zone is not None:
        reader.error("spec.schedule", f"names the zone {prefix!r} beside timeZone; CronJob refuses that as well")
    elif prefix is not None:
        zone = prefix
        reader.warn("spec.schedule", f"the prefix is left out, and timeZone is {prefix}")
    elif zone is None:
        zone = wishes.zone or DEFAULT_ZONE
        if wishes.zone is None:
            reader.warn(
                "spec.timeZone",
                f"is absent: CronJob then uses the zone of the kube-controller-manager; {DEFAULT_ZONE} is written, "
                "which is that zone in most clusters (--default-time-zone names another one)",
            )
    result: Object = {"schedule": schedule, "timeZone": zone}
    if schedule.lower().startswith("@every"):
        reader.error("spec.schedule", _about_every(schedule))
    try:
        changing = bool(clock_changes(load_zone(zone), now, now + _YEARS_AHEAD))
    except InvalidScheduleError as error:
        reader.error("spec.timeZone", error.message)
        changing = False
    if changing:
        result["clockChangePolicy"] = str(ClockChangePolicy.Kubernetes)
        reader.warn(
            "spec.timeZone",
            f"the clock of {zone} changes: clockChangePolicy is {ClockChangePolicy.Kubernetes}, which does as CronJob "
            "does: a skipped local time doesn't run, a repeated one runs twice; "
            f"{ClockChangePolicy.RunOnce} would run each of them once",
        )
    if wishes.not_before is not None:
        result["notBefore"] = wishes.not_before
    if _boolean(spec, "suspend", "spec"):
        result["suspend"] = True
        reader.warn(
            "spec.suspend",
            "stays true; at resume CronJob starts the latest tick that it missed, a LeasedJob replays none",
        )
    deadline = _integer(spec, "startingDeadlineSeconds", "spec")
    if deadline is not None:
        result["startingDeadlineSeconds"] = deadline
        if deadline < MIN_STARTING_DEADLINE:
            reader.error(
                "spec.startingDeadlineSeconds",
                f"is {deadline}: CronJob, which looks every 10 seconds, may never start such a job; "
                f"a LeasedJob takes {MIN_STARTING_DEADLINE} or more",
            )
    return result


def _without_prefix(schedule: str) -> tuple[str, str | None]:
    """A schedule without its `TZ=` or `CRON_TZ=`, and the zone that this names."""
    for prefix in ("TZ=", "CRON_TZ="):
        if schedule.startswith(prefix):
            zone, _, rest = schedule.removeprefix(prefix).partition(" ")
            return rest.strip(), zone
    return schedule, None


def _about_every(schedule: str) -> str:
    said = "@every counts from when the CronJob was created or last ran, and a LeasedJob has no such schedule"
    match = re.fullmatch(r"@every\s+([1-9][0-9]*)(m|h)", schedule.strip(), re.IGNORECASE)
    if match is None:
        return said
    count, unit = int(match[1]), match[2].lower()
    if unit == "m" and 60 % count == 0:
        return f"{said}; {'*' if count == 1 else f'*/{count}'} * * * * has the same distances from the full hour"
    if unit == "h" and 24 % count == 0:
        return f"{said}; 0 {'*' if count == 1 else f'*/{count}'} * * * has the same distances from midnight"
    return said


def _policies(reader: _Reader, spec: Mapping[str, Any], job: Mapping[str, Any]) -> Object:
    concurrency = _text(spec, "concurrencyPolicy", "spec") or "Allow"
    result: Object = {"concurrencyPolicy": concurrency}
    if concurrency == "Forbid":
        reader.warn(
            "spec.concurrencyPolicy",
            "Forbid: CronJob starts the latest tick that it held back as soon as the running Job ends; a LeasedJob "
            "skips it for good, and records that",
        )
    elif concurrency == "Replace":
        reader.warn(
            "spec.concurrencyPolicy", "Replace: the new run starts when the old one's Pod has stopped, not beside it"
        )
    elif concurrency != "Allow":
        reader.error("spec.concurrencyPolicy", f"is {concurrency!r}, but must be Allow, Forbid or Replace")
    backoff = _integer(job, "backoffLimit", _JOB)
    result["backoffLimit"] = JOB_BACKOFF_LIMIT if backoff is None else backoff
    deadline = _integer(job, "activeDeadlineSeconds", _JOB, 1)
    if deadline is not None:
        result["activeDeadlineSeconds"] = deadline
        if result["backoffLimit"]:
            reader.warn(
                f"{_JOB}.activeDeadlineSeconds",
                f"a Job has {deadline} s for all its attempts together and is not tried again after them; a LeasedJob "
                f"has {deadline} s for each attempt, and up to {result['backoffLimit'] + 1} of them",
            )
    return result


def _budget(reader: _Reader, template: Mapping[str, Any]) -> Object:
    """A Pod's grace period, in the one place where a LeasedJob has it. SIGTERM comes at once, as it does in a Job."""
    pod = _part(template, "spec", f"{_TEMPLATE}.", required=True)
    grace = _integer(pod, "terminationGracePeriodSeconds", f"{_TEMPLATE}.spec")
    if grace is None:
        grace = POD_GRACE_SECONDS
    where = f"{_TEMPLATE}.spec.terminationGracePeriodSeconds"
    if grace > MAX_GRACE_SECONDS:
        reader.error(
            where,
            f"is {grace}: a LeasedJob stops within {MAX_GRACE_SECONDS} s, since the fence has to stop the workload "
            "before the lease ends; a workload that needs longer has to save its progress",
        )
    elif grace < MIN_GRACE_SECONDS:
        reader.warn(where, f"is {grace}; {MIN_GRACE_SECONDS} s is the least, and is written")
        grace = MIN_GRACE_SECONDS
    return {"shutdown": {"preStopSeconds": 0, "terminationGracePeriodSeconds": min(grace, MAX_GRACE_SECONDS)}}


def _history(reader: _Reader, spec: Mapping[str, Any], job: Mapping[str, Any]) -> Object:
    result: Object = {}
    for theirs, ours, default in (
        ("successfulJobsHistoryLimit", "successfulRunsHistoryLimit", SUCCESSFUL_HISTORY),
        ("failedJobsHistoryLimit", "failedRunsHistoryLimit", FAILED_HISTORY),
    ):
        kept = _integer(spec, theirs, "spec")
        if kept is not None and kept > MAX_HISTORY:
            reader.warn(f"spec.{theirs}", f"is {kept}; {MAX_HISTORY} is the most, and is written")
            kept = MAX_HISTORY
        if kept is not None and kept != default:
            result[ours] = kept
    ttl = _integer(job, "ttlSecondsAfterFinished", _JOB)
    if ttl is not None:
        reader.warn(
            f"{_JOB}.ttlSecondsAfterFinished",
            "is left out: Pods of ended runs are kept by number, successfulRunsHistoryLimit and "
            "failedRunsHistoryLimit (0 keeps none), not by age",
        )
    return result


_REFUSED: Final[Mapping[str, str]] = {
    "podFailurePolicy": "a LeasedJob has no rules by exit code or Pod condition; let the program decide, and report by "
    "the SDK whether the run failed for good",
    "successPolicy": "a LeasedJob's run is one Pod, and succeeds with it",
    "backoffLimitPerIndex": "a LeasedJob's run is one Pod, without indexes",
    "maxFailedIndexes": "a LeasedJob's run is one Pod, without indexes",
    "selector": "a CronJob must not have it, and a LeasedJob has no Jobs to select Pods for",
    "scheduling": "a LeasedJob's Pod is scheduled by itself, not as a member of a group",
}


def _only_one_pod(reader: _Reader, job: Mapping[str, Any]) -> None:
    known = frozenset(_REFUSED) | {
        "parallelism",
        "completions",
        "completionMode",
        "activeDeadlineSeconds",
        "backoffLimit",
        "manualSelector",
        "template",
        "ttlSecondsAfterFinished",
        "suspend",
        "podReplacementPolicy",
        "managedBy",
    }
    reader.unknown(job, known, _JOB)
    for key in ("parallelism", "completions"):
        pods = _integer(job, key, _JOB)
        if pods == 0:
            reader.error(f"{_JOB}.{key}", "is 0: such a Job runs no Pod; spec.suspend is the way to run nothing")
        elif pods is not None and pods != 1:
            reader.error(f"{_JOB}.{key}", f"is {pods}, but a LeasedJob's run is one Pod with one holder")
    if _text(job, "completionMode", _JOB) not in (None, "NonIndexed"):
        reader.error(f"{_JOB}.completionMode", "a LeasedJob's Pod has no index, and no JOB_COMPLETION_INDEX")
    for key, why in _REFUSED.items():
        if job.get(key) is not None:
            reader.error(f"{_JOB}.{key}", f"is refused: {why}")
    if _boolean(job, "manualSelector", _JOB):
        reader.error(f"{_JOB}.manualSelector", "is refused: a LeasedJob has no Jobs to select Pods for")
    if _boolean(job, "suspend", _JOB):
        reader.error(
            f"{_JOB}.suspend", "is refused: each Job waits for somebody who resumes it (a queue); a run starts at once"
        )
    if _text(job, "managedBy", _JOB) not in (None, JOB_CONTROLLER):
        reader.error(f"{_JOB}.managedBy", f"is refused: {job['managedBy']} carries these Jobs out, not Kubernetes")
    replacement = _text(job, "podReplacementPolicy", _JOB)
    if replacement == "TerminatingOrFailed":
        reader.warn(
            f"{_JOB}.podReplacementPolicy",
            "the next attempt starts when the former Pod has ended, as with Failed, and never while it terminates",
        )
    elif replacement not in (None, "Failed"):
        reader.error(f"{_JOB}.podReplacementPolicy", f"is {replacement!r}, but must be TerminatingOrFailed or Failed")


def _job_metadata(reader: _Reader, job_template: Mapping[str, Any]) -> None:
    reader.unknown(job_template, frozenset({"metadata", "spec"}), "spec.jobTemplate")
    metadata = _part(job_template, "metadata", "spec.jobTemplate.")
    for kind in ("labels", "annotations"):
        if metadata.get(kind):
            reader.warn(
                f"spec.jobTemplate.metadata.{kind}",
                f"is left out: there are no Jobs to carry it (the Pods' own {kind} stay)",
            )


def _template(reader: _Reader, given: Mapping[str, Any], *, live: bool) -> Object:
    template: Object = copy.deepcopy(dict(given))
    reader.unknown(template, frozenset({"metadata", "spec"}), _TEMPLATE)
    metadata, pod = _part(template, "metadata", f"{_TEMPLATE}."), template["spec"]
    metadata.pop("creationTimestamp", None)
    if not metadata:
        template.pop("metadata", None)
    _restarts(reader, pod)
    pod.pop("terminationGracePeriodSeconds", None)
    if live:
        _without_defaults(pod)
    for path, key in _asks_for_a_job(pod):
        reader.error(path, f"asks for {key}, which only the Pods of a Job have")
    if _is_windows(pod):
        reader.error(f"{_TEMPLATE}.spec", "is for Windows; the containers that keep the lease are Linux programs")
    inits = [c for c in pod.get("initContainers") or [] if isinstance(c, dict) and c.get("restartPolicy") != "Always"]
    if inits:
        reader.warn(
            f"{_TEMPLATE}.spec.initContainers",
            "run once the lease is taken, and are not fenced: should it be lost, they run to their end",
        )
    if pod.get("resources"):
        reader.warn(f"{_TEMPLATE}.spec.resources", "also has to do for the three containers that keep the lease")
    for index, container in enumerate(pod.get("containers") or []):
        if isinstance(container, dict) and container.get("livenessProbe"):
            reader.warn(
                f"{_TEMPLATE}.spec.containers[{index}].livenessProbe",
                "is performed by the sidecar in the Pod; where it fails the whole Pod stops, with its grace period",
            )
    return template


def _restarts(reader: _Reader, pod: Object) -> None:
    where = f"{_TEMPLATE}.spec.restartPolicy"
    match pod.get("restartPolicy"):
        case "Never":
            pass
        case "OnFailure":
            reader.error(
                where,
                "is OnFailure: the kubelet would restart the program in its Pod, outside the lease. With Never each "
                "failure gets a new Pod and its emptyDirs are new too; if the job bears that, set it here first",
            )
        case None:
            reader.error(where, "is required in a CronJob: absent it means Always, which the API server refuses")
        case other:
            reader.error(where, f"is {other!r}, but must be Never")


def _without_defaults(pod: Object) -> None:
    _drop(pod, _POD_DEFAULTS)
    for kind in ("initContainers", "containers"):
        for container in pod.get(kind) or []:
            if isinstance(container, dict):
                _drop(container, _CONTAINER_DEFAULTS)
    if pod.get("serviceAccount") == pod.get("serviceAccountName"):
        pod.pop("serviceAccount", None)  # the deprecated twin


def _drop(part: Object, defaults: Mapping[str, object]) -> None:
    for key, value in defaults.items():
        if key in part and part[key] == value:
            del part[key]


def _asks_for_a_job(pod: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Where the template uses a label that the Job controller puts on its Pods: the path, and the label."""
    for path, value in _leaves(pod, f"{_TEMPLATE}.spec"):
        found = _FIELD_PATH.match(value) if path.endswith(".fieldPath") else None
        if found and found[1] in _OF_A_JOB:
            yield path, found[1]
    for part in ("affinity", "topologySpreadConstraints"):
        for path, value in _leaves(pod.get(part), f"{_TEMPLATE}.spec.{part}"):
            key = path.rpartition("[")[2].rstrip("]")
            if key in _OF_A_JOB:
                yield path, key
            elif value in _OF_A_JOB and (path.endswith(".key") or "LabelKeys[" in path):
                yield path, value


def _leaves(value: object, path: str) -> Iterator[tuple[str, str]]:
    """Every text below `value`, and its path. A key that is no plain name stands in brackets."""
    if isinstance(value, dict):
        for key, child in value.items():
            plain = re.fullmatch(r"[A-Za-z]+", str(key)) is not None
            yield from _leaves(child, f"{path}.{key}" if plain else f"{path}[{key}]")
    elif isinstance(value, list):
        for index, child in enumerate(value):
            yield from _leaves(child, f"{path}[{index}]")
    elif isinstance(value, str):
        yield path, value


def _is_windows(pod: Mapping[str, Any]) -> bool:
    system, selector = pod.get("os"), pod.get("nodeSelector")
    return (isinstance(system, dict) and system.get("name") == "windows") or (
        isinstance(selector, dict) and selector.get("kubernetes.io/os") == "windows"
    )
