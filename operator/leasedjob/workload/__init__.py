"""The workload SDK: which run this is, stopping well, and a command line for programs that know nothing of it.

The names below are imported when they are first used: importing this package costs next to nothing, and pulls in no
adapter and no database driver.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from leasedjob.errors import (
        DrainingError,
        IdempotencyKeyReusedError,
        InvalidOutboxMessageError,
        InvalidShutdownBudgetError,
        MessageRefusedError,
        OutcomeRefusedError,
        PublisherUnavailableError,
        RunNotAcquiredError,
        SidecarUnavailableError,
        StaleFencingTokenError,
    )
    from leasedjob.workload.abort import AbortSignal
    from leasedjob.workload.cascade import AsyncCascade, Cascade
    from leasedjob.workload.checkpoint import AsyncCheckpoints, Checkpoints
    from leasedjob.workload.draining import ShutdownState
    from leasedjob.workload.intervals import IntervalRegistry, SyncIntervalRegistry
    from leasedjob.workload.outbox.http import HttpPublisher
    from leasedjob.workload.outbox.judge import Patience
    from leasedjob.workload.outbox.operations import (
        enqueue_once,
        install_outbox,
        outbox_status,
        parked_messages,
        prune_outbox,
        retry_parked,
    )
    from leasedjob.workload.outbox.publisher import CallablePublisher, OutboxMessage, Publisher
    from leasedjob.workload.outbox.relay import OutboxRelay
    from leasedjob.workload.phases import Phase, PhaseReport, ShutdownBudget
    from leasedjob.workload.run import Mode, Run, current_run, find_run
    from leasedjob.workload.shutdown import GracefulShutdown, Stoppable

_HOME: Final = {
    "DrainingError": "leasedjob.errors",
    "IdempotencyKeyReusedError": "leasedjob.errors",
    "InvalidOutboxMessageError": "leasedjob.errors",
    "InvalidShutdownBudgetError": "leasedjob.errors",
    "MessageRefusedError": "leasedjob.errors",
    "OutcomeRefusedError": "leasedjob.errors",
    "PublisherUnavailableError": "leasedjob.errors",
    "RunNotAcquiredError": "leasedjob.errors",
    "SidecarUnavailableError": "leasedjob.errors",
    "StaleFencingTokenError": "leasedjob.errors",
    "AbortSignal": "leasedjob.workload.abort",
    "AsyncCascade": "leasedjob.workload.cascade",
    "AsyncCheckpoints": "leasedjob.workload.checkpoint",
    "Cascade": "leasedjob.workload.cascade",
    "Checkpoints": "leasedjob.workload.checkpoint",
    "ShutdownState": "leasedjob.workload.draining",
    "IntervalRegistry": "leasedjob.workload.intervals",
    "CallablePublisher": "leasedjob.workload.outbox.publisher",
    "HttpPublisher": "leasedjob.workload.outbox.http",
    "OutboxMessage": "leasedjob.workload.outbox.publisher",
    "OutboxRelay": "leasedjob.workload.outbox.relay",
    "Patience": "leasedjob.workload.outbox.judge",
    "Publisher": "leasedjob.workload.outbox.publisher",
    "enqueue_once": "leasedjob.workload.outbox.operations",
    "install_outbox": "leasedjob.workload.outbox.operations",
    "outbox_status": "leasedjob.workload.outbox.operations",
    "parked_messages": "leasedjob.workload.outbox.operations",
    "prune_outbox": "leasedjob.workload.outbox.operations",
    "retry_parked": "leasedjob.workload.outbox.operations",
    "Phase": "leasedjob.workload.phases",
    "PhaseReport": "leasedjob.workload.phases",
    "ShutdownBudget": "leasedjob.workload.phases",
    "Mode": "leasedjob.workload.run",
    "Run": "leasedjob.workload.run",
    "current_run": "leasedjob.workload.run",
    "find_run": "leasedjob.workload.run",
    "SyncIntervalRegistry": "leasedjob.workload.intervals",
    "GracefulShutdown": "leasedjob.workload.shutdown",
    "Stoppable": "leasedjob.workload.shutdown",
}

__all__ = [
    "AbortSignal",
    "AsyncCascade",
    "AsyncCheckpoints",
    "CallablePublisher",
    "Cascade",
    "Checkpoints",
    "DrainingError",
    "GracefulShutdown",
    "HttpPublisher",
    "IdempotencyKeyReusedError",
    "IntervalRegistry",
    "InvalidOutboxMessageError",
    "InvalidShutdownBudgetError",
    "MessageRefusedError",
    "Mode",
    "OutboxMessage",
    "OutboxRelay",
    "OutcomeRefusedError",
    "Patience",
    "Phase",
    "PhaseReport",
    "Publisher",
    "PublisherUnavailableError",
    "Run",
    "RunNotAcquiredError",
    "ShutdownBudget",
    "ShutdownState",
    "SidecarUnavailableError",
    "StaleFencingTokenError",
    "Stoppable",
    "SyncIntervalRegistry",
    "current_run",
    "enqueue_once",
    "find_run",
    "install_outbox",
    "outbox_status",
    "parked_messages",
    "prune_outbox",
    "retry_parked",
]


def __getattr__(name: str) -> Any:
    if (home := _HOME.get(name)) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(home), name)
