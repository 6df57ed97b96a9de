"""The images: the sandbox's pause, a Python base made from Debian packages, and the project's own."""

from __future__ import annotations

import fcntl
import shlex
from pathlib import Path

from tests.cluster import archive, packages
from tests.cluster.layout import Cache, digest
from tests.cluster.onenode import PAUSE_IMAGE
from tests.cluster.progress import Progress, clean_environment, output

BASE_IMAGE = "leasedjob.io/python:1"  # examples and tests run their workloads in it
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
        archive.write(target, image=PAUSE_IMAGE, layer=layer, command=["/pause"])
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
    return f"{SUITE}-{digest([], *BASE_PACKAGES, *_LEFT_OUT)}"


def base_commands(root: Path, layer: Path, mirror: str | None) -> list[list[str]]:
    """Makes the base's file system in `root` and packs it into `layer`."""
    bootstrap = ["debootstrap", "--variant=minbase", f"--include={','.join(BASE_PACKAGES)}", SUITE, str(root)]
    pack = ["tar", "--sort=name", "--numeric-owner", "--one-file-system"]
    pack += [f"--exclude={path}" for path in _LEFT_OUT]
    # Folders that programs expect although nothing in them is kept.
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
        archive.write(target, image=BASE_IMAGE, layer=layer, command=["python3"], env={"PATH": _PATH})
        progress.run(remove, what="clearing the work folder", log=log, timeout=120)
    return target
