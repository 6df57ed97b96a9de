"""Waiting for what several parts wait for."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable

import psycopg


def wait_for(probe: Callable[[], bool], *, seconds: float, every: float = 1.0) -> bool:
    """Whether `probe` became true within the time; what it raises counts as not yet."""
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(AssertionError, OSError, psycopg.Error, subprocess.TimeoutExpired):
            if probe():
                return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(every)
