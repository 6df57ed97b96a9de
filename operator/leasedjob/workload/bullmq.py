"""BullMQ, so that no job is lost or done twice when a worker stops. The extra `bullmq` brings bullmq for Python.

    queue = BullMQQueue("payments", connection="redis://redis:6379/0")
    await queue.add("charge", {"order": 7}, idempotency_key="charge/7")     # twice is once

    async def charge(job, idempotency_key): ...                             # the key goes to the sink

    worker = BullMQWorker("payments", charge, state, connection="redis://redis:6379/0", concurrency=5)
    shutdown.add(worker)
    worker.start()

A worker that drains fetches nothing more; a job that was on its way is failed as "draining" and is at once free for
another worker. Jobs that run are finished and recorded, then the worker is closed, never by force.

The loop is ours, the rest is bullmq's. Its own loop, told to close, no longer renews the locks of jobs that run on:
another worker takes a long one for stalled and runs it a second time. And it waits for the last fetch, but not for the
job that this one brings.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

try:
    from bullmq import DelayedError, Queue, UnrecoverableError, Worker
except ModuleNotFoundError as error:
    error.add_note("it comes with: pip install 'leasedjob[bullmq]'")
    raise

from leasedjob.errors import DrainingError, MessageRefusedError, PublisherUnavailableError
from leasedjob.identity import bullmq_job_id
from leasedjob.workload.draining import ShutdownState
from leasedjob.workload.outbox.publisher import OutboxMessage
from leasedjob.workload.phases import Phase

_log: Final = logging.getLogger("leasedjob.workload")
IDEMPOTENCY_KEY: Final = "idempotencyKey"  # in a job's data
DRAINING: Final = "draining"  # why a job has failed that a draining worker had fetched
RETRY_SECONDS: Final = 1.0  # until Redis is asked again after it has failed
LOOK_SECONDS: Final = 0.1
FETCH_SECONDS: Final = 5.0  # for an answer that is on its way when draining begins
# bullmq waits for a job for up to 10 s. By default redis-py 8 takes a connection for dead that was silent for 5 s, and
# then doesn't ask again for up to 20 s.
ANSWER_SECONDS: Final = 15
ADD_SECONDS: Final = 10.0
RECOVER: Final = 1000  # failed jobs that a worker looks through when it starts
# What this adapter decides itself.
_OURS: Final = frozenset({"autorun", "concurrency", "connection"})

Work = Callable[[Any, str], Awaitable[object] | object]


class BullMQWorker:
    """Works on the jobs of a queue, and stops in Phase.BACKGROUND.

    A job without `idempotencyKey` in its data is refused: it fails with a message that says so, and isn't tried again.
    A job that raises fails as BullMQ has it (`attempts`, `backoff`); bullmq's UnrecoverableError ends its attempts.

    Args:
        queue: its name.
        work: is given each bullmq Job and its idempotency key; what it returns is the job's result. A coroutine
            function runs on the loop, a plain function in a thread.
        state: whose draining ends the fetching.
        connection: a redis:// URL, or keyword arguments of redis.asyncio.Redis.
        concurrency: jobs at a time.
        options: further options of bullmq's Worker: `lockDuration`, `stalledInterval`, `prefix`, `removeOnComplete`…
        name: for log lines; default "queue <name>".

    Raises:
        ValueError: an argument is out of range, or `options` has one of those above.
    """

    phase: Final = Phase.BACKGROUND

    def __init__(
        self,
        queue: str,
        work: Work,
        state: ShutdownState,
        *,
        connection: str | Mapping[str, Any],
        concurrency: int = 1,
        options: Mapping[str, Any] | None = None,
        name: str | None = None,
    ) -> None:
        if isinstance(concurrency, bool) or not isinstance(concurrency, int) or concurrency < 1:
            raise ValueError(f"concurrency must be a whole number, 1 or more, not {concurrency!r}")
        if taken := sorted(_OURS & set(options or {})):
            raise ValueError(f"options: {', '.join(taken)}: give it as an argument, or leave it out")
        self.name = name or f"queue {queue}"
        self._queue, self._work, self._state, self._concurrency = queue, work, state, concurrency
        self._options = {**(options or {}), "connection": _patient(_connection(connection))}
        self._worker: Any = None
        self._tasks: list[asyncio.Task[None]] = []  # the loop, and the check for stalled jobs
        self._running: dict[asyncio.Task[None], Any] = {}  # -> its job
        self._ending = asyncio.Event()
        self._empty: tuple[float, float] | None = (
            None  # since when, and until when, Redis has said that there is no job
        )
        self._forget: Callable[[], None] = lambda: None

    def start(self) -> None:
        """Begins to fetch, on the running event loop. It goes on while Redis is away.

        Raises:
            RuntimeError: it was started before, or no event loop is running.
            DrainingError: a stop has begun.
        """
        if self._worker is not None:
            raise RuntimeError(f"{self.name} was started before")
        if self._state.is_draining():
            raise DrainingError(f"{self.name} is not to be started: {self._state.reason}")
        loop = asyncio.get_running_loop()
        self._worker = Worker(self._queue, self._process, {**self._options, "autorun": False})
        self._worker.on("error", self._on_error)
        self._worker.on("failed", self._on_failed)
        self._worker.on("stalled", lambda id: _log.warning("%s: job %s has stalled, it is tried again", self.name, id))
        self._worker.lockManager.start()
        self._tasks = [
            loop.create_task(self._fetch(), name=f"{self.name}: fetching"),
            loop.create_task(self._check_stalled(), name=f"{self.name}: stalled jobs"),
        ]
        self._forget = self._state.signal.call(lambda: loop.call_soon_threadsafe(self._end))

    async def stop(self) -> None:
        """Fetches nothing more, waits for the jobs that run, and closes the worker without force."""
        self._forget()
        self._end()
        if self._worker is None:
            return
        fetching, stalled = self._tasks
        await asyncio.wait([fetching], timeout=FETCH_SECONDS)
        if not fetching.done():
            _log.warning(
                "%s: Redis doesn't answer; if it gave out a job, that one stalls, and goes to another", self.name
            )
            fetching.cancel()
            await asyncio.wait([fetching])
        while self._running:
            await asyncio.wait(list(self._running))
        stalled.cancel()
        await asyncio.wait([stalled])
        await self._worker.close()

    async def idle(self, seconds: float) -> bool:
        """Returns True when for so long there has been no job to work on; False when a stop has begun before.

        For a run that works off what there is, and ends. Redis has to say it, while it doesn't answer, this waits; it
        does so each `drainDelay`, 5 s. A job that waits for its next try, or for its time, is not there yet.
        """
        while not self._ending.is_set():
            if not self._running and self._empty is not None and self._empty[1] - self._empty[0] >= seconds:
                return True
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), LOOK_SECONDS)
        return False

    def in_hand(self) -> Sequence[str]:
        """The jobs that run."""
        return [f"job {job.id} ({job.name})" for job in self._running.values()]

    # --- fetching ---

    def _end(self) -> None:
        self._ending.set()
        if self._worker is not None:
            # Nothing is in hand of a fetch that only waits for a job to come.
            self._worker.paused = True
            if self._worker.waiting is not None:
                self._worker.waiting.cancel()

    async def _fetch(self) -> None:
        await self._retrying(self._recover)
        count = 0
        while not self._ending.is_set():
            if len(self._running) >= self._concurrency:
                await self._room()
                continue
            count += 1
            token = f"{self._worker.id}:{count}"
            job = await self._retrying(lambda token=token: self._worker.getNextJob(token))  # type: ignore[misc]
            now = time.monotonic()
            if job is None:
                self._empty = (self._empty or (now, now))[0], now
            else:
                self._empty = None
                task = asyncio.get_running_loop().create_task(
                    self._worker.processJob(job, token), name=f"{self.name}: job {job.id}"
                )
                self._running[task] = job
                task.add_done_callback(self._running.pop)

    async def _room(self) -> None:
        """Until a job ends or a stop begins."""
        ending = asyncio.ensure_future(self._ending.wait())
        try:
            await asyncio.wait([ending, *self._running], return_when=asyncio.FIRST_COMPLETED)
        finally:
            ending.cancel()

    async def _retrying(self, call: Callable[[], Awaitable[Any]]) -> Any:
        """Asks Redis until it answers or a stop begins, which is answered with None."""
        silent = False
        while not self._ending.is_set():
            try:
                return await call()
            except Exception as error:
                self._empty = None
                level = logging.DEBUG if silent else logging.WARNING
                _log.log(level, "%s: Redis fails; it is asked again and again: %s", self.name, error)
                silent = True
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), RETRY_SECONDS)
        return None

    async def _recover(self) -> None:
        """What a worker had failed as draining, and was killed before it could free it, is freed."""
        queue = Queue(self._queue, {k: v for k, v in self._options.items() if k in ("connection", "prefix")})
        try:
            for job in await queue.getFailed(0, RECOVER - 1):
                if job is not None and job.failedReason == DRAINING:
                    with contextlib.suppress(Exception):  # another worker was faster
                        await job.retry("failed")
        finally:
            await queue.close()

    async def _check_stalled(self) -> None:
        while True:
            await self._worker.runStalledJobsCheck()
            await asyncio.sleep(self._worker.opts["stalledInterval"] / 1000)

    # --- one job ---

    async def _process(self, job: Any, token: str) -> object:
        if self._ending.is_set():
            await self._fail_as_draining(job, token)
            raise DelayedError  # bullmq's word for: it is recorded already
        key = _key_of(job)
        if inspect.iscoroutinefunction(self._work):
            return await self._work(job, key)
        given = await asyncio.to_thread(self._work, job, key)
        return await given if inspect.isawaitable(given) else given

    async def _fail_as_draining(self, job: Any, token: str) -> None:
        job.opts["removeOnFail"] = False  # it is kept, whatever was asked for: it isn't done
        await job.moveToFailed(DrainingError(DRAINING), token)
        if await job.isFailed():  # it had no attempt left; else it waits for its next one already
            await job.retry("failed")
        _log.info("%s: job %s (%s) was fetched while draining: another worker gets it", self.name, job.id, job.name)

    def _on_error(self, error: Exception, job: Any = None) -> None:
        _log.error("%s: %s%s: %s", self.name, "" if job is None else f"job {job.id}: ", type(error).__name__, error)

    def _on_failed(self, job: Any, error: Exception) -> None:
        _log.error("%s: job %s (%s) has failed: %s: %s", self.name, job.id, job.name, type(error).__name__, error)


class BullMQQueue:
    """Adds jobs, each under an idempotency key. Closed in Phase.POOLS, after what uses it.

    A key is added once for as long as Redis keeps its job: `removeOnComplete` forgets it. So the sink decides in the
    end, which is given the key by the worker.

    Args:
        name: of the queue.
        connection: a redis:// URL, or keyword arguments of redis.asyncio.Redis.
        options: further options of bullmq's Queue: `prefix`, `defaultJobOptions`…
        seconds: for one `add`, whatever Redis does.
    """

    phase: Final = Phase.POOLS

    def __init__(
        self,
        name: str,
        *,
        connection: str | Mapping[str, Any],
        options: Mapping[str, Any] | None = None,
        seconds: float = ADD_SECONDS,
    ) -> None:
        self.queue, self.name, self._seconds = name, f"adding to queue {name}", seconds
        self._queue: Any = Queue(name, {**(options or {}), "connection": _connection(connection)})
        self._adding: dict[object, str] = {}

    async def add(
        self,
        name: str,
        data: Mapping[str, Any] | None = None,
        *,
        idempotency_key: str,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """Adds a job, unless one is there that was added under this key.

        Args:
            name: what is to be done.
            data: JSON; the key is put into it as `idempotencyKey`.
            idempotency_key: not blank.
            options: of the job: `attempts`, `backoff`, `delay`…

        Returns:
            the job's id: `bullmq_job_id(idempotency_key)`.

        Raises:
            ValueError: the key is blank, or `data` has another one, or isn't a mapping, or `options` has a `jobId`.
            TimeoutError: Redis doesn't answer. The job may be there; adding it again is harmless.
            redis.exceptions.RedisError: Redis refuses it.
        """
        if not isinstance(idempotency_key, str) or not idempotency_key.strip():
            raise ValueError(f"idempotency_key must be text that isn't blank, not {idempotency_key!r}")
        if data is not None and not isinstance(data, Mapping):
            raise ValueError(f"data must be a mapping, which the key can be put into, not {type(data).__name__}")
        given = dict(data or {})
        if given.setdefault(IDEMPOTENCY_KEY, idempotency_key) != idempotency_key:
            raise ValueError(f"data: {IDEMPOTENCY_KEY} must be the key {idempotency_key!r} or left out")
        if "jobId" in (options or {}):
            raise ValueError("options: jobId must be left out: it follows from the idempotency key")
        job_id = bullmq_job_id(idempotency_key)
        self._adding[job := object()] = f"job {name} with key {idempotency_key}"
        try:
            async with asyncio.timeout(self._seconds):
                await self._queue.add(name, given, {**(options or {}), "jobId": job_id})
        finally:
            del self._adding[job]
        return job_id

    async def stop(self) -> None:
        """Closes the connection."""
        await self._queue.close()

    def in_hand(self) -> Sequence[str]:
        """What is being added."""
        return list(self._adding.values())


class BullMQPublisher:
    """An outbox publisher: each message becomes a job, its type the job's name, its payload the data.

    A payload that isn't an object is put into `{"payload": …}`. Headers, if there are any, are added as `headers`.

    Args:
        queues: topic -> queue.
        options: of each job: `attempts`, `backoff`…
    """

    def __init__(self, queues: Mapping[str, BullMQQueue], *, options: Mapping[str, Any] | None = None) -> None:
        self._queues, self._options = dict(queues), dict(options or {})

    async def publish(self, message: OutboxMessage) -> None:
        """Returns when Redis has the job."""
        from redis.exceptions import ConnectionError, RedisError, TimeoutError

        if (queue := self._queues.get(message.topic)) is None:
            raise MessageRefusedError(f"topic {message.topic!r} has no queue; there are {', '.join(self._queues)}")
        data = dict(message.payload) if isinstance(message.payload, dict) else {"payload": message.payload}
        if message.headers:
            data.setdefault("headers", dict(message.headers))
        try:
            await queue.add(message.type, data, idempotency_key=message.idempotency_key, options=self._options)
        except (ConnectionError, TimeoutError) as error:
            raise PublisherUnavailableError(f"Redis: {error}") from error
        except RedisError as error:
            raise MessageRefusedError(f"Redis: {error}") from error
        except ValueError as error:
            raise MessageRefusedError(str(error), final=True) from error


def _connection(connection: object) -> str | dict[str, Any]:
    if isinstance(connection, Mapping):
        return dict(connection)
    if isinstance(connection, str) and connection.startswith(("redis://", "rediss://", "unix://")):
        return connection
    raise ValueError("connection must be a redis:// URL or a mapping of redis.asyncio.Redis's arguments")


def _patient(connection: str | dict[str, Any]) -> str | dict[str, Any]:
    """The same, for a connection on which answers are waited for."""
    if isinstance(connection, dict):
        return {"socket_timeout": ANSWER_SECONDS, **connection}
    if "socket_timeout=" in connection:
        return connection
    return f"{connection}{'&' if '?' in connection else '?'}socket_timeout={ANSWER_SECONDS}"


def _key_of(job: Any) -> str:
    key = job.data.get(IDEMPOTENCY_KEY) if isinstance(job.data, Mapping) else None
    if not isinstance(key, str) or not key.strip():
        raise UnrecoverableError(
            f"job {job.id} ({job.name}) has no {IDEMPOTENCY_KEY} in its data, so that a retry could do its work twice: "
            "it is refused, and not tried again"
        )
    return key
