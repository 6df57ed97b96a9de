"""LeasedJob: each tick of a schedule is one logical run, owned by one holder at a time.

The lease library's names are those of `leasedjob.lease`, and can be imported from here. They are loaded when they are
first used: the sidecar and the command lines start without them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from leasedjob.lease import (
        DEFAULT_HEARTBEAT_MS,
        DEFAULT_LEASE_MS,
        DatabaseRefusedError,
        DatabaseUnavailableError,
        InvalidJobIdentityOptionsError,
        InvalidJobLeaseOptionsError,
        JobAcquired,
        JobAcquireOptions,
        JobAcquireResult,
        JobExecutionLease,
        JobLease,
        JobNotAcquired,
        JobScheduler,
        JobSchedulerModule,
        JobSchedulerModuleOptions,
        JobSchedulerService,
        JobSchedulerStatus,
        JobSchedulerType,
        LeasedJobError,
        LostJobLeaseError,
        LostSignal,
        NotAcquired,
        Pruned,
        RunExclusiveResult,
        SchemaMissingError,
        SyncJobSchedulerModule,
        SyncJobSchedulerService,
        bullmq_job_id,
        install_schema,
        run_key_for,
    )

__version__ = "0.1.0"

__all__ = [
    "DEFAULT_HEARTBEAT_MS",
    "DEFAULT_LEASE_MS",
    "DatabaseRefusedError",
    "DatabaseUnavailableError",
    "InvalidJobIdentityOptionsError",
    "InvalidJobLeaseOptionsError",
    "JobAcquireOptions",
    "JobAcquireResult",
    "JobAcquired",
    "JobExecutionLease",
    "JobLease",
    "JobNotAcquired",
    "JobScheduler",
    "JobSchedulerModule",
    "JobSchedulerModuleOptions",
    "JobSchedulerService",
    "JobSchedulerStatus",
    "JobSchedulerType",
    "LeasedJobError",
    "LostJobLeaseError",
    "LostSignal",
    "NotAcquired",
    "Pruned",
    "RunExclusiveResult",
    "SchemaMissingError",
    "SyncJobSchedulerModule",
    "SyncJobSchedulerService",
    "__version__",
    "bullmq_job_id",
    "install_schema",
    "run_key_for",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module("leasedjob.lease"), name)
