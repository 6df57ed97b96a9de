"""docs/reference/errors.md: the exceptions that a program may catch."""

from __future__ import annotations

import inspect
import re
import textwrap

from docsite.table import notice, table
from leasedjob import errors
from leasedjob.lease import migrate


def page() -> str:
    """The page."""
    tree = re.search(r"\n\n(    LeasedJobError\n.*?)\n\n", inspect.getdoc(errors) or "", re.DOTALL)
    assert tree is not None, "leasedjob.errors draws its tree"
    classes = [kind for kind in vars(errors).values() if inspect.isclass(kind) and issubclass(kind, Exception)]
    classes += [migrate.MigrationChangedError, migrate.SchemaAheadError]
    rows = [(f"`{kind.__name__}`", f"`{kind.__module__}`", _meaning(kind)) for kind in classes]
    return "\n".join(
        (
            notice("the docstrings of leasedjob.errors"),
            "# Errors\n",
            "Every error that LeasedJob raises on purpose is a `LeasedJobError`. What a caller can act on differently has a "
            "type of its own; what else the database reports is raised as psycopg raised it.\n",
            f"```text\n{textwrap.dedent(tree[1])}\n```\n",
            table(("error", "module", "when"), rows),
            "What the command lines exit with: [exit-codes.md](exit-codes.md). Reasons in status and Events: "
            "[events.md](events.md).\n",
        )
    )


def _meaning(kind: type) -> str:
    first = (inspect.getdoc(kind) or "").partition("\n\nArgs:")[0]
    return " ".join(first.split())
