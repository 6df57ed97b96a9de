"""The outbox: what is to be sent is put down in the transaction that makes it true, and published from there.

    enqueue_once(connection, key, "order-paid", {"order": 7}, topic="orders", partition_key="order-7")

A relay publishes it afterwards, at least once, and the sink takes it once, by its idempotency key.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from leasedjob.workload.outbox.batch import Relayed
    from leasedjob.workload.outbox.http import HttpPublisher
    from leasedjob.workload.outbox.judge import Patience
    from leasedjob.workload.outbox.operations import (
        OutboxStatus,
        ParkedMessage,
        enqueue_once,
        install_outbox,
        outbox_status,
        parked_messages,
        prune_outbox,
        retry_parked,
    )
    from leasedjob.workload.outbox.publisher import CallablePublisher, OutboxMessage, Publisher
    from leasedjob.workload.outbox.relay import OutboxRelay
    from leasedjob.workload.outbox.table import INSTALL

_HOME: Final = {
    "INSTALL": "table",
    "CallablePublisher": "publisher",
    "HttpPublisher": "http",
    "OutboxMessage": "publisher",
    "OutboxRelay": "relay",
    "OutboxStatus": "operations",
    "ParkedMessage": "operations",
    "Patience": "judge",
    "Publisher": "publisher",
    "Relayed": "batch",
    "enqueue_once": "operations",
    "install_outbox": "operations",
    "outbox_status": "operations",
    "parked_messages": "operations",
    "prune_outbox": "operations",
    "retry_parked": "operations",
}

__all__ = [
    "INSTALL",
    "CallablePublisher",
    "HttpPublisher",
    "OutboxMessage",
    "OutboxRelay",
    "OutboxStatus",
    "ParkedMessage",
    "Patience",
    "Publisher",
    "Relayed",
    "enqueue_once",
    "install_outbox",
    "outbox_status",
    "parked_messages",
    "prune_outbox",
    "retry_parked",
]


def __getattr__(name: str) -> Any:
    if (home := _HOME.get(name)) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)
