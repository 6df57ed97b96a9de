"""docs/reference/exit-codes.md: every exit code of every program, with what it means."""

from __future__ import annotations

from docsite.table import comments, notice, table
from leasedjob import protocol
from leasedjob.cli import database, exits
from leasedjob.workload import verbs
from leasedjob.workload.outbox import verb as outbox

# What the numbers of an enum mean, where its comments don't say it in full.
_PLUGIN = {
    exits.Exit.OK: "done; with `--wait`: the run has succeeded",
    exits.Exit.RUN_FAILED: "`--wait`: the run has failed, or something of a backfill has",
    exits.Exit.RUN_CANCELLED: "`--wait`: the run was cancelled",
    exits.Exit.RUN_REFUSED: "`--wait`: the run was refused",
    exits.Exit.TIMED_OUT: "`--wait`: the run goes on after `--timeout`, as timeout(1) has it",
}


def page() -> str:
    """The page."""
    said = comments(exits.Exit)
    plugin = [(f"{code:d}", f"`{code.name}`", _PLUGIN.get(code) or said[code.name]) for code in exits.Exit]
    of_database = comments(database.Exit)
    database_rows = [
        (f"{code:d}", f"`{code.name}`", of_database[code.name] or "a flag or argument that can't be used")
        for code in database.Exit
    ]
    return "\n".join(
        (
            notice("docsite/codes.py and the enums that it reads"),
            "# Exit codes\n",
            "A number keeps its meaning: scripts rely on it. What each verb does is in [cli.md](cli.md).\n",
            "## kubectl leasedjob\n",
            table(("code", "name", "meaning"), plugin),
            "## leasedjob migrate, prune, restored and moved\n",
            table(("code", "name", "meaning"), database_rows),
            "## leasedjob exec\n",
            "The command's own code; `128+n` where signal n ended it, 126 and 127 as a shell's where it can't be started.\n",
            table(
                ("code", "meaning"),
                (
                    ("143", "a stop came before the command was started: nothing ran"),
                    (f"{verbs.EXIT_USAGE}", "usage"),
                ),
            ),
            "## leasedjob run-exclusive\n",
            "The command's own code where it ran, and\n",
            table(
                ("code", "meaning"),
                (
                    ("that of `--not-acquired` (0)", "somebody else has the run, or it has succeeded: nothing ran"),
                    (
                        f"{verbs.EXIT_UNRECORDED}",
                        "it exited with 0, but its success could not be recorded: it may be repeated",
                    ),
                    (f"{verbs.EXIT_NO_LEASE}", "the database could not be asked for the lease: nothing ran"),
                    (f"{verbs.EXIT_USAGE}", "usage"),
                ),
            ),
            "## leasedjob outbox\n",
            table(
                ("code", "meaning"),
                (
                    ("0", "done"),
                    (f"{outbox.EXIT_USAGE}", "usage"),
                    (f"{outbox.EXIT_DATABASE}", "the database can't be reached, or refuses the login"),
                    (f"{outbox.EXIT_FAILED}", "the database answered, and it could not be done"),
                ),
            ),
            "## Containers of a run's Pod\n",
            "Neither decides how a run ended: the sidecar's testimony does, and the workload's own exit codes.\n",
            table(
                ("container", "code", "meaning"),
                (
                    (
                        f"`{protocol.CONTAINER_ADOPT}`, `{protocol.CONTAINER_GATE}`",
                        f"{protocol.EXIT_NOT_MINE}",
                        "the lease isn't this Pod's: nothing ran",
                    ),
                    (f"`{protocol.CONTAINER_HOLD}`", "0, 137, 143", "normal, after the workload has ended"),
                ),
            ),
        )
    )
