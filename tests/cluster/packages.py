"""Debian packages that the one-node cluster and the image builds need; only what is missing gets installed."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from tests.cluster.layout import Cache
from tests.cluster.progress import ClusterError, Progress, clean_environment, output

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


# --- programs without installing their package ----------------------------------------------------------------------
OLDEST_POSTGRESQL = "postgresql-15"
_FONTS = ("fonts-inter", "fonts-dejavu-core")  # so that a page looks the same on each machine


def libraries_of(depends: str) -> list[str]:
    """The packages of PgBouncer's own libraries, from `apt-cache depends`; what every system has is left out."""
    lines = [line.strip().lstrip("|") for line in depends.splitlines()]
    names = [line.removeprefix("Depends:").strip() for line in lines if line.startswith("Depends:")]
    return sorted(name for name in names if name.startswith(("libevent", "libc-ares", "libcares")))


def libraries_to_come(simulated: str) -> list[str]:
    """The libraries that an installation would bring, from `apt-get install --simulate`. LLVM is left out: it is large,
    and PostgreSQL does without it."""
    names = [line.split()[1] for line in simulated.splitlines() if line.startswith("Inst ")]
    return sorted(name for name in names if name.startswith("lib") and not name.startswith("libllvm"))


def pgbouncer(target: Path, cache: Cache, progress: Progress) -> Path:
    """Puts PgBouncer and its libraries into `target`, where any account can run it; the program's path.

    Its Debian package is only unpacked: installing it would start a service. Raises ClusterError where that isn't
    possible.
    """

    def wanted() -> list[str]:
        depends = output(["apt-cache", "depends", "pgbouncer"])
        return ["pgbouncer", *libraries_of(depends)] if depends else []

    unpacked = cache.root / "pgbouncer"
    _unpack("PgBouncer", wanted, unpacked, unpacked / "usr/sbin/pgbouncer", cache, progress)
    shutil.copytree(unpacked / "usr", target / "usr", symlinks=True, dirs_exist_ok=True)
    return _launcher(target / "pgbouncer", target / "usr/sbin/pgbouncer", target)


def postgresql(target: Path, cache: Cache, progress: Progress) -> Path:
    """The same with PostgreSQL 15, the oldest that is supported; the folder of `postgres` and `initdb`."""

    def wanted() -> list[str]:
        simulated = output(["apt-get", "install", "--simulate", "--no-install-recommends", OLDEST_POSTGRESQL])
        return [OLDEST_POSTGRESQL, *libraries_to_come(simulated)] if simulated else []

    unpacked = cache.root / OLDEST_POSTGRESQL
    programs = Path("usr/lib/postgresql/15/bin")
    _unpack("PostgreSQL 15", wanted, unpacked, unpacked / programs / "postgres", cache, progress)
    for folder in ("usr", "lib"):
        if (unpacked / folder).is_dir():
            shutil.copytree(unpacked / folder, target / folder, symlinks=True, dirs_exist_ok=True)
    launchers = target / "bin"
    launchers.mkdir(exist_ok=True)
    for name in ("postgres", "initdb"):
        _launcher(launchers / name, target / programs / name, target)
    return launchers


def redis(target: Path, cache: Cache, progress: Progress) -> Path:
    """The same with Redis; the path of `redis-server`."""

    def wanted() -> list[str]:
        simulated = output(["apt-get", "install", "--simulate", "--no-install-recommends", "redis-server"])
        return ["redis-server", "redis-tools", *libraries_to_come(simulated)] if simulated else []

    unpacked = cache.root / "redis"
    _unpack("Redis", wanted, unpacked, unpacked / "usr/bin/redis-server", cache, progress)
    shutil.copytree(unpacked / "usr", target / "usr", symlinks=True, dirs_exist_ok=True)
    return _launcher(target / "redis-server", target / "usr/bin/redis-server", target)


def chromium(cache: Cache, progress: Progress) -> Path:
    """Chromium without a window, with its libraries and two fonts, in the cache; the path of a script that runs it."""
    program = "chromium-headless-shell"
    unpacked = cache.root / program

    def wanted() -> list[str]:
        simulated = output(["apt-get", "install", "--simulate", "--no-install-recommends", program])
        fonts = [name for name in _FONTS if output(["apt-cache", "show", name])]
        return [program, "chromium-common", *libraries_to_come(simulated), *fonts] if simulated else []

    binary = unpacked / "usr/lib/chromium" / program
    _unpack("Chromium", wanted, unpacked, binary, cache, progress)
    fonts = unpacked / "fonts.conf"
    families = "".join(
        f"<alias binding='same'><family>{generic}</family><prefer><family>{font}</family></prefer></alias>"
        for generic, font in (("sans-serif", "Inter"), ("system-ui", "Inter"), ("monospace", "DejaVu Sans Mono"))
    )
    fonts.write_text(
        f"<fontconfig><dir>{unpacked}/usr/share/fonts</dir><dir>/usr/share/fonts</dir>"
        f"<cachedir>{unpacked}/fontcache</cachedir>{families}</fontconfig>"
    )
    return _launcher(unpacked / "chromium", binary, unpacked, FONTCONFIG_FILE=str(fonts))


def faketime(cache: Cache, progress: Progress) -> Path:
    """libfaketime, which lets a process see another time than the machine's; the path of the library in the cache."""
    unpacked = cache.root / "faketime"

    def wanted() -> list[str]:
        return ["libfaketime"] if output(["apt-cache", "show", "libfaketime"]) else []

    def found() -> Path | None:
        return next(iter(sorted(unpacked.glob("usr/lib/*/faketime/libfaketime.so.1"))), None)

    if (library := found()) is None:
        _unpack("libfaketime", wanted, unpacked, unpacked / "usr/lib/libfaketime", cache, progress)
        library = found()
    if library is None:
        raise ClusterError("the Debian package libfaketime has no libfaketime.so.1")
    return library


def promtool(cache: Cache, progress: Progress) -> Path:
    """Prometheus' own checker, which needs no library but the system's; the path of `promtool` in the cache."""
    unpacked = cache.root / "prometheus"
    program = unpacked / "usr/bin/promtool"

    def wanted() -> list[str]:
        return ["prometheus"] if output(["apt-cache", "show", "prometheus"]) else []

    _unpack("promtool", wanted, unpacked, program, cache, progress)
    return program


def _unpack(
    what: str, wanted: Callable[[], list[str]], into: Path, proof: Path, cache: Cache, progress: Progress
) -> None:
    """Unpacks the Debian packages that `wanted` names; it names none while the package lists are missing."""
    if proof.exists():
        return
    log = cache.logs / "apt.log"
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        raise ClusterError(f"{what} is not installed, and there is no apt-get to get it with")
    packages = wanted()
    if not packages and os.geteuid() == 0:
        progress.run(["apt-get", "update", "-qq"], what="apt-get update", log=log, timeout=300)
        packages = wanted()
    if not packages:
        raise ClusterError(f"{what} is not installed, and this system's package lists don't have it")
    progress.say(f"downloading {what} from the Debian packages")
    with tempfile.TemporaryDirectory(prefix="leasedjob-apt-") as folder:
        Path(folder).chmod(0o777)  # apt downloads as an account of its own
        download = ["apt-get", "download", "-qq", *packages]
        progress.run(download, what=f"downloading {what}", log=log, timeout=300, cwd=Path(folder))
        for archive in sorted(Path(folder).glob("*.deb")):
            unpack = ["dpkg", "-x", str(archive), str(into)]
            progress.run(unpack, what=f"unpacking {archive.name}", log=log, timeout=60)


def _launcher(path: Path, program: Path, tree: Path, **environment: str) -> Path:
    """A script that runs `program` with the libraries that came with it."""
    libraries = sorted({str(found.parent) for found in tree.rglob("lib*.so.*") if found.parent.parent.name == "lib"})
    libraries += sorted(str(found) for found in tree.glob("usr/lib/*/pulseaudio"))  # where PulseAudio has its own
    more = "".join(f"{name}={value} " for name, value in environment.items())
    path.write_text(f'#!/bin/sh\n{more}LD_LIBRARY_PATH={":".join(libraries)} exec {program} "$@"\n')
    path.chmod(0o755)
    return path
