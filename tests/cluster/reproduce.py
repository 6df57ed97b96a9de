"""Whether the images can be built again bit by bit: `python -m tests.cluster.reproduce [TARGET...]`.

Builds each target twice from nothing, in two stores, with SOURCE_DATE_EPOCH as the time of everything in them, and
compares the digests. What both builds share is their input: the base image, the wheels that the lock files name and the
sources.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shlex
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path

from tests.cluster import images, packages
from tests.cluster.layout import REPOSITORY, Cache
from tests.cluster.progress import ClusterError, Progress, clean_environment, fail, output

DEFAULT_TARGETS = ("operator", "sidecar")


def commit_time() -> int:
    """The time of the last commit: what a release's build takes for now."""
    return int(output(["git", "-C", str(REPOSITORY), "log", "-1", "--format=%ct"]) or 0)


def manifest_digest(layout: Path) -> str:
    """The digest of the one image in an OCI layout; it covers the configuration and every layer."""
    (entry,) = json.loads((layout / "index.json").read_text())["manifests"]
    return str(entry["digest"])


def differing_layers(one: Path, two: Path) -> list[int]:
    """The positions of layers that are not the same; -1: the configuration isn't."""

    def parts(layout: Path) -> list[str]:
        name = manifest_digest(layout).removeprefix("sha256:")
        manifest = json.loads((layout / "blobs" / "sha256" / name).read_text())
        return [manifest["config"]["digest"], *(layer["digest"] for layer in manifest["layers"])]

    return [n - 1 for n, (a, b) in enumerate(zip(parts(one), parts(two), strict=True)) if a != b]


def differing_files(one: Path, two: Path, layer: int) -> list[str]:
    """The files of a layer that are not the same, by content or by what the archive says of them."""

    def contents(layout: Path) -> dict[str, tuple[object, ...]]:
        name = manifest_digest(layout).removeprefix("sha256:")
        manifest = json.loads((layout / "blobs" / "sha256" / name).read_text())
        blob = layout / "blobs" / "sha256" / manifest["layers"][layer]["digest"].removeprefix("sha256:")
        found: dict[str, tuple[object, ...]] = {}
        with tarfile.open(blob) as files:
            for member in files:
                file = files.extractfile(member) if member.isfile() else None
                content = hashlib.sha256(file.read()).hexdigest() if file else member.linkname
                found[member.name] = (content, member.mtime, member.mode, member.uid, member.gid, member.type)
        return found

    first, second = contents(one), contents(two)
    return sorted(name for name in first.keys() | second.keys() if first.get(name) != second.get(name))


def difference(one: Path, two: Path) -> str:
    """What is not the same, for a person: a few files of each layer."""
    lines = []
    for layer in differing_layers(one, two):
        files = [] if layer < 0 else differing_files(one, two, layer)
        shown = ", ".join(files[:8]) or "nothing but the order or the compression"
        lines.append("the configuration" if layer < 0 else f"layer {layer}, {len(files)} files: {shown}")
    return "\n".join(lines)


def build_script(target: str, base: Path, context: Path, work: Path, epoch: int) -> str:
    """Builds the target in a store of its own and writes it as an OCI layout."""
    buildah = ["buildah", "--root", str(work / "store"), "--runroot", str(work / "run")]
    image = images.Image(target, "reproduced")
    build = images.buildah_build_command(buildah, image, context)
    at = build.index("bud") + 1
    build[at:at] = ["--no-cache", "--timestamp", str(epoch)]
    commands = [
        [*buildah, "pull", "-q", f"docker-archive:{base}:{images.BASE_IMAGE}"],
        [word for word in build if word != "--layers"],
        [*buildah, "push", "-q", image.name, f"oci:{work / 'layout'}"],
    ]
    return "set -ex\n" + "\n".join(shlex.join(c) for c in commands)


def _twice(target: str, base: Path, context: Path, cache: Cache, progress: Progress, epoch: int) -> str:
    layouts = []
    with tempfile.TemporaryDirectory(prefix="leasedjob-reproduce-", dir=cache.root) as temporary:
        for turn in ("first", "second"):
            work = Path(temporary) / turn
            (work / "run").mkdir(parents=True)
            script = build_script(target, base, context, work, epoch)
            progress.run(
                ["unshare", "--mount", "--propagation", "private", "bash", "-c", script],
                what=f"building {target} for the {turn} time",
                log=cache.logs / f"reproduce-{target}.log",
                timeout=images.BUILD_SECONDS,
                env=clean_environment(PATH=packages.search_path(), TMPDIR=str(work / "run")),
            )
            layouts.append(work / "layout")
            shutil.rmtree(work / "store", ignore_errors=True)
        digests = [manifest_digest(layout) for layout in layouts]
        if digests[0] != digests[1]:
            what = difference(*layouts)
            raise ClusterError(f"{target}: two builds differ: {digests[0]}, {digests[1]}\n{what}")
    return digests[0]


def reproduce(targets: list[str], cache: Cache, progress: Progress, epoch: int) -> dict[str, str]:
    """Digest of each target. Raises ClusterError where two builds differ, with the layers that do."""
    base = images.base_archive(cache, progress)
    packages.ensure(packages.BUILD, cache, progress)
    wheels = images.wheels(cache, progress)
    found = {}
    # One copy of the sources for all builds: somebody may be working in the repository.
    with images._context(REPOSITORY, wheels) as context:
        for target in targets:
            found[target] = _twice(target, base, context, cache, progress, epoch)
    return found


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.reproduce", description=__doc__)
    parser.add_argument("target", nargs="*", default=DEFAULT_TARGETS, help="default: operator and sidecar")
    parser.add_argument("--epoch", type=int, help="default: $SOURCE_DATE_EPOCH, else the time of the last commit")
    options = parser.parse_args(argv)
    epoch = options.epoch or int(os.environ.get("SOURCE_DATE_EPOCH") or commit_time())
    try:
        for target, digest in reproduce(list(options.target), Cache.from_env(), Progress(), epoch).items():
            print(f"{digest}  {target}")
    except ClusterError as error:
        return fail(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
