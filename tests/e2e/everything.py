"""The workload of test_everything.py: HTTP, an interval, a relay, a cascade and a consumer in one program.

Before a stop each unit of work takes a moment. What is in hand when the notice comes lasts until some seconds after
SIGTERM, as work of any length might. Each unit writes `began` and `ended` into a table with a unique key.
"""

import asyncio
import inspect
import os
import sys
import time

import psycopg
import uvicorn
from psycopg_pool import AsyncConnectionPool

from leasedjob import http1
from leasedjob.workload import AsyncCascade, DrainingError, GracefulShutdown, IntervalRegistry, Phase, ShutdownState
from leasedjob.workload import current_run as current
from leasedjob.workload.asgi import UvicornServer
from leasedjob.workload.outbox import OutboxRelay, enqueue_once, install_outbox
from leasedjob.workload.pools import AsyncPsycopgPool

URL = os.environ["WORK_DATABASE_URL"]
# Seconds after SIGTERM that what is in hand takes.
AFTER = {"request": 7.0, "iteration": 6.0, "item": 5.0, "message": 4.0, "record": 3.0}
ITEMS = 200
state = ShutdownState.listening()
run = current()
units = 0


def mark(*words):
    sys.stdout.write(" ".join(map(str, (time.time(), *words))) + "\n")  # at once: several threads write
    sys.stdout.flush()


async def unit(kind, connection, name=None):
    """One unit of work of a kind, in transactions of the connection's own kind."""
    global units
    units += 1
    name = name or f"{run.attempt}-{units}"
    await connection.execute("INSERT INTO effect VALUES (%s, %s, 'began')", (kind, name))
    await asyncio.sleep(0.3 if run.attempt == 1 else 0.01)
    if state.is_draining():
        while not state.is_stopping():
            await asyncio.sleep(0.05)
        await asyncio.sleep(AFTER[kind])
    await connection.execute("INSERT INTO effect VALUES (%s, %s, 'ended')", (kind, name))


class Told:
    """A part whose stop is written down."""

    def __init__(self, part):
        self.part, self.phase, self.name = part, part.phase, part.name

    async def stop(self):
        mark("stops", self.name)
        given = await asyncio.to_thread(self.part.stop) if not inspect.iscoroutinefunction(self.part.stop) else (
            self.part.stop()
        )  # fmt: skip
        if inspect.isawaitable(given):
            await given
        mark("stopped", self.name)

    def in_hand(self):
        return self.part.in_hand()


class Consumer:
    """Takes records from a table, in order, as a consumer of a broker would; gives none back."""

    phase, name = Phase.CONSUMERS, "consumer"

    def __init__(self, pool):
        self.pool, self.ending = pool, False

    async def consume(self):
        while not self.ending:
            async with self.pool.connection() as connection, connection.transaction():
                row = await (
                    await connection.execute("DELETE FROM inbox WHERE id = (SELECT min(id) FROM inbox) RETURNING id")
                ).fetchone()
                if row is not None:
                    await unit("record", connection, f"r{row[0]}")

    def start(self):
        self.consuming = asyncio.create_task(self.consume())

    async def stop(self):
        self.ending = True
        await self.consuming

    def in_hand(self):
        return ["a record"]


async def main():
    pool = AsyncConnectionPool(URL, open=False, min_size=6, max_size=12, kwargs={"autocommit": True})
    await pool.open()

    async def app(scope, receive, send):
        async with pool.connection() as connection:
            await unit("request", connection)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    async def iterate():
        async with pool.connection() as connection:
            await unit("iteration", connection)
            for number in range(3):
                await enqueue_once(connection, f"{run.attempt}-{time.time_ns()}-{number}", "counted", {"n": number})

    async def publish(message):
        async with pool.connection() as connection:
            await unit("message", connection, message.idempotency_key)

    async def ask(port, path):
        return (await asyncio.to_thread(http1.ask, "127.0.0.1", port, "GET", path, seconds=60))[0]

    async def client(port):
        """Asks until the notice; what is in flight then has to be answered."""
        answers = set()
        while not state.is_draining():
            answers.add(await ask(port, "/work"))
        mark("answers", *answers)

    async def late(port):
        """Comes when the notice has come, since the Pod's address is still known."""
        await state
        mark("late", await ask(port, "/readyz"), await ask(port, "/work"))

    async def sync():
        async with await psycopg.AsyncConnection.connect(URL) as connection:
            await cascade.install(connection)
            await connection.commit()
            mark("checkpoint", await run.has_checkpoint(connection))
            await connection.commit()
            async for item in cascade.items(connection, range(ITEMS)):
                async with item as number:
                    await unit("item", connection, f"i{number}")
            mark("items", cascade.done)

    async with pool.connection() as connection:
        await install_outbox(connection)
    cascade = AsyncCascade(run, state)
    relay = OutboxRelay(pool.connection, publish, state, interval=0.1, message_seconds=16, batch_seconds=2)
    intervals = IntervalRegistry(state)
    server = UvicornServer(uvicorn.Config(app, port=0, lifespan="off", log_level="error"), state)
    consumer = Consumer(pool)
    try:
        async with GracefulShutdown(state) as shutdown:
            for part in (AsyncPsycopgPool(pool), consumer, relay, cascade, intervals, server):
                shutdown.add(Told(part))
            state.signal.call(lambda: mark("notice"))
            state.stopping.call(lambda: mark("sigterm"))
            intervals.add("count", 0.05, iterate)
            relay.start()
            consumer.start()
            await server.start()
            asking = asyncio.gather(client(server.ports[0]), late(server.ports[0]))
            mark("ready")
            await sync()
            state.begin("all items are done")
            await asking
        await asyncio.to_thread(run.complete, {"items": cascade.done})
    finally:
        for line in shutdown.report():
            mark("phase", line.phase, line.outcome, f"{line.seconds:.1f}")


try:
    with run:
        asyncio.run(main())
except DrainingError:
    mark("ends")
