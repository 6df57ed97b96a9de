"""Bills of materials and the audit: what a release says of what is in it."""

from __future__ import annotations

import hashlib
import io
import json
import os
import runpy
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
from tests.cluster import images, reproduce

ROOT = Path(__file__).resolve().parents[2]
SBOM = runpy.run_path(str(ROOT / "scripts" / "sbom.py"), run_name="sbom")


def bills(**known: str) -> dict[str, Any]:
    return {image: json.loads(text) for image, text in SBOM["bills"](ROOT, known).items()}


def test_each_image_has_a_bill_with_exactly_what_its_lock_file_names() -> None:
    for image, bill in bills().items():
        assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
        lock = list(SBOM["locked"]((ROOT / "requirements" / f"{image}.txt").read_text()))
        listed = {c["purl"]: c for c in bill["components"] if c["name"] != "leasedjob" and "purl" in c}
        assert listed.keys() == {entry.purl for entry in lock}
        assert all(len(c["hashes"]) >= 1 for c in listed.values())
        references = [bill["metadata"]["component"]["bom-ref"], *(c["bom-ref"] for c in bill["components"])]
        assert len(references) == len(set(references))
        assert {d["ref"] for d in bill["dependencies"]} == set(references)
    assert set(bills()) == set(images.TARGETS)


def test_the_same_input_gives_the_same_bytes_and_another_one_another_number(tmp_path: Path) -> None:
    for name in ("one", "two"):
        done = subprocess.run(
            [sys.executable, str(ROOT / "scripts" / "sbom.py"), "--output", str(tmp_path / name)],
            capture_output=True, text=True, timeout=60, check=True, env={"TZ": name, "PATH": os.environ["PATH"]},
        )  # fmt: skip
        assert str(tmp_path / name / "operator.cdx.json") in done.stdout
    for image in images.TARGETS:
        one, two = (tmp_path / name / f"{image}.cdx.json" for name in ("one", "two"))
        assert one.read_bytes() == two.read_bytes()
        assert "/" + str(ROOT).split("/")[1] + "/" not in one.read_text(), "no path of the machine"
    hashes = bills()["sidecar"]["components"][-1]["hashes"]
    changed = bills(**{hashes[0]["content"]: "MIT"})["sidecar"]
    assert changed["serialNumber"] != bills()["sidecar"]["serialNumber"]
    assert changed["components"][-1]["licenses"] == [{"license": {"name": "MIT"}}]


def test_what_is_not_pinned_is_refused() -> None:
    for text in ("psycopg>=3\n", "psycopg==3.3.9\n"):
        with pytest.raises(ValueError, match="not a pinned requirement"):
            list(SBOM["locked"](text))


@pytest.mark.parametrize(
    ("metadata", "wanted"),
    [
        ("License-Expression: MIT OR Apache-2.0\n", "MIT OR Apache-2.0"),
        ("License: LGPL\nClassifier: License :: OSI Approved :: BSD License\nClassifier: Topic :: X\n", "BSD License"),
        ("License: LGPL-3.0\n", "LGPL-3.0"),
        ("", ""),
    ],
)
def test_licences_come_from_the_wheels(tmp_path: Path, metadata: str, wanted: str) -> None:
    with zipfile.ZipFile(tmp_path / "a-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("a-1.dist-info/METADATA", f"Metadata-Version: 2.4\nName: a\n{metadata}\nText\n")
    assert list(SBOM["licences"](tmp_path).values()) == [wanted]


# --- the audit --------------------------------------------------------------------------------------------------------


def audit(tmp_path: Path, report: dict[str, Any] | None, **env: str) -> subprocess.CompletedProcess[str]:
    """The script, with a pip-audit that says this."""
    tool = tmp_path / "pip-audit"
    tool.write_text(
        "#!/bin/sh\nwhile [ $# -gt 0 ]; do [ \"$1\" != --output ] || out=$2; shift; done\n"
        + (f"cat > \"$out\" <<'EOF'\n{json.dumps(report)}\nEOF\n" if report is not None else "exit 1\n")
    )  # fmt: skip
    tool.chmod(0o755)
    (tmp_path / "python").symlink_to(sys.executable)
    return subprocess.run(
        [str(ROOT / "scripts" / "audit.sh")],
        env={"PATH": os.environ["PATH"], "BIN": str(tmp_path), **env},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


GOOD: dict[str, Any] = {"name": "a", "version": "1", "vulns": []}
BAD = {"name": "b", "version": "2", "vulns": [{"id": "CVE-1", "fix_versions": ["3"]}]}
UNKNOWN = {"name": "c", "skip_reason": "not found"}


def test_what_is_known_fails_the_audit(tmp_path: Path) -> None:
    done = audit(tmp_path, {"dependencies": [GOOD, BAD]})
    assert done.returncode == 1
    assert "b 2: CVE-1, fixed in 3" in done.stdout


def test_packages_that_the_service_does_not_know_are_no_success(tmp_path: Path) -> None:
    done = audit(tmp_path, {"dependencies": [GOOD, UNKNOWN]})
    assert done.returncode == 1
    assert "NOT AUDITED: c" in done.stdout


@pytest.mark.parametrize("report", [None, {"dependencies": [UNKNOWN]}], ids=["no answer", "an empty mirror"])
def test_without_the_service_it_says_so_and_fails_only_where_it_must_not_be_missing(
    tmp_path: Path, report: dict[str, Any] | None
) -> None:
    done = audit(tmp_path, report)
    assert (done.returncode, done.stdout) == (0, "")
    assert "THE DEPENDENCIES WERE NOT AUDITED" in done.stderr
    (tmp_path / "python").unlink()
    assert audit(tmp_path, report, AUDIT="required").returncode == 1


def test_nothing_bad_is_a_success(tmp_path: Path) -> None:
    done = audit(tmp_path, {"dependencies": [GOOD]})
    assert done.returncode == 0, done.stderr
    assert "1 of 1 packages audited, 0 vulnerabilities" in done.stdout


# --- building again ---------------------------------------------------------------------------------------------------


def test_two_builds_share_nothing_but_their_input(tmp_path: Path) -> None:
    script = reproduce.build_script("sidecar", tmp_path / "base.tar", tmp_path / "context", tmp_path / "work", 1234)
    assert "--no-cache --timestamp 1234" in script
    assert "--layers" not in script
    assert f"--root {tmp_path}/work/store" in script


def layout(folder: Path, layers: list[dict[str, str]]) -> Path:
    """An OCI layout whose layers have these files."""
    blobs = folder / "blobs" / "sha256"
    blobs.mkdir(parents=True)

    def blob(content: bytes) -> dict[str, str]:
        name = hashlib.sha256(content).hexdigest()
        (blobs / name).write_bytes(content)
        return {"digest": f"sha256:{name}"}

    def layer(files: dict[str, str]) -> dict[str, str]:
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            for name, text in files.items():
                member = tarfile.TarInfo(name)
                member.size = len(text)
                archive.addfile(member, io.BytesIO(text.encode()))
        return blob(buffer.getvalue())

    manifest = {"config": blob(b"{}"), "layers": [layer(files) for files in layers]}
    (folder / "index.json").write_text(json.dumps({"manifests": [blob(json.dumps(manifest).encode())]}))
    return folder


def test_layers_and_files_that_differ_are_named(tmp_path: Path) -> None:
    same = {"a": "1", "b": "2"}
    one = layout(tmp_path / "one", [same, {"x": "1", "y": "1"}])
    two = layout(tmp_path / "two", [same, {"x": "1", "y": "2", "z": "3"}])
    assert reproduce.manifest_digest(one) == reproduce.manifest_digest(
        layout(tmp_path / "three", [same, {"x": "1", "y": "1"}])
    )
    assert reproduce.differing_layers(one, two) == [1]
    assert reproduce.difference(one, two) == "layer 1, 2 files: y, z"


# --- signing ----------------------------------------------------------------------------------------------------------


def sign(*words: str | Path) -> int:
    argv = [str(ROOT / "scripts" / "sign.sh"), *map(str, words)]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False).returncode


def test_a_signature_holds_for_what_was_signed_and_for_nothing_else(tmp_path: Path) -> None:
    assert sign("key", tmp_path) == 0
    key, public = tmp_path / "release.key", tmp_path / "release.pub"
    assert key.stat().st_mode & 0o077 == 0
    assert sign("key", tmp_path) == 1, "a key is never overwritten"
    file = tmp_path / "digests"
    file.write_text("sha256:1  operator\n")
    assert sign("sign", key, file) == 0
    assert sign("verify", public, file) == 0
    file.write_text("sha256:2  operator\n")
    assert sign("verify", public, file) == 1
    assert sign() == sign("verify", public) == 2
