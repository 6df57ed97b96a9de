"""`python -m tests.pictures [FOLDER]`: takes the pictures of the status page that the documentation shows."""

from __future__ import annotations

import sys
from pathlib import Path

import psycopg

from leasedjob.lease.migrate import migrate
from leasedjob.testing.postgres import PostgresServer
from tests.browser import Browser, program
from tests.cluster.layout import REPOSITORY, Cache
from tests.cluster.packages import chromium
from tests.cluster.progress import Progress
from tests.page_scene import night, scene

FOLDER = REPOSITORY / "docs" / "images" / "status-page"
# name, path, width, height, dark
PICTURES = (
    ("jobs-light", "/", 1200, 860, False),
    ("jobs-dark", "/", 1200, 860, True),
    ("job-light", "/jobs/billing/settle-payments", 1200, 860, False),
    ("timeline-dark", "/timeline", 1200, 860, True),
    ("leases-light", "/leases", 1200, 640, False),
    ("narrow", "/?state=attention", 320, 900, False),
)


def take(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    binary = program() or str(chromium(Cache.from_env(), Progress()))
    with PostgresServer() as server:
        server.create_database("pictures")
        dsn = server.conninfo("pictures")
        with psycopg.connect(dsn, autocommit=True) as connection:
            migrate(connection)
        with scene(dsn) as stage:
            night(stage)
            browser = Browser(binary)
            try:
                for name, path, width, height, dark in PICTURES:
                    with browser.tab(width=width, height=height, dark=dark) as tab:
                        tab.send("Emulation.setScrollbarsHidden", hidden=True)
                        tab.open(stage.url + path)
                        tab.picture(folder / f"{name}.png")
                        print(folder / f"{name}.png")
            finally:
                browser.close()


if __name__ == "__main__":
    take(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
