"""`leasedjob migrate`: bring the database's schema up to this version, or say whether it is."""

from __future__ import annotations

import argparse
import math
import random
import time
from typing import TYPE_CHECKING, Final

from leasedjob.cli.database import DEFAULT_DIRECTORY, ENV_URL, Exit, add_database_flags, complain, credentials

if TYPE_CHECKING:
    from leasedjob.lease.database import Credentials

RETRY_SECONDS: Final = 2.0


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
    add_database_flags(verb)
    verb.set_defaults(verb=migrate)


def migrate(arguments: argparse.Namespace) -> int:
    """Carries the verb out; what it did goes to stdout, what went wrong to stderr."""
    import psycopg

    from leasedjob.errors import DatabaseRefusedError, DatabaseUnavailableError, LeasedJobError

    where = credentials(arguments)
    end = time.monotonic() + arguments.wait
    while True:
        try:
            return _once(where, check=arguments.check)
        except (DatabaseUnavailableError, DatabaseRefusedError) as error:
            # A refusal may pass too: in a fresh installation role and Secret arrive after this process.
            left = end - time.monotonic()
            if left <= 0:
                complain("migrate", str(error))
                return Exit.DATABASE
            complain("migrate", f"{error}; trying again for {math.ceil(left)} s")
            time.sleep(min(left, RETRY_SECONDS * random.uniform(0.5, 1.5)))
        except (LeasedJobError, psycopg.Error) as error:
            complain("migrate", str(error))
            return Exit.FAILED


def _once(where: Credentials, *, check: bool) -> Exit:
    from leasedjob.lease import migrate as schema
    from leasedjob.lease.database import connect_sync

    with connect_sync(where, application_name="leasedjob-migrate") as connection:
        if check:
            lacking = schema.pending(connection)
            for step in lacking:
                print(f"missing {step}")
            if lacking:
                complain("migrate", "the schema is not current: run `leasedjob migrate`")
                return Exit.PENDING
        else:
            for step in schema.migrate(connection):
                print(f"applied {step}")
        print(f"the schema is current: {schema.migrations()[-1]}")
        return Exit.DONE


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError("must be a number of seconds, 0 or more")
    return value


__all__ = ["DEFAULT_DIRECTORY", "ENV_URL", "Exit", "add", "migrate"]
