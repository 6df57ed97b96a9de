"""The lease: identity in, one owner at a time out.

The names below are the library's public face. They are imported when they are first used, so that a sidecar that needs
two small modules doesn't load the rest.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from leasedjob.errors import (
        DatabaseRefusedError,
        DatabaseUnavailableError,
        InvalidJobIdentityOptionsError,
        InvalidJobLeaseOptionsError,
        LeasedJobError,
        LostJobLeaseError,
        SchemaMissingError,
    )
    from leasedjob.identity import JobSchedulerType, bullmq_job_id, run_key_for
    from leasedjob.lease.core import (
        JobAcquired,
        JobAcquireResult,
        JobExecutionLease,
        JobLease,
        JobNotAcquired,
        JobScheduler,
        NotAcquired,
        RunExclusiveResult,
    )
    from leasedjob.lease.lost import LostSignal
    from leasedjob.lease.migrate import install_schema
    from leasedjob.lease.module import JobSchedulerModule, JobSchedulerModuleOptions, SyncJobSchedulerModule
    from leasedjob.lease.options import DEFAULT_HEARTBEAT_MS, DEFAULT_LEASE_MS, JobAcquireOptions
    from leasedjob.lease.retention import Pruned
    from leasedjob.lease.rows import JobSchedulerStatus
    from leasedjob.lease.service import JobSchedulerService, SyncJobSchedulerService

_HOME: Final = {
    "DatabaseRefusedError": "leasedjob.errors",
    "DatabaseUnavailableError": "leasedjob.errors",
    "InvalidJobIdentityOptionsError": "leasedjob.errors",
    "InvalidJobLeaseOptionsError": "leasedjob.errors",
    "LeasedJobError": "leasedjob.errors",
    "LostJobLeaseError": "leasedjob.errors",
    "SchemaMissingError": "leasedjob.errors",
    "JobSchedulerType": "leasedjob.identity",
    "bullmq_job_id": "leasedjob.identity",
    "run_key_for": "leasedjob.identity",
    "JobAcquireResult": "leasedjob.lease.core",
    "JobAcquired": "leasedjob.lease.core",
    "JobExecutionLease": "leasedjob.lease.core",
    "JobLease": "leasedjob.lease.core",
    "JobNotAcquired": "leasedjob.lease.core",
    "JobScheduler": "leasedjob.lease.core",
    "NotAcquired": "leasedjob.lease.core",
    "RunExclusiveResult": "leasedjob.lease.core",
    "LostSignal": "leasedjob.lease.lost",
    "install_schema": "leasedjob.lease.migrate",
    "JobSchedulerModule": "leasedjob.lease.module",
    "JobSchedulerModuleOptions": "leasedjob.lease.module",
    "SyncJobSchedulerModule": "leasedjob.lease.module",
    "DEFAULT_HEARTBEAT_MS": "leasedjob.lease.options",
    "DEFAULT_LEASE_MS": "leasedjob.lease.options",
    "JobAcquireOptions": "leasedjob.lease.options",
    "Pruned": "leasedjob.lease.retention",
    "JobSchedulerStatus": "leasedjob.lease.rows",
    "JobSchedulerService": "leasedjob.lease.service",
    "SyncJobSchedulerService": "leasedjob.lease.service",
}

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
    "bullmq_job_id",
    "install_schema",
    "run_key_for",
]


def __getattr__(name: str) -> Any:
    if (home := _HOME.get(name)) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(home), name)
