"""What all tests share."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

# A deadline for each example measures the machine, not the code; the suite has a time limit for each test instead.
# CI repeats the same examples, so that a commit isn't blamed for what another one left; everybody else looks further.
settings.register_profile("leasedjob", deadline=None, derandomize=os.environ.get("CI") == "true")
settings.load_profile("leasedjob")


@pytest.fixture(scope="session", autouse=True)
def no_end_by_force() -> None:
    """A shutdown that a test carries out in the tests' own process must not end that when its budget is over."""
    from leasedjob.workload.shutdown import GracefulShutdown

    (GracefulShutdown.__init__.__kwdefaults__ or {})["exit"] = lambda _code: None
