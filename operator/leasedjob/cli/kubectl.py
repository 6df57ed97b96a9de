"""`kubectl leasedjob`: the plugin's entry point. Verbs are imported when they are named."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Final

try:
    import click
except ModuleNotFoundError:
    sys.exit("kubectl leasedjob: it needs more than the package alone: pip install 'leasedjob[cli]'")

from leasedjob.cli.options import cluster_options

PROGRAM: Final = "kubectl leasedjob"
# click's own completion, for whoever calls kubectl-leasedjob directly.
COMPLETE_VAR: Final = "_KUBECTL_LEASEDJOB_COMPLETE"

# A verb is `command` in the module of its name. The lines are here so that the help needs none of the modules.
VERBS: Final = {
    "run": "Start a run of a LeasedJob.",
    "cancel": "Cancel a run, or a backfill.",
    "backfill": "Run past ticks of a LeasedJob, the oldest first.",
    "list": "List LeasedJobs and their last results.",
    "get": "Show LeasedJobs, with their next ticks and recent runs.",
    "runs": "List a LeasedJob's recent runs.",
    "why": "Say why a LeasedJob does, or doesn't, run: now, or at a tick.",
    "timeline": "Draw a LeasedJob's recent runs.",
    "dashboard": "Show the operator's status page in a browser.",
    "logs": "Print the log of a run's Pod.",
    "preview": "Show the next ticks, with what clock changes do to them.",
    "suspend": "Suspend LeasedJobs: no tick counts until `resume`.",
    "resume": "Let the ticks of suspended LeasedJobs count again.",
    "convert": "Write CronJobs as LeasedJobs, and tell each difference.",
    "lint": "Judge manifests offline.",
    "release": "End the present attempt of a run, so that the next one begins.",
    "forget": "Forget that a run failed, so that it may be tried again.",
    "clusters": "List the clusters that share the database.",
    "cordon": "Let a cluster take no new runs.",
    "uncordon": "Let a cluster take runs again.",
    "forget-cluster": "Forget a cluster that is gone for good.",
    "version": "Print the plugin's version.",
}


class Verbs(click.Group):
    """Loads a verb's module when the verb is named, and not for the help that lists them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        command: click.Command = import_module(f"leasedjob.cli.{cmd_name.replace('-', '_')}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(VERBS.items()))


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
