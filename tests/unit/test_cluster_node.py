"""The one-node cluster's configurations and command lines, and how its state on disk is read."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.cluster import archive, demo, lifecycle, onenode
from tests.cluster.layout import Cache
from tests.cluster.onenode import Node
from tests.cluster.progress import ClusterError
from tests.cluster.source import Source


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node("test", 7, tmp_path / "clusters" / "test", Path("/bin-of-cluster"))


def test_every_cluster_has_addresses_of_its_own() -> None:
    one, two = (Node("a", i, Path("/a"), Path("/b")) for i in (1, 2))
    assert (one.address, one.gateway, one.link) == ("10.99.1.2", "10.99.1.1", "lj1")
    assert (two.address, two.gateway, two.link) == ("10.99.2.2", "10.99.2.1", "lj2")


@pytest.mark.parametrize("name", ["", "A", "a_b", "-a", "a-", "a" * 21, "a/b", "a b"])
def test_names_that_would_not_do_are_refused(name: str) -> None:
    with pytest.raises(ClusterError, match="cluster name"):
        Node(name, 1, Path("/a"), Path("/b"))


@pytest.mark.parametrize("index", [0, -1, 251])
def test_numbers_that_are_no_subnet_are_refused(index: int) -> None:
    with pytest.raises(ClusterError, match="cluster index"):
        Node("a", index, Path("/a"), Path("/b"))


def test_configurations_can_be_read_and_stay_inside(node: Node) -> None:
    for text in (onenode.kubelet_config(node), onenode.proxy_config(node), onenode.cni_config()):
        json.loads(text)
    containerd = tomllib.loads(onenode.containerd_config(node))
    assert containerd["grpc"]["address"] == str(node.socket)
    kubelet = json.loads(onenode.kubelet_config(node))
    assert kubelet["cgroupRoot"] == "/leasedjob-test-7"
    assert kubelet["enforceNodeAllocatable"] == []


def test_a_lost_node_is_noticed_sooner_where_asked(node: Node) -> None:
    fast = Node(node.name, node.index, node.folder, node.binaries, fast_node_loss=True)
    assert json.loads(onenode.kubelet_config(fast))["nodeStatusUpdateFrequency"] == "2s"
    assert "--node-monitor-grace-period=12s" in onenode.component_commands(fast)["kcm"]
    assert "--node-monitor-grace-period" not in onenode.component_commands(node)["kcm"]


def test_no_default_route_and_no_sysctl_of_the_machine(node: Node) -> None:
    script = onenode.init_script(node)
    assert "default" not in [
        word for line in script.splitlines() if line.startswith("ip route") for word in line.split()
    ]
    for name in onenode.KUBELET_SYSCTLS:
        assert f"mount --bind sysctl/{name.replace('/', '.')} /proc/sys/{name}" in script


def test_the_start_script_starts_every_component_once(node: Node) -> None:
    script = onenode.init_script(node)
    for name in onenode.component_commands(node):
        assert script.count(f"\nstart {name} ") == 1


def test_a_kubeconfig_is_complete_in_itself(node: Node) -> None:
    value = json.loads(onenode.kubeconfig(node, ca="Y2E=", certificate="Y2VydA==", key="a2V5"))
    assert value["clusters"][0]["cluster"]["server"] == "https://10.99.7.2:6443"
    assert value["current-context"] == value["contexts"][0]["name"]


def test_a_name_keeps_its_number_and_a_new_one_takes_a_free_one() -> None:
    assert lifecycle.choose_index("demo", {2}) == 1
    assert lifecycle.choose_index("demo", {1, 2}) == 10
    assert lifecycle.choose_index("mine", {1, 2, 10, 11}) == 12


def test_state_on_disk(node: Node, tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    assert lifecycle.find(cache, "test") is None
    node.folder.mkdir(parents=True)
    state = {"index": 7, "binaries": "/bin-of-cluster", "fast_node_loss": False}
    (node.folder / "cluster.json").write_text(json.dumps(state))
    assert lifecycle.find(cache, "test") == node
    assert lifecycle.find_all(cache) == [node]
    assert lifecycle.main_pid(node) is None


def test_a_number_that_now_names_another_process_is_not_ours(node: Node) -> None:
    """After a reboot, or a long time, the number in the file may be anybody's: nobody else's process is ever killed."""
    node.folder.mkdir(parents=True)
    (node.folder / "process.json").write_text(json.dumps({"pid": os.getpid(), "start": "another boot:1"}))
    assert lifecycle.main_pid(node) is None
    with pytest.raises(ClusterError, match="is not running"):
        lifecycle.enter(node, "true")


def test_an_image_archive_is_what_docker_load_reads(tmp_path: Path) -> None:
    program = tmp_path / "pause"
    program.write_bytes(b"a program")
    layer = tmp_path / "layer"
    layer.write_bytes(archive.layer_of(program))
    target = tmp_path / "image.tar"
    archive.write(target, images=("example.org/pause:1", "example.org/pause:2"), layer=layer, command=["/pause"])
    with tarfile.open(target) as tar:

        def content(name: str) -> bytes:
            file = tar.extractfile(name)
            assert file is not None
            return file.read()

        (manifest,) = json.loads(content("manifest.json"))
        config = json.loads(content(manifest["Config"]))
        layer_bytes = content(manifest["Layers"][0])
    assert manifest["RepoTags"] == ["example.org/pause:1", "example.org/pause:2"]
    assert config["config"]["Cmd"] == ["/pause"]
    assert config["rootfs"]["diff_ids"] == [f"sha256:{hashlib.sha256(layer_bytes).hexdigest()}"]
    with tarfile.open(fileobj=io.BytesIO(layer_bytes)) as inner:
        assert inner.getmember("pause").mode == 0o755


# --- the demo --------------------------------------------------------------------------------------------------------
def test_the_demo_counts_runs_that_have_ended() -> None:
    runs = [
        {"runKey": "2026-07-20T03:02:00Z", "outcome": "Running"},
        {"runKey": "2026-07-20T03:01:00Z", "outcome": "Failed"},
        {"runKey": "2026-07-20T03:00:00Z", "outcome": "Success"},
    ]
    job = {"status": {"recentRuns": runs}}
    assert demo.finished(job) == {"2026-07-20T03:00:00Z": "Success", "2026-07-20T03:01:00Z": "Failed"}
    assert demo.finished(None) == {}
    assert demo.finished({"status": {}}) == {}


SETTINGS = ["--set", "postgresql.embedded=true", "--set-string", "image.tag=2"]


@pytest.mark.parametrize(
    ("values", "helm_help", "argument", "said"),
    [
        (None, "--reset-then-reuse-values", [], ""),
        ({"postgresql": {"embedded": True}, "image": {"tag": "1"}}, "", [], ""),
        ({"replicas": 3}, "--reset-then-reuse-values", ["--reset-then-reuse-values"], "set before stay: replicas"),
        ({"image": {"tag": "1", "pullPolicy": "Always"}}, "", [], "are reset: image.pullPolicy"),
    ],
    ids=["first run", "its own values", "kept", "an old helm"],
)
def test_a_second_run_of_the_demo_does_not_reset_values_in_silence(
    monkeypatch: pytest.MonkeyPatch, values: Any, helm_help: str, argument: list[str], said: str
) -> None:
    def output(argv: list[str]) -> str | None:
        if argv[-1] == "--help":
            return helm_help
        return None if values is None else json.dumps(values)

    told: list[str] = []
    client = SimpleNamespace(helm=lambda *words: ["helm", *words])
    monkeypatch.setattr(demo, "output", output)
    kept = demo._values_that_stay(client, SETTINGS, SimpleNamespace(say=told.append))  # type: ignore[arg-type]
    assert kept == argument
    assert said in "".join(told)
    assert bool(told) == bool(said)


@pytest.mark.parametrize("where", list(Source))
def test_the_demo_says_which_image_a_job_of_ones_own_may_use(where: Source) -> None:
    said = demo.workload_images(SimpleNamespace(source=where))  # type: ignore[arg-type]
    assert "python:3.13-slim-trixie" in said
    assert ("in the cluster already" in said) == (where is not Source.USER)


def test_the_demo_says_what_it_waits_for() -> None:
    refused = {"status": {"conditions": [{"type": "Ready", "status": "False", "reason": "Bad", "message": "spec.x"}]}}
    assert demo.waiting_for(refused) == "Bad: spec.x"
    run = {"runKey": "k", "outcome": "Pending", "reason": "ImagePullBackOff", "message": "no such image"}
    assert demo.waiting_for({"status": {"recentRuns": [run]}}) == "Pending, ImagePullBackOff: no such image"
    assert demo.waiting_for({"status": {"nextScheduleTime": "soon"}}) == "the next tick is soon"
    assert demo.waiting_for(None) == "the next tick is not known yet"
