"""kubectl and helm as a person would run them, and waits that end with what was last seen."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.cluster.progress import clean_environment
from tests.cluster.source import Cluster

Json = dict[str, Any]


class CommandFailed(AssertionError):
    """A command of a test ended with something other than 0; the message has its output."""


def _run(argv: list[str], *, text: str | None, timeout: float, check: bool) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        argv, input=text or "", capture_output=True, text=True, timeout=timeout, env=clean_environment(), check=False
    )
    if check and done.returncode != 0:
        raise CommandFailed(f"{' '.join(argv)}\nexit {done.returncode}\n{done.stdout}{done.stderr}")
    return done


@dataclass(frozen=True, slots=True)
class Kubectl:
    """kubectl on one cluster and in one namespace; `kubectl("get", "pods")` gives what it prints.

    A command that fails raises CommandFailed with its output.
    """

    cluster: Cluster
    namespace: str = "default"

    def within(self, namespace: str) -> Kubectl:
        return replace(self, namespace=namespace)

    def argv(self, *words: str) -> list[str]:
        return [self.cluster.kubectl, "--kubeconfig", str(self.cluster.kubeconfig), "-n", self.namespace, *words]

    def run(self, *words: str, text: str | None = None, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        """The finished process, whatever its exit code."""
        return _run(self.argv(*words), text=text, timeout=timeout, check=False)

    def __call__(self, *words: str, text: str | None = None, timeout: float = 60) -> str:
        return _run(self.argv(*words), text=text, timeout=timeout, check=True).stdout

    def json(self, *words: str, timeout: float = 60) -> Json:
        """What `kubectl WORDS -o json` prints."""
        value: Json = json.loads(self(*words, "-o", "json", timeout=timeout))
        return value

    def items(self, *words: str) -> list[Json]:
        """The objects that `kubectl get WORDS` finds."""
        found: list[Json] = self.json("get", *words)["items"]
        return found

    def find(self, *words: str) -> Json | None:
        """One object, or None where it doesn't exist."""
        text = self("get", *words, "-o", "json", "--ignore-not-found")
        return json.loads(text) if text.strip() else None

    def apply(self, *objects: Json) -> str:
        """Applies objects, each given as a dict."""
        documents = {"apiVersion": "v1", "kind": "List", "items": list(objects)}
        return self("apply", "-f", "-", text=json.dumps(documents))

    def wait(self, what: str, probe: Callable[[], Any], *, timeout: float = 60, every: float = 0.25) -> Any:
        """The first true answer of `probe`; raises AssertionError that names `what` and the last answer."""
        deadline = time.monotonic() + timeout
        while not (answer := probe()):
            if time.monotonic() >= deadline:
                pods = self.run("get", "pods", "-o", "wide").stdout
                events = self.run("get", "events", "--sort-by=.lastTimestamp").stdout
                raise AssertionError(f"waited {timeout:.0f} s for {what}; last seen: {answer!r}\n{pods}\n{events}")
            time.sleep(every)
        return answer

    def wait_gone(self, *words: str, timeout: float = 60) -> None:
        """Until the objects that WORDS name are deleted."""
        self("wait", "--for=delete", *words, f"--timeout={timeout:.0f}s", timeout=timeout + 10)

    def logs(self, pod: str, container: str) -> str:
        return self("logs", pod, "-c", container)


@dataclass(frozen=True, slots=True)
class Helm:
    """helm on one cluster; a command that fails raises CommandFailed with its output."""

    cluster: Cluster

    def run(self, *words: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        argv = [self.cluster.helm, "--kubeconfig", str(self.cluster.kubeconfig), *words]
        return _run(argv, text=None, timeout=timeout, check=False)

    def __call__(self, *words: str, timeout: float = 300) -> str:
        argv = [self.cluster.helm, "--kubeconfig", str(self.cluster.kubeconfig), *words]
        return _run(argv, text=None, timeout=timeout, check=True).stdout


def write_json(path: Path, value: Json) -> Path:
    """A file for `kubectl apply -f` or `helm -f`; JSON is YAML."""
    path.write_text(json.dumps(value))
    return path
