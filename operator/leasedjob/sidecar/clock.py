"""The two local clocks, and nothing else that tells the time."""

from __future__ import annotations

import time


def boottime() -> float:
    """Seconds since boot, suspend included (CLOCK_BOOTTIME): the only clock that trust is measured with."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def walltime() -> float:
    """Seconds since the epoch; for the testimony, whose reader compares it with the kubelet's times only."""
    return time.time()


def boot_id() -> str:
    """Tells two boots apart: a boottime that was written before a reboot means nothing after it. "" if unknown."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""
