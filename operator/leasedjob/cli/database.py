"""Where the database is: the flags that the verbs of `leasedjob` share, and what a fault of it exits with."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from leasedjob.lease.database import Credentials

ENV_URL: Final = "LEASEDJOB_DATABASE_URL"
DEFAULT_DIRECTORY: Final = "/etc/leasedjob/database"


class Exit(IntEnum):
    """Exit codes of the verbs that use the database; documented in docs/reference/cli.md."""

    DONE = 0  # migrate: the schema is current
    PENDING = 1  # migrate --check: it is not
    USAGE = 2
    DATABASE = 3  # not reachable, or it refuses the login
    FAILED = 4  # the database answered, and it could not be done


def add_database_flags(verb: argparse.ArgumentParser) -> None:
    """Declares `--database-dir` and `--database-url`."""
    where = verb.add_mutually_exclusive_group()
    where.add_argument(
        "--database-dir",
        metavar="DIR",
        help=f"directory of the mounted Secret: files host, user, password, ... (default: {DEFAULT_DIRECTORY})",
    )
    where.add_argument(
        "--database-url",
        metavar="URL",
        help=f"connection string, instead of the directory; ${ENV_URL} is the same and hides a password from ps",
    )


def credentials(arguments: argparse.Namespace) -> Credentials:
    """The flag that is given; else the environment's URL; else the default directory."""
    from leasedjob.lease.database import Credentials

    url = arguments.database_url
    if url is None and arguments.database_dir is None:
        url = os.environ.get(ENV_URL) or None
    if url is not None:
        return Credentials.from_conninfo(url)
    if arguments.database_dir is not None:
        return Credentials.from_directory(arguments.database_dir)
    return Credentials(Path(DEFAULT_DIRECTORY), advice=f"${ENV_URL} or --database-url names another database")


def carried_out(verb: str, work: Callable[[], object]) -> Exit:
    """Does the work; what goes wrong is a line on stderr and the exit code."""
    import psycopg

    from leasedjob.errors import DatabaseRefusedError, DatabaseUnavailableError, LeasedJobError

    try:
        work()
    except (DatabaseUnavailableError, DatabaseRefusedError) as error:
        complain(verb, error)
        return Exit.DATABASE
    except (LeasedJobError, psycopg.Error) as error:
        complain(verb, error)
        return Exit.FAILED
    return Exit.DONE


def complain(verb: str, message: Any) -> None:
    """One line on stderr."""
    print(f"leasedjob {verb}: {' '.join(str(message).split())}", file=sys.stderr, flush=True)
