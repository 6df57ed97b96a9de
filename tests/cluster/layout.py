"""Where things are kept: binaries, images and the state of running clusters."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
GO_MODULES = Path(__file__).resolve().parent / "go"


@dataclass(frozen=True, slots=True)
class Cache:
    """The cache folder: `LEASEDJOB_CACHE`, else `$XDG_CACHE_HOME/leasedjob`, else `~/.cache/leasedjob`."""

    root: Path

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> Cache:
        if named := env.get("LEASEDJOB_CACHE"):
            return cls(Path(named).absolute())
        base = env.get("XDG_CACHE_HOME") or os.path.join(env.get("HOME") or str(Path.home()), ".cache")
        return cls(Path(base).absolute() / "leasedjob")

    @property
    def clusters(self) -> Path:
        return self.root / "clusters"

    @property
    def images(self) -> Path:
        return self.root / "images"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    def binaries(self, key: str) -> Path:
        return self.root / "bin" / key


def digest(paths: Iterable[Path], *more: str) -> str:
    """12 hex digits that change when a file's name or content, or one of `more`, does; folders count with all files."""
    sha = hashlib.sha256()
    for path in sorted(paths):
        files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        for file in files:
            if "__pycache__" in file.parts or not file.exists():
                continue
            sha.update(f"{file.relative_to(path.parent)}\0".encode())
            sha.update(file.read_bytes())
            sha.update(b"\0")
    for text in more:
        sha.update(text.encode() + b"\0")
    return sha.hexdigest()[:12]
