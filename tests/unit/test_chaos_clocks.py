"""The layer over the product's images that makes clocks wrong, and the table that a verdict is printed as."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from pathlib import Path

from tests.chaos_cluster import clocks, table
from tests.chaos_cluster.checker import Broken, Excused, Verdict
from tests.cluster import archive
from tests.cluster.images import Image
from tests.cluster.layout import Cache
from tests.cluster.progress import Progress

IMAGE = Image("operator", "abc")


def layered(tmp_path: Path) -> Path:
    """An image of one layer, and the archive of the one over it."""
    library = tmp_path / "faketime/usr/lib/any/faketime/libfaketime.so.1"
    library.parent.mkdir(parents=True)
    library.write_bytes(b"a library")
    layer = tmp_path / "layer"
    with tarfile.open(layer, "w") as tar:
        tar.addfile(tarfile.TarInfo("bin/operator"), io.BytesIO())
    source = tmp_path / "operator-1.tar"
    archive.write(
        source, images=(IMAGE.name,), layer=layer, command=["operator"], env={"PATH": "/bin", "LD_PRELOAD": "x"}
    )
    cache = Cache(tmp_path)
    cache.images.mkdir()
    old = cache.images / "clocked-operator-of-before.tar"
    old.touch()
    tag, made = clocks.clocked(IMAGE, source, "/run/clock/offset", cache, Progress())
    assert tag == "abc-clock"
    assert not old.exists(), "one of each is kept"
    assert clocks.clocked(IMAGE, source, "/run/clock/offset", cache, Progress()) == (tag, made)
    return made


def test_a_layer_lies_over_the_image_and_the_rest_stays(tmp_path: Path) -> None:
    with tarfile.open(layered(tmp_path)) as tar:

        def content(name: str) -> bytes:
            file = tar.extractfile(name)
            assert file is not None
            return file.read()

        (manifest,) = json.loads(content("manifest.json"))
        assert manifest["RepoTags"] == ["docker.io/leasedjob/operator:abc-clock"]
        config = json.loads(content(manifest["Config"]))
        assert [f"sha256:{hashlib.sha256(content(name)).hexdigest()}" for name in manifest["Layers"]] == config[
            "rootfs"
        ]["diff_ids"], "each layer is what the image says"
        assert len(manifest["Layers"]) == 2
        environment = dict(entry.split("=", 1) for entry in config["config"]["Env"])
        assert environment["PATH"] == "/bin"
        assert environment["LD_PRELOAD"] == f"/{clocks.LIBRARY}"
        assert environment["FAKETIME_TIMESTAMP_FILE"] == "/run/clock/offset"
        assert config["config"]["Cmd"] == ["operator"]
        with tarfile.open(fileobj=io.BytesIO(content(manifest["Layers"][1]))) as over:
            assert over.getnames() == [clocks.LIBRARY, f"{clocks.FOLDER}/sitecustomize.py"]


def test_what_the_table_says() -> None:
    verdict = Verdict()
    verdict.real.due, verdict.simulated.due = 123, 456
    verdict.real.run["SUCCESS"] = 120
    verdict.real.not_run["skipped Overlap"] = 3
    verdict.faults["node-drain"] = 2
    verdict.left_out["pod-freeze"] = 1
    verdict.say(Broken.NOT_DONE, "k", "token 5")
    verdict.excused.append(Excused("k", "beside each other", 7, "kubelet-kill"))
    text = "\n".join(table.lines(verdict, {"seed": 9, "minutes": 20}))
    for words in ("seed 9, 20 minutes", "2 node-drain", "1 pod-freeze", "1 kubelet-kill", str(verdict.violations[0])):
        assert words in text
    rows = {line[:36].strip(): line[36:].split() for line in text.splitlines()}
    assert rows["ticks due"] == ["123", "456"]
    assert rows["skipped Overlap"] == ["3", "0"]
    for broken in (Broken.UNACCOUNTED, Broken.OVERLAP, Broken.OLD_TOKEN, Broken.RAN_AGAIN):
        assert any(line.startswith(broken) and line.endswith(" 0") for line in text.splitlines()), (
            "also where it is none"
        )
