"""The relay's part of the conversation: claiming a batch, and writing down what has become of it.

Both are one transaction, at READ COMMITTED: the second statement of a claim must see what was committed before it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final

from leasedjob.lease import jsonsafe
from leasedjob.workload.outbox import table
from leasedjob.workload.outbox.driving import Talk, operation
from leasedjob.workload.outbox.judge import Failure
from leasedjob.workload.outbox.publisher import OutboxMessage

ROUNDS: Final = 5  # each passes over the lanes at the front that other relays hold


@operation
def claim(batch: int, topics: Sequence[str] | None, idle: float) -> Talk[list[OutboxMessage]]:
    """The next messages that may be published, oldest first, and locked until the transaction's end.

    Args:
        batch: how many at most.
        topics: only of these; None for all.
        idle: seconds after which the server ends the transaction if nothing is heard of it: a process that is frozen
            doesn't keep its rows from the other relays.
    """
    lanes: list[int] = []
    others: list[int] = []
    loose = False
    for _ in range(ROUNDS):
        rows = yield (
            table.LANES,
            {
                "batch": batch,
                "topics": None if topics is None else list(topics),
                "idle": f"{round(1000 * idle)}ms",
                "others": others,
            },
        )
        for lane, got in rows:
            if lane is None:
                loose = True
            else:
                (lanes if got else others).append(lane)
        if not rows or lanes or loose:
            break
    if not lanes and not loose:
        return []
    rows = yield (
        table.CLAIM,
        {"batch": batch, "topics": None if topics is None else list(topics), "lanes": lanes},
    )
    return [
        OutboxMessage(
            id=id,
            idempotency_key=key,
            type=type,
            payload=json.loads(payload),
            topic=topic,
            partition_key=partition_key,
            headers=json.loads(headers),
            created_at=created_at,
            tries=tries,
        )
        for id, key, type, payload, topic, partition_key, headers, created_at, tries in rows
    ]


@operation
def settle(published: Sequence[OutboxMessage], failures: Sequence[Failure]) -> Talk[None]:
    """Marks what was published, and holds or parks what was not."""
    if published:
        yield table.MARK, {"ids": [message.id for message in published]}
    if failures:
        yield (
            table.HOLD,
            {
                "ids": [failure.message.id for failure in failures],
                "tries": [failure.tries for failure in failures],
                "waits": [failure.wait for failure in failures],
                "errors": [jsonsafe.text(failure.error) for failure in failures],
            },
        )
