"""The images: the sandbox's pause, a Python base made from Debian packages, and the project's own.

The base stands in for `python:3.13-slim-trixie` where no image registry is used: it carries that name too, so the
Dockerfile's default and the examples mean it.
"""

from __future__ import annotations

import fcntl
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.cluster import archive, packages
from tests.cluster.layout import REPOSITORY, Cache, digest
from tests.cluster.onenode import PAUSE_IMAGE
from tests.cluster.progress import Progress, clean_environment, output

BASE_IMAGE = "leasedjob.io/python:1"  # tests run their workloads in it
PUBLIC_BASE_IMAGE = "python:3.13-slim-trixie"  # the Dockerfile's default, and what the examples name
SUITE = "trixie"
BASE_PACKAGES = ("ca-certificates", "python3", "python3-venv")
_LEFT_OUT = (
    "./etc/apt/sources.list",  # names the mirror of the machine that built the image
    "./etc/hostname",
    "./etc/resolv.conf",
    "./usr/share/doc",
    "./usr/share/locale",
    "./usr/share/man",
    "./var/cache/apt",
    "./var/cache/debconf",
    "./var/lib/apt/lists",
    "./var/log",
)
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def pause_archive(cache: Cache, binaries: Path) -> Path:
    """The archive of the sandbox image; made of the program `pause` alone."""
    target = cache.images / f"pause-{binaries.name}.tar"
    if not target.exists():
        cache.images.mkdir(parents=True, exist_ok=True)
        layer = target.with_suffix(".layer")
        layer.write_bytes(archive.layer_of(binaries / "pause"))
        archive.write(target, images=(PAUSE_IMAGE,), layer=layer, command=["/pause"])
        layer.unlink()
    return target


def debian_mirror(index_targets: str | None) -> str | None:
    """The mirror that this machine's apt uses for Debian itself, or None: then debootstrap's own default serves.

    `index_targets` is the output of `apt-get indextargets --format '$(ORIGIN) $(SUITE) $(COMPONENT) $(REPO_URI)'`.
    """
    for line in (index_targets or "").splitlines():
        origin, _, rest = line.partition(" ")
        fields = rest.split()
        if origin == "Debian" and len(fields) == 3 and fields[1] == "main" and "security" not in fields[2]:
            return fields[2]
    return None


def base_key() -> str:
    """Changes with what goes into the base image."""
    return f"{SUITE}-{digest([], *BASE_PACKAGES, *_LEFT_OUT, BASE_IMAGE, PUBLIC_BASE_IMAGE)}"


def base_commands(root: Path, layer: Path, mirror: str | None) -> list[list[str]]:
    """Makes the base's file system in `root` and packs it into `layer`."""
    bootstrap = ["debootstrap", "--variant=minbase", f"--include={','.join(BASE_PACKAGES)}", SUITE, str(root)]
    pack = ["tar", "--sort=name", "--numeric-owner", "--one-file-system"]
    pack += [f"--exclude={path}" for path in _LEFT_OUT]
    return [
        [*bootstrap, *([mirror] if mirror else [])],
        [*pack, "-C", str(root), "-cf", str(layer), "."],
    ]


def base_archive(cache: Cache, progress: Progress) -> Path:
    """The archive of the Python base image; about a minute the first time."""
    target = cache.images / f"base-{base_key()}.tar"
    cache.images.mkdir(parents=True, exist_ok=True)
    with (cache.root / "base.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.exists():
            return target
        packages.ensure(packages.BUILD, cache, progress)
        progress.say(f"making the base image {BASE_IMAGE}: Debian {SUITE} with {', '.join(BASE_PACKAGES)}")
        wanted = "$(ORIGIN) $(SUITE) $(COMPONENT) $(REPO_URI)"
        mirror = debian_mirror(output(["apt-get", "indextargets", "--format", wanted]))
        work = cache.root / "work" / "base"
        log = cache.logs / "base-image.log"
        env = clean_environment(PATH=packages.search_path())
        remove = ["rm", "-rf", "--one-file-system", str(work)]
        progress.run(remove, what="clearing the work folder", log=log, timeout=120)
        work.mkdir(parents=True)
        layer = work / "layer.tar"
        script = " && ".join(shlex.join(c) for c in base_commands(work / "root", layer, mirror))
        # In a mount namespace of its own: debootstrap mounts /proc and /sys of the new system, and may die before
        # it unmounts them.
        isolated = ["unshare", "--mount", "--propagation", "private", "bash", "-c", script]
        progress.run(isolated, what="making the base image", log=log, timeout=900, env=env)
        names = (BASE_IMAGE, f"docker.io/library/{PUBLIC_BASE_IMAGE}")
        archive.write(target, images=names, layer=layer, command=["python3"], env={"PATH": _PATH})
        progress.run(remove, what="clearing the work folder", log=log, timeout=120)
    return target


# --- the project's own -----------------------------------------------------------------------------------------------
TARGETS = ("operator", "sidecar", "postgresql")  # of the Dockerfile
POSTGRESQL_TAG = "18"  # the chart's default: a new operator image leaves the database running
SOURCES = (
    "Dockerfile",
    ".dockerignore",
    "LICENSE",
    "README.md",
    "images",
    "operator",
    "pyproject.toml",
    "requirements",
)
_LOCKS = ("operator", "sidecar", "build", "postgresql")
KEPT_ARCHIVES = 2
BUILD_SECONDS = 900


def project_tag(base: str) -> str:
    """The tag of the images of this working tree: changes with what is in them."""
    return digest([REPOSITORY / name for name in SOURCES], base)


def _content(image: Image, base: str) -> str:
    """Names what is in an image; PostgreSQL's has none of the package's sources."""
    if image.target != "postgresql":
        return image.tag
    return digest([REPOSITORY / name for name in ("Dockerfile", "images", "requirements/postgresql.txt")], base)


@dataclass(frozen=True, slots=True)
class Image:
    """One of the project's images; `name` is as the chart knows it."""

    target: str
    tag: str
    registry: str = "docker.io"

    @property
    def name(self) -> str:
        return f"{self.registry}/leasedjob/{self.target}:{self.tag}"


def project_images(tag: str, registry: str = "docker.io") -> list[Image]:
    return [Image(target, POSTGRESQL_TAG if target == "postgresql" else tag, registry) for target in TARGETS]


def engine_build_command(engine: str, image: Image, context: Path = REPOSITORY) -> list[str]:
    """Builds with docker or podman, from the public base image and the package index."""
    return [engine, "build", "--target", image.target, "-t", image.name, str(context)]


def buildah_build_command(buildah: list[str], image: Image, context: Path) -> list[str]:
    """Builds without a network: the base is in the store, the wheels are in the context."""
    options = ["--isolation=chroot", "--layers", "--pull=never", "--build-arg", f"BASE_IMAGE={BASE_IMAGE}"]
    return [*buildah, "bud", *options, "--target", image.target, "-t", image.name, str(context)]


def forget_script(buildah: list[str], current: list[Image]) -> str:
    """Removes images of earlier working trees from the build's store; the layers of the current ones stay."""
    program = shlex.join(buildah)
    keep = " ".join(f"-e {shlex.quote(image.name)}" for image in current)
    ours = f"{program} images --format '{{{{.Name}}}}:{{{{.Tag}}}}' | {{ grep '^docker.io/leasedjob/' || :; }}"
    return f"{ours} | {{ grep -vxF {keep} || :; }} | xargs -r {program} rmi"


def wheels(cache: Cache, progress: Progress, sources: Path = REPOSITORY) -> Path:
    """The folder with the wheels that the images install, downloaded once for each set of lock files."""
    locks = [sources / "requirements" / f"{name}.txt" for name in _LOCKS]
    folder = cache.root / "wheels" / digest(locks)
    if not folder.exists():
        progress.say("downloading the Python packages of the images")
        partial = folder.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        script = [str(sources / "requirements" / "download-wheels.sh"), os.uname().machine]
        pip = f"{sys.executable} -m pip"
        progress.run(
            ["sh", *script, pip, str(partial)], what="downloading wheels", log=cache.logs / "wheels.log", timeout=600
        )
        partial.rename(folder)
    return folder


@contextmanager
def _context(sources: Path, wheels_folder: Path) -> Iterator[Path]:
    """A build context with the sources and the wheels; the folder of the sources itself stays as it is."""
    with tempfile.TemporaryDirectory(prefix="leasedjob-context-") as temporary:
        context = Path(temporary)
        for name in SOURCES:
            source = sources / name
            if source.is_dir():
                shutil.copytree(source, context / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy2(source, context / name)
        shutil.copytree(wheels_folder, context / "wheels")
        yield context


def project_archives(cache: Cache, progress: Progress, env: Mapping[str, str] = os.environ) -> dict[Image, Path]:
    """The project's images as archives, built with buildah; only those that are not there yet.

    The build has a store of its own in the cache and runs in a mount namespace of its own: nothing of it shows in the
    machine's own container store or mounts.
    """
    images = project_images(project_tag(base_key()))
    target = {image: cache.images / f"{image.target}-{_content(image, base_key())}.tar" for image in images}
    with (cache.root / "images.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if missing := {image: path for image, path in target.items() if not path.exists()}:
            _build(missing, REPOSITORY, cache, progress, current=images)
            for old in stale(cache.images, set(target.values())):
                old.unlink()
    return target


def release_archives(name: str, sources: Path, cache: Cache, progress: Progress) -> dict[Image, Path]:
    """The operator's and the sidecar's image of another release, from its sources; `name` is their tag."""
    base_archive(cache, progress)
    key = f"{name}-{digest([sources / part for part in SOURCES], base_key())}"
    images = [image for image in project_images(name) if image.target != "postgresql"]
    target = {image: cache.images / f"release-{image.target}-{key}.tar" for image in images}
    with (cache.root / "images.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if missing := {image: path for image, path in target.items() if not path.exists()}:
            _build(missing, sources, cache, progress)
    return target


def _build(
    wanted: Mapping[Image, Path], sources: Path, cache: Cache, progress: Progress, current: list[Image] | None = None
) -> None:
    """Builds images from sources, each into its archive; where `current` ones are named, the store keeps no others."""
    packages.ensure(packages.BUILD, cache, progress)
    base = base_archive(cache, progress)
    folder = wheels(cache, progress, sources)
    log = cache.logs / "images.log"
    tag = next(iter(wanted)).tag
    progress.say(f"building the images {', '.join(image.target for image in wanted)} ({tag})")
    with _context(sources, folder) as context, tempfile.TemporaryDirectory(prefix="leasedjob-buildah-") as run:
        buildah = ["buildah", "--root", str(cache.root / "buildah"), "--runroot", run]
        commands = [[*buildah, "pull", "-q", f"docker-archive:{base}:{BASE_IMAGE}"]]
        for image, archive_path in wanted.items():
            partial = archive_path.with_suffix(".partial")
            commands += [
                buildah_build_command(buildah, image, context),
                ["rm", "-f", str(partial)],
                [*buildah, "push", "-q", image.name, f"docker-archive:{partial}:{image.name}"],
                ["mv", str(partial), str(archive_path)],
            ]
        script = "set -ex\n" + "\n".join(shlex.join(c) for c in commands)
        if current is not None:
            script += "\n" + forget_script(buildah, current)
        isolated = ["unshare", "--mount", "--propagation", "private", "bash", "-c", script]
        environment = clean_environment(PATH=packages.search_path(), TMPDIR=run)
        progress.run(isolated, what="building the images", log=log, timeout=BUILD_SECONDS, env=environment)


def stale(folder: Path, current: set[Path]) -> list[Path]:
    """Archives of the project's images beyond the newest few of each kind."""
    found: list[Path] = []
    for name in TARGETS:
        archives = sorted(folder.glob(f"{name}-*.tar"), key=lambda p: p.stat().st_mtime, reverse=True)
        found += [p for p in archives[KEPT_ARCHIVES:] if p not in current]
    return found
