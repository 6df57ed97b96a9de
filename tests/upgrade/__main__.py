"""Keeps releases for the tests of upgrades: `python -m tests.upgrade keep REVISION`, `… list`."""

from __future__ import annotations

import argparse
import sys

from tests.cluster.progress import ClusterError, fail
from tests.upgrade.releases import keep, kept_releases


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.upgrade", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("list", help="the releases that are kept")
    verbs.add_parser("keep", help="make the archive of a revision").add_argument("revision")
    options = parser.parse_args(argv)
    try:
        made = [keep(options.revision)] if options.verb == "keep" else kept_releases()
    except ClusterError as error:
        return fail(str(error))
    for release in made:
        print(f"{release.name}\t{release.archive.stat().st_size // 1024} KiB\t{release.archive}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
