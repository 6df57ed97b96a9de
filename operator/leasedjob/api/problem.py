"""What is wrong with an object, in words for the person who wrote it. Pure."""

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


@dataclass(frozen=True, slots=True)
class Problem:
    """One reason to refuse an object.

    Attributes:
        field: the path as the user writes it, such as `spec.lease.durationSeconds`.
        reason: for the condition, by kind.
        message: a sentence that begins with the field's name.
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
        case "schedule" | "schedules" | "type":
            return Reason.INVALID_SCHEDULE
        case "timeZone":
            return Reason.UNKNOWN_TIME_ZONE
        case "lease" | "shutdown":
            return Reason.INVALID_TIMING
        case "template":
            return Reason.INVALID_TEMPLATE
        case _:
            return Reason.INVALID_SPEC
