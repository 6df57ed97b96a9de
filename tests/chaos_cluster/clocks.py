"""Wrong clocks: a layer with libfaketime over the product's images, and the file that says how wrong they are.

Only the time of day is changed, as by a clock that was set; CLOCK_MONOTONIC and CLOCK_BOOTTIME go on, as they would.
The file is looked at once a second. Where it isn't there the time is right.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import json
import tarfile
from pathlib import Path
from typing import Final

from tests.cluster import packages
from tests.cluster.images import Image
from tests.cluster.layout import Cache, digest
from tests.cluster.progress import Progress

FOLDER: Final = "opt/faketime"
LIBRARY: Final = f"{FOLDER}/libfaketime.so.1"
# Debian's libfaketime takes the deadline of a sleep on CLOCK_MONOTONIC for one of the clock that it changes: the sleep
# fails; waiting on nothing is the same to a program, and isn't its concern.
PATCH: Final = "import select, time\ntime.sleep = lambda seconds: (select.select([], [], [], seconds), None)[1]\n"
# In each kind of container, on a volume that it can write to.
OPERATOR_FILE: Final = "/run/clock/offset"
SIDECAR_FILE: Final = "/run/leasedjob/clock"
_ENVIRONMENT: Final = {
    "LD_PRELOAD": f"/{LIBRARY}",
    "PYTHONPATH": f"/{FOLDER}",
    "FAKETIME_CACHE_DURATION": "1",
    "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    "DONT_FAKE_MONOTONIC": "1",
    "FAKETIME_DISABLE_SHM": "1",
    "NO_FAKE_STAT": "1",
}

RIGHT: Final = {"LD_PRELOAD": "", "PYTHONPATH": ""}  # in a container's environment: nothing of it


def set_clock(pid: int, file: str, seconds: int) -> None:
    """How much a running process is ahead of the machine's time, from the next second on.

    Args:
        pid: the host's number of the container's first process. file: as it is called in there.
    """
    path = Path(f"/proc/{pid}/root{file}")
    path.write_text(f"{seconds:+d}\n")
    path.chmod(0o644)


def clocked(image: Image, archive: Path, file: str, cache: Cache, progress: Progress) -> tuple[str, Path]:
    """An image over `image` whose processes see the time that `file` says; its tag and its archive."""
    library = packages.faketime(cache, progress)
    environment = {**_ENVIRONMENT, "FAKETIME_TIMESTAMP_FILE": file}
    key = digest([library], PATCH, json.dumps(environment), archive.name)
    tag = f"{image.tag}-clock"
    target = cache.images / f"clocked-{image.target}-{key}.tar"
    with (cache.root / "clocked.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            progress.say(f"putting libfaketime over {image.name}")
            _layer(archive, target, f"{image.name}-clock", library, environment)
            for old in cache.images.glob(f"clocked-{image.target}-*.tar"):
                if old != target:
                    with contextlib.suppress(FileNotFoundError):
                        old.unlink()
    return tag, target


def _layer(source: Path, target: Path, name: str, library: Path, environment: dict[str, str]) -> None:
    """Writes an archive with one more layer, from an archive of one image; never half of it."""
    layer = _packed(library)
    partial = target.with_suffix(".partial")
    with tarfile.open(source) as old, tarfile.open(partial, "w") as new:
        (manifest,) = json.load(_file(old, "manifest.json"))
        config = json.load(_file(old, manifest["Config"]))
        for layer_name in dict.fromkeys(manifest["Layers"]):
            member = old.getmember(layer_name)
            if member.isfile():
                new.addfile(member, old.extractfile(member))
            else:  # a link to a layer of the same content
                new.addfile(member)
        own = hashlib.sha256(layer).hexdigest()
        config["rootfs"]["diff_ids"].append(f"sha256:{own}")
        config.setdefault("history", []).append({"created_by": "leasedjob tests/chaos_cluster"})
        kept = [e for e in config["config"].get("Env") or [] if e.partition("=")[0] not in environment]
        config["config"]["Env"] = kept + [f"{key}={value}" for key, value in environment.items()]
        text = json.dumps(config).encode()
        config_name = f"{hashlib.sha256(text).hexdigest()}.json"
        described = [{"Config": config_name, "RepoTags": [name], "Layers": [*manifest["Layers"], f"{own}.tar"]}]
        for path, content in (
            (f"{own}.tar", layer),
            (config_name, text),
            ("manifest.json", json.dumps(described).encode()),
        ):
            entry = tarfile.TarInfo(path)
            entry.size, entry.mode = len(content), 0o644
            new.addfile(entry, io.BytesIO(content))
    partial.rename(target)


def _file(archive: tarfile.TarFile, name: str) -> io.BufferedReader:
    found = archive.extractfile(name)
    assert isinstance(found, io.BufferedReader)
    return found


def _packed(library: Path) -> bytes:
    """A layer with the library and the patch, the same bytes whenever it is made."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, content in ((LIBRARY, library.read_bytes()), (f"{FOLDER}/sitecustomize.py", PATCH.encode())):
            entry = tarfile.TarInfo(name)
            entry.mode, entry.size = 0o755, len(content)
            tar.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()
