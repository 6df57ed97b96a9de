"""Puts the catalogue into the shop, product by product; goes on where the attempt before has stopped."""

import logging
import os
from collections.abc import Iterator

import psycopg

from leasedjob.workload import Cascade, DrainingError, GracefulShutdown, ShutdownState, current_run

state = ShutdownState.listening()  # first: from here on SIGTERM begins a stop instead of ending the program
run = current_run(code="catalogue")
logging.basicConfig(level=logging.INFO)
cascade = Cascade(run, state)


def products(after: str | None) -> Iterator[tuple[str, int]]:
    """The supplier's products behind one of them, in the order of their numbers; a page at a time."""
    with psycopg.connect(os.environ["DATABASE_URL"], autocommit=True) as supplier:
        while page := supplier.execute(
            "SELECT sku, cents FROM supplier WHERE sku > %s ORDER BY sku LIMIT 20", (after or "",)
        ).fetchall():
            yield from page
            after = page[-1][0]


def main() -> None:
    with GracefulShutdown(state) as shutdown, psycopg.connect(os.environ["DATABASE_URL"]) as connection:
        shutdown.add(cascade)  # the item in hand has 20 seconds to be finished
        cascade.install(connection)
        connection.commit()
        print("goes on" if run.has_checkpoint(connection) else "begins", flush=True)
        for item in cascade.items(connection, products, key=lambda product: product[0]):
            with item as (sku, cents):  # one transaction: both changes and the checkpoint, or none of them
                connection.execute("INSERT INTO product (sku, cents) VALUES (%s, %s)", (sku, cents))
                connection.execute("SELECT pg_sleep(0.05)")
                connection.execute("INSERT INTO search_index (sku) VALUES (%s)", (sku,))
            print("synced", sku, flush=True)
        run.complete({"products": cascade.done})


try:
    with run:
        main()
except DrainingError as error:
    print(f"{error}: the next attempt goes on")
