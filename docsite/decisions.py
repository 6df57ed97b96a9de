"""docs/decisions/README.md: the index of the design decisions, from their headings."""

from __future__ import annotations

from pathlib import Path

from docsite.table import notice, table

FOLDER = Path(__file__).parents[1] / "docs" / "decisions"


def page() -> str:
    """The page."""
    rows = []
    for note in sorted(FOLDER.glob("[0-9]*.md")):
        number, _, title = note.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ").partition(". ")
        rows.append((number, f"[{title}]({note.name})"))
    return "\n".join(
        (
            notice("docsite/decisions.py; a new note appears by itself"),
            "# Design decisions\n",
            "One note for each decision that was hard: the question, what was decided, what else was possible and why not. They "
            "are written when the decision is made, and corrected when it changes.\n",
            table(("", "about"), rows),
        )
    )
