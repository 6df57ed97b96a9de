"""`leasedjob moved`: the database is on another server now, and nothing of it was lost."""

from __future__ import annotations

import argparse

from leasedjob.cli.database import add_database_flags, carried_out, credentials


def add(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares the verb and its arguments."""
    verb = verbs.add_parser(
        "moved",
        help="say that the database was copied to another server, and that nothing was lost",
        description="Run it once, after the database was copied to another server and before an operator uses it "
        "there. Database roles of namespaces that the new server lacks are forgotten, so that the operator makes new "
        "ones, and what PUBLIC never had is taken from it. Leases, runs and ticks stay as they are: where something "
        "may have been lost, run `leasedjob restored` instead.",
        epilog="exit codes: 0 done, 2 usage, 3 the database can't be reached or refuses the login, 4 failed",
        allow_abbrev=False,
    )
    add_database_flags(verb)
    verb.set_defaults(verb=moved)


def moved(arguments: argparse.Namespace) -> int:
    """Carries the verb out; what it did goes to stdout, what went wrong to stderr."""
    return carried_out("moved", lambda: _moved(arguments))


def _moved(arguments: argparse.Namespace) -> None:
    from leasedjob.lease import migrate
    from leasedjob.lease.database import connect_sync
    from leasedjob.lease.restore import after_move

    with connect_sync(credentials(arguments), application_name="leasedjob-moved") as connection:
        migrate.check(connection)
        roles = after_move(connection)
    print(f"{len(roles)} roles of namespaces are not on this server; the operator makes new ones")
