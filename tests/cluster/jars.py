"""A Kafka broker's jars, by the machine's Maven, from wherever that looks; each compared with its checksum."""

from __future__ import annotations

import fcntl
import hashlib
import tempfile
from pathlib import Path

from tests.cluster import packages
from tests.cluster.layout import Cache, digest
from tests.cluster.progress import ClusterError, Progress

PROJECT = Path(__file__).resolve().parent / "kafka"
RUN = {"java": "default-jre-headless"}
FETCH = {"mvn": "maven"}
GOAL = "org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy-dependencies"


def folder(cache: Cache) -> Path:
    """Where the jars of this version of the project are, or will be."""
    return cache.root / f"kafka-{digest([PROJECT])}"


def ensure(cache: Cache, progress: Progress) -> Path:
    """The folder with the jars; fetches them where they aren't there. Raises ClusterError where that isn't possible."""
    target = folder(cache)
    packages.ensure(RUN if target.exists() else RUN | FETCH, cache, progress)
    cache.root.mkdir(parents=True, exist_ok=True)
    with (cache.root / "kafka.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            _fetch(target, cache, progress)
    return target


def _fetch(target: Path, cache: Cache, progress: Progress) -> None:
    progress.say("getting the jars of Kafka with Maven (once)")
    with tempfile.TemporaryDirectory(prefix="kafka-", dir=cache.root) as name:
        partial = Path(name) / "jars"
        progress.run(
            [
                *("mvn", "--batch-mode", "--quiet", "--strict-checksums", "--file", str(PROJECT / "pom.xml"), GOAL),
                *("-DincludeScope=runtime", f"-DoutputDirectory={partial}"),
            ],
            what="getting the jars of Kafka",
            log=cache.logs / "maven.log",
            timeout=600,
            cwd=Path(name),
        )
        if wrong := differences((PROJECT / "jars.sha256").read_text(), partial):
            raise ClusterError(f"the jars of Kafka are not what {PROJECT / 'jars.sha256'} says: {', '.join(wrong)}")
        partial.rename(target)


def differences(sums: str, jars: Path) -> list[str]:
    """The names of jars that are missing, unknown, or have another content than `sums` (as sha256sum writes) says."""
    wanted = {name: value for value, name in (line.split() for line in sums.splitlines())}
    found = {jar.name: hashlib.sha256(jar.read_bytes()).hexdigest() for jar in jars.glob("*.jar")}
    return sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
