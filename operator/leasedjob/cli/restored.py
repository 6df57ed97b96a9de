"""`leasedjob restored`: the database was restored to an earlier point, so that what it forgot isn't done twice."""

from __future__ import annotations

import argparse
import re
from datetime import datetime, timedelta
from typing import Final

from leasedjob.cli.database import add_database_flags, carried_out, credentials

LONGEST_LEASE: Final = 900  # leasedjob.lease.restore's, which would import psycopg


def add(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares the verb and its arguments."""
    verb = verbs.add_parser(
        "restored",
        help="say that the database was restored to an earlier point (from a backup)",
        description="Run it once, after the database was restored to an earlier point and before an operator uses "
        "it. Fencing tokens and attempts go on above what may have been given out; nobody holds a lease any more, and "
        "no run begins before whoever held one has stopped; ticks up to --as-of don't run any more unless somebody "
        "asks for them. What is not known counts as done. Scale all operators to 0 first, in every cluster.",
        epilog="exit codes: 0 done, 2 usage, 3 the database can't be reached or refuses the login, 4 refused "
        "(operators are connected, --as-of can't be true) or failed",
        allow_abbrev=False,
    )
    verb.add_argument(
        "--as-of",
        type=_time,
        metavar="TIME",
        help="when the lost database has last answered anybody, RFC 3339 with an offset (default: now)",
    )
    verb.add_argument(
        "--longest-lease",
        type=_seconds,
        default=LONGEST_LEASE,
        metavar="SECONDS",
        help=f"the longest lease.durationSeconds of any LeasedJob (default: {LONGEST_LEASE}, or the longest that the "
        "database knows)",
    )
    verb.add_argument(
        "--token-above",
        type=_token,
        default=0,
        metavar="N",
        help="a fencing token that a sink has seen: the next one is larger (default: a thousand million more than the "
        "largest of the backup)",
    )
    verb.add_argument("--dry-run", action="store_true", help="change nothing; say what would be done")
    verb.add_argument("--force", action="store_true", help="also while operators are connected")
    add_database_flags(verb)
    verb.set_defaults(verb=restored)


def restored(arguments: argparse.Namespace) -> int:
    """Carries the verb out; what it did goes to stdout, what went wrong to stderr."""
    return carried_out("restored", lambda: _restored(arguments))


def _restored(arguments: argparse.Namespace) -> None:
    from leasedjob.lease import migrate
    from leasedjob.lease.database import connect_sync
    from leasedjob.lease.restore import after_restore

    with connect_sync(credentials(arguments), application_name="leasedjob-restored") as connection:
        # A backup of an earlier version lacks what this needs.
        migrate.check(connection)
        done = after_restore(
            connection,
            as_of=arguments.as_of,
            longest_lease=timedelta(seconds=arguments.longest_lease),
            token_above=arguments.token_above,
            dry_run=arguments.dry_run,
            force=arguments.force,
        )
    print("nothing was changed; it would be so:" if arguments.dry_run else "the database counts as restored:")
    print(
        f"  ticks up to {_at(done.as_of)} of {done.codes} LeasedJobs don't run any more unless somebody asks for them"
    )
    print(f"  no run begins before {_at(done.begins_at)}")
    print(f"  fencing tokens go on after {done.token_to} (the backup's largest is {done.token_from})")
    print(
        f"  runs without a further attempt: {done.running} that a Pod held, {done.claims} that no Pod had taken, "
        f"{done.waiting} that waited for their next attempt, {done.library} of the library"
    )
    if done.backfills:
        print(f"  {done.backfills} backfills end where they are")
    if done.roles:
        print(f"  {len(done.roles)} roles of namespaces are not on this server; the operator makes new ones")


def _at(when: datetime) -> str:
    return f"{when:%Y-%m-%dT%H:%M:%SZ}"


def _time(text: str) -> datetime:
    try:
        value = datetime.fromisoformat(text)
    except ValueError:
        value = None
    if value is None or value.tzinfo is None:
        raise argparse.ArgumentTypeError("must be a time with an offset, such as 2026-07-20T03:00:00Z")
    return value


def _seconds(text: str) -> int:
    if not re.fullmatch("[0-9]{1,6}", text) or not int(text):
        raise argparse.ArgumentTypeError("must be a number of seconds above 0")
    return int(text)


def _token(text: str) -> int:
    if not re.fullmatch("[0-9]{1,16}", text):
        raise argparse.ArgumentTypeError("must be a fencing token: a whole number")
    return int(text)
