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
        """Corrects the offset by one round trip, as far as that proves it wrong.

        The database read its clock at some time in between. So a slow round trip, which says little, spoils nothing
        that a quick one has said.

        Args:
            asked, answered: by the machine's wall clock.
        """
        if answered < asked:  # the machine's clock was set meanwhile
            return
        self.offset = min(max(self.offset, db_now - answered), db_now - asked)

    def now(self) -> datetime:
        return datetime.now(UTC) + self.offset
