"""Puts orders into the queue `payments`: python add.py 20. Doing it twice adds nothing."""

import asyncio
import os
import sys

from leasedjob.workload.bullmq import BullMQQueue


async def main(orders: int) -> None:
    queue = BullMQQueue("payments", connection=os.environ["REDIS_URL"])
    for order in range(orders):
        # A job that fails is tried five times; a second try meets the same key at the sink.
        await queue.add(
            "charge",
            {"order": order, "cents": 990},
            idempotency_key=f"charge/{order}",
            options={"attempts": 5, "backoff": {"type": "exponential", "delay": 1000}},
        )
    await queue.stop()


asyncio.run(main(int(sys.argv[1])))
