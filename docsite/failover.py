"""docs/reference/failover.md: how long a lease for which workload, computed by the fence's own formula."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from docsite.table import notice, table
from leasedjob.lease.trust import Timing, default_heartbeat


@dataclass(frozen=True, slots=True)
class Preset:
    """A timing that fits a kind of work."""

    name: str
    work: str
    timing: Timing


PRESETS = (
    Preset("patient (default)", "hours of work; a second run is costly, waiting is not", Timing(900, 60, 60, 10)),
    Preset(
        "steady", "minutes to an hour; a lost node is to be made up for within five minutes", Timing(300, 30, 60, 10)
    ),
    Preset("brisk", "minutes; work that stops within half a minute", Timing(120, 15, 30, 5)),
    Preset("quick", "seconds to minutes, in small steps that stop at once", Timing(60, 10, 10, 2)),
    Preset("quickest", "work that stops within seconds, near its database", Timing(30, 5, 10, 2)),
)
_GRACES = (60, 30, 10)
_HEARTBEATS = (None, 15, 5)


def shortest(grace: int, heartbeat: int | None, containers: int = 1) -> int:
    """The shortest lease, in seconds, that leaves two heartbeats of trust; heartbeat None: the default for the lease."""
    for duration in range(1, 86_400):
        beat = default_heartbeat(duration) if heartbeat is None else heartbeat
        if Timing(duration, beat, grace, 0, containers).trust_problem() is None:
            return duration
    raise ValueError("no lease is long enough")


def page() -> str:
    """The page."""
    return "\n".join(
        (
            notice("docsite/failover.py; the numbers come from leasedjob.lease.trust"),
            "# How long a lease\n",
            _TEXT,
            table(
                (
                    "preset",
                    "for",
                    "lease / heartbeat / grace",
                    "trusted for",
                    "the database may be away for",
                    "a lost node's run goes on after",
                    "heartbeats of 1,000 runs",
                ),
                (
                    (
                        preset.name,
                        preset.work,
                        f"{t.duration} / {t.heartbeat} / {t.grace}",
                        f"{math.floor(t.trust)} s",
                        f"{math.floor(t.tolerated_outage)} s",
                        f"{t.duration - t.heartbeat} to {t.duration} s",
                        f"{1000 / t.heartbeat:.0f}/s",
                    )
                    for preset in PRESETS
                    for t in (preset.timing,)
                ),
            ),
            _AFTER,
            "\n".join(_manifests()),
            "## The shortest that is accepted\n",
            "It has to leave two heartbeats of trust after the time that a stop takes; a shorter one is refused at "
            "`kubectl apply`, with these numbers. For a Pod with one workload container:\n",
            table(
                ("grace period", "heartbeat 60 s or a third (default)", "15 s", "5 s"),
                (
                    (
                        f"{grace} s{' (default)' if grace == 60 else ''}",
                        *(f"{shortest(grace, beat)} s" for beat in _HEARTBEATS),
                    )
                    for grace in _GRACES
                ),
            ),
            f"Each further workload container adds a grace period, since the kubelet may stop them one after the other: two "
            f"with the defaults need {shortest(60, None, 2)} s, three {shortest(60, None, 3)} s.\n",
        )
    )


_TEXT = """\
`lease.durationSeconds` weighs two things against each other. A run whose node is lost goes on elsewhere when its lease has
run out, not before: a short lease is a quick failover. But a workload whose heartbeats don't get through has to be stopped
*before* its lease runs out: a short lease forgives a short outage of the database.

    trusted for                   0.98 × lease − fence budget            (98 %: clock rates may differ by two percent)
    fence budget                  detection + containers × grace period + 5 s
    detection                     at most min(20 s, a tenth of the lease)
    the database may be away for  trusted for − heartbeat                (the outage may begin just before one)
    a lost node's run goes on     lease − heartbeat to lease after the loss, and then its Pod has to start

What a lease doesn't decide: a container that fails, a Pod that is deleted or evicted, and a drained node are seen at once,
and the next attempt follows at once (after a failure, with backoff). A lease matters only where nobody can say what became
of the holder.
"""

_AFTER = """\
`kubectl leasedjob lint` prints these numbers for your own manifests:

```console
$ kubectl leasedjob lint --timing nightly.yaml
nightly.yaml: leasedjob/nightly: ok
nightly.yaml: leasedjob/nightly: a lease of 900 s is trusted for 797 s: the database may be away for 737 s, a lost node's run goes on within 900 s
```

If the database fails over to a replica, the lease has to outlast that: with a failover of a minute, `quick` and `quickest`
stop healthy work each time. A shorter heartbeat makes both numbers better and costs statements: a heartbeat is one small
UPDATE ([what it costs](../performance.md)).

As fields:
"""


def _manifests() -> Iterator[str]:
    for preset in PRESETS[1:]:
        t = preset.timing
        yield (
            f"```yaml fragment=spec\n# {preset.name}\n"
            f"lease: {{durationSeconds: {t.duration}, heartbeatSeconds: {t.heartbeat}}}\n"
            f"shutdown: {{terminationGracePeriodSeconds: {t.grace}, preStopSeconds: {t.pre_stop}}}\n```\n"
        )
