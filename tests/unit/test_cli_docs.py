"""docs/reference/cli.md says what the programs do: every verb, flag and exit code."""

from __future__ import annotations

import re
from pathlib import Path

import click

from leasedjob.cli import leasedjob, migrate, prune
from leasedjob.cli.exits import Exit
from leasedjob.cli.kubectl import plugin
from leasedjob.lease import retention

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
