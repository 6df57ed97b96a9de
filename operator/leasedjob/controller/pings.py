"""Tells monitors of starts, successes and failures (`spec.monitoring`), in Healthchecks' way.

Beside everything else: a run never waits for a ping, and what a monitor does or doesn't answer changes nothing here.
Each job's pings go out in their order, a few tries each; what can't be told within the budget is counted, shown in an
Event and forgotten. A success that is not told makes the monitor complain, which is the safe side.

Where a start is told, it is so within START_SECONDS and one try. The store gives what follows a start to another
replica only after that, so that two replicas don't tell of them the other way round.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import logging
import socket
import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, Self
from urllib.parse import urlsplit, urlunsplit

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

from leasedjob import __version__
from leasedjob.controller.cache import Key
from leasedjob.controller.events import EventReason, Recorder
from leasedjob.controller.kube import Kube, KubeError
from leasedjob.controller.metrics import Metrics
from leasedjob.controller.model import Monitoring
from leasedjob.controller.ping_hosts import PingHosts, PingRefusedError, Trust, may_connect
from leasedjob.lease.rows import Transition, TransitionKind

log = logging.getLogger(__name__)
TRIES: Final = (0.0, 2.0, 10.0, 30.0)  # seconds before each try
TRY_SECONDS: Final = 5.0  # for one try; a start has only one
START_SECONDS: Final = 1.0  # for which a start may wait; after that it isn't told
WAITING_EACH: Final = 16  # pings of one job that wait
WAITING_ALL: Final = 5000
AT_ONCE: Final = 32  # requests
AT_ONCE_EACH: Final = 4  # of one namespace: its slow host must not hold up the others
PARTING_SECONDS: Final = 3.0  # for what waits when the operator stops


class Signal(StrEnum):
    START = "start"
    SUCCESS = "success"
    FAIL = "fail"


class PingResult(StrEnum):
    SENT = "sent"
    FAILED = "failed"
    REFUSED = "refused"
    DROPPED = "dropped"


def signal_of(transition: Transition) -> Signal | None:
    """What a monitor is told of this; None: nothing. A run that was not wanted any more is no success either."""
    if transition.kind is TransitionKind.STARTED:
        return Signal.START
    if transition.final:
        return Signal.SUCCESS if transition.succeeded else Signal.FAIL
    return None


def signal_url(url: str, signal: Signal, run_id: str) -> str:
    """Where it is told: the run's id goes along, so that a monitor can tell overlapping runs apart."""
    parts = urlsplit(url)
    path = parts.path if signal is Signal.SUCCESS else f"{parts.path.rstrip('/')}/{signal}"
    query = "&".join(filter(None, (parts.query, f"rid={run_id}")))
    return urlunsplit((parts.scheme, parts.netloc, path or "/", query, ""))


@dataclass(frozen=True, slots=True)
class Ping:
    """One thing to be told.

    Args:
        regarding: the LeasedJob.
        text: the request's body: nothing of the workload's own output.
    """

    regarding: Mapping[str, Any]
    monitoring: Monitoring
    signal: Signal
    run_id: str
    text: str
    told_at: float = field(default_factory=time.monotonic)

    @property
    def key(self) -> Key:
        meta = self.regarding["metadata"]
        return meta["namespace"], meta["name"]


class _Resolver(AbstractResolver):
    """Names of one kind of trust; an address that such a name may not stand for isn't given to anybody."""

    def __init__(self, trust: Trust) -> None:
        self._trust = trust
        self._inner = aiohttp.ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        found = await self._inner.resolve(host, port, family)
        allowed = [r for r in found if may_connect(r["host"], self._trust)]
        if found and not allowed:
            raise _ForbiddenAddressError(f"{host} stands for an address that may not be called")
        return allowed

    async def close(self) -> None:
        await self._inner.close()


class _ForbiddenAddressError(OSError):
    pass


class _NotTakenError(Exception):
    """The monitor's answer says that another try is of no use."""


class Pinger:
    """Sends pings in the background. Use as an async context manager."""

    def __init__(
        self,
        kube: Kube,
        hosts: PingHosts,
        secret: str,
        events: Recorder,
        metrics: Metrics,
        *,
        tries: Sequence[float] = TRIES,
        try_seconds: float = TRY_SECONDS,
    ) -> None:
        self._kube = kube
        self._hosts = hosts
        self._secret = secret
        self._events = events
        self._metrics = metrics
        self._tries = tries
        self._try_seconds = try_seconds
        self._waiting: dict[Key, deque[Ping]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._all = asyncio.Semaphore(AT_ONCE)
        self._each: defaultdict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(AT_ONCE_EACH))
        self._sessions: dict[Trust, aiohttp.ClientSession] = {}

    async def __aenter__(self) -> Self:
        for trust in Trust:
            self._sessions[trust] = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(resolver=_Resolver(trust), limit=AT_ONCE, force_close=True),
                timeout=aiohttp.ClientTimeout(total=self._try_seconds),
                headers={"User-Agent": f"leasedjob/{__version__}"},
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=PARTING_SECONDS)
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for session in self._sessions.values():
            await session.close()

    def tell(self, ping: Ping) -> None:
        """Takes it on; never blocks."""
        waiting = self._waiting.get(ping.key)
        if waiting is None:
            if sum(map(len, self._waiting.values())) >= WAITING_ALL:
                self._count(ping, PingResult.DROPPED)
                return
            waiting = self._waiting[ping.key] = deque()
            task = asyncio.create_task(self._work(ping.key, waiting), name=f"pings of {'/'.join(ping.key)}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif len(waiting) >= WAITING_EACH:
            self._count(waiting.popleft(), PingResult.DROPPED)
        waiting.append(ping)

    async def _work(self, key: Key, waiting: deque[Ping]) -> None:
        try:
            while waiting:
                ping = waiting.popleft()
                if ping.signal is Signal.START and any(p.run_id == ping.run_id for p in waiting):
                    continue  # it has ended meanwhile: told that way round nobody misses the start
                self._count(ping, await self._deliver(ping))
        except Exception:
            log.exception("pings of %s/%s failed", *key)
        finally:
            del self._waiting[key]

    def _count(self, ping: Ping, result: PingResult) -> None:
        self._metrics.pings.labels(ping.signal.value, result.value).inc()

    async def _deliver(self, ping: Ping) -> PingResult:
        start = ping.signal is Signal.START
        if start and time.monotonic() - ping.told_at > START_SECONDS:
            return PingResult.DROPPED
        why = ""
        for delay in self._tries[:1] if start else self._tries:
            await asyncio.sleep(delay)
            try:
                async with asyncio.timeout(self._try_seconds if start else None):
                    async with self._each[ping.key[0]], self._all, asyncio.timeout(self._try_seconds):
                        await self._try(ping)
            except (PingRefusedError, _ForbiddenAddressError) as e:
                self._say(ping, EventReason.PING_REFUSED, str(e))
                return PingResult.REFUSED
            except _NotTakenError as e:
                why = str(e)
                break
            except (KubeError, aiohttp.ClientError, TimeoutError, OSError) as e:
                if isinstance(forbidden := _cause(e), _ForbiddenAddressError):
                    self._say(ping, EventReason.PING_REFUSED, str(forbidden))
                    return PingResult.REFUSED
                # aiohttp's texts may have the whole URL in them.
                why = f"no answer ({type(e).__name__})"
            else:
                return PingResult.SENT
        self._say(ping, EventReason.PING_FAILED, why)
        return PingResult.FAILED

    def _say(self, ping: Ping, reason: EventReason, why: str) -> None:
        self._events.record(ping.regarding, reason, f"{ping.signal}: {why}", warning=True)

    async def _try(self, ping: Ping) -> None:
        url = ping.monitoring.ping_url or await self._from_secret(ping)
        trust = self._hosts.trust(url)
        session = self._sessions[trust]
        target = signal_url(url, ping.signal, ping.run_id)
        # A redirect would lead to where nobody has looked; the answer's body is not read.
        response = await session.post(target, data=ping.text.encode(), allow_redirects=False)
        response.close()
        if response.status in (408, 429) or response.status >= 500:
            raise aiohttp.ClientError
        if response.status >= 300:
            raise _NotTakenError(f"the monitor answered {response.status}")

    async def _from_secret(self, ping: Ping) -> str:
        key = ping.monitoring.ping_url_key or ""
        where = f"Secret {self._secret}"
        try:
            secret = await self._kube.get_secret(ping.key[0], self._secret)
        except KubeError as e:
            if e.status == 403:
                raise PingRefusedError(f"{where} can't be read") from e
            raise
        data = (secret or {}).get("data") or {}
        if secret is None or key not in data:
            raise PingRefusedError(f"{where} has no key {key}" if secret else f"there is no {where} in the namespace")
        with contextlib.suppress(binascii.Error, UnicodeDecodeError):
            return base64.b64decode(data[key], validate=True).decode("ascii").strip()
        raise PingRefusedError(f"{where}: {key} is no URL")


def _cause(error: BaseException) -> BaseException:
    """What is at the bottom of it."""
    while (inner := error.__cause__ or getattr(error, "os_error", None)) is not None:
        error = inner
    return error
