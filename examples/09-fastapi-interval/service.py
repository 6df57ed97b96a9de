"""Takes prices by HTTP while the market is open, and sums them up at an interval."""

import asyncio
import logging
import os

import uvicorn
from fastapi import FastAPI
from psycopg_pool import AsyncConnectionPool

from leasedjob.workload import GracefulShutdown, IntervalRegistry, ShutdownState, current_run
from leasedjob.workload.asgi import UvicornServer
from leasedjob.workload.pools import AsyncPsycopgPool

SERVE_SECONDS = float(os.environ.get("SERVE_SECONDS", "36000"))
SUM_SECONDS = float(os.environ.get("SUM_SECONDS", "5"))
PORT = int(os.environ.get("PORT", "8080"))
state = ShutdownState.listening()  # first: from here on SIGTERM begins a stop instead of ending the program
run = current_run()
logging.basicConfig(level=logging.INFO)
app = FastAPI()
pool = AsyncConnectionPool(os.environ["DATABASE_URL"], open=False)


@app.put("/prices/{id}")
async def put(id: str, cents: int) -> dict[str, str]:
    async with pool.connection() as connection:
        # A client that got no answer asks again, perhaps another Pod: the id makes that harmless.
        await connection.execute("INSERT INTO price (id, cents) VALUES (%s, %s) ON CONFLICT DO NOTHING", (id, cents))
        await asyncio.sleep(0.2)  # whatever else takes time
    return {"accepted": id}


async def sum_up() -> None:
    async with pool.connection() as connection:
        await connection.execute(
            "WITH fresh AS (UPDATE price SET summed = true WHERE NOT summed RETURNING cents)"
            " INSERT INTO total (cents, prices) SELECT sum(cents), count(*) FROM fresh HAVING count(*) > 0"
        )
        await asyncio.sleep(0.2)


async def main() -> bool:
    await pool.open()
    async with GracefulShutdown(state) as shutdown:
        intervals = IntervalRegistry(state)
        server = UvicornServer(uvicorn.Config(app, host="0.0.0.0", port=PORT, log_level="warning"), state)
        shutdown.add(AsyncPsycopgPool(pool))
        shutdown.add(intervals)
        shutdown.add(server)
        intervals.add("sum", SUM_SECONDS, sum_up)
        await server.start()
        print("serves on port", *server.ports, flush=True)
        try:
            async with asyncio.timeout(SERVE_SECONDS):
                await state
        except TimeoutError:
            pass  # the market closes
        return not state.is_draining()


with run:
    if asyncio.run(main()):
        run.complete()
        print("closed")
