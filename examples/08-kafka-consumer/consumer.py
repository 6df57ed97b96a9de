"""Writes an invoice for each order in the topic `orders`, and ends when there are no more."""

import asyncio
import json
import logging
import os

from psycopg_pool import AsyncConnectionPool

from leasedjob.workload import GracefulShutdown, ShutdownState, current_run
from leasedjob.workload.kafka import KafkaConsumer, KafkaProducer
from leasedjob.workload.pools import AsyncPsycopgPool

IDLE_SECONDS = float(os.environ.get("IDLE_SECONDS", "10"))
state = ShutdownState.listening()  # first: from here on SIGTERM begins a stop instead of ending the program
run = current_run()
logging.basicConfig(level=logging.INFO)


async def main() -> bool:
    servers = os.environ["KAFKA_SERVERS"]
    pool = AsyncConnectionPool(os.environ["DATABASE_URL"], open=False)
    await pool.open()

    async def write(record, idempotency_key: str) -> None:
        order = json.loads(record.value)
        async with pool.connection() as connection:
            await connection.execute(
                "INSERT INTO invoice (idempotency_key, order_id, cents) VALUES (%s, %s, %s)"
                " ON CONFLICT (idempotency_key) DO NOTHING",
                (idempotency_key, order["order"], order["cents"]),
            )
        await asyncio.sleep(0.02)  # whatever else takes time
        print("invoice for order", order["order"], flush=True)

    async def put_aside(record, error: Exception) -> None:
        where = f"{record.topic}/{record.partition}/{record.offset}"
        await producer.send(
            "orders-aside", record.value, idempotency_key=where, key=record.key, headers={"error": str(error)}
        )

    async with GracefulShutdown(state) as shutdown:
        shutdown.add(AsyncPsycopgPool(pool))
        producer = KafkaProducer(servers=servers)
        shutdown.add(producer)  # closed after the consumer, which uses it
        await producer.start()
        consumer = KafkaConsumer(
            ["orders"], write, state, group_id="invoices", servers=servers, poison=put_aside, tries=3
        )
        shutdown.add(consumer)
        await consumer.start()
        return await consumer.idle(IDLE_SECONDS)  # False: a stop has begun


with run:
    if asyncio.run(main()):
        run.complete()
        print("an invoice for each order")
