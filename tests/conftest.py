"""What all tests share."""

from __future__ import annotations

import os

from hypothesis import settings

# A deadline for each example measures the machine, not the code; the suite has a time limit for each test instead.
# CI repeats the same examples, so that a commit isn't blamed for what another one left; everybody else looks further.
settings.register_profile("leasedjob", deadline=None, derandomize=os.environ.get("CI") == "true")
settings.load_profile("leasedjob")
