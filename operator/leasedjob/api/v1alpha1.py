"""LeasedJob and LeasedJobRun, version leasedjob.io/v1alpha1: the models that the CRDs are generated from. Pure.

Field names, defaults and limits are CronJob's where it has the field. `LeasedJobSpec.model_validate(body["spec"])`
gives a spec that obeys every rule, or raises; `parse_job` gives the spec or the problems, in the user's words.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Final, TypeVar, assert_never

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, ValidationError, WithJsonSchema
from pydantic_core import PydanticCustomError

from leasedjob.api import expressions
from leasedjob.api import template as pod_template
from leasedjob.api.expressions import CODE_RULES, PRE_STOP_RULE, SCHEDULE_RULES, TIME_ZONE_RULES, TRUST_RULE
from leasedjob.api.problem import Problem, Reason
from leasedjob.api.structural import MAX_INT32, Bool, Int, ListMap, OpenShape, Rule, Rules, Shape, problems_of
from leasedjob.api.template import GRACE_RULE, PodTemplate
from leasedjob.errors import InvalidScheduleError
from leasedjob.identity import JobSchedulerType, js_trim
from leasedjob.lease import trust
from leasedjob.lease.trust import Timing
from leasedjob.schedule import MAX_JITTER_SECONDS, MAX_SCHEDULES, ClockChangePolicy, MissedRunPolicy, Timetable

Spec = TypeVar("Spec", bound=Shape)
MAX_LEASE_SECONDS: Final = 86_400
MIN_GRACE_SECONDS: Final = 5
MAX_GRACE_SECONDS: Final = 60
MAX_PULL_SECRETS: Final = 16
# Characters of an item of `schedules`: the API server estimates the cost of the rules from it, squared, ten times.
MAX_ONE_OF_SEVERAL: Final = 256
MAX_RUNS: Final = 10  # of `active` and of `recentRuns`; all of them are in the database
MAX_RANGES: Final = 10  # of `ledger`
MAX_BACKFILL_TICKS: Final = 100_000
MAX_PLAN: Final = 50  # ticks that a dry run shows; the counts are of all


class JobType(StrEnum):
    """`Initial` runs once, ever; `Schedule` runs once a tick."""

    INITIAL = "Initial"
    SCHEDULE = "Schedule"

    @property
    def scheduler_type(self) -> JobSchedulerType:
        """The type in the run's identity."""
        return JobSchedulerType.INITIAL if self is JobType.INITIAL else JobSchedulerType.SCHEDULE


class ConcurrencyPolicy(StrEnum):
    """What a due tick does while another run of the code is active, in any cluster."""

    FORBID = "Forbid"
    ALLOW = "Allow"
    REPLACE = "Replace"


class ExitZeroOnStop(StrEnum):
    """What exit 0 means after a stop."""

    RETRY = "Retry"
    SUCCESS = "Success"


# --- of both kinds ---------------------------------------------------------------------------------------------------
_TICK: Final = r"^[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])T([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]Z$"


def _is_instant(text: str) -> str:
    try:
        datetime.fromisoformat(text)
    except ValueError:
        raise PydanticCustomError("tick", "no such date") from None
    return text


_INSTANT: Final = Rule(
    cel=expressions.matches(_TICK),
    holds=expressions.matcher(_TICK),
    message="must be an instant in UTC such as 2026-07-20T03:00:00Z",
)
Instant = Annotated[str, Field(max_length=64), Rules((_INSTANT,)), AfterValidator(_is_instant)]


# --- LeasedJob: spec -------------------------------------------------------------------------------------------------
class LeaseSpec(Shape):
    """How long a lease lives without a heartbeat, and how often it is renewed."""

    duration_seconds: Annotated[Int, Field(ge=trust.MIN_LEASE_SECONDS, le=MAX_LEASE_SECONDS)] = (
        trust.DEFAULT_LEASE_SECONDS
    )
    """Seconds after the last heartbeat at which the run may be claimed by another holder. 20 to 86400."""
    heartbeat_seconds: Annotated[Int, Field(ge=1, le=MAX_LEASE_SECONDS // 2)] | None = None
    """Seconds between heartbeats. Default: 60, or a third of durationSeconds if that is less."""

    @property
    def heartbeat(self) -> int:
        """Seconds between heartbeats, the default worked out."""
        if self.heartbeat_seconds is None:
            return trust.default_heartbeat(self.duration_seconds)
        return self.heartbeat_seconds


class ShutdownSpec(Shape):
    """The one budget that a stop has to fit in, and how a stopped workload's exit is read."""

    pre_stop_seconds: Annotated[Int, Field(ge=0, le=MAX_GRACE_SECONDS - MIN_GRACE_SECONDS)] = (
        trust.DEFAULT_PRE_STOP_SECONDS
    )
    """Seconds between the drain notice and SIGTERM; part of the grace period."""
    termination_grace_period_seconds: Annotated[Int, Field(ge=MIN_GRACE_SECONDS, le=MAX_GRACE_SECONDS)] = (
        trust.DEFAULT_GRACE_SECONDS
    )
    """Seconds from the stop to SIGKILL, preStop included. 5 to 60; the Pod template must not say otherwise."""
    exit_zero_on_stop: ExitZeroOnStop = ExitZeroOnStop.RETRY
    """What exit 0 means after a stop: Retry runs again, Success takes it as done."""


def _quantity(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | str | float):
        raise PydanticCustomError("quantity", "must be a quantity such as 100m or 64Mi")
    return value


Quantity = Annotated[
    Any,
    AfterValidator(_quantity),
    WithJsonSchema({"x-kubernetes-int-or-string": True, "anyOf": [{"type": "integer"}, {"type": "string"}]}),
]


class Resources(OpenShape):
    """ResourceRequirements of the containers that the operator adds."""

    limits: Annotated[dict[str, Quantity], Field(max_length=32)] | None = None
    """As of any container."""
    requests: Annotated[dict[str, Quantity], Field(max_length=32)] | None = None
    """As of any container."""


class SecretReference(Shape):
    """A Secret in the job's namespace."""

    name: Annotated[str, Field(min_length=1, max_length=253)]
    """The Secret's name."""


class SidecarSpec(Shape):
    """Overrides of the chart's settings for the containers that the operator adds to each Pod of this job."""

    resources: Resources | None = None
    """Resource requests and limits of each added container, instead of the chart's."""
    image_pull_secrets: Annotated[list[SecretReference], ListMap("name"), Field(max_length=MAX_PULL_SECRETS)] | None = (
        None
    )
    """Pull secrets for the sidecar's image, besides the chart's and the template's."""


# Printable ASCII without a user, a fragment or an IPv6 literal.
PING_URL: Final = r"""^https?://[A-Za-z0-9.-]+(:[0-9]{1,5})?([/?][!-"$-~]*)?$"""


class MonitoringSpec(Shape):
    """A dead-man's switch: tells a monitor of each run's start and end, in Healthchecks' way."""

    ping_url: (
        Annotated[
            str,
            Field(min_length=1, max_length=1024),
            Rules(
                (
                    Rule(
                        cel=expressions.matches(PING_URL),
                        holds=expressions.matcher(PING_URL),
                        message="must be an http or https URL such as https://monitor.example/ping/1234, "
                        "without user and fragment",
                    ),
                )
            ),
        ]
        | None
    ) = Field(default=None, alias="pingURL")
    """A success is a POST to this URL; a start and a failure go to /start and /fail below it. The operator must be
    allowed to call its host. Everybody who may read the object can read it."""
    ping_url_key: Annotated[str, Field(min_length=1, max_length=253)] | None = Field(default=None, alias="pingURLKey")
    """Instead of pingURL: the key in the namespace's Secret leasedjob-monitoring that has the URL."""
    grace_seconds: Annotated[Int, Field(ge=60, le=MAX_INT32)] | None = None
    """How long after the start of a tick a success may come before the job counts as overdue. Default: until the start
    of the next tick, at least five minutes."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="!has(self.pingURL) || !has(self.pingURLKey)",
            holds=lambda monitoring: monitoring.ping_url is None or monitoring.ping_url_key is None,
            field="pingURLKey",
            message="can't stand beside pingURL",
        ),
    )


_HAS_SCHEDULE: Final = Rule(
    cel="self.type == 'Initial' || has(self.schedule) || has(self.schedules)",
    holds=lambda spec: spec.type is JobType.INITIAL or spec.schedule is not None or spec.schedules is not None,
    field="schedule",
    message="is required unless type is Initial; several of them go into schedules",
)
_ONE_SCHEDULE: Final = Rule(
    cel="!has(self.schedule) || !has(self.schedules)",
    holds=lambda spec: spec.schedule is None or spec.schedules is None,
    field="schedules",
    message="can't stand beside schedule: write all of them into schedules",
)


def _instant(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)


def _not_for_initial(field: str, attribute: str) -> Rule:
    return Rule(
        cel=f"self.type != 'Initial' || !has(self.{field})",
        holds=lambda spec: spec.type is not JobType.INITIAL or getattr(spec, attribute) is None,
        field=field,
        message="is forbidden for type Initial, which runs once, ever",
    )


_BOUNDS: Final = Rule(  # one form, in UTC: text sorts as the instants do
    cel="!has(self.notBefore) || !has(self.notAfter) || self.notBefore <= self.notAfter",
    holds=lambda spec: spec.not_before is None or spec.not_after is None or spec.not_before <= spec.not_after,
    field="notAfter",
    message="must not be earlier than notBefore",
)
_CODE_STAYS: Final = Rule(
    cel="has(self.code) == has(oldSelf.code) && (!has(self.code) || self.code == oldSelf.code)",
    field="code",
    message="is immutable: it is the identity of the runs; create another LeasedJob instead",
)
_TYPE_STAYS: Final = Rule(
    cel="self.type == oldSelf.type",
    field="type",
    message="is immutable: it is part of the runs' identity; create another LeasedJob instead",
)


class LeasedJobSpec(Shape):
    """What runs, when, and under which policy."""

    type: JobType = JobType.SCHEDULE
    """Schedule runs once a tick; Initial runs once, ever, and forbids schedule. Immutable."""
    code: Annotated[str, Field(min_length=1, max_length=64), Rules(CODE_RULES), AfterValidator(js_trim)] | None = None
    """Names the runs within the namespace, in every cluster of the database. Default: the object's name. Immutable."""
    schedule: Annotated[str, Field(min_length=1, max_length=1024), Rules(SCHEDULE_RULES)] | None = None
    """Five cron fields or a macro such as @daily; H stands for a number that follows from the code."""
    schedules: (
        Annotated[
            list[Annotated[str, Field(min_length=1, max_length=MAX_ONE_OF_SEVERAL), Rules(SCHEDULE_RULES)]],
            Field(min_length=1, max_length=MAX_SCHEDULES),
        ]
        | None
    ) = None
    """Several of them instead of schedule, in one time zone; where they meet there is one run."""
    not_before: Instant | None = None
    """No tick before this instant, such as 2026-07-20T03:00:00Z; a tick at it counts."""
    not_after: Instant | None = None
    """No tick after this instant; a tick at it counts."""
    jitter_seconds: Annotated[Int, Field(ge=0, le=MAX_JITTER_SECONDS)] | None = None
    """A run starts up to so many seconds after its tick, and before the next one: a time that follows from code and
    tick, the same in every cluster. The run key stays the tick."""
    time_zone: Annotated[str, Field(min_length=1, max_length=64), Rules(TIME_ZONE_RULES)] = "Etc/UTC"
    """The IANA time zone of schedule and schedules."""
    clock_change_policy: ClockChangePolicy = ClockChangePolicy.RunOnce
    """RunOnce runs a fixed time that a clock change skips or repeats exactly once; Kubernetes does as CronJob does."""
    suspend: Bool = False
    """No tick counts while true; a resume replays nothing."""
    starting_deadline_seconds: Annotated[Int, Field(ge=10, le=MAX_INT32)] | None = None
    """How late the first claim of a tick may be; later, the tick is recorded as missed. At least 10."""
    concurrency_policy: ConcurrencyPolicy = ConcurrencyPolicy.FORBID
    """A due tick while a run is active, in any cluster: Forbid skips it, Allow runs it, Replace stops the other run."""
    missed_run_policy: MissedRunPolicy = MissedRunPolicy("RunLatest")
    """After a gap: RunLatest starts the latest missed tick, RunAll all of them (see missedRunLimit), Skip none."""
    missed_run_limit: Annotated[Int, Field(ge=1, le=10_000)] = 100
    """At most how many missed ticks RunAll starts, the most recent ones, oldest first."""
    suspend_after_failures: Annotated[Int, Field(ge=1, le=100)] | None = None
    """So many failed runs in a row suspend the schedule, in every cluster, until a LeasedJobRun with action Resume."""
    backoff_limit: Annotated[Int, Field(ge=0, le=MAX_INT32)] = 0
    """Failed attempts of a run that are repeated, after 10 s doubling to 6 min. Interruptions don't count."""
    pending_deadline_seconds: Annotated[Int, Field(ge=5, le=MAX_INT32)] = 900
    """Seconds within which the workload must have started, else the attempt ends."""
    active_deadline_seconds: Annotated[Int, Field(ge=1, le=MAX_INT32)] | None = None
    """Seconds that an attempt may run; past them it has failed, whatever its exit code."""
    lease: LeaseSpec = Field(default_factory=LeaseSpec, json_schema_extra={"default": {}})
    """The lease's timing."""
    shutdown: ShutdownSpec = Field(default_factory=ShutdownSpec, json_schema_extra={"default": {}})
    """The budget of a stop."""
    sidecar: SidecarSpec | None = None
    """Overrides for the containers that the operator adds."""
    monitoring: MonitoringSpec | None = None
    """A dead-man's switch."""
    successful_runs_history_limit: Annotated[Int, Field(ge=0, le=1000)] = 3
    """Pods of successful runs that are kept."""
    failed_runs_history_limit: Annotated[Int, Field(ge=0, le=1000)] = 1
    """Pods of failed runs that are kept."""
    template: PodTemplate
    """The Pod of a run, a PodTemplateSpec, kept as written. restartPolicy is Never or absent."""

    rules: ClassVar[tuple[Rule, ...]] = (
        _HAS_SCHEDULE,
        _ONE_SCHEDULE,
        *(
            _not_for_initial(field, attribute)
            for field, attribute in (
                ("schedule", "schedule"),
                ("schedules", "schedules"),
                ("notBefore", "not_before"),
                ("notAfter", "not_after"),
                ("jitterSeconds", "jitter_seconds"),
            )
        ),
        _BOUNDS,
        _CODE_STAYS,
        _TYPE_STAYS,
        TRUST_RULE,
        PRE_STOP_RULE,
        GRACE_RULE,
    )

    def more_problems(self) -> list[tuple[str, str]]:
        found = [(p.field.removeprefix("spec."), p.message) for p in pod_template.problems(self.template, self)]
        try:
            self.schedule_for("")
        except InvalidScheduleError as error:
            found.append((error.field, error.message))
        return found

    @property
    def timing(self) -> Timing:
        """The attempt's timing, every default worked out."""
        return Timing(
            duration=self.lease.duration_seconds,
            heartbeat=self.lease.heartbeat,
            grace=self.shutdown.termination_grace_period_seconds,
            pre_stop=self.shutdown.pre_stop_seconds,
            containers=pod_template.workload_count(self.template),
        )

    def schedule_for(self, code: str) -> Timetable | None:
        """All schedules, parsed; `code` is what `H` and the jitter are hashes of. None for type Initial.

        Raises:
            InvalidScheduleError: never for a spec that was validated.
        """
        if self.schedules is None and self.schedule is None:
            return None
        return Timetable.of(
            [self.schedule] if self.schedule is not None else self.schedules or [],
            self.time_zone,
            policy=self.clock_change_policy,
            code=code,
            fields=() if self.schedule is None else ["schedule"],
            not_before=_instant(self.not_before),
            not_after=_instant(self.not_after),
            jitter_seconds=self.jitter_seconds or 0,
        )


def parse_job(body: Mapping[str, Any]) -> LeasedJobSpec | list[Problem]:
    """The spec of a LeasedJob object, or every problem that was found, at least one."""
    return _parse(LeasedJobSpec, body)


# --- status, of both kinds -------------------------------------------------------------------------------------------
def bounded(text: str, limit: int) -> str:
    """`text` cut to `limit` bytes of JSON as the API server stores it, control characters made blanks.

    An object's size is what etcd limits, and there `<`, `>` and `&` take six bytes. A cut text ends in "…".
    """
    # a character takes at least one byte: no more of them need to be looked at
    clean = "".join(c if c.isprintable() or c == "\n" else " " for c in text[: limit + 1])
    used = cut = 0
    for index, character in enumerate(clean):
        used += _stored_size(character)
        if used > limit:
            return clean[:cut] + "…"
        if used <= limit - 3:
            cut = index + 1
    return clean


def _stored_size(character: str) -> int:
    if character in "<>&":
        return 6
    if character in '"\\\n':
        return 2
    return len(character.encode())


def _text(limit: int) -> Any:
    return BeforeValidator(lambda value: bounded(value, limit) if isinstance(value, str) else value)


def _rfc3339(at: datetime) -> str:
    return at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


# Aware; written in UTC to the second, as Kubernetes writes times.
Time = Annotated[datetime, PlainSerializer(_rfc3339, when_used="json")]
Count = Annotated[Int, Field(ge=0)]
RunKeyText = Annotated[str, _text(256), Field(max_length=256)]
ReasonText = Annotated[str, _text(64), Field(max_length=64)]
MessageText = Annotated[str, _text(512), Field(max_length=512)]
HolderText = Annotated[str, _text(256), Field(max_length=256)]
NameText = Annotated[str, _text(253), Field(max_length=253)]


class ConditionStatus(StrEnum):
    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class Condition(Shape):
    """A metav1.Condition."""

    type: Annotated[str, _text(64), Field(min_length=1, max_length=64)]
    """What it is about."""
    status: ConditionStatus
    """Whether it is so."""
    observed_generation: Count | None = None
    """The metadata.generation of the object that this was said of."""
    last_transition_time: Time
    """Since when status has been what it is."""
    reason: Annotated[str, _text(64), Field(min_length=1, max_length=64)]
    """Why, in one word."""
    message: Annotated[str, _text(1024), Field(max_length=1024)] = ""
    """Why, for people."""


Conditions = Annotated[list[Condition], ListMap("type"), Field(max_length=8)]


class RunOutcome(StrEnum):
    """The words of `outcome` and `lastResult`: how a run stands or ended."""

    PENDING = "Pending"
    RUNNING = "Running"
    RETRYING = "Retrying"
    FAILED = "Failed"
    CANCELLED = "Cancelled"
    REPLACED = "Replaced"
    SUCCESS = "Success"

    @property
    def progress(self) -> int:
        """How far an attempt is that stands so; it only ever goes forward."""
        match self:
            case RunOutcome.PENDING | RunOutcome.RUNNING:
                return 0
            case RunOutcome.RETRYING:
                return 1
            case RunOutcome.FAILED | RunOutcome.CANCELLED | RunOutcome.REPLACED:
                return 2
            case RunOutcome.SUCCESS:
                return 3
            case _:
                assert_never(self)


class RunStatus(Shape):
    """One run, as the database and its Pod tell."""

    run_key: RunKeyText
    """The tick in UTC; of a run that somebody asked for `manual/…`; empty for type Initial."""
    attempt: Count | None = None
    """Its number within the run, from 1."""
    outcome: ReasonText | None = None
    """Pending, Running, Retrying, Failed, Cancelled, Replaced or Success: how the run stands or ended."""
    reason: ReasonText | None = None
    """Why it stands so or ended so, in one word."""
    message: MessageText | None = None
    """The same, for people; of a failure the end of what the container wrote."""
    holder: HolderText | None = None
    """cluster/namespace/pod of the last owner."""
    pod_name: NameText | None = None
    """The attempt's Pod."""
    scheduled_time: Time | None = None
    """The tick; absent for a run that has none."""
    start_time: Time | None = None
    """When the attempt was claimed, by the database's clock."""
    completion_time: Time | None = None
    """When its end was recorded, by the database's clock."""


class LedgerKind(StrEnum):
    """Why ticks did not run: by policy, because it was too late, or because an edit left them behind."""

    SKIPPED = "Skipped"
    MISSED = "Missed"
    DROPPED = "Dropped"


class LedgerRange(Shape):
    """Ticks in a row that did not run, for one reason."""

    from_: Annotated[Time, Field(alias="from")]
    """The first of them."""
    to: Time
    """The last of them."""
    count: Annotated[Int, Field(ge=1)]
    """How many; at least so many where exact is false."""
    exact: Bool | None = None
    """False where counting stopped at its bound; else absent."""
    kind: LedgerKind
    """Skipped, Missed or Dropped."""
    reason: ReasonText
    """Overlap, Suspended, SuspendedAfterFailures, StartingDeadline, MissedRunPolicy, MissedRunLimit, SpecDiffers,
    ScheduleEdited, JobDeleted."""
    decided_by: HolderText | None = None
    """The clusters whose operators decided."""
    decided_at: Time | None = None
    """When, by the database's clock; of a range that grew the last time."""


class LeasedJobStatus(Shape):
    """What was last observed: it follows from database and Pods, and is bounded. The database has the whole history."""

    observed_generation: Count | None = None
    """The metadata.generation that all of this is about."""
    code: Annotated[str, _text(256), Field(max_length=256)] | None = None
    """The code of the runs: namespace and spec.code, or its hashed form."""
    conditions: Conditions | None = None
    """Ready says that the object is accepted and scheduled, not how the last run went."""
    next_schedule_time: Time | None = None
    """The next tick; absent while suspended, and for type Initial."""
    next_schedule_times: Annotated[list[Time], Field(max_length=5)] | None = None
    """The next ticks, the first of which is nextScheduleTime."""
    last_schedule_time: Time | None = None
    """The latest tick that a run was started for."""
    last_successful_time: Time | None = None
    """When a run last succeeded."""
    last_failure_time: Time | None = None
    """When an attempt last failed; what was cancelled or replaced has not failed."""
    last_result: ReasonText | None = None
    """The outcome of the latest run."""
    active_count: Count | None = None
    """Runs that are held now."""
    holder: HolderText | None = None
    """cluster/namespace/pod of the latest active run."""
    active: Annotated[list[RunStatus], Field(max_length=MAX_RUNS)] | None = None
    """Runs that are held, or that will be tried again."""
    recent_runs: Annotated[list[RunStatus], Field(max_length=MAX_RUNS)] | None = None
    """The active runs, then those that have ended, the latest first."""
    skipped_ticks: Count | None = None
    """Ticks that policy left out: Overlap, Suspended, SuspendedAfterFailures. In all clusters, ever."""
    missed_ticks: Count | None = None
    """Ticks that nobody could start in time, or that missedRunPolicy or its limit left out. In all clusters, ever."""
    dropped_ticks: Count | None = None
    """Ticks that were due and not decided when an edit of the schedule left them behind. In all clusters, ever."""
    ledger: Annotated[list[LedgerRange], Field(max_length=MAX_RANGES)] | None = None
    """The latest ranges of ticks that did not run, the latest first. The database has all of them."""


# --- LeasedJobRun ----------------------------------------------------------------------------------------------------
def _stays(field: str, optional: bool) -> Rule:
    same = f"self.{field} == oldSelf.{field}"
    return Rule(
        cel=f"has(self.{field}) == has(oldSelf.{field}) && (!has(self.{field}) || {same})" if optional else same,
        field=field,
        message="is immutable: a LeasedJobRun asks for one run; create another one instead",
    )


class RunAction(StrEnum):
    """What a LeasedJobRun asks for."""

    RUN = "Run"
    EXPLAIN = "Explain"
    CANCEL = "Cancel"
    RELEASE = "Release"
    FORGET = "Forget"
    RESUME = "Resume"


class Reprocess(StrEnum):
    """Which ticks that have a run already a backfill runs as well."""

    NONE = "None"
    FAILED = "Failed"
    ALL = "All"


class BackfillSpec(Shape):
    """Past ticks to run, oldest first, under the job's lease and policy."""

    from_: Annotated[Instant, Field(alias="from")]
    """The first instant, in UTC; a tick at it is run."""
    to: Instant
    """The last instant, in UTC; a tick at it is run. It must not lie in the future."""
    reprocess: Reprocess = Reprocess.NONE
    """None: ticks without a run. Failed: also failed runs, anew. All: also what succeeded, as a run of its own."""
    max_active: Annotated[Int, Field(ge=1, le=100)] = 1
    """Runs of this backfill that may be active at a time; concurrencyPolicy Forbid and Replace allow one anyway."""
    dry_run: Bool = False
    """Starts nothing; status.backfill says what would run."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="self.to >= self.from",
            holds=lambda backfill: backfill.to >= backfill.from_,
            field="to",
            message="must not be before from",
        ),
    )


_RUNS: Final = (None, RunAction.RUN)
_ABOUT_RUNS: Final = (RunAction.EXPLAIN, RunAction.CANCEL, RunAction.RELEASE, RunAction.FORGET)
_ABOUT_RUNS_CEL: Final = "['Explain', 'Cancel', 'Release', 'Forget']"
_IS_RUN_CEL: Final = "(!has(self.action) || self.action == 'Run')"


class LeasedJobRunSpec(Shape):
    """A request for one run of a LeasedJob, for many (backfill), or about one (action). Only cancel may change."""

    job_name: Annotated[str, Field(min_length=1, max_length=253)]
    """The LeasedJob in the same namespace. Immutable."""
    action: RunAction | None = None
    """Run (the default); Explain, Cancel, Release or Forget a run; Resume after suspendAfterFailures. Immutable."""
    tick: Instant | None = None
    """The tick, in UTC. A run recorded as SUCCESS is refused; without tick a run has a key of its own. Immutable."""
    run_key: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    """Instead of tick, the key of the run that an action is about, such as 2026-07-20T03:00:00Z#r1. Immutable."""
    backfill: BackfillSpec | None = None
    """Runs past ticks instead of one run. Immutable."""
    force: Bool | None = None
    """With action Release: somebody has made sure that the workload has stopped; the lease ends at once. Immutable."""
    reason: Annotated[str, Field(max_length=1024)] | None = None
    """Why, for people. Immutable."""
    cancel: Bool = False
    """True stops the run, or the backfill with its active runs; it can't be taken back."""

    rules: ClassVar[tuple[Rule, ...]] = (
        _stays("jobName", optional=False),
        _stays("action", optional=True),
        _stays("tick", optional=True),
        _stays("runKey", optional=True),
        _stays("backfill", optional=True),
        _stays("force", optional=True),
        _stays("reason", optional=True),
        Rule(cel="!oldSelf.cancel || self.cancel", field="cancel", message="can't be taken back"),
        Rule(
            cel=f"!has(self.backfill) || ({_IS_RUN_CEL} && !has(self.tick))",
            holds=lambda spec: spec.backfill is None or (spec.action in _RUNS and spec.tick is None),
            field="backfill",
            message="excludes tick and every action but Run",
        ),
        Rule(
            cel=f"!has(self.runKey) || (has(self.action) && self.action in {_ABOUT_RUNS_CEL} && !has(self.tick))",
            holds=lambda spec: spec.run_key is None or (spec.action in _ABOUT_RUNS and spec.tick is None),
            field="runKey",
            message="goes with action Explain, Cancel, Release or Forget, and without tick",
        ),
        Rule(
            cel="!has(self.tick) || !has(self.action) || self.action != 'Resume'",
            holds=lambda spec: spec.tick is None or spec.action is not RunAction.RESUME,
            field="tick",
            message="is forbidden for action Resume, which is about the whole schedule",
        ),
        Rule(
            cel="!has(self.force) || (has(self.action) && self.action == 'Release')",
            holds=lambda spec: spec.force is None or spec.action is RunAction.RELEASE,
            field="force",
            message="goes with action Release",
        ),
        Rule(
            cel=f"!self.cancel || {_IS_RUN_CEL}",
            holds=lambda spec: not spec.cancel or spec.action in _RUNS,
            field="cancel",
            message="goes with action Run; an action that waits ends when its object is deleted",
        ),
    )

    @property
    def tick_time(self) -> datetime | None:
        """`tick` as an aware datetime."""
        return None if self.tick is None else datetime.fromisoformat(self.tick).astimezone(UTC)


def parse_run(body: Mapping[str, Any]) -> LeasedJobRunSpec | list[Problem]:
    """The spec of a LeasedJobRun object, or every problem that was found, at least one."""
    return _parse(LeasedJobRunSpec, body)


def manual_run_key(namespace: str, name: str, uid: str) -> str:
    """The run key of a LeasedJobRun without a tick: each such object is a run of its own."""
    return f"manual/{namespace}/{name}/{uid}"


class RunPhase(StrEnum):
    PENDING = "Pending"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    CANCELLED = "Cancelled"
    REFUSED = "Refused"


class PlannedAction(StrEnum):
    """What a backfill does about one tick."""

    RUN = "Run"
    RETRY = "Retry"
    REPROCESS = "Reprocess"
    SKIP = "Skip"


class PlannedTick(Shape):
    """One tick of a dry run."""

    tick: Time
    """The tick."""
    action: PlannedAction
    """Run: it has none. Retry: its failed run, anew. Reprocess: another run of it. Skip: nothing, and why."""
    run_key: RunKeyText | None = None
    """The key of the run that it would get."""
    reason: ReasonText | None = None
    """Of Skip: Succeeded, Failed, Active or Pruned."""


class BackfillStatus(Shape):
    """How far a backfill is. The counts are of ticks; each tick is in one of them when all is done."""

    ticks: Count | None = None
    """Ticks of the schedule in the range."""
    planned: Count | None = None
    """Of those, how many were to be run when it began."""
    running: Count | None = None
    """Runs that are active now, or wait for their next attempt."""
    succeeded: Count | None = None
    """Runs that have succeeded."""
    failed: Count | None = None
    """Runs that have failed, or were stopped, and get no further attempt."""
    skipped: Count | None = None
    """Ticks that are left as they are: reprocess says so, somebody else runs them, or their records were deleted."""
    through: Time | None = None
    """Every tick up to here is decided."""
    current: Annotated[list[RunKeyText], Field(max_length=MAX_RUNS)] | None = None
    """The keys of the runs that are active now, the oldest tick first."""
    plan: Annotated[list[PlannedTick], Field(max_length=MAX_PLAN)] | None = None
    """Of a dry run: the first ticks, and what would be done about each."""


class Verdict(StrEnum):
    """What became of a tick, or of a run, in one word."""

    RAN = "Ran"
    RUNNING = "Running"
    RETRYING = "Retrying"
    PENDING = "Pending"
    SKIPPED = "Skipped"
    MISSED = "Missed"
    DROPPED = "Dropped"
    BEFORE_WATERMARK = "BeforeWatermark"
    NOT_A_TICK = "NotATick"
    PRUNED = "Pruned"
    NO_SUCH_RUN = "NoSuchRun"


class Explanation(Shape):
    """Why a tick did, or did not, run."""

    verdict: Verdict
    """Ran, Running, Retrying, Pending, Skipped, Missed, Dropped, BeforeWatermark, NotATick, Pruned or NoSuchRun."""
    reason: ReasonText | None = None
    """Why, in one word."""
    message: Annotated[str, _text(1024), Field(max_length=1024)] | None = None
    """The decision, in words."""
    tick: Time | None = None
    """The tick; absent for a run that has none."""
    run: RunStatus | None = None
    """The tick's run, if it has one."""
    failures: Count | None = None
    """Attempts that failed and counted against backoffLimit."""
    interruptions: Count | None = None
    """Attempts that were stopped from outside or lost their lease."""
    reruns: Annotated[list[RunStatus], Field(max_length=MAX_RUNS)] | None = None
    """Further runs of the tick, by backfills with reprocess All; the latest first."""
    range: LedgerRange | None = None
    """The ledger's entry that the tick is in."""
    watermark: Time | None = None
    """Every tick up to here is decided."""
    previous_tick: Time | None = None
    """Of a time that is no tick, the tick before it."""
    next_tick: Time | None = None
    """Of a time that is no tick, the tick after it."""


class LeasedJobRunStatus(Shape):
    """How the run stands."""

    observed_generation: Count | None = None
    """The metadata.generation that all of this is about."""
    conditions: Conditions | None = None
    """Succeeded says how the run ended; Unknown while it goes on."""
    phase: RunPhase | None = None
    """Succeeded, Failed, Cancelled and Refused are final."""
    reason: ReasonText | None = None
    """Why it is in this phase, in one word."""
    message: MessageText | None = None
    """The same, for people."""
    run_key: Annotated[str, _text(1024), Field(max_length=1024)] | None = None
    """The run's key: the tick, or one of its own."""
    code: Annotated[str, _text(256), Field(max_length=256)] | None = None
    """The code of the LeasedJob's runs."""
    attempt: Count | None = None
    """The number of the current or last attempt, from 1."""
    holder: HolderText | None = None
    """cluster/namespace/pod of the last owner."""
    pod_name: NameText | None = None
    """The attempt's Pod."""
    start_time: Time | None = None
    """When the attempt was claimed, by the database's clock."""
    completion_time: Time | None = None
    """When the run reached its final phase."""
    backfill: BackfillStatus | None = None
    """How far a backfill is."""
    explanation: Explanation | None = None
    """The answer to action Explain."""


# --- the two objects, for the schema ---------------------------------------------------------------------------------
class LeasedJob(Shape):
    """A CronJob whose every tick is one run with one holder at a time, arbitrated by PostgreSQL."""

    spec: LeasedJobSpec
    status: LeasedJobStatus | None = None


class LeasedJobRun(Shape):
    """Run now: asks for one run of a LeasedJob, for a backfill, or for something about a run."""

    spec: LeasedJobRunSpec
    status: LeasedJobRunStatus | None = None


def _parse(model: type[Spec], body: Mapping[str, Any]) -> Spec | list[Problem]:
    spec = body.get("spec")
    if not isinstance(spec, Mapping):
        return [Problem("spec", Reason.INVALID_SPEC, "is required")]
    try:
        return model.model_validate(spec)
    except ValidationError as error:
        return problems_of(error, "spec")
