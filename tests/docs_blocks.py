"""The fenced blocks of the documentation, for the tests that run or check each of them.

What a block's first line says behind the language:

    a file's name    the block is that file; a test of the page's own uses it
    run              shell that is run for real, with a database (tests/integration/test_docs.py)
    cluster          shell that is run for real, on a cluster (tests/e2e/test_tutorial.py)
    fragment=spec    YAML: fields of a LeasedJob's spec
    fragment=values  YAML: values of the chart; fragment=other: of something else
    skip="why"       neither run nor checked, and why not
"""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
_FENCE = re.compile(r"^( *)```(\w*)([^\n`]*)\n(.*?)^ *```[ \t]*$", re.MULTILINE | re.DOTALL)
LANGUAGES = {"python", "yaml", "sh", "sql", "console", "crontab", "lua", "text", "mermaid", "dockerfile", ""}


@dataclass(frozen=True, slots=True)
class Block:
    """One of them."""

    page: str
    line: int
    language: str
    marks: tuple[str, ...]
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    def mark(self, name: str) -> str | None:
        """Its value ("" where it has none); None where the block isn't marked so."""
        for mark in self.marks:
            key, _, value = mark.partition("=")
            if key == name:
                return value
        return None


def pages() -> Iterator[Path]:
    """Every page that people read."""
    for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "charts/leasedjob/README.md"):
        if (ROOT / name).exists():
            yield ROOT / name
    for folder in ("docs", "examples"):
        yield from sorted((ROOT / folder).rglob("*.md"))


def blocks(*languages: str) -> list[Block]:
    """All blocks in these languages, in the order of the pages; those to be skipped left out."""
    found = []
    for page in pages():
        text = page.read_text(encoding="utf-8")
        for match in _FENCE.finditer(text):
            block = Block(
                page.relative_to(ROOT).as_posix(),
                text.count("\n", 0, match.start()) + 1,
                match[2],
                tuple(shlex.split(match[3])),
                textwrap.dedent(match[4]),
            )
            if not languages or (block.language in languages and block.mark("skip") is None):
                found.append(block)
    return found


def commands(block: Block) -> Iterator[str]:
    """The command lines of a shell or console block; lines that go on are joined."""
    text = block.text
    if block.language == "console":
        text = "\n".join(line[2:] for line in text.splitlines() if line.startswith("$ "))
    held = ""
    for line in re.sub(r"\\\n\s*", " ", text).splitlines():
        held = f"{held}\n{line}" if held else line
        try:
            found = words(held)
        except ValueError:  # a quote is open
            continue
        if found:
            yield held
        held = ""
    assert not held, f"{block}: a quote is not closed"


def words(line: str) -> list[list[str]]:
    """The words of each command in a line: pipes and lists are cut apart, comments and redirections left out.

    Raises:
        ValueError: a quote is open.
    """
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    lexer.commenters = "#"
    found: list[list[str]] = [[]]
    skip = False
    for word in lexer:
        if re.fullmatch(r"[|&;()]+", word):
            found.append([])
        elif re.fullmatch(r"[<>]+|[<>]+&", word):
            skip = True
        elif skip:
            skip = False
        else:
            found[-1].append(word)
    return [command for command in found if command]
