"""LeasedJobs for tests: a Python program as the workload, under the restricted profile."""

from __future__ import annotations

import textwrap
from typing import Any

from tests.e2e.kube import Json

IMAGE = "leasedjob.io/python:1"
# The shortest timing that a loaded two-core machine carries: the kubelet asks each second, two missed answers decide.
SHORT = {
    "lease": {"durationSeconds": 40, "heartbeatSeconds": 4},
    "shutdown": {"preStopSeconds": 0, "terminationGracePeriodSeconds": 6},
}
NEVER = "0 0 1 1 *"  # a schedule whose next tick no test sees: runs come from LeasedJobRuns


def container(program: str, name: str = "main", **more: Any) -> Json:
    return {
        "name": name,
        "image": IMAGE,
        "imagePullPolicy": "IfNotPresent",
        "command": ["python3", "-u", "-c", textwrap.dedent(program)],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "resources": {"requests": {"cpu": "5m", "memory": "16Mi"}},
        **more,
    }


def leased_job(name: str, program: str = "", *, containers: list[Json] | None = None, **spec: Any) -> Json:
    """A LeasedJob that runs `program`; `spec` in the API's own names, `pod` for more of the Pod's spec."""
    pod = spec.pop("pod", {})
    labels = spec.pop("labels", None)
    return {
        "apiVersion": "leasedjob.io/v1alpha1",
        "kind": "LeasedJob",
        "metadata": {"name": name},
        "spec": {
            **({} if spec.get("type") == "Initial" else {"schedule": "* * * * *"}),
            **spec,
            "template": {
                **({"metadata": {"labels": labels}} if labels else {}),
                "spec": {
                    "securityContext": {
                        "runAsNonRoot": True,
                        "runAsUser": 65532,
                        "seccompProfile": {"type": "RuntimeDefault"},
                    },
                    "containers": containers or [container(program)],
                    **pod,
                },
            },
        },
    }


def run_of(job: str, name: str, **spec: Any) -> Json:
    return {
        "apiVersion": "leasedjob.io/v1alpha1",
        "kind": "LeasedJobRun",
        "metadata": {"name": name},
        "spec": {"jobName": job, **spec},
    }
