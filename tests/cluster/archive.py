"""Container images as `docker load` archives, written without a container engine."""

from __future__ import annotations

import hashlib
import io
import json
import platform
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


def architecture() -> str:
    """This machine's architecture as images name it."""
    return _ARCHITECTURES.get(platform.machine(), platform.machine())


def layer_of(program: Path) -> bytes:
    """A layer with one program at the image's root, the same bytes whenever it is made."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        entry = tarfile.TarInfo(program.name)
        entry.mode, entry.size = 0o755, program.stat().st_size
        with program.open("rb") as file:
            tar.addfile(entry, file)
    return buffer.getvalue()


def write(
    target: Path,
    *,
    images: Sequence[str],
    layer: Path,
    command: Sequence[str],
    env: Mapping[str, str] | None = None,
) -> None:
    """Writes an image of one uncompressed layer, with all names in `images`, to `target`; never half of it."""
    with layer.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    config = {
        "architecture": architecture(),
        "os": "linux",
        "config": {"Cmd": list(command), "Env": [f"{k}={v}" for k, v in (env or {}).items()]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
        "history": [{"created_by": "leasedjob tests/cluster"}],
    }
    config_text = json.dumps(config).encode()
    config_name = f"{hashlib.sha256(config_text).hexdigest()}.json"
    manifest = [{"Config": config_name, "RepoTags": list(images), "Layers": ["layer.tar"]}]
    partial = target.with_suffix(".partial")
    with tarfile.open(partial, "w") as tar:
        for name, content in ((config_name, config_text), ("manifest.json", json.dumps(manifest).encode())):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o644
            tar.addfile(entry, io.BytesIO(content))
        entry = tarfile.TarInfo("layer.tar")
        entry.size, entry.mode = layer.stat().st_size, 0o644
        with layer.open("rb") as file:
            tar.addfile(entry, file)
    partial.rename(target)
