"""`leasedjob-sidecar drain`: the sidecar's preStop. Tells `hold`, and through it the workload, that a stop has begun.

It is a notice only: heartbeats go on until the workload has ended. It never fails and takes two seconds at most, since
it runs in the Pod's grace period, and it also runs when the workload has simply ended.
"""

from __future__ import annotations

from typing import Final

from leasedjob.http1 import HttpError, ask
from leasedjob.sidecar.settings import Settings

SECONDS: Final = 2.0


def run(settings: Settings) -> int:
    """Always 0."""
    try:
        ask("127.0.0.1", settings.report_port, "POST", "/v1/drain", seconds=SECONDS)
    except (OSError, HttpError) as error:
        print(f"leasedjob-drain: the sidecar was not told: {error}")
    return 0
