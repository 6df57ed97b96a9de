"""For tests, also those of users: the lease in memory, and a real PostgreSQL that the test starts and stops.

The names below are loaded when they are first used; `leasedjob.testing.postgres` is imported by its own name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from leasedjob.testing.memory import (
        Clock,
        InMemoryJobSchedulerService,
        InMemoryLeases,
        InMemorySyncJobSchedulerService,
    )

__all__ = ["Clock", "InMemoryJobSchedulerService", "InMemoryLeases", "InMemorySyncJobSchedulerService"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module("leasedjob.testing.memory"), name)
