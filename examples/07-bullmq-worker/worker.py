"""Charges the orders in the queue `payments`, and ends when there are no more."""

import asyncio
import logging
import os

from psycopg_pool import AsyncConnectionPool

from leasedjob.workload import GracefulShutdown, ShutdownState, current_run
from leasedjob.workload.bullmq import BullMQWorker
from leasedjob.workload.pools import AsyncPsycopgPool

IDLE_SECONDS = float(os.environ.get("IDLE_SECONDS", "10"))
state = ShutdownState.listening()  # first: from here on SIGTERM begins a stop instead of ending the program
run = current_run()
logging.basicConfig(level=logging.INFO)


async def main() -> bool:
    pool = AsyncConnectionPool(os.environ["DATABASE_URL"], open=False)
    await pool.open()

    async def charge(job, idempotency_key: str) -> None:
        async with pool.connection() as connection:
            # Here the charge is a row. A provider takes the same key in a header of its own.
            await connection.execute(
                "INSERT INTO charge (idempotency_key, order_id, cents) VALUES (%s, %s, %s)"
                " ON CONFLICT (idempotency_key) DO NOTHING",
                (idempotency_key, job.data["order"], job.data["cents"]),
            )
        await asyncio.sleep(0.1)  # whatever else takes time
        print("charged order", job.data["order"], flush=True)

    async with GracefulShutdown(state) as shutdown:
        shutdown.add(AsyncPsycopgPool(pool))
        worker = BullMQWorker("payments", charge, state, connection=os.environ["REDIS_URL"], concurrency=5)
        shutdown.add(worker)
        worker.start()
        return await worker.idle(IDLE_SECONDS)  # False: a stop has begun


with run:
    if asyncio.run(main()):
        run.complete()
        print("nothing left to charge")
