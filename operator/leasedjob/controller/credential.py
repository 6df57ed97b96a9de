"""What a namespace's Secret holds, and the next step towards a credential that works and is young enough. Pure.

A rotation is written down before it is made: the new password first lies beside the old one in the Secret (`next-user`,
`next-password`), then its role gets it, then it takes the old one's place. So whoever finds a rotation half done, in
whichever step another replica has died, goes on from there; and no step leaves a Secret that doesn't work.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Any, Final

from leasedjob.lease.tenants import Slot, TenantState
from leasedjob.protocol import LABEL_MANAGED

USER: Final = "user"
PASSWORD: Final = "password"
NEXT_USER: Final = "next-user"
NEXT_PASSWORD: Final = "next-password"
WHERE: Final = (
    "host",
    "port",
    "dbname",
    "sslmode",
    "sslrootcert",
    "ca.crt",
)  # where the database is; other keys are kept


@dataclass(frozen=True, slots=True)
class SecretView:
    """A namespace's Secret, as the decision needs it.

    Args:
        slot: whose role it names, None where that is neither of the tenant's or has no password.
        next: the same of the credential that lies ready.
        where_is_current: host, port, database and TLS are what this operator would write.
    """

    slot: Slot | None
    next: Slot | None
    where_is_current: bool


class Step(StrEnum):
    """What is to be done next; after each step everything is read again."""

    STAGE = "stage"  # write a new password beside the old one
    PROMOTE = "promote"  # give the staged password to its role, then put it in the old one's place
    SWITCH = "switch"  # the Secret names the other slot: write down since when
    READDRESS = "readdress"  # write host, port, database and TLS anew
    RETIRE = "retire"  # disable the slot that nobody needs any more
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class Next:
    """A step, and the slot that it is about."""

    step: Step
    slot: Slot


def decide(secret: SecretView | None, state: TenantState, rotate_after: timedelta) -> Next:
    """The next step for one namespace.

    Args:
        secret: None where there is none.
        rotate_after: zero: credentials don't grow old.
    """
    if secret is not None and secret.next is not None:
        return Next(Step.PROMOTE, secret.next)
    if secret is None or secret.slot not in state.in_force:
        # Nothing that works, perhaps an old Secret from a backup. A slot that Pods may be using keeps its password.
        return Next(Step.STAGE, state.slot.other if state.slot in state.in_force else state.slot)
    if secret.slot is not None and secret.slot is not state.slot:
        return Next(Step.SWITCH, secret.slot)
    if not secret.where_is_current:
        return Next(Step.READDRESS, state.slot)
    if state.retirable:
        return Next(Step.RETIRE, state.slot.other)
    if rotate_after and state.age >= rotate_after and not state.overlapping:
        return Next(Step.STAGE, state.slot.other)
    return Next(Step.NOTHING, state.slot)


def is_ours(secret: Mapping[str, Any]) -> bool:
    """Whether the operator made it. A Secret of the user's own is never touched."""
    return ((secret["metadata"].get("labels") or {}).get(LABEL_MANAGED)) == "true"


def view(secret: Mapping[str, Any], names: Mapping[str, Slot], where: Mapping[str, str]) -> SecretView:
    """The Secret seen with the tenant's role names and the connection that this operator would write."""
    values = decoded(secret.get("data") or {})
    return SecretView(
        slot=names.get(values.get(USER, "")) if values.get(PASSWORD) else None,
        next=names.get(values.get(NEXT_USER, "")) if values.get(NEXT_PASSWORD) else None,
        where_is_current={key: values[key] for key in WHERE if values.get(key)} == dict(where),
    )


def encoded(values: Mapping[str, str]) -> dict[str, str]:
    """As a Secret's `data`."""
    return {k: base64.b64encode(v.encode()).decode() for k, v in values.items()}


def decoded(data: Mapping[str, str]) -> dict[str, str]:
    """A Secret's `data` as text; what is no text is empty."""
    return {k: _text(v) for k, v in data.items()}


def _text(value: str) -> str:
    try:
        return base64.b64decode(value).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""
