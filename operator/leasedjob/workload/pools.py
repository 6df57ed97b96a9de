"""Pools of psycopg_pool, closed after everything that uses them. The extra `pool` brings psycopg_pool.

    shutdown.add(PsycopgPool(pool))         # or AsyncPsycopgPool

Closing a pool fails whoever asks it for a connection, so it happens in the last phase. What is still out then has three
seconds to come back.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from leasedjob.workload.phases import Phase

if TYPE_CHECKING:
    from psycopg_pool import AsyncConnectionPool, ConnectionPool

LOOK_SECONDS: Final = 0.02
WAIT_SECONDS: Final = 3.0  # of the phase's five; a pool that can't connect counts its connections as out as well
CLOSE_SECONDS: Final = 1.0

_log: Final = logging.getLogger("leasedjob.workload")


def _out(stats: Mapping[str, int]) -> int:
    """Connections that somebody holds, or waits for."""
    return max(0, stats.get("pool_size", 0) - stats.get("pool_available", 0)) + stats.get("requests_waiting", 0)


class _Pool:
    phase: Final = Phase.POOLS

    def __init__(self, pool: ConnectionPool[Any] | AsyncConnectionPool[Any], name: str) -> None:
        self.name = name
        self._stats = pool.get_stats
        self._closing = pool

    def _looks(self) -> Iterator[None]:
        """Goes on while connections are out, for so long."""
        until = time.monotonic() + WAIT_SECONDS
        while self.in_hand():
            if time.monotonic() >= until:
                _log.warning("shutdown: %s is closed with %s", self.name, ", ".join(self.in_hand()))
                return
            yield

    def in_hand(self) -> Sequence[str]:
        """How many connections are out."""
        if self._closing.closed:  # then the pool counts no more
            return []
        return [f"{count} connection{'s' if count > 1 else ''} in use"] if (count := _out(self._stats())) else []


class PsycopgPool(_Pool):
    """A `psycopg_pool.ConnectionPool`, or its subclass NullConnectionPool.

    Args:
        pool: is closed in the last phase.
        name: for log lines.
    """

    def __init__(self, pool: ConnectionPool[Any], name: str = "database") -> None:
        super().__init__(pool, name)
        self._pool = pool

    def stop(self) -> None:
        """Waits for the connections that are out, then closes the pool."""
        for _ in self._looks():
            time.sleep(LOOK_SECONDS)
        self._pool.close(CLOSE_SECONDS)


class AsyncPsycopgPool(_Pool):
    """A `psycopg_pool.AsyncConnectionPool`, or its subclass AsyncNullConnectionPool. Arguments as PsycopgPool."""

    def __init__(self, pool: AsyncConnectionPool[Any], name: str = "database") -> None:
        super().__init__(pool, name)
        self._pool = pool

    async def stop(self) -> None:
        """As PsycopgPool.stop."""
        for _ in self._looks():
            await asyncio.sleep(LOOK_SECONDS)
        await self._pool.close(CLOSE_SECONDS)
