"""What is wrong with an object, in words for the person who wrote it. Pure.

How a field's error is worded, here, in the CRDs' rules and in what the operator and the command line show:

    <path>: <what is wrong with it>

The path is said once, by whoever shows the error: by `Problem`, or by the API server, which writes `<path>: Invalid
value: …` before a rule's message. So a message never begins with its own field's name. Other fields in it are named by
their path below `spec`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Reason(StrEnum):
    """Why an object isn't accepted; the `reason` of its condition `Ready=False`."""

    INVALID_SPEC = "InvalidSpec"
    INVALID_CODE = "InvalidCode"
    INVALID_SCHEDULE = "InvalidSchedule"
    UNKNOWN_TIME_ZONE = "UnknownTimeZone"
    INVALID_TIMING = "InvalidTiming"  # lease or shutdown: the fence could not hold
    INVALID_TEMPLATE = "InvalidTemplate"
    UNKNOWN_FIELD = "UnknownField"


@dataclass(frozen=True, slots=True)
class Problem:
    """One reason to refuse an object.

    Attributes:
        field: the path as the user writes it, such as `spec.lease.durationSeconds`.
        reason: for the condition, by kind.
        message: what is wrong with it, without the field's name.
    """

    field: str
    reason: Reason
    message: str

    def __str__(self) -> str:
        return f"{self.field}: {self.message}"


def reason_for(field: str) -> Reason:
    """The reason that belongs to a field path."""
    match field.removeprefix("spec.").replace("[", ".").split(".", 1)[0]:
        case "code":
            return Reason.INVALID_CODE
        case "schedule" | "schedules" | "type" | "notBefore" | "notAfter" | "jitterSeconds":
            return Reason.INVALID_SCHEDULE
        case "timeZone":
            return Reason.UNKNOWN_TIME_ZONE
        case "lease" | "shutdown":
            return Reason.INVALID_TIMING
        case "template":
            return Reason.INVALID_TEMPLATE
        case _:
            return Reason.INVALID_SPEC
