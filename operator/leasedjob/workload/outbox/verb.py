"""`leasedjob outbox`: looks after an outbox from a shell. It needs argparse and psycopg only."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import psycopg

VERB: Final = "outbox"
ENV_URL: Final = "LEASEDJOB_DATABASE_URL"
EXIT_USAGE: Final = 2
EXIT_DATABASE: Final = 3
EXIT_FAILED: Final = 4
_COLUMNS: Final = ("idempotency_key", "type", "topic", "partition_key", "tries", "parked_at", "error")

Work = Callable[["psycopg.Connection[Any]", argparse.Namespace], None]


def parser() -> argparse.ArgumentParser:
    """The command line behind `leasedjob outbox`."""
    top = argparse.ArgumentParser(
        prog=f"leasedjob {VERB}",
        description="Looks after the outbox in an application's database (table leasedjob_outbox).",
        epilog=f"exit code: 0 done, {EXIT_USAGE} usage, {EXIT_DATABASE} the database can't be reached or refuses the "
        f"login, {EXIT_FAILED} it answered, and it could not be done (is the outbox installed?)",
        allow_abbrev=False,
    )
    verbs = top.add_subparsers(metavar="WHAT", required=True)

    def verb(name: str, work: Work, line: str) -> argparse.ArgumentParser:
        made = verbs.add_parser(name, help=line, description=f"{line[0].upper()}{line[1:]}.", allow_abbrev=False)
        where = made.add_mutually_exclusive_group()
        where.add_argument("--database-url", metavar="URL", help=f"default: ${ENV_URL}, which hides a password from ps")
        where.add_argument("--database-dir", metavar="DIR", help="a folder of files: uri, or host, user, password, …")
        made.set_defaults(work=work)
        return made

    verb("install", _install, "make the table if it isn't there")
    verb("status", _status, "say how much is pending, waiting and parked, and for how long the oldest is pending")
    parked = verb("parked", _parked, "list what is parked, oldest first: fields are separated by tabs")
    parked.add_argument("--limit", type=_count, default=100, metavar="N", help="at most so many (default: 100)")
    retry = verb("retry", _retry, "put parked messages back, so that they are tried again")
    which = retry.add_mutually_exclusive_group(required=True)
    which.add_argument("keys", nargs="*", default=[], metavar="KEY", help="their idempotency keys")
    which.add_argument("--all", action="store_true", help="all of them")
    return top


def main(words: Sequence[str]) -> int:
    """Carries out a command line, without the program's name and the verb; the exit code."""
    top = parser()
    arguments = top.parse_args(words)
    url = arguments.database_url or (None if arguments.database_dir else os.environ.get(ENV_URL))
    if not url and not arguments.database_dir:
        top.error(f"say where the database is: --database-url, --database-dir or ${ENV_URL}")
    import psycopg

    from leasedjob.errors import DatabaseRefusedError, DatabaseUnavailableError, LeasedJobError
    from leasedjob.lease.database import Credentials, connect_sync
    from leasedjob.workload.outbox.running import asked

    credentials = Credentials.from_conninfo(url) if url else Credentials.from_directory(arguments.database_dir)
    try:
        with asked(), connect_sync(credentials, application_name="leasedjob-outbox") as connection:
            arguments.work(connection, arguments)
    except (DatabaseUnavailableError, DatabaseRefusedError) as error:
        return _failed(error, EXIT_DATABASE)
    except (LeasedJobError, psycopg.Error) as error:
        return _failed(error, EXIT_FAILED)
    return 0


def _install(connection: psycopg.Connection[Any], _arguments: argparse.Namespace) -> None:
    from leasedjob.workload.outbox.operations import install_outbox

    install_outbox(connection)
    print("the outbox is installed")


def _status(connection: psycopg.Connection[Any], _arguments: argparse.Namespace) -> None:
    from leasedjob.workload.outbox.operations import outbox_status

    status = outbox_status(connection)
    print(f"pending {status.pending}\nwaiting {status.waiting}\nparked {status.parked}\nlag {status.lag:.1f} s")


def _parked(connection: psycopg.Connection[Any], arguments: argparse.Namespace) -> None:
    from leasedjob.workload.outbox.operations import parked_messages

    print(*(name.upper() for name in _COLUMNS), sep="\t")
    for message in parked_messages(connection, arguments.limit):
        values = (getattr(message, name) for name in _COLUMNS)
        print(*(" ".join(str("" if value is None else value).split()) for value in values), sep="\t")


def _retry(connection: psycopg.Connection[Any], arguments: argparse.Namespace) -> None:
    from leasedjob.workload.outbox.operations import retry_parked

    print(f"put back {retry_parked(connection, None if arguments.all else arguments.keys)}")


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 0 < int(text) < 10**6:
        raise argparse.ArgumentTypeError("must be a number above 0")
    return int(text)


def _failed(error: Exception, code: int) -> int:
    print(f"leasedjob {VERB}: {' '.join(str(error).split())}", file=sys.stderr)
    return code
