"""The identity of a logical run, and the names that follow from it. Pure.

A run is `{type, code, runKey}`. Its lock key is also its idempotency key:

    "v2:" + base64url without padding of SHA-256 over the UTF-8 of
    {"version":2,"type":…,"code":…,"runKey":…|null}      compact, keys in this order

Text is trimmed, measured and escaped as JavaScript does, so that a NestJS service with `@sdcorejs/nestjs` and a Python
service compute the same key for the same run (`tests/contract/identity-vectors.yaml`).
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from leasedjob.errors import InvalidJobIdentityOptionsError

if TYPE_CHECKING:
    from collections.abc import Collection

MAX_LABEL_LENGTH: Final = 63  # of a label's value, in Kubernetes
MAX_CODE_LENGTH: Final = 64  # UTF-16 code units
MAX_RUN_KEY_LENGTH: Final = 1024  # UTF-16 code units
MAX_POD_NAME_LENGTH: Final = 63

# ECMA-262 WhiteSpace and LineTerminator. str.strip() differs: it takes U+001C..U+001F and U+0085, and leaves U+FEFF.
_JS_WHITESPACE: Final = (
    "\t\n\v\f\r \u00a0\u1680" + "".join(map(chr, range(0x2000, 0x200B))) + "\u2028\u2029\u202f\u205f\u3000\ufeff"
)
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
_CANONICAL_KEY: Final = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ)(?:#r([1-9][0-9]{0,8}))?", re.ASCII)
_NOT_IN_LABEL: Final = re.compile(r"[^a-z0-9]+")
# Escapes ", \ and U+0000-U+001F only, as JSON.stringify does. One encoder for all: a tick may bring a thousand keys.
_json: Final = json.JSONEncoder(ensure_ascii=False).encode


class JobSchedulerType(StrEnum):
    """INITIAL runs once, ever, per code; SCHEDULE runs once per run key."""

    INITIAL = "INITIAL"
    SCHEDULE = "SCHEDULE"


_TYPES: Final = {str(kind.value): kind for kind in JobSchedulerType}


def utf16_length(text: str) -> int:
    """The length of `text` in UTF-16 code units, which is what JavaScript's `length` counts."""
    return len(text) if text.isascii() else len(text) + sum(1 for character in text if character > "\uffff")


def js_trim(text: str) -> str:
    """`text` without leading and trailing white space, as JavaScript's `String.prototype.trim` defines it."""
    return text.strip(_JS_WHITESPACE)


def _checked(value: object, field: str, limit: int) -> str:
    if not isinstance(value, str):
        raise InvalidJobIdentityOptionsError(f"{field} must be a string, not {type(value).__name__}")
    text = js_trim(str(value))
    if not text:
        raise InvalidJobIdentityOptionsError(f"{field} must not be blank")
    if "\0" in text:
        raise InvalidJobIdentityOptionsError(f"{field} must not contain U+0000, which PostgreSQL can't store")
    if not text.isascii() and _SURROGATE.search(text):
        raise InvalidJobIdentityOptionsError(f"{field} must not contain a lone surrogate, which isn't valid text")
    if (length := utf16_length(text)) > limit:
        raise InvalidJobIdentityOptionsError(f"{field} must be at most {limit} UTF-16 code units long, not {length}")
    return text


@dataclass(frozen=True, slots=True)
class RunIdentity:
    """One logical run. Build it with `of`, which checks; the constructor takes values that were checked before."""

    type: JobSchedulerType
    code: str
    run_key: str | None

    @classmethod
    def of(cls, *, type: object = JobSchedulerType.SCHEDULE, code: object, run_key: object = None) -> RunIdentity:
        """The identity of these values, trimmed.

        Args:
            type: a JobSchedulerType or its name; default SCHEDULE.
            code: 1-64 UTF-16 code units after trimming.
            run_key: 1-1,024 UTF-16 code units after trimming; required for SCHEDULE, forbidden for INITIAL.

        Raises:
            InvalidJobIdentityOptionsError: for anything else, also for values of another type.
        """
        if not isinstance(type, str) or (kind := _TYPES.get(type)) is None:
            raise InvalidJobIdentityOptionsError(f"type must be INITIAL or SCHEDULE, not {type!r}")
        checked_code = _checked(code, "code", MAX_CODE_LENGTH)
        if kind is JobSchedulerType.INITIAL:
            if run_key is not None:
                raise InvalidJobIdentityOptionsError("run_key is forbidden for type INITIAL, which runs once per code")
            return cls(kind, checked_code, None)
        if run_key is None:
            raise InvalidJobIdentityOptionsError("run_key is required for type SCHEDULE")
        return cls(kind, checked_code, _checked(run_key, "run_key", MAX_RUN_KEY_LENGTH))

    @property
    def lock_key(self) -> str:
        """The unique key of the lease row: 46 ASCII characters, beginning with "v2:"."""
        code, run_key = _json(self.code), _json(self.run_key)
        text = f'{{"version":2,"type":"{self.type.value}","code":{code},"runKey":{run_key}}}'
        digest = hashlib.sha256(text.encode()).digest()
        return "v2:" + base64.urlsafe_b64encode(digest).rstrip(b"=").decode()

    @property
    def idempotency_key(self) -> str:
        """The same key, under the name by which a unique outbox row uses it."""
        return self.lock_key


def short_hash(text: str) -> str:
    """16 hexadecimal digits of the SHA-256 of `text`: for labels and names, not for security."""
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]


def label_value(text: str) -> str:
    """`text` where it is a valid label value, else its hash."""
    ok = len(text) <= MAX_LABEL_LENGTH and text[:1].isalnum() and text[-1:].isalnum() and text.isascii()
    return text if ok and all(c.isalnum() or c in "-_." for c in text) else short_hash(text)


def _cut_utf16(text: str, units: int) -> str:
    """The longest prefix of `text` with at most `units` UTF-16 code units; never half a surrogate pair."""
    return text.encode("utf-16-le")[: 2 * units].decode("utf-16-le", errors="ignore")


def job_code(namespace: str, name: str, spec_code: str | None = None, shared_codes: Collection[str] = ()) -> str:
    """The code of a LeasedJob: `<namespace>/<spec.code, or the name>`.

    A namespace's RBAC is therefore the RBAC of its codes. A `spec_code` that `shared_codes` lists is the code itself,
    for every namespace. Over 64 UTF-16 code units the code is its first 47, "-" and `short_hash` of the full text.

    Raises:
        InvalidJobIdentityOptionsError: `spec_code` is blank, too long (64 units) or holds text that can't be stored.
    """
    own = name if spec_code is None else _checked(spec_code, "code", MAX_CODE_LENGTH)
    full = own if spec_code is not None and own in shared_codes else f"{namespace}/{own}"
    if utf16_length(full) <= MAX_CODE_LENGTH:
        return full
    return f"{_cut_utf16(full, 47)}-{short_hash(full)}"


def run_key_for(tick: datetime, reprocess: int = 0) -> str:
    """The run key of a tick: "2026-07-20T03:00:00Z", and "…Z#r1" for its first reprocessing.

    Args:
        tick: an aware datetime on a whole second; converted to UTC.
        reprocess: 0 for the scheduled run, 1 and more for runs that repeat it.

    Raises:
        ValueError: a naive datetime, a fraction of a second, or a negative number.
    """
    if tick.tzinfo is None or tick.microsecond:
        raise ValueError(f"a tick is an aware datetime on a whole second, not {tick!r}")
    if reprocess < 0:
        raise ValueError(f"reprocess must not be negative: {reprocess}")
    utc = tick.astimezone(UTC)
    key = f"{utc.year:04d}-{utc:%m-%dT%H:%M:%S}Z"
    return f"{key}#r{reprocess}" if reprocess else key


def tick_of(run_key: str | None) -> datetime | None:
    """The tick that a canonical UTC key names (also "…Z#rN"); None for any other key."""
    match = _CANONICAL_KEY.fullmatch(run_key or "")
    if match is None:
        return None
    try:
        return datetime.strptime(match[1], "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
    except ValueError:
        return None


def pod_name(job_name: str, lock_key: str, attempt: int) -> str:
    """The name of an attempt's Pod: a DNS label of at most 63 characters.

    The same for everybody who computes it, and different for different jobs, runs and attempts: creating the Pod
    twice is therefore refused by the API server. Form: `<job name, cut>-<10 hexadecimal digits>-<attempt>`.
    """
    digest = hashlib.sha256(f"{job_name}\n{lock_key}".encode()).hexdigest()[:10]
    tail = f"-{digest}-{attempt}"
    head = _NOT_IN_LABEL.sub("-", job_name.lower())[: MAX_POD_NAME_LENGTH - len(tail)].strip("-")
    return (head or "run") + tail


def bullmq_job_id(idempotency_key: str) -> str:
    """A BullMQ job id for a run: 64 hexadecimal digits, the SHA-256 of its idempotency key.

    BullMQ refuses ids that contain ":", as every idempotency key does.
    """
    return hashlib.sha256(idempotency_key.encode()).hexdigest()
