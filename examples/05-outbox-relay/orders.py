"""The application: pays orders, and tells of it in the same transaction."""

import os
import sys

import psycopg

from leasedjob.workload import enqueue_once, install_outbox

with psycopg.connect(os.environ["DATABASE_URL"]) as connection:
    install_outbox(connection)
    connection.commit()
    for number in range(1, int(sys.argv[1]) + 1):
        with connection.transaction():  # the order and the message about it, or neither
            connection.execute(
                "INSERT INTO orders (id, cents) VALUES (%s, %s) ON CONFLICT DO NOTHING", (number, 100 * number)
            )
            new = enqueue_once(
                connection,
                f"order-{number}-paid",
                "order-paid",
                {"order": number, "cents": 100 * number},
                topic="orders",
                partition_key=f"customer-{number % 7}",
            )
        connection.commit()
        print("order", number, "is paid" if new else "was paid before")
