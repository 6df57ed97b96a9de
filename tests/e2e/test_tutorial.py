"""docs/tutorial.md, followed literally: each of its files is saved, each of its commands is run, in order."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import psycopg
import pytest
import yaml

from tests.cluster.progress import clean_environment
from tests.cluster.source import Cluster
from tests.docs_blocks import Block, blocks
from tests.e2e.kube import Kubectl
from tests.e2e.test_path import pods, rows

STEPS = [b for b in blocks("sh", "yaml", "python") if b.page == "docs/tutorial.md"]


class Reader:
    """A shell in an empty folder, with kubectl, its plugin, and the tutorial's namespace as the current one."""

    def __init__(self, cluster: Cluster, kubectl: Kubectl, folder: Path) -> None:
        self.folder = folder
        config = folder / "kubeconfig"
        config.write_text(cluster.kubeconfig.read_text(encoding="utf-8"), encoding="utf-8")
        config.chmod(0o600)
        path = [str(Path(sys.executable).parent), str(Path(cluster.kubectl).parent), os.environ.get("PATH", "")]
        self.environment = {**clean_environment(), "PATH": os.pathsep.join(path), "KUBECONFIG": str(config)}
        (folder / "bin").mkdir()
        (folder / "bin" / "kubectl").symlink_to(cluster.kubectl)
        self.environment["PATH"] = f"{folder / 'bin'}{os.pathsep}{self.environment['PATH']}"
        self.run(f"kubectl config set-context --current --namespace={kubectl.namespace}")

    def run(self, text: str) -> str:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", text],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )
        assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr


def test_each_step_works_as_written(
    cluster: Cluster, kubectl: Kubectl, namespace: str, db: psycopg.Connection, tmp_path: Path
) -> None:
    reader = Reader(cluster, kubectl, tmp_path)
    kubectl("label", "namespace", namespace, "argocd.argoproj.io/instance=tutorial")
    said: dict[str, str] = {}
    for block in STEPS:
        if block.language == "yaml":
            (tmp_path / block.marks[0]).write_text(block.text, encoding="utf-8")
        else:
            assert block.mark("cluster") is not None, f"{block}: neither run nor explained"
            said[block.text.splitlines()[0]] = reader.run(block.text)

    def of(start: str) -> str:
        (found,) = (output for line, output in said.items() if line.startswith(start))
        return found

    assert "hello.yaml: leasedjob/hello: ok" in of("kubectl leasedjob lint hello.yaml")
    assert "Succeeded" in of("kubectl leasedjob run hello")
    assert "run " in of("kubectl leasedjob run hello")
    assert "leasedjob-adopt,leasedjob-hold,leasedjob-gate" in of("kubectl get pods -o custom-columns")
    failed = of("kubectl leasedjob run report --wait || true")
    assert "no such table: orders" in failed
    why = of("kubectl leasedjob why report")
    assert "BeforeWatermark" in why
    assert "NotATick" in why
    assert "42 orders" in of('sed -i "s/raise')
    (run,) = rows(db, namespace, "items")
    assert (run["status"], run["attempt"], run["failures"], run["data"]) == ("SUCCESS", 2, 0, {"items": 3})
    assert run["interruptions"] == 1
    assert "attempt 2 of v2:" in of("until kubectl logs")


def test_the_program_of_the_page_is_the_one_that_runs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "tutorial.md").read_text(encoding="utf-8")
    program = textwrap.dedent(page.partition("```python")[2].partition("\n")[2].partition("```")[0])
    (text,) = (b.text for b in STEPS if b.marks[:1] == ("items.yaml",))
    config, _ = yaml.safe_load_all(text)
    assert config["data"]["items.py"] == program


@pytest.mark.parametrize("label", ["argocd.argoproj.io/instance", "kustomize.toolkit.fluxcd.io/name"])
def test_labels_of_a_job_are_not_on_its_pods(kubectl: Kubectl, label: str) -> None:
    """A GitOps tool that finds its mark on a Pod takes it for its own, and prunes it."""
    from tests.e2e.jobs import NEVER, container, leased_job, run_of

    job = leased_job("marked", containers=[container("print('x')")], schedule=NEVER)
    job["metadata"]["labels"] = {label: "mine"}
    job["metadata"]["annotations"] = {label: "mine"}
    kubectl.apply(job, run_of("marked", "now"))
    (pod,) = kubectl.wait("there is a Pod", lambda: pods(kubectl, "marked"), timeout=60)
    meta = pod["metadata"]
    assert label not in {**meta["labels"], **meta["annotations"]}
    kubectl("delete", "leasedjob", "marked")


def test_blocks_are_all_of_a_kind() -> None:
    assert {b.language for b in STEPS} == {"sh", "yaml"}
    assert all(isinstance(b, Block) for b in STEPS)
    assert sum(b.language == "yaml" for b in STEPS) == 3
