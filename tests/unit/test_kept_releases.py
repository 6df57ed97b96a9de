"""The releases that tests of upgrades start from, and what this version owes to them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml
from tests.cluster import images
from tests.cluster.layout import REPOSITORY
from tests.cluster.progress import ClusterError
from tests.upgrade.releases import CHART, KeptRelease, keep, kept_releases

from leasedjob.lease.migrate import migrations

RELEASES = kept_releases()
each = pytest.mark.parametrize("release", RELEASES, ids=lambda r: r.name)


def test_there_is_something_to_upgrade_from() -> None:
    assert RELEASES
    assert len({r.name for r in RELEASES}) == len(RELEASES)
    assert RELEASES[0].schema < len(migrations()), "the oldest one has an earlier schema"


@each
def test_what_it_migrated_is_what_this_version_knows(release: KeptRelease) -> None:
    """An edited migration would keep every operator of this version from work on a database of that release."""
    theirs = release.migrations()
    assert sorted(theirs) == list(range(1, release.schema + 1))
    ours = {m.version: m.sql.encode() for m in migrations()}
    assert {number: ours.get(number) for number in theirs} == theirs


@each
def test_it_is_whole_and_small(release: KeptRelease, tmp_path: Path) -> None:
    sources = release.unpack(tmp_path / "sources")
    assert yaml.safe_load((sources / CHART / "Chart.yaml").read_text())["version"] == release.version
    dockerfile = (sources / "Dockerfile").read_text()
    for target in ("operator", "sidecar"):
        assert f" AS {target}\n" in dockerfile
    assert release.archive.stat().st_size < 500_000
    image = images.project_images(release.name)[0]
    assert image.name == f"docker.io/leasedjob/operator:{release.name}"


def test_a_revision_is_kept_as_the_same_bytes(tmp_path: Path) -> None:
    if subprocess.run(["git", "rev-parse", "HEAD"], cwd=REPOSITORY, capture_output=True, check=False).returncode != 0:
        pytest.skip("this working tree has no history")
    first, second = keep("HEAD", tmp_path / "a"), keep("HEAD", tmp_path / "b")
    assert first.name == second.name
    assert first.archive.read_bytes() == second.archive.read_bytes()
    assert kept_releases(tmp_path / "a") == [first]
    with pytest.raises(ClusterError, match="no-such-revision"):
        keep("no-such-revision", tmp_path)
