#!/usr/bin/env python3
"""Writes a bill of materials (CycloneDX 1.6, JSON) for each image, from the lock files that the image installs.

Nothing in it depends on when or where it is written: the same lock files and wheels give the same bytes. Licences come
from the wheels (`--wheels`, as requirements/download-wheels.sh fetches them); only those count whose hash is locked.
"""

from __future__ import annotations

import argparse
import email.parser
import hashlib
import json
import re
import sys
import uuid
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NAMESPACE = uuid.UUID("6f2b5f0e-6b0c-5a6e-9a37-5d0c2b7e3a11")  # of the serial numbers, which follow from the content
# Image -> what it installs, and what its build uses that stays outside.
IMAGES = {"operator": "operator", "sidecar": "sidecar", "postgresql": "postgresql"}


@dataclass(frozen=True, slots=True)
class Locked:
    """One requirement of a lock file."""

    name: str
    version: str
    hashes: tuple[str, ...]

    @property
    def purl(self) -> str:
        return f"pkg:pypi/{re.sub(r'[-_.]+', '-', self.name).lower()}@{self.version}"


def locked(text: str) -> Iterator[Locked]:
    """The requirements of a lock file with hashes."""
    for entry in re.split(r"\n(?=\S)", text.strip()):
        found = re.match(r"([A-Za-z0-9][A-Za-z0-9._-]*)(?:\[[^]]*\])?==([^\s;\\]+)", entry)
        hashes = tuple(sorted(re.findall(r"--hash=sha256:([0-9a-f]{64})", entry)))
        if not found or not hashes:
            raise ValueError(f"not a pinned requirement with hashes: {entry[:80]!r}")
        yield Locked(found[1], found[2], hashes)


def licences(folder: Path) -> dict[str, str]:
    """SHA-256 of each wheel in `folder` -> what it says of its licence."""
    found = {}
    for wheel in sorted(folder.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
            said = email.parser.Parser().parsestr(archive.read(name).decode("utf-8", "replace"), headersonly=True)
        classifiers = [c.rpartition(" :: ")[2] for c in said.get_all("Classifier") or [] if c.startswith("License ::")]
        text = said.get("License-Expression") or " AND ".join(classifiers) or (said.get("License") or "").split("\n")[0]
        found[hashlib.sha256(wheel.read_bytes()).hexdigest()] = text.strip()
    return found


def component(entry: Locked, known: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "type": "library", "bom-ref": entry.purl, "name": entry.name, "version": entry.version, "purl": entry.purl,
        "hashes": [{"alg": "SHA-256", "content": each} for each in entry.hashes],
    }  # fmt: skip
    for each in entry.hashes:
        if known.get(each):
            # A name, for not everybody writes an SPDX expression.
            found["licenses"] = [{"license": {"name": known[each]}}]
    return found


def bill(image: str, version: str, lock: str, base: str, known: Mapping[str, str]) -> dict[str, Any]:
    """The bill of one image."""
    entries = sorted(locked(lock), key=lambda e: e.purl)
    own = f"pkg:pypi/leasedjob@{version}"
    root: dict[str, Any] = {
        "type": "container", "bom-ref": f"image:{image}", "name": f"leasedjob/{image}", "version": version,
        "licenses": [{"license": {"id": "Apache-2.0"}}],
    }  # fmt: skip
    package: dict[str, Any] = {
        "type": "library", "bom-ref": own, "name": "leasedjob", "version": version, "purl": own,
        "licenses": [{"license": {"id": "Apache-2.0"}}],
    }  # fmt: skip
    # Its packages aren't listed: which they are is decided by whoever builds the image, with the digest of the base.
    beneath: dict[str, Any] = {"type": "container", "bom-ref": f"base:{base}", "name": base}
    parts = [beneath, *([package] if image != "postgresql" else []), *(component(e, known) for e in entries)]
    content: dict[str, Any] = {
        "metadata": {"component": root},
        "components": parts,
        "dependencies": [
            {"ref": root["bom-ref"], "dependsOn": sorted(part["bom-ref"] for part in parts)},
            *({"ref": part["bom-ref"]} for part in parts),
        ],
    }
    serial = uuid.uuid5(NAMESPACE, json.dumps(content, sort_keys=True))
    head = {"bomFormat": "CycloneDX", "specVersion": "1.6", "serialNumber": f"urn:uuid:{serial}", "version": 1}
    return {**head, **content}


def bills(root: Path, known: Mapping[str, str]) -> dict[str, str]:
    """Image -> its bill as JSON."""
    said = re.search(r'^__version__ = "([^"]+)"', (root / "operator/leasedjob/__init__.py").read_text(), re.MULTILINE)
    base = re.search(r"^ARG BASE_IMAGE=(\S+)$", (root / "Dockerfile").read_text(), re.MULTILINE)
    if not said or not base:
        raise ValueError("the package has no __version__, or the Dockerfile no BASE_IMAGE")
    return {
        image: json.dumps(
            bill(image, said[1], (root / "requirements" / f"{lock}.txt").read_text(), base[1], known),
            indent=1,
            ensure_ascii=False,
        )
        + "\n"
        for image, lock in IMAGES.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "sbom", help="folder (default: build/sbom)")
    parser.add_argument("--wheels", type=Path, help="folder with the wheels that are locked, for their licences")
    options = parser.parse_args()
    known = licences(options.wheels) if options.wheels else {}
    options.output.mkdir(parents=True, exist_ok=True)
    for image, text in bills(ROOT, known).items():
        path: Path = options.output / f"{image}.cdx.json"
        path.write_text(text)
        print(f"{hashlib.sha256(text.encode()).hexdigest()}  {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
