"""`python -m docsite`: writes the generated pages of docs/reference; with --check, says which are not current."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence
from pathlib import Path

from docsite import chart, codes, decisions, environment, errors, failover, python

ROOT = Path(__file__).parents[1]


def files() -> dict[str, str]:
    """Path, relative to the repository's root -> content."""
    return {
        "charts/leasedjob/README.md": chart.readme(),
        "charts/leasedjob/values.schema.json": chart.schema(),
        "docs/decisions/README.md": decisions.page(),
        "docs/reference/environment.md": environment.page(),
        "docs/reference/errors.md": errors.page(),
        "docs/reference/exit-codes.md": codes.page(),
        "docs/reference/failover.md": failover.page(),
        "docs/reference/values.md": chart.page(),
        "docs/reference/python.md": python.page(),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m docsite", description="Write the generated pages.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a page isn't current")
    parser.add_argument("--root", type=Path, default=ROOT, help="the repository (default: this file's)")
    options = parser.parse_args(argv)
    stale = False
    for name, wanted in files().items():
        path: Path = options.root / name
        found = path.read_text(encoding="utf-8") if path.exists() else ""
        if found == wanted:
            continue
        stale = True
        if options.check:
            lines = difflib.unified_diff(found.splitlines(True), wanted.splitlines(True), name, f"{name} (generated)")
            sys.stderr.write("".join(lines))
        else:
            path.write_text(wanted, encoding="utf-8")
            print(name)
    if stale and options.check:
        sys.stderr.write("\nrun `make generate`\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
