"""The exceptions of LeasedJob: one tree.

    LeasedJobError
    ├── InvalidJobIdentityOptionsError   (also ValueError)   a caller's mistake: type, code or run key
    ├── InvalidJobLeaseOptionsError      (also ValueError)   a caller's mistake: lease or heartbeat timing
    ├── InvalidScheduleError             (also ValueError)   a user's mistake: schedule or time zone
    ├── LostJobLeaseError                                    the lease belongs to somebody else now, or has run out
    ├── DatabaseUnavailableError                             a passing fault: try again
    ├── DatabaseRefusedError                                 a fault of configuration: a person has to act
    ├── SchemaMissingError                                   the schema is absent or too old: `leasedjob migrate`
    │   └── OutboxMissingError                               the table of the outbox is: `leasedjob outbox install`
    ├── InvalidShutdownBudgetError       (also ValueError)   a caller's mistake: stopping can't fit into its budget
    ├── RunNotAcquiredError                                  somebody else has the run, or it has succeeded
    ├── OutcomeRefusedError                                  another outcome came first, or this one can't be stored
    ├── SidecarUnavailableError                              a passing fault: the Pod's sidecar does not answer
    ├── StaleFencingTokenError                               a later attempt of the run was here
    ├── DrainingError                                        a stop has begun: nothing new is to be
    ├── InvalidOutboxMessageError        (also ValueError)   a caller's mistake: a message that can't be put in
    ├── IdempotencyKeyReusedError                            another message was put in under this key
    ├── MessageRefusedError                                  a publisher's: the sink refuses this message
    └── PublisherUnavailableError                            a publisher's: the sink does not work now

What a caller can act on differently has a type of its own; everything else that the database reports is a bug and is
raised as psycopg raised it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from uuid import UUID


class LeasedJobError(Exception):
    """Base of every error that this package raises on purpose."""


class InvalidJobIdentityOptionsError(LeasedJobError, ValueError):
    """Type, code or run key don't name one logical run. Raised before any SQL."""


class InvalidJobLeaseOptionsError(LeasedJobError, ValueError):
    """Lease or heartbeat timing is unsafe or of the wrong type. Raised before any SQL."""


class InvalidScheduleError(LeasedJobError, ValueError):
    """A schedule or time zone can't be used.

    Args:
        field: the field at fault: "schedule", "timeZone" or "schedules[i]".
        message: what is wrong with it, without the field's name.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


class LostJobLeaseError(LeasedJobError):
    """The lease is no longer held: it expired, or another owner reclaimed the run.

    Args:
        id: the lease row's id.
    """

    def __init__(self, id: UUID | str, message: str | None = None) -> None:
        super().__init__(message or f"the lease {id} is no longer held by this owner")
        self.id = id


class DatabaseUnavailableError(LeasedJobError):
    """The database can't answer now: network, restart, failover, too many connections, a lock held elsewhere.

    Args:
        message: the likely cause, for people.
        kind: a `leasedjob.lease.database.Fault` value.
    """

    def __init__(self, message: str, kind: str = "transient") -> None:
        super().__init__(message)
        self.kind = kind


class DatabaseRefusedError(LeasedJobError):
    """The database or its TLS refuses this configuration: password, role, certificate, pg_hba.

    It may still pass (a Secret that is being rotated), so long-running callers retry it slowly.

    Args:
        message: the likely cause, for people.
        kind: a `leasedjob.lease.database.Fault` value.
    """

    def __init__(self, message: str, kind: str = "refused_login") -> None:
        super().__init__(message)
        self.kind = kind


class SchemaMissingError(LeasedJobError):
    """The database lacks the schema `leasedjob`, or a migration of it."""

    def __init__(self, detail: str = "") -> None:
        super().__init__(
            "the database has no current LeasedJob schema: run `leasedjob migrate`" + (f" ({detail})" if detail else "")
        )


class OutboxMissingError(SchemaMissingError):
    """The database lacks the table `leasedjob_outbox`, on the search path."""

    def __init__(self, detail: str = "") -> None:
        LeasedJobError.__init__(
            self,
            "there is no outbox in this database: call install_outbox, or `leasedjob outbox install`"
            + (f" ({detail})" if detail else ""),
        )


class InvalidShutdownBudgetError(LeasedJobError, ValueError):
    """The phases of a stop don't fit into their budget. Raised where the budget is made, which is at the start."""


class RunNotAcquiredError(LeasedJobError):
    """The run is not ours: another process holds it, or it has succeeded."""


class OutcomeRefusedError(LeasedJobError):
    """An outcome was not taken: another one was reported before, or the data can't be stored."""


class SidecarUnavailableError(LeasedJobError):
    """The sidecar of the run's Pod gave no answer in time; it may be restarting."""


class StaleFencingTokenError(LeasedJobError):
    """What was to be written belongs to a later attempt by now: this one has lost its lease, known or not."""


class DrainingError(LeasedJobError):
    """A stop has begun, so this is not begun any more; the message says why."""


class InvalidOutboxMessageError(LeasedJobError, ValueError):
    """A message can't be put into the outbox: the text names the field. Raised before any SQL."""


class IdempotencyKeyReusedError(LeasedJobError):
    """Another message (another type, payload, topic or partition key) was put into the outbox under this key."""


class MessageRefusedError(LeasedJobError):
    """Raised by a publisher: the sink refuses this one message.

    Args:
        message: why.
        final: it would refuse it each time, so that it isn't tried again.
    """

    def __init__(self, message: str, *, final: bool = False) -> None:
        super().__init__(message)
        self.final = final


class PublisherUnavailableError(LeasedJobError):
    """Raised by a publisher: the sink does not work now, whatever is sent to it.

    Args:
        message: why.
        retry_after: seconds after which the sink wants to be asked again, if it says so.
    """

    def __init__(self, message: str, *, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after
