"""What an application asks of the outbox, on a connection of its own and in its own transaction.

    with psycopg.connect(...) as connection:
        connection.execute("UPDATE orders SET paid = true WHERE id = 7")
        enqueue_once(connection, "order-7-paid", "order-paid", {"order": 7}, topic="orders", partition_key="order-7")

Each of these functions takes any connection that `driving` knows; for an asynchronous one what it gives is awaited.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from leasedjob.errors import IdempotencyKeyReusedError, InvalidOutboxMessageError
from leasedjob.workload.outbox import table
from leasedjob.workload.outbox.driving import Talk, operation
from leasedjob.workload.outbox.publisher import NO_HEADERS

MAX_LENGTH: Final = 255
LOOKS: Final = 10  # for a row that is pruned again and again between two statements
_CONTROL: Final = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
_HEADER_NAME: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_NUL_IN_JSON: Final = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")


@operation
def install_outbox() -> Talk[None]:
    """Makes the table `leasedjob_outbox`, in the first schema of the search path, if there is none on it.

    Any number may do this at once. `leasedjob.workload.outbox.INSTALL` is the statement, for a migration tool.
    """
    yield table.INSTALL, {}


@operation
def enqueue_once(
    idempotency_key: str,
    type: str,
    payload: Any,
    *,
    topic: str | None = None,
    partition_key: str | None = None,
    headers: Mapping[str, str] = NO_HEADERS,
) -> Talk[bool]:
    """Puts a message into the outbox, in the caller's transaction: it is published if that one commits, and only then.

    A key that was put in before is not put in again, for as long as its row is there (the relay's `retention`).

    Args:
        idempotency_key: says which effect this is; the same each time it is tried. `run.idempotency_key` for a run that
            has one message, with more behind it for several: f"{run.idempotency_key}:{order.id}". As `type`, `topic`
            and `partition_key` at most 255 characters, none of them a control character, no white space at the ends.
        type: what happened or is to happen, for the receiver.
        payload: JSON (anything that json.dumps takes, but no NaN and no U+0000).
        topic: where it goes; default: the type.
        partition_key: messages with the same topic and the same key are published in the order of the calls; None if no
            order is asked for.
        headers: names and values as HTTP has them, for the receiver. They don't tell messages apart.

    Returns:
        True if it is new; False if this message was put in before.

    Raises:
        InvalidOutboxMessageError: before any SQL; the text names the field.
        IdempotencyKeyReusedError: another message was put in under this key. The transaction is still usable.
    """
    message = {
        "key": _text("idempotency_key", idempotency_key),
        "type": _text("type", type),
        "payload": _json(payload),
        "topic": _text("topic", type if topic is None else topic),
        "partition_key": None if partition_key is None else _text("partition_key", partition_key),
        "headers": json.dumps(_headers(headers)),
    }
    known = {name: value for name, value in message.items() if name != "headers"}
    for _ in range(LOOKS):
        if (yield table.ENQUEUE, message):
            return True
        if rows := (yield table.DIFFERENT, known):
            ((different,),) = rows
            if different:
                raise IdempotencyKeyReusedError(
                    f"another {' and '.join(different)} was put into the outbox under the key {idempotency_key}"
                )
            return False
    raise RuntimeError(f"the row of the key {idempotency_key} is there and isn't")


def _text(field: str, value: object) -> str:
    if not isinstance(value, str):
        raise InvalidOutboxMessageError(f"{field} must be a string, not {value.__class__.__name__}")
    if not value.strip():
        raise InvalidOutboxMessageError(f"{field} must not be blank")
    if len(value) > MAX_LENGTH:
        raise InvalidOutboxMessageError(f"{field} must be at most {MAX_LENGTH} characters long, not {len(value)}")
    if _CONTROL.search(value) or _SURROGATE.search(value):
        raise InvalidOutboxMessageError(f"{field} must not contain control characters or lone surrogates: {value!r}")
    if value != value.strip():
        raise InvalidOutboxMessageError(f"{field} must not begin or end with white space: {value!r}")
    return str(value)


def _json(payload: object) -> str:
    try:
        text = json.dumps(payload, allow_nan=False, ensure_ascii=False)
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidOutboxMessageError(f"payload must be JSON: {error}") from error
    if _NUL_IN_JSON.search(text):
        raise InvalidOutboxMessageError("payload must not contain U+0000, which PostgreSQL can't store")
    return text


def _headers(headers: object) -> dict[str, str]:
    if not isinstance(headers, Mapping):
        raise InvalidOutboxMessageError(f"headers must be a mapping, not {type(headers).__name__}")
    for name, value in headers.items():
        if not isinstance(name, str) or not _HEADER_NAME.fullmatch(name):
            raise InvalidOutboxMessageError(f"headers: {name!r} is not the name of a header")
        if not isinstance(value, str) or _CONTROL.search(value) or _SURROGATE.search(value):
            raise InvalidOutboxMessageError(f"headers: the value of {name} must be text without control characters")
    return dict(headers)


# --- looking after it ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ParkedMessage:
    """A message that the sink has refused so often that it isn't tried any more.

    Args:
        tries: how often.
        error: what the last refusal said.
    """

    id: int
    idempotency_key: str
    type: str
    topic: str
    partition_key: str | None
    payload: Any
    created_at: datetime
    parked_at: datetime
    tries: int
    error: str


@operation
def parked_messages(limit: int = 100) -> Talk[list[ParkedMessage]]:
    """What is parked, oldest first."""
    rows = yield table.PARKED, {"limit": limit}
    return [
        ParkedMessage(
            id=id,
            idempotency_key=key,
            type=type,
            topic=topic,
            partition_key=partition_key,
            payload=json.loads(payload),
            created_at=created_at,
            parked_at=parked_at,
            tries=tries,
            error=error or "",
        )
        for id, key, type, topic, partition_key, payload, created_at, parked_at, tries, error in rows
    ]


@operation
def retry_parked(keys: Iterable[str] | None) -> Talk[int]:
    """Parked messages are tried again, with all their tries; says how many. They keep their place: in front of those of
    their partition key that came later and are not published yet.

    Args:
        keys: their idempotency keys; None for all.
    """
    if isinstance(keys, str):
        raise TypeError("keys must be several idempotency keys, or None for all: not one string")
    ((count,),) = yield table.PUT_BACK, {"keys": None if keys is None else list(keys)}
    return int(count)


@operation
def prune_outbox(age: timedelta, *, limit: int = 1000) -> Talk[int]:
    """Deletes messages that were published longer ago than `age`, and says how many; their keys are forgotten.

    Args:
        limit: how many at most, so that the statement is short: repeat it until it says less.
    """
    if age < timedelta():
        raise ValueError(f"age must not be negative: {age}")
    ((count,),) = yield table.PRUNE, {"age": age, "limit": limit}
    return int(count)


@dataclass(frozen=True, slots=True)
class OutboxStatus:
    """How the outbox is.

    Args:
        pending: messages to be published, those that wait included.
        waiting: of them, those that the sink has refused or not taken, and whose next try is yet to come.
        parked: messages that aren't tried any more.
        lag: seconds since the oldest pending one was put in; 0.0 if there is none.
    """

    pending: int
    waiting: int
    parked: int
    lag: float


@operation
def outbox_status(topics: Iterable[str] | None = None) -> Talk[OutboxStatus]:
    """How many messages are pending, waiting and parked, and for how long the oldest one has been pending.

    Args:
        topics: of messages to these; None for all.
    """
    if isinstance(topics, str):
        raise TypeError("topics must be several topics, or None for all: not one string")
    ((pending, waiting, parked, lag),) = yield table.STATUS, {"topics": None if topics is None else list(topics)}
    return OutboxStatus(int(pending), int(waiting), int(parked), max(0.0, float(lag or 0.0)))
