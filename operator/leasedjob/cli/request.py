"""Asking the operator for something: a LeasedJobRun is created, and its status is the answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from leasedjob.cli.exits import Failure, Phase
from leasedjob.protocol import GROUP, VERSION

if TYPE_CHECKING:
    from leasedjob.cli.cluster import Cluster

Object = dict[str, Any]


def request(cluster: Cluster, name: str, **spec: object) -> Object:
    """Creates a LeasedJobRun for the LeasedJob `name`, which owns it, and returns it as stored.

    Args:
        spec: the LeasedJobRun's, without jobName.

    Raises:
        Failure: NOT_FOUND where there is no such LeasedJob: a wrong name is an error here, not an object that waits.
    """
    job = cluster.get("leasedjobs", name)
    body: Object = {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": "LeasedJobRun",
        "metadata": {
            "generateName": f"{name}-",
            "ownerReferences": [
                {
                    "apiVersion": f"{GROUP}/{VERSION}",
                    "kind": "LeasedJob",
                    "name": name,
                    "uid": job["metadata"]["uid"],
                }
            ],
        },
        "spec": {"jobName": name, **spec},
    }
    return cluster.create("leasedjobruns", body)


def raise_unless_good(run: Object) -> None:
    """Ends the command with the code of a LeasedJobRun that has ended otherwise than well."""
    phase = Phase.of(run)
    if phase.exit_code:
        message = (run.get("status") or {}).get("message") or phase
        raise Failure(phase.exit_code, f"run {run['metadata']['name']}: {message}")
