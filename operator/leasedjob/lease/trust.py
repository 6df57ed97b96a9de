"""The trust window and the fence budget: until when a holder may believe in its lease. Pure.

The rule (docs/decisions/0003-fence.md):

    trusted until = heartbeat request sent + 0.98 * duration - fence budget
    fence budget  = detection + workload containers * terminationGracePeriodSeconds + 5 s
    detection     = liveness period * threshold + timeout, at most min(20 s, duration / 10)

0.98 covers a clock *rate* error of two percent between the holder and the database. A holder that is past its trust
answers "not leased"; the kubelet needs `detection` to notice and the Pod's whole grace period to stop the workload,
and then the lease has still not expired by the database's clock. Of several workload containers the kubelet stops the
one whose probe failed first alone, and looks at the others only when it has ended: each may take a grace period.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass

CLOCK_RATE_PERCENT = 98
CLOCK_RATE = CLOCK_RATE_PERCENT / 100
STOP_MARGIN_SECONDS = 5.0
MAX_DETECTION_SECONDS = 20
MIN_LEASE_SECONDS = 20
DEFAULT_LEASE_SECONDS = 900
DEFAULT_HEARTBEAT_SECONDS = 60
DEFAULT_GRACE_SECONDS = 60
DEFAULT_PRE_STOP_SECONDS = 10
# What is said of a timing that can't hold the fence; `%d` means the same to Python and to the CRD's rules.
TRUST_PROBLEM = (
    "%d s leave %d s of trust (98 %% of them, less detection %d, %d x grace period %d and 5), but two heartbeats need "
    "%d: raise lease.durationSeconds, or lower lease.heartbeatSeconds (%d) or "
    "shutdown.terminationGracePeriodSeconds (%d)"
)
PRE_STOP_PROBLEM = "%d s leave no time to stop in: it must be at most shutdown.terminationGracePeriodSeconds (%d) - 5"


@dataclass(frozen=True, slots=True)
class Probe:
    """The liveness probe's timing, whole seconds as Kubernetes wants them."""

    period: int
    threshold: int
    timeout: int

    @property
    def detection(self) -> int:
        """Seconds from the first "no" (or silence) until the kubelet has decided to stop the Pod."""
        return self.period * self.threshold + self.timeout


def probe_for(duration_seconds: float) -> Probe:
    """The probe whose detection is at most min(20 s, duration / 10); three answers decide wherever that has room."""
    budget = max(2, math.floor(min(MAX_DETECTION_SECONDS, duration_seconds / 10)))
    timeout = max(1, budget // 4)
    threshold = 3 if budget >= 4 else budget - 1
    return Probe(period=(budget - timeout) // threshold, threshold=threshold, timeout=timeout)


def default_heartbeat(duration_seconds: int) -> int:
    """min(60, a third of the lease), at least 1; seconds."""
    return min(DEFAULT_HEARTBEAT_SECONDS, max(1, duration_seconds // 3))


@dataclass(frozen=True, slots=True)
class Timing:
    """One attempt's timing; every value in seconds. The one budget from which Pod, probe and sidecar are derived.

    Args:
        containers: how many workload containers the Pod has; the kubelet may stop them one after the other.
    """

    duration: int
    heartbeat: int
    grace: int
    pre_stop: int
    containers: int = 1

    @property
    def probe(self) -> Probe:
        return probe_for(self.duration)

    @property
    def fence_budget(self) -> float:
        """Seconds between the sidecar's "no" and the last moment at which the workload may still run."""
        return self.probe.detection + self.containers * self.grace + STOP_MARGIN_SECONDS

    @property
    def trust(self) -> float:
        """Seconds for which one successful heartbeat is trusted, counted from when it was sent."""
        return CLOCK_RATE * self.duration - self.fence_budget

    @property
    def tolerated_outage(self) -> float:
        """Seconds for which the database may be away without healthy work being stopped: it may have gone just before a
        heartbeat."""
        return self.trust - self.heartbeat

    def in_words(self) -> str:
        """What this timing means for whoever chose it."""
        return (
            f"a lease of {self.duration} s is trusted for {math.floor(self.trust)} s: the database may be away for "
            f"{math.floor(self.tolerated_outage)} s, a lost node's run goes on within {self.duration} s"
        )

    def problem(self) -> str | None:
        """Why this timing can't hold the fence, as `<field>: <what is wrong>`; None where it can."""
        if text := self.trust_problem():
            return f"lease.durationSeconds: {text}"
        if text := self.pre_stop_problem():
            return f"shutdown.preStopSeconds: {text}"
        return None

    def trust_problem(self) -> str | None:
        """Why the trust window is too short, with the numbers and the fields that change them; None if it isn't."""
        if self.trust >= 2 * self.heartbeat:
            return None
        # whole numbers, so that the CRD's rule, which has no others, says the same
        trust = CLOCK_RATE_PERCENT * self.duration // 100 - int(self.fence_budget)
        numbers = (self.duration, trust, self.probe.detection, self.containers, self.grace, 2 * self.heartbeat)
        return TRUST_PROBLEM % (*numbers, self.heartbeat, self.grace)

    def pre_stop_problem(self) -> str | None:
        """Why a stop has no time after preStop, with the numbers; None if it has."""
        if self.pre_stop <= self.grace - STOP_MARGIN_SECONDS:
            return None
        return PRE_STOP_PROBLEM % (self.pre_stop, self.grace)

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Timing:
        return cls(**json.loads(text))
