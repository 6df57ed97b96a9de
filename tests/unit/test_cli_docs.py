"""docs/reference/cli.md says what the programs do: every verb, flag and exit code."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import click

from leasedjob import __main__ as program
from leasedjob.cli import leasedjob, migrate, moved, prune, restored
from leasedjob.cli.exits import Exit
from leasedjob.cli.kubectl import plugin
from leasedjob.lease import retention
from leasedjob.workload import verbs
from leasedjob.workload.outbox import verb as outbox

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")
PLUGIN, PROGRAM = PAGE.split("\n## leasedjob\n")


def section(page: str, title: str) -> str:
    """The text under a heading of the third level."""
    return page.partition(f"\n### {title}\n")[2].partition("\n### ")[0]


def codes(text: str) -> list[int]:
    return [int(code) for code in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)]


def test_every_verb_and_flag_of_the_plugin() -> None:
    context = click.Context(plugin)
    shared = {name for option in plugin.params for name in (*option.opts, *option.secondary_opts)}
    for verb in plugin.list_commands(context):
        command = plugin.get_command(context, verb)
        assert command is not None
        text = section(PLUGIN, verb)
        assert text, f"no section {verb}"
        for option in command.params:
            if isinstance(option, click.Option) and not shared & set(option.opts):
                assert any(name in text for name in option.opts), f"{verb}: {option.opts}"
    assert all(name in section(PLUGIN, "Flags that every verb takes") for name in shared)


def test_every_exit_code_of_the_plugin() -> None:
    assert codes(section(PLUGIN, "Exit codes")) == [int(code) for code in Exit]


def test_migrate() -> None:
    text = section(PROGRAM, "migrate")
    help_text = " ".join(leasedjob.parser().format_help().split())
    assert "migrate" in help_text
    assert codes(text) == [int(code) for code in migrate.Exit]
    for flag in ("--check", "--wait", "--database-dir", "--database-url", migrate.ENV_URL, migrate.DEFAULT_DIRECTORY):
        assert flag in text


def test_prune() -> None:
    text = section(PROGRAM, "prune")
    assert codes(text) == [int(code) for code in migrate.Exit if code is not migrate.Exit.PENDING]
    for flag in ("--older-than", "--keep-last", "--dry-run", "--database-dir", "--database-url"):
        assert flag in text
    assert f"| {prune.KEEP_LAST} |" in text
    assert prune.KEEP_LAST == retention.KEEP_LAST


def test_restored_and_moved() -> None:
    for module in (restored, moved):
        (name,) = [name for name in ("restored", "moved") if module.__name__.endswith(name)]
        text = section(PROGRAM, name)
        assert codes(text) == [int(code) for code in migrate.Exit if code is not migrate.Exit.PENDING]
        (verbs_of_it,) = (a for a in leasedjob.parser()._actions if isinstance(a, argparse._SubParsersAction))
        for action in verbs_of_it.choices[name]._actions:
            for flag in action.option_strings:
                assert flag in ("-h", "--help") or flag in text, f"{name}: {flag}"


def test_the_verbs_around_a_command() -> None:
    assert list(program.AROUND_A_COMMAND) == [verbs.EXEC, verbs.RUN_EXCLUSIVE]
    help_text = leasedjob.parser(program.AROUND_A_COMMAND).format_help()
    for verb, parser in ((verbs.EXEC, verbs._exec_parser()), (verbs.RUN_EXCLUSIVE, verbs._run_exclusive_parser())):
        assert verb in help_text
        text = section(PROGRAM, verb)
        assert verb in PROGRAM
        for flag in (
            name for action in parser._actions for name in action.option_strings if name not in ("-h", "--help")
        ):
            assert f"`{flag}" in text or f", `{flag}" in text, f"{verb}: {flag}"
    assert codes(section(PROGRAM, verbs.EXEC)) == [128 + 15, verbs.EXIT_USAGE]
    assert codes(section(PROGRAM, verbs.RUN_EXCLUSIVE)) == [
        verbs.EXIT_UNRECORDED,
        verbs.EXIT_NO_LEASE,
        verbs.EXIT_USAGE,
    ]


def test_the_outbox() -> None:
    assert list(program.OF_THE_OUTBOX) == [outbox.VERB]
    text = section(PROGRAM, outbox.VERB)
    assert codes(text) == [0, outbox.EXIT_USAGE, outbox.EXIT_DATABASE, outbox.EXIT_FAILED]
    (verbs_of_it,) = (action for action in outbox.parser()._actions if isinstance(action, argparse._SubParsersAction))
    for name, parser in verbs_of_it.choices.items():
        assert f"| `{name}` |" in text
        assert name in program.OF_THE_OUTBOX[outbox.VERB]
        for flag in (flag for action in parser._actions for flag in action.option_strings if len(flag) > 2):
            assert flag == "--help" or flag in text, f"{name}: {flag}"
