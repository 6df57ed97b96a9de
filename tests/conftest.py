"""What all tests share."""

from __future__ import annotations

from hypothesis import settings

# A deadline for each example measures the machine, not the code; the suite has a time limit for each test instead.
settings.register_profile("leasedjob", deadline=None)
settings.load_profile("leasedjob")
