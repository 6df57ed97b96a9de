"""The relay: posts what is in the outbox to a webhook, and ends when there is nothing left."""

import asyncio
import logging
import os

from leasedjob.workload import GracefulShutdown, HttpPublisher, OutboxRelay, ShutdownState, current_run

state = ShutdownState.listening()  # first: from here on SIGTERM begins a stop instead of ending the program
run = current_run(code="outbox-relay")
logging.basicConfig(level=logging.INFO)


async def main() -> None:
    webhook = HttpPublisher(os.environ["WEBHOOK_URL"] + "/{topic}")
    relay = OutboxRelay(os.environ["DATABASE_URL"], webhook, state, concurrency=4)
    async with GracefulShutdown(state) as shutdown:
        shutdown.add(webhook)
        shutdown.add(relay)  # the batch in hand has 20 seconds to be finished
        done = await relay.flush()
    print("published", done.published, "parked", done.parked, flush=True)
    if not done.available:
        raise SystemExit("the webhook is unavailable: the next run goes on")
    run.complete({"published": done.published, "parked": done.parked})


with run:
    asyncio.run(main())
