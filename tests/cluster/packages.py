"""Debian packages that the one-node cluster and the image builds need; only what is missing gets installed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from tests.cluster.layout import Cache
from tests.cluster.progress import ClusterError, Progress, clean_environment

# What is looked for -> the package that has it.
RUN = {
    "runc": "runc",
    "/usr/lib/cni/bridge": "containernetworking-plugins",
    "nft": "nftables",
    "iptables": "iptables",
    "conntrack": "conntrack",
    "socat": "socat",
    "ip": "iproute2",
    "openssl": "openssl",
    "nsenter": "util-linux",
    "mount": "mount",
}
BUILD = {"buildah": "buildah", "newuidmap": "uidmap", "debootstrap": "debootstrap"}
_SBIN = ("/usr/local/sbin", "/usr/sbin", "/sbin")


def search_path() -> str:
    """PATH with the administrator's folders, where `ip`, `nft` and `debootstrap` are."""
    return os.pathsep.join([os.environ.get("PATH", "/usr/bin:/bin"), *_SBIN])


def _present(wanted: str) -> bool:
    return Path(wanted).exists() if wanted.startswith("/") else shutil.which(wanted, path=search_path()) is not None


def missing(wanted: dict[str, str], present: Callable[[str], bool] = _present) -> list[str]:
    """Packages of those things in `wanted` that are not on this machine."""
    return sorted({package for thing, package in wanted.items() if not present(thing)})


def install_commands(packages: Iterable[str]) -> list[list[str]]:
    """Refreshes the package lists, then installs without a question and without starting any service."""
    return [
        ["apt-get", "update", "-qq"],
        ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *packages],
    ]


def ensure(wanted: dict[str, str], cache: Cache, progress: Progress) -> None:
    """Installs the packages of `wanted` that are missing. Raises ClusterError naming them where that isn't possible."""
    packages = missing(wanted)
    if not packages:
        return
    names = " ".join(packages)
    if shutil.which("apt-get") is None:
        raise ClusterError(f"these Debian packages, or your distribution's counterparts, are needed: {names}")
    if os.geteuid() != 0:
        raise ClusterError(f"these packages are needed; run: sudo apt-get install {names}")
    progress.say(f"installing Debian packages: {names}")
    # policy-rc.d would be the machine's own; RUNLEVEL=1 makes invoke-rc.d leave services (nftables) stopped.
    env = clean_environment(DEBIAN_FRONTEND="noninteractive", RUNLEVEL="1")
    for argv in install_commands(packages):
        progress.run(argv, what=" ".join(argv[:2]), log=cache.logs / "apt.log", timeout=900, env=env)
    if still := missing(wanted):
        raise ClusterError(f"apt-get installed {names}, but still missing: {' '.join(still)}")
