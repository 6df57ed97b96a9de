"""What the controller observes of one LeasedJob, and the policy that it asked for. Values only."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from leasedjob.api.v1alpha1 import ConcurrencyPolicy, ExitZeroOnStop
from leasedjob.controller.facts import PodFacts
from leasedjob.identity import JobSchedulerType, run_key_for
from leasedjob.lease.rows import Run
from leasedjob.lease.trust import Timing
from leasedjob.schedule import CodeTicks, MissedRunPolicy, Timetable


@dataclass(frozen=True, slots=True)
class Monitoring:
    """What is told to a monitor, and by when a success is expected."""

    ping_url: str | None = None
    ping_url_key: str | None = None  # in the namespace's Secret
    grace: timedelta | None = None

    @property
    def pings(self) -> bool:
        return self.ping_url is not None or self.ping_url_key is not None


@dataclass(frozen=True, slots=True)
class Policy:
    """The parts of spec that decisions are made from; durations in seconds."""

    type: JobSchedulerType
    timing: Timing
    schedule: Timetable | None = None
    suspend: bool = False
    starting_deadline: int | None = None
    concurrency: ConcurrencyPolicy = ConcurrencyPolicy.FORBID
    missed: MissedRunPolicy = MissedRunPolicy.RunLatest
    missed_limit: int = 100
    suspend_after: int | None = None  # failed runs in a row; None: never
    backoff_limit: int = 0
    pending_deadline: int = 900
    active_deadline: int | None = None
    exit_zero_on_stop: ExitZeroOnStop = ExitZeroOnStop.RETRY
    keep_successful: int = 3
    keep_failed: int = 1
    monitoring: Monitoring = Monitoring()

    def finish_policy(self) -> str:
        """What a Pod carries so that it can be finalized when its LeasedJob is gone."""
        return json.dumps({"exitZeroOnStop": self.exit_zero_on_stop.value}, separators=(",", ":"))


@dataclass(frozen=True, slots=True)
class FinishPolicy:
    """The finish policy read back from a Pod's annotation; defaults where it can't be read."""

    exit_zero_on_stop: ExitZeroOnStop = ExitZeroOnStop.RETRY

    @classmethod
    def from_json(cls, text: str) -> FinishPolicy:
        try:
            raw: dict[str, Any] = json.loads(text)
            return cls(ExitZeroOnStop(raw["exitZeroOnStop"]))
        except (ValueError, KeyError, TypeError):
            return cls()


@dataclass(frozen=True, slots=True)
class ManualRun:
    """A LeasedJobRun that asks for a run of this job."""

    uid: str
    name: str
    run_key: str
    lock_key: str
    tick: datetime | None
    cancel: bool
    refusal: str = ""  # why it never starts, as `<Reason>: <message>`


@dataclass(frozen=True, slots=True)
class JobView:
    """One LeasedJob as it was observed; `now` is the database's clock as this process estimates it."""

    cluster: str
    code: str
    policy: Policy
    watermark: datetime | None  # None: not registered with the database yet, so nothing may be claimed
    initial_lock_key: str
    now: datetime
    rows: Mapping[UUID, Run] = field(default_factory=dict)  # by id; all that aren't terminal, and recent terminal ones
    pods: tuple[PodFacts, ...] = ()
    manual: tuple[ManualRun, ...] = ()
    fresh: bool = True  # Pods were listed and the watch is alive: a Pod that isn't here doesn't exist
    uid: str = ""  # of the object
    suspended: bool = False  # after failures, in all clusters
    cordoned: str = ""  # why this cluster takes no new runs
    helped_at: datetime | None = None  # when a Pod was last seen that another replica has created
    schedule_hash: str = ""  # as it is registered
    ticks: CodeTicks | None = None  # all of the code that aren't decided yet; None: those of the policy's schedule
    version: int | None = None  # of what `ticks` are of

    def run_with_key(self, lock_key: str) -> Run | None:
        return next((r for r in self.rows.values() if r.lock_key == lock_key), None)

    def run_of_tick(self, tick: datetime) -> Run | None:
        key = run_key_for(tick)
        return next((r for r in self.rows.values() if r.identity.run_key == key), None)
