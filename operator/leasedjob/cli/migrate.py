"""`leasedjob migrate`: bring the database's schema up to this version, or say whether it is."""

from __future__ import annotations

import argparse
import math
import os
import random
import sys
import time
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from leasedjob.lease.database import Credentials

ENV_URL: Final = "LEASEDJOB_DATABASE_URL"
DEFAULT_DIRECTORY: Final = "/etc/leasedjob/database"
RETRY_SECONDS: Final = 2.0


class Exit(IntEnum):
    """Exit codes of `leasedjob migrate`; documented in docs/reference/cli.md."""

    DONE = 0  # the schema is current
    PENDING = 1  # --check: it is not
    USAGE = 2
    DATABASE = 3  # not reachable, or it refuses the login
    FAILED = 4  # the database answered, and a migration could not be applied


def add(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares the verb and its arguments."""
    verb = verbs.add_parser(
        "migrate",
        help="bring the database's schema up to this version",
        description="Brings the database's schema up to this version. Safe with the previous version still running, "
        "and when several run at once.",
        epilog="exit codes: 0 the schema is current, 1 --check found it is not, 2 usage, 3 the database can't be "
        "reached or refuses the login, 4 a migration failed",
        allow_abbrev=False,
    )
    verb.add_argument("--check", action="store_true", help="change nothing; exit 1 and list what is missing")
    verb.add_argument(
        "--wait",
        type=_seconds,
        default=0.0,
        metavar="SECONDS",
        help="keep trying for so long while the database can't be reached (default: 0)",
    )
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
    verb.set_defaults(verb=migrate)


def migrate(arguments: argparse.Namespace) -> int:
    """Carries the verb out; what it did goes to stdout, what went wrong to stderr."""
    import psycopg

    from leasedjob.errors import DatabaseRefusedError, DatabaseUnavailableError, LeasedJobError

    credentials = _credentials(arguments)
    end = time.monotonic() + arguments.wait
    while True:
        try:
            return _once(credentials, check=arguments.check)
        except (DatabaseUnavailableError, DatabaseRefusedError) as error:
            # A refusal may pass too: in a fresh installation role and Secret arrive after this process.
            left = end - time.monotonic()
            if left <= 0:
                _complain(str(error))
                return Exit.DATABASE
            _complain(f"{error}; trying again for {math.ceil(left)} s")
            time.sleep(min(left, RETRY_SECONDS * random.uniform(0.5, 1.5)))
        except (LeasedJobError, psycopg.Error) as error:
            _complain(str(error))
            return Exit.FAILED


def _once(credentials: Credentials, *, check: bool) -> Exit:
    from leasedjob.lease import migrate as schema
    from leasedjob.lease.database import connect_sync

    with connect_sync(credentials, application_name="leasedjob-migrate") as connection:
        if check:
            lacking = schema.pending(connection)
            for step in lacking:
                print(f"missing {step}")
            if lacking:
                _complain("the schema is not current: run `leasedjob migrate`")
                return Exit.PENDING
        else:
            for step in schema.migrate(connection):
                print(f"applied {step}")
        print(f"the schema is current: {schema.migrations()[-1]}")
        return Exit.DONE


def _credentials(arguments: argparse.Namespace) -> Credentials:
    """The flag that is given; else the environment's URL; else the default directory."""
    from leasedjob.lease.database import Credentials

    url = arguments.database_url
    if url is None and arguments.database_dir is None:
        url = os.environ.get(ENV_URL) or None
    if url is not None:
        return Credentials.from_conninfo(url)
    return Credentials.from_directory(arguments.database_dir or DEFAULT_DIRECTORY)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError("must be a number of seconds, 0 or more")
    return value


def _complain(message: Any) -> None:
    print(f"leasedjob migrate: {' '.join(str(message).split())}", file=sys.stderr, flush=True)
