"""The database's clock as this process knows it. It decides nothing by itself: every claim is judged by the database.

Only the *time to ask* follows from it, so that operators whose machines disagree ask at the same instant.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta


class DatabaseClock:
    """The machine's wall clock plus the offset that was last observed."""

    def __init__(self) -> None:
        self.offset = timedelta(0)

    def observe(self, asked: datetime, answered: datetime, db_now: datetime) -> None:
        """Takes the offset over from one round trip; its error is at most half the round trip."""
        middle = asked + (answered - asked) / 2
        self.offset = db_now - middle

    def now(self) -> datetime:
        return datetime.now(UTC) + self.offset
