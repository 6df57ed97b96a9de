"""The kept releases. Each is one archive: what its images are built from, and its chart, as they were.

`python -m tests.upgrade keep REVISION` makes one (docs/decisions/0022-kept-releases.md says when, and which ones stay).
"""

from __future__ import annotations

import lzma
import re
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path

from tests.cluster import images
from tests.cluster.layout import REPOSITORY
from tests.cluster.progress import ClusterError

FOLDER = Path(__file__).resolve().parent / "releases"
CHART = "charts/leasedjob"
# What the images are built from; the chart comes with them.
PATHS = (*images.SOURCES, CHART)
_NAME = re.compile(r"(\d+\.\d+\.\d+)-(\d{4})\.tar\.xz")
_MIGRATION = re.compile(r"operator/leasedjob/lease/migrations/(\d{4})_[a-z0-9_]+\.sql")


@dataclass(frozen=True, slots=True)
class KeptRelease:
    """One archive: the version of its chart, and the last migration that it knows."""

    version: str
    schema: int
    archive: Path

    @property
    def name(self) -> str:
        """Also the tag of its images."""
        return f"{self.version}-{self.schema:04d}"

    def unpack(self, folder: Path) -> Path:
        """Puts it into `folder`, which is made; the folder."""
        folder.mkdir(parents=True)
        with tarfile.open(self.archive, "r:xz") as archive:
            archive.extractall(folder, filter="data")
        return folder

    def migrations(self) -> dict[int, bytes]:
        """Number -> text of each migration that it knows."""
        found = {}
        with tarfile.open(self.archive, "r:xz") as archive:
            for member in archive:
                if (match := _MIGRATION.fullmatch(member.name)) and (file := archive.extractfile(member)):
                    found[int(match[1])] = file.read()
        return found


def kept_releases(folder: Path = FOLDER) -> list[KeptRelease]:
    """All that are kept, the oldest first."""
    found = [(path, _NAME.fullmatch(path.name)) for path in folder.glob("*.tar.xz")]
    releases = [KeptRelease(match[1], int(match[2]), path) for path, match in found if match]
    return sorted(releases, key=lambda r: (tuple(map(int, r.version.split("."))), r.schema))


def keep(revision: str, folder: Path = FOLDER) -> KeptRelease:
    """Makes the archive of a revision; the same bytes each time."""

    def git(*words: str) -> bytes:
        done = subprocess.run(["git", *words], cwd=REPOSITORY, capture_output=True, check=False, timeout=60)
        if done.returncode != 0:
            raise ClusterError(f"git {' '.join(words)}: {done.stderr.decode().strip()}")
        return done.stdout

    chart = git("show", f"{revision}:{CHART}/Chart.yaml").decode()
    version = re.search(r"^version: (\S+)$", chart, re.MULTILINE)
    files = git("ls-tree", "-r", "--name-only", revision, "operator/leasedjob/lease/migrations").decode().split()
    schema = max((int(match[1]) for file in files if (match := _MIGRATION.fullmatch(file))), default=0)
    if version is None or not schema:
        raise ClusterError(f"{revision} has no chart with a version, or no migrations")
    archive = git("archive", "--format=tar", revision, *PATHS)
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{version[1]}-{schema:04d}.tar.xz"
    target.write_bytes(lzma.compress(archive, preset=9 | lzma.PRESET_EXTREME))
    return KeptRelease(version[1], schema, target)
