"""`leasedjob`: the command line in the operator's image. It needs argparse and psycopg only.

A verb is a module with `add(parsers)`, which declares its arguments and sets `verb` to the function that carries it
out and returns the exit code. Only argparse is imported before the verb is known.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from leasedjob import __version__
from leasedjob.cli import migrate, moved, prune, restored

NOTHING: Final[Mapping[str, str]] = {}


def parser(others: Mapping[str, str] = NOTHING) -> argparse.ArgumentParser:
    """The whole command line.

    Args:
        others: verbs that are carried out elsewhere, each with a line of help.
    """
    top = argparse.ArgumentParser(
        prog="leasedjob", description="LeasedJob's database, and commands under a lease.", allow_abbrev=False
    )
    verbs = top.add_subparsers(metavar="VERB", required=True)
    migrate.add(verbs)
    prune.add(verbs)
    restored.add(verbs)
    moved.add(verbs)
    version = verbs.add_parser("version", help="print the version", allow_abbrev=False)
    version.set_defaults(verb=_version)
    for name, line in others.items():
        verbs.add_parser(name, help=line, add_help=False)
    return top


def run(words: Sequence[str], others: Mapping[str, str] = NOTHING) -> int:
    """Carries out a command line, without the program's name; returns the exit code (usage errors exit with 2)."""
    arguments = parser(others).parse_args(words)
    verb: Callable[[argparse.Namespace], int] = arguments.verb
    return verb(arguments)


def _version(_arguments: argparse.Namespace) -> int:
    print(__version__)
    return 0


def main(others: Mapping[str, str] = NOTHING) -> None:
    """The entry point."""
    try:
        code = run(sys.argv[1:], others)
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)


if __name__ == "__main__":
    main()
