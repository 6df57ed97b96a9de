"""What a caller of the library asks for, checked before any SQL. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import Enum
from typing import Final

from leasedjob.errors import InvalidJobIdentityOptionsError, InvalidJobLeaseOptionsError
from leasedjob.identity import JobSchedulerType, RunIdentity
from leasedjob.lease import jsonsafe

DEFAULT_LEASE_MS: Final = 15 * 60_000
DEFAULT_HEARTBEAT_MS: Final = 60_000
"""The largest default interval; the default itself is the smaller of this and a third of the lease."""
MAX_SAFE_INTEGER: Final = 2**53 - 1


class _LeftOut(Enum):
    LEFT_OUT = "left out"

    def __repr__(self) -> str:
        return "LEFT_OUT"


LEFT_OUT: Final = _LeftOut.LEFT_OUT
"""The default of every option: an explicit None is not the same, and is refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobAcquireOptions:
    """Logical identity and lease timing. Values are checked when they are used, so that untyped callers are, too.

    Args:
        code: 1-64 UTF-16 code units after trimming.
        run_key: at most 1,024 UTF-16 code units; required for SCHEDULE, to be left out for INITIAL.
        name: for people; default the code.
        type: default SCHEDULE.
        lease_ms: milliseconds, an integer above 2 and at most 2^53-1; default 900,000.
        heartbeat_ms: milliseconds, 0 or an integer below half the lease; 0 disables heartbeats. Default the smaller
            of 60,000 and a third of the lease.
    """

    code: str
    run_key: str | _LeftOut = LEFT_OUT
    name: str | _LeftOut = LEFT_OUT
    type: JobSchedulerType | _LeftOut = LEFT_OUT
    lease_ms: int | _LeftOut = LEFT_OUT
    heartbeat_ms: int | _LeftOut = LEFT_OUT


@dataclass(frozen=True, slots=True)
class Resolved:
    """Options that were checked; what the rest of the library works with."""

    identity: RunIdentity
    name: str
    lease_ms: int
    heartbeat_ms: int


def default_heartbeat_ms(lease_ms: int) -> int:
    """min(60,000, max(1, a third of the lease)), milliseconds."""
    return min(DEFAULT_HEARTBEAT_MS, max(1, lease_ms // 3))


def resolve(options: object) -> Resolved:
    """The options, checked and with defaults.

    Args:
        options: a JobAcquireOptions, or a mapping with the same names.

    Raises:
        InvalidJobIdentityOptionsError: no options, an unknown option, or code, type, run key or name is unusable.
        InvalidJobLeaseOptionsError: the timing is unsafe or no integer.
    """
    if isinstance(options, Mapping):
        known = {field.name for field in fields(JobAcquireOptions)}
        if unknown := sorted(set(options) - known, key=str):
            raise InvalidJobIdentityOptionsError(f"unknown options: {', '.join(map(str, unknown))}")
        options = JobAcquireOptions(**{"code": LEFT_OUT, **options})
    elif not isinstance(options, JobAcquireOptions):
        raise InvalidJobIdentityOptionsError(f"options must be JobAcquireOptions, not {type(options).__name__}")

    identity = _identity(options)
    name: object = options.name
    if name is LEFT_OUT:
        name = identity.code
    elif not isinstance(name, str):
        raise InvalidJobIdentityOptionsError(f"name must be a string, not {type(name).__name__}")
    lease_ms = _lease(options.lease_ms)
    return Resolved(identity, jsonsafe.text(name), lease_ms, _heartbeat(options.heartbeat_ms, lease_ms))


def _identity(options: JobAcquireOptions) -> RunIdentity:
    kind, run_key = options.type, options.run_key
    if run_key is None:
        raise InvalidJobIdentityOptionsError("run_key must be a string or be left out, not None")
    return RunIdentity.of(
        type=JobSchedulerType.SCHEDULE if kind is LEFT_OUT else kind,
        code=options.code,
        run_key=None if run_key is LEFT_OUT else run_key,
    )


def _integer(value: object, name: str) -> int:
    if type(value) is not int:  # bool is an int, but no duration
        raise InvalidJobLeaseOptionsError(f"{name} must be an integer, not {type(value).__name__}")
    if abs(value) > MAX_SAFE_INTEGER:
        raise InvalidJobLeaseOptionsError(f"{name} must be at most 2^53-1")
    return value


def _lease(value: object) -> int:
    if value is LEFT_OUT:
        return DEFAULT_LEASE_MS
    lease_ms = _integer(value, "lease_ms")
    if lease_ms <= 2:
        raise InvalidJobLeaseOptionsError(f"lease_ms must be greater than 2, not {lease_ms}")
    return lease_ms


def _heartbeat(value: object, lease_ms: int) -> int:
    if value is LEFT_OUT:
        return default_heartbeat_ms(lease_ms)
    heartbeat_ms = _integer(value, "heartbeat_ms")
    if heartbeat_ms < 0:
        raise InvalidJobLeaseOptionsError(f"heartbeat_ms must not be negative, but is {heartbeat_ms}")
    if 2 * heartbeat_ms >= lease_ms:
        raise InvalidJobLeaseOptionsError(
            f"heartbeat_ms must be less than half the lease: {heartbeat_ms} is not below {lease_ms} / 2"
        )
    return heartbeat_ms
