"""Where a cluster comes from, and the command lines of the ways that can't be run on every machine."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from tests.cluster import binaries, images, jars, kind, lifecycle, packages, source
from tests.cluster.layout import REPOSITORY, Cache, digest
from tests.cluster.progress import ClusterError, Progress, clean_environment, wait_for
from tests.cluster.source import Machine, Source

NOTHING = Machine(kubeconfig=None, engine=None, linux=True, root=False)


@pytest.mark.parametrize(
    ("machine", "wanted"),
    [
        pytest.param(Machine("/k", "docker", True, True), Source.USER, id="a named kubeconfig comes first"),
        pytest.param(Machine("/k", "docker", True, True, "kind"), Source.USER, id="even where kind is forced"),
        pytest.param(Machine(None, "docker", True, True), Source.KIND, id="an engine that answers: kind"),
        pytest.param(Machine(None, "podman", False, False), Source.KIND, id="kind needs neither Linux nor root"),
        pytest.param(Machine(None, None, True, True), Source.ONE_NODE, id="no engine, Linux and root: one node"),
        pytest.param(Machine(None, "docker", True, True, "one-node"), Source.ONE_NODE, id="one node forced"),
        pytest.param(Machine(None, "docker", True, False, "one-node"), None, id="one node forced without root"),
        pytest.param(Machine(None, None, True, True, "kind"), None, id="kind forced without an engine"),
        pytest.param(Machine(None, "docker", True, True, "minikube"), None, id="forced to what isn't known"),
        pytest.param(Machine(None, None, False, True), None, id="not Linux, no engine"),
        pytest.param(NOTHING, None, id="neither engine nor root"),
    ],
)
def test_the_first_source_that_the_machine_can_have(machine: Machine, wanted: Source | None) -> None:
    assert source.choose(machine).source is wanted


def test_what_is_missing_is_named_with_how_to_get_it() -> None:
    reason = source.choose(NOTHING).reason
    for words in ("LEASEDJOB_KUBECONFIG", "KUBECONFIG=path", "docker info", "podman info", "as root"):
        assert words in reason


def test_the_default_context_is_never_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", "/home/someone/.kube/config")
    monkeypatch.delenv(source.KUBECONFIG_VARIABLE, raising=False)
    assert source.observe().kubeconfig is None
    assert "KUBECONFIG" not in clean_environment()


@pytest.mark.parametrize("engine", ["docker", "podman"])
def test_a_client_without_an_engine_is_no_engine(tmp_path: Path, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    client = tmp_path / engine
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for body, answers in (("echo; exit 1", False), ("echo; exit 0", False), ("echo 28.2.2", True)):
        client.write_text(f"#!/bin/sh\n{body}\n")
        client.chmod(0o755)
        assert source.engine_answers(engine) is answers


def test_the_named_kubeconfig_must_exist(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="there is no kubeconfig"):
        source.find(Cache(tmp_path), "x", {source.KUBECONFIG_VARIABLE: str(tmp_path / "none")})


def test_nothing_is_found_in_an_empty_cache(tmp_path: Path) -> None:
    assert source.find(Cache(tmp_path), "x", {}) is None


# --- kind ------------------------------------------------------------------------------------------------------------
def test_kind_never_writes_the_users_own_kubeconfig() -> None:
    kubeconfig = Path("/c/kubeconfig")
    for command in (kind.create_command, kind.export_command, kind.delete_command):
        argv = command("kind", "demo", kubeconfig)
        assert argv[argv.index("--kubeconfig") + 1] == "/c/kubeconfig"
        assert argv[argv.index("--name") + 1] == "leasedjob-demo"


def test_kind_command_lines() -> None:
    assert kind.create_command("kind", "demo", Path("/k"))[:3] == ["kind", "create", "cluster"]
    assert kind.create_command("kind", "demo", Path("/k"))[-2:] == ["--wait", "300s"]
    assert kind.list_command("kind") == ["kind", "get", "clusters"]
    wanted = ["kind", "load", "image-archive", "--name", "leasedjob-demo", "/i.tar"]
    assert kind.load_command("kind", "leasedjob-demo", Path("/i.tar")) == wanted
    assert kind.save_command("podman", "a/b:1", Path("/i.tar")) == ["podman", "save", "-o", "/i.tar", "a/b:1"]
    assert kind.install_command("/go/bin/go") == ["/go/bin/go", "install", f"sigs.k8s.io/kind@{kind.VERSION}"]
    assert kind.environment("docker") == {}
    assert kind.environment("podman") == {"KIND_EXPERIMENTAL_PROVIDER": "podman"}


@pytest.mark.parametrize(
    ("text", "address"),
    [("fc00:f853::1 172.18.0.1 \n", "172.18.0.1"), ("172.18.0.1", "172.18.0.1"), ("", None), (None, None)],
)
def test_the_address_of_this_machine_in_kinds_network(text: str | None, address: str | None) -> None:
    assert kind.first_ipv4(text) == address


# --- images ----------------------------------------------------------------------------------------------------------
def test_engines_build_each_target_of_the_dockerfile() -> None:
    dockerfile = (REPOSITORY / "Dockerfile").read_text()
    for image in images.project_images("abc"):
        assert f" AS {image.target}\n" in dockerfile
        argv = images.engine_build_command("docker", image)
        assert argv[:4] == ["docker", "build", "--target", image.target]
        assert argv[5] == image.name
        assert Path(argv[-1]) == REPOSITORY


def test_image_names_are_what_the_chart_asks_for() -> None:
    names = [image.name for image in images.project_images("abc")]
    assert names == [
        "docker.io/leasedjob/operator:abc",
        "docker.io/leasedjob/sidecar:abc",
        f"docker.io/leasedjob/postgresql:{images.POSTGRESQL_TAG}",
    ]
    values = source.chart_values("abc", "registry.example/mine")
    assert values[1::2] == ["image.tag=abc", "sidecar.image.tag=abc", "global.imageRegistry=registry.example/mine"]
    assert (
        images.project_images("abc", "registry.example/mine")[0].name == "registry.example/mine/leasedjob/operator:abc"
    )


def test_buildah_builds_without_a_network() -> None:
    argv = images.buildah_build_command(["buildah"], images.project_images("abc")[0], Path("/context"))
    assert "--pull=never" in argv
    assert f"BASE_IMAGE={images.BASE_IMAGE}" in argv
    assert argv[-1] == "/context"


def test_the_mirror_is_the_one_that_apt_uses() -> None:
    listed = "\n".join(
        [
            "Docker bookworm stable https://docker.example/linux/debian",
            "Debian-Security bookworm-security main http://mirror.example/debian-security",
            "Debian bookworm contrib http://mirror.example/contrib",
            "Debian bookworm main http://mirror.example/debian",
        ]
    )
    assert images.debian_mirror(listed) == "http://mirror.example/debian"
    assert images.debian_mirror("Ubuntu noble main http://ubuntu.example/ubuntu") is None
    assert images.debian_mirror(None) is None


def test_old_archives_go_but_never_a_current_one(tmp_path: Path) -> None:
    archives = [tmp_path / f"operator-{n}.tar" for n in range(5)]
    for number, path in enumerate(archives):
        path.touch()
        os.utime(path, (number, number))
    (tmp_path / "base-x.tar").touch()
    assert images.stale(tmp_path, {archives[0]}) == [archives[2], archives[1]]


# --- programs and packages -------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("go version go1.26.8 linux/amd64", (1, 26)),
        ("go version go1.9 linux/amd64", (1, 9)),
        ("go version devel go1.28-abcdef", (1, 28)),
        ("bash: go: command not found", None),
        (None, None),
    ],
)
def test_go_versions(text: str | None, version: tuple[int, int] | None) -> None:
    assert binaries.go_version(text) == version


def test_an_old_go_is_no_go(tmp_path: Path) -> None:
    old = tmp_path / "go"
    old.write_text("#!/bin/sh\necho go version go1.19.8 linux/amd64\n")
    old.chmod(0o755)
    assert binaries.find_go({"PATH": str(tmp_path)}) != str(old)


def test_programs_are_built_reproducibly_from_pinned_modules() -> None:
    for module in (*binaries.every_module("1.34.4"), binaries.kube("1.37.2")):
        assert (binaries.GO_MODULES / module.folder / "go.sum").exists() or module is binaries.PAUSE
        for program in module.programs:
            argv = module.command("go", program, Path("/out"))
            assert argv[:3] == ["go", "build", "-trimpath"]
            assert argv[-2] == f"/out/{program}"


def test_each_kubernetes_is_built_from_its_own_pins_into_a_folder_of_its_own() -> None:
    versions = binaries.kubernetes_versions()
    assert list(versions) == ["1.34", "1.37"], "the oldest first"
    for minor, version in versions.items():
        assert version.startswith(f"{minor}.")
        module = binaries.kube(version)
        assert module.folder == f"kube-{minor}"
        assert any(f"gitVersion=v{version}" in argument for argument in module.command("go", "kubelet", Path("/o")))
        pins = (binaries.GO_MODULES / module.folder / "go.mod").read_text()
        staging = version.replace("1.", "v0.", 1)
        replaced = re.findall(r"^replace (\S+) => (\S+) (\S+)$", pins, re.MULTILINE)
        assert len(replaced) > 25
        assert {(old == new, pin) for old, new, pin in replaced} == {(True, staging)}
        assert binaries.version_of(Path("/cache/bin") / binaries.cache_key(version)) == version
    keys = {binaries.cache_key(version) for version in versions.values()}
    assert len(keys) == len(versions)


def test_chart_and_documentation_name_the_versions_that_are_tested() -> None:
    oldest, *_, newest = binaries.kubernetes_versions()
    chart = yaml.safe_load((REPOSITORY / "charts/leasedjob/Chart.yaml").read_text())
    assert chart["kubeVersion"] == f">={oldest}.0-0"
    assert f"Needs Kubernetes {oldest} or newer" in (REPOSITORY / "charts/leasedjob/README.md").read_text()
    page = (REPOSITORY / "docs/reference/kubernetes-versions.md").read_text()
    assert f"| {oldest} | the oldest one that is supported" in page
    assert f"| {newest} | the newest one that is tested" in page
    assert f"## What differs between {oldest} and {newest}" in page
    between = ", ".join(f"1.{minor}" for minor in range(int(oldest[2:]) + 1, int(newest[2:])))
    assert f"| {between} | supported" in page


@pytest.mark.parametrize("asked", ["1.34", "v1.34", "1.34.4"])
def test_a_version_of_kubernetes_is_asked_for_by_name(asked: str) -> None:
    assert binaries.kubernetes_version({binaries.KUBERNETES_VARIABLE: asked}) == "1.34.4"


def test_the_newest_kubernetes_is_the_default() -> None:
    assert binaries.kubernetes_asked({}) is None
    assert binaries.kubernetes_version({}) == binaries.kubernetes_version({binaries.KUBERNETES_VARIABLE: "1.37"})


@pytest.mark.parametrize("asked", ["1.33", "1.34.99", "latest", "34"])
def test_a_version_that_cannot_be_built_is_refused_with_those_that_can(asked: str) -> None:
    with pytest.raises(ClusterError, match=rf"KUBERNETES={asked}: .*; there are 1\.34, 1\.37$"):
        binaries.kubernetes_version({binaries.KUBERNETES_VARIABLE: asked})
    done = subprocess.run(
        ["make", "-n", "cluster-up", f"KUBERNETES={asked}"],
        cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode != 0
    assert f"KUBERNETES={asked}: there is no such version here; there are 1.34 1.37" in done.stderr


def test_each_version_has_a_test_cluster_of_its_own() -> None:
    def shown(*more: str) -> str:
        argv = ["make", "-n", "cluster-up", *more]
        env = {k: v for k, v in os.environ.items() if k not in ("TEST_CLUSTER", "KUBERNETES")}
        return subprocess.run(
            argv, cwd=REPOSITORY, capture_output=True, text=True, check=True, timeout=60, env=env
        ).stdout

    assert "tests.cluster up test\n" in shown()
    assert "tests.cluster up test-134\n" in shown("KUBERNETES=1.34")
    assert "tests.cluster up mine\n" in shown("KUBERNETES=1.34", "TEST_CLUSTER=mine")


def test_a_cluster_of_another_version_is_not_taken_for_the_one_that_is_asked_for() -> None:
    lifecycle.same_minor("cluster test", "1.34.2", "1.34.4")
    with pytest.raises(ClusterError, match=r"cluster test runs Kubernetes 1\.37\.2, and 1\.34\.4 is asked for"):
        lifecycle.same_minor("cluster test", "1.37.2", "1.34.4")
    with pytest.raises(ClusterError, match=r"\(unknown\)"):
        lifecycle.same_minor("cluster test", source.server_version(None), "1.34.4")
    assert source.server_version('{"gitVersion": "v1.34.4"}') == "1.34.4"
    assert source.server_version("no JSON") == ""


def test_a_version_that_is_asked_for_is_built_and_no_image_of_kind() -> None:
    asked = Machine(None, "docker", True, True, kubernetes="1.34.4")
    assert source.choose(asked).source is Source.ONE_NODE
    without = source.choose(Machine(None, "docker", True, False, kubernetes="1.34.4"))
    assert without.source is None
    assert "1.34.4 is built from source" in without.reason
    assert source.choose(Machine("/k", "docker", True, True, kubernetes="1.34.4")).source is Source.USER


def test_only_missing_packages_are_installed() -> None:
    wanted = {"runc": "runc", "ip": "iproute2", "nft": "nftables"}
    assert packages.missing(wanted, lambda thing: thing == "ip") == ["nftables", "runc"]
    update, install = packages.install_commands(["nftables", "runc"])
    assert update[:2] == ["apt-get", "update"]
    assert install[-2:] == ["nftables", "runc"]
    assert "-y" in install


def test_pgbouncers_own_libraries_come_with_it() -> None:
    lines = (
        "pgbouncer",
        "  PreDepends: libevent-x",
        "  Depends: libc-ares2",
        "  Depends: libc6",
        " |Depends: libevent-2.1-7",
    )
    depends = "\n".join(lines)
    assert packages.libraries_of(depends) == ["libc-ares2", "libevent-2.1-7"]


def test_the_libraries_of_postgresql_come_with_it_but_for_llvm() -> None:
    lines = (
        "NOTE: This is only a simulation!",
        "Inst libllvm14 (1:14.0.6-12 Debian:12.11/stable [amd64])",
        "Inst postgresql-client-15 (15.18-0+deb12u1 Debian:12.11/stable [amd64]) []",
        "Inst libxslt1.1 (1.1.35 Debian:12.11/stable [amd64])",
        "Inst libpq5 [15.1] (15.18-0+deb12u1 Debian:12.11/stable [amd64])",
        "Conf libpq5 (15.18-0+deb12u1 Debian:12.11/stable [amd64])",
    )
    assert packages.libraries_to_come("\n".join(lines)) == ["libpq5", "libxslt1.1"]


@pytest.mark.parametrize(
    ("env", "root"),
    [
        ({"LEASEDJOB_CACHE": "/c", "XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/c"),
        ({"XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/x/leasedjob"),
        ({"HOME": "/h"}, "/h/.cache/leasedjob"),
        ({"LEASEDJOB_CACHE": "", "HOME": "/h"}, "/h/.cache/leasedjob"),
    ],
)
def test_the_cache_folder(env: dict[str, str], root: str) -> None:
    assert Cache.from_env(env).root == Path(root)


def test_a_digest_changes_with_content_and_name_but_not_with_caches(tmp_path: Path) -> None:
    folder = tmp_path / "src"
    folder.mkdir()
    (folder / "a").write_text("1")
    first = digest([folder])
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "a.pyc").write_text("x")
    assert digest([folder]) == first
    (folder / "a").write_text("2")
    assert digest([folder]) != first
    (folder / "a").write_text("1")
    assert digest([folder]) == first
    (folder / "a").rename(folder / "b")
    assert digest([folder]) != first


# --- progress --------------------------------------------------------------------------------------------------------
def test_a_wait_ends_with_what_was_waited_for_and_the_log(tmp_path: Path) -> None:
    log = tmp_path / "some.log"
    log.write_text("the last words\n")
    with pytest.raises(ClusterError, match=r"waited 0 s for the API.*some\.log\n +the last words"):
        wait_for("the API", lambda: False, timeout=0.05, log=log, every=0.01)


def test_a_command_that_hangs_is_ended(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="sleeping: not done after 0 s"):
        Progress().run(["sleep", "60"], what="sleeping", log=tmp_path / "log", timeout=0.1)


def test_a_command_that_fails_shows_the_end_of_its_log(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"trying failed \(exit 3\)(.|\n)*it broke"):
        Progress().run(["sh", "-c", "echo it broke; exit 3"], what="trying", log=tmp_path / "log", timeout=10)


def test_a_program_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="no-such-program is not installed"):
        Progress().run(["no-such-program"], what="trying", log=tmp_path / "log", timeout=10)


# --- kind, with programs that only write down how they were called ----------------------------------------------------
@pytest.fixture
def pretend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with docker, kind, kubectl and helm; each call is a line of the file that is returned."""
    calls = tmp_path / "calls"
    calls.touch()
    answers = {
        "docker": 'case "$1 $2" in "info --format") echo 28.2.2;; "network inspect") echo "fc00::1 172.18.0.1";; esac',
        "kind": f'case "$1 $2" in "get clusters") cat {tmp_path}/clusters 2> /dev/null;; '
        f'"create cluster") echo leasedjob-x > {tmp_path}/clusters;; "delete cluster") rm {tmp_path}/clusters;; esac',
        "kubectl": 'case "$*" in *current-context*) echo kind-leasedjob-x;; esac',
        "helm": "",
    }
    for name, body in answers.items():
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f'#!/bin/sh\necho "{name} $*" >> {calls}\n{body}\n')
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    for variable in (source.KUBECONFIG_VARIABLE, source.REGISTRY_VARIABLE, source.FORCE_VARIABLE):
        monkeypatch.delenv(variable, raising=False)
    return calls


def test_kind_from_up_to_down(pretend: Path, tmp_path: Path) -> None:
    cache, progress = Cache(tmp_path / "cache"), Progress()
    cluster = source.up(cache, "x", progress, {})
    assert (cluster.source, cluster.host_address) == (Source.KIND, "172.18.0.1")
    assert cluster.kubeconfig == tmp_path / "cache" / "clusters" / "x-kind" / "kubeconfig"
    assert source.find(cache, "x", {}) == cluster
    pretend.write_text("")
    assert source.up(cache, "x", progress, {}) == cluster
    assert "create cluster" not in pretend.read_text(), "a cluster that is there is not made again"
    pretend.write_text("")
    values = source.deliver(cluster, cache, progress, {})
    calls = pretend.read_text().splitlines()
    assert values == source.chart_values(images.project_tag(images.base_key()))
    for image in images.project_images(images.project_tag(images.base_key())):
        assert f"docker build --target {image.target} -t {image.name} {REPOSITORY}" in calls
    assert sum(call.startswith("kind load image-archive --name leasedjob-x ") for call in calls) == 5
    source.down(cache, "x", progress)
    assert source.find(cache, "x", {}) is None


def test_a_users_cluster_gets_its_images_from_a_registry(pretend: Path, tmp_path: Path) -> None:
    (tmp_path / "bin" / "kubectl").write_text("#!/bin/sh\necho production\n")
    kubeconfig = tmp_path / "config"
    kubeconfig.touch()
    cache, progress = Cache(tmp_path / "cache"), Progress()
    cluster = source.up(cache, "x", progress, {source.KUBECONFIG_VARIABLE: str(kubeconfig)})
    assert (cluster.source, cluster.kubeconfig) == (Source.USER, kubeconfig)
    with pytest.raises(ClusterError, match="set LEASEDJOB_REGISTRY"):
        source.deliver(cluster, cache, progress, {})
    pretend.write_text("")
    values = source.deliver(cluster, cache, progress, {source.REGISTRY_VARIABLE: "registry.example/mine/"})
    assert values[-1] == "global.imageRegistry=registry.example/mine"
    tag = images.project_tag(images.base_key())
    assert f"docker push registry.example/mine/leasedjob/operator:{tag}" in pretend.read_text().splitlines()
    assert "kind" not in pretend.read_text()


def test_jars_are_what_their_checksums_say(tmp_path: Path) -> None:
    for name in ("right", "changed", "unknown"):
        (tmp_path / f"{name}.jar").write_text(name)
    digest = hashlib.sha256(b"right").hexdigest()
    sums = f"{digest}  right.jar\n{digest}  changed.jar\n{digest}  missing.jar\n"
    assert jars.differences(sums, tmp_path) == ["changed.jar", "missing.jar", "unknown.jar"]
    (line,) = (line for line in (jars.PROJECT / "jars.sha256").read_text().splitlines() if " kafka_" in line)
    version = line.rpartition("-")[2].removesuffix(".jar")
    assert f"<version>{version}</version>" in (jars.PROJECT / "pom.xml").read_text()
