"""`leasedjob prune`: delete runs that ended long ago, so that they never run again, and what else is that old."""

from __future__ import annotations

import argparse
import re
from datetime import timedelta
from typing import Final

from leasedjob.cli.database import add_database_flags, carried_out, credentials

KEEP_LAST: Final = 10  # leasedjob.lease.retention's, which would import psycopg
_UNITS: Final = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


def add(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares the verb and its arguments."""
    verb = verbs.add_parser(
        "prune",
        help="delete runs that ended long ago, and the ledger of ticks that did not run",
        description="Deletes runs that ended, and whose tick was, longer ago than an age; their ticks can't be claimed "
        "any more. Runs whose key is no tick, and those that run once, stay for ever. What says of ticks of that age "
        "why they did not run goes as well, with audit lines and records of backfills. It takes a minute at least, and "
        "is safe at any time, also when several run at once.",
        epilog="exit codes: 0 done, 2 usage, 3 the database can't be reached, refuses the login, or has a transaction "
        "that doesn't end, 4 failed",
        allow_abbrev=False,
    )
    verb.add_argument(
        "--older-than", type=_age, required=True, metavar="AGE", help="a number and a unit, s m h d w: 90d, 12h"
    )
    verb.add_argument(
        "--keep-last",
        type=_count,
        default=KEEP_LAST,
        metavar="N",
        help=f"how many of the newest runs of each code stay, however old (default: {KEEP_LAST})",
    )
    verb.add_argument("--dry-run", action="store_true", help="change nothing; list what would go")
    add_database_flags(verb)
    verb.set_defaults(verb=prune)


def prune(arguments: argparse.Namespace) -> int:
    """Carries the verb out; what it did goes to stdout, what went wrong to stderr."""
    return carried_out("prune", lambda: _prune(arguments))


def _prune(arguments: argparse.Namespace) -> None:
    from leasedjob.lease.service import SyncJobSchedulerService

    jobs = SyncJobSchedulerService(credentials(arguments))
    done = jobs.prune(arguments.older_than, keep_last=arguments.keep_last, dry_run=arguments.dry_run)
    ledger = jobs.prune_ledger(arguments.older_than, dry_run=arguments.dry_run)
    verb = "would delete" if arguments.dry_run else "deleted"
    for item in done:
        print(f"{item.code}: {verb} {item.rows} up to {item.through:%Y-%m-%dT%H:%M:%SZ}")
    print(f"{verb} {sum(item.rows for item in done)} runs of {len(done)} codes")
    print(f"{verb} {ledger} records of ticks that did not run")


def _age(text: str) -> timedelta:
    match = re.fullmatch(r"([0-9]{1,6})([smhdw])", text)
    if match is None or not int(match[1]):
        raise argparse.ArgumentTypeError("must be a number above 0 and a unit: s, m, h, d or w")
    return timedelta(**{_UNITS[match[2]]: int(match[1])})


def _count(text: str) -> int:
    if not re.fullmatch("[0-9]{1,6}", text):
        raise argparse.ArgumentTypeError("must be a number, 0 or more")
    return int(text)
