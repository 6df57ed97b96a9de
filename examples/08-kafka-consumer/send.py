"""Sends orders to the topic `orders`: python send.py 200."""

import asyncio
import json
import os
import sys

from leasedjob.workload.kafka import KafkaProducer


async def main(orders: int) -> None:
    producer = KafkaProducer(servers=os.environ["KAFKA_SERVERS"])
    await producer.start()
    for order in range(orders):
        value = json.dumps({"order": order, "cents": 990}).encode()
        customer = f"customer-{order % 5}".encode()  # each customer's orders stay in their order
        await producer.send("orders", value, idempotency_key=f"order/{order}", key=customer)
    await producer.stop()


asyncio.run(main(int(sys.argv[1])))
