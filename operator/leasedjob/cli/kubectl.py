"""`kubectl leasedjob`: the plugin's entry point. Verbs are imported when they are named."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Final

import click

from leasedjob.cli.options import cluster_options

PROGRAM: Final = "kubectl leasedjob"
# click's own completion, for whoever calls kubectl-leasedjob directly.
COMPLETE_VAR: Final = "_KUBECTL_LEASEDJOB_COMPLETE"

# Each module has a `command`. For the help's lines all are imported, so they import click and nothing heavier.
_VERBS: Final = {
    "run": "leasedjob.cli.run",
    "cancel": "leasedjob.cli.cancel",
    "backfill": "leasedjob.cli.backfill",
    "list": "leasedjob.cli.list",
    "get": "leasedjob.cli.get",
    "runs": "leasedjob.cli.runs",
    "why": "leasedjob.cli.why",
    "timeline": "leasedjob.cli.timeline",
    "logs": "leasedjob.cli.logs",
    "preview": "leasedjob.cli.preview",
    "suspend": "leasedjob.cli.suspend",
    "resume": "leasedjob.cli.resume",
    "convert": "leasedjob.cli.convert",
    "lint": "leasedjob.cli.lint",
    "release": "leasedjob.cli.release",
    "forget": "leasedjob.cli.forget",
    "version": "leasedjob.cli.version",
}


class Verbs(click.Group):
    """Loads `command` of a verb's module at first use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        module = _VERBS.get(cmd_name)
        if module is None:
            return None
        command: click.Command = import_module(module).command
        return command


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@cluster_options
def plugin() -> None:
    """Run, watch, explain and repair LeasedJobs.

    Exit codes: 0 done, 1 refused, 2 usage, 3 not found, 4 not installed, 5 no access, 6 cluster unreachable;
    10 the run failed, 11 cancelled, 12 refused by the operator; 20 an invalid manifest; 124 timed out, 130 Ctrl-C.
    """


def main() -> None:
    """Runs the plugin and exits with a code of `leasedjob.cli.exits.Exit`."""
    from leasedjob.cli.exits import Exit

    try:
        code = plugin(prog_name=PROGRAM, complete_var=COMPLETE_VAR, standalone_mode=False)
    except click.Abort:
        sys.exit(Exit.INTERRUPTED)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    # Without standalone mode click returns --help's exit code, and a verb's None.
    sys.exit(code or Exit.OK)


if __name__ == "__main__":
    main()
