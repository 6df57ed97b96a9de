"""What a worker does outside under its lease, and what it writes down of what it was told."""

from __future__ import annotations

import json
import os
from pathlib import Path

from leasedjob.errors import LeasedJobError
from leasedjob.lease.database import Pool, translated
from tests.chaos.history import Told, What


class EffectRefusedError(Exception):
    """The sink has seen a newer token: somebody else has the run."""


class Sink:
    """The sink, on connections of its own: what breaks the way to the leases doesn't break the way to it."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    async def act(self, key: str, token: int) -> None:
        """One effect.

        Raises:
            EffectRefusedError: it was not let pass.
            DatabaseUnavailableError: it is unknown whether it was.
        """
        with translated():
            async with self._pool.connection() as connection:
                cursor = await connection.execute("SELECT chaos.act(%s, %s) AS accepted", (key, token))
                row = await cursor.fetchone()
        if row is None or not row["accepted"]:
            raise EffectRefusedError(key)

    async def open_runs(self) -> list[tuple[str, str]] | None:
        """Code and run key of each run that began and hasn't succeeded; None if the database can't say."""
        try:
            with translated():
                async with self._pool.connection() as connection:
                    cursor = await connection.execute(
                        "SELECT code, run_key FROM leasedjob.job_scheduler WHERE status <> 'SUCCESS'"
                    )
                    return [(row["code"], row["run_key"]) for row in await cursor.fetchall()]
        except LeasedJobError:
            return None


class Notes:
    """What this process was told, one line each. A line that is written outlives the process."""

    def __init__(self, folder: Path, client: str) -> None:
        self.client = client
        self._file = os.open(folder / f"notes-{client}-{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def told(self, what: What, key: str, token: int, detail: str = "") -> None:
        client = f"{self.client}/{os.getpid()}"
        os.write(self._file, (json.dumps([client, what, key, token, detail]) + "\n").encode())

    @staticmethod
    def read(folder: Path) -> list[Told]:
        """All that was written down; a last line that was cut off counts as not told."""
        found = []
        for path in sorted(folder.glob("notes-*")):
            for line in path.read_text().splitlines(keepends=True):
                if line.endswith("\n"):
                    client, what, key, token, detail = json.loads(line)
                    found.append(Told(client=client, what=What(what), key=key, token=token, detail=detail))
        return found
