"""The chart, installed in a test cluster on a PostgreSQL beside it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tests.cluster.database import OWNER, OWNER_PASSWORD, Database
from tests.cluster.layout import REPOSITORY, Cache
from tests.cluster.progress import ClusterError, Progress, output
from tests.cluster.source import Cluster

RELEASE: Final = "leasedjob"
SYSTEM: Final = "leasedjob-system"
SECRET: Final = "leasedjob-database"
INSTALL_SECONDS: Final = 180


def secret(database: Database, dbname: str, name: str = SECRET) -> dict[str, Any]:
    """The Secret that the chart's `database.existingSecret` names."""
    values = {
        "host": database.host,
        "port": str(database.port),
        "dbname": dbname,
        "user": OWNER,
        "password": OWNER_PASSWORD,
    }
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "stringData": values}


def install(
    cluster: Cluster,
    database: Database,
    dbname: str,
    cache: Cache,
    progress: Progress,
    *,
    values: Mapping[str, Any],
    images: Sequence[str],
) -> None:
    """The release, installed or brought to these values; waits until its operators are ready.

    Args:
        dbname: a database there that the operator's role owns (`database.create_owned`).
        values: of the chart.
        images: `--set` arguments that name its images (`source.deliver`).

    Raises:
        ClusterError: it isn't ready in time; with what its Pods and Events say.
    """
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": SYSTEM, "labels": labels}}
    log = cache.logs / f"release-{cluster.name}.log"
    client = [cluster.kubectl, "--kubeconfig", str(cluster.kubeconfig)]
    with tempfile.TemporaryDirectory(prefix="leasedjob-release-") as name:
        folder = Path(name)
        for number, body in enumerate((namespace, secret(database, dbname))):
            file = folder / f"{number}.json"
            file.write_text(json.dumps(body))
            progress.run([*client, "apply", "-n", SYSTEM, "-f", str(file)], what="kubectl apply", log=log, timeout=60)
        file = folder / "values.json"
        file.write_text(json.dumps({"database": {"existingSecret": SECRET}, **values}))
        argv = [cluster.helm, "--kubeconfig", str(cluster.kubeconfig), "upgrade", "--install", RELEASE]
        argv += [str(REPOSITORY / "charts" / "leasedjob"), "-n", SYSTEM, "-f", str(file), *images]
        argv += ["--wait", f"--timeout={INSTALL_SECONDS}s"]
        try:
            progress.run(argv, what=f"helm install in {cluster.name}", log=log, timeout=INSTALL_SECONDS + 60)
        except ClusterError as error:
            seen = [
                output([*client, "-n", SYSTEM, *words.split()]) or ""
                for words in (
                    "get pods -o wide",
                    "get events --sort-by=.lastTimestamp",
                    "logs --prefix --all-containers --tail=40 -l app.kubernetes.io/part-of=leasedjob",
                )
            ]
            raise ClusterError("\n".join([str(error), *seen])) from error
