"""`make demo`: from nothing to two ticks of examples/01-hello, each step with its elapsed time; `make demo-down`."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.cluster import source
from tests.cluster.images import PUBLIC_BASE_IMAGE
from tests.cluster.layout import REPOSITORY, Cache
from tests.cluster.progress import ClusterError, Progress, clean_environment, fail, output
from tests.cluster.source import Cluster

NAME = "demo"
RELEASE = "leasedjob"
SYSTEM = "leasedjob-system"  # the operator and its PostgreSQL
NAMESPACE = "leasedjob-demo"  # the example
MARK = "leasedjob.io/demo"  # on namespaces that the demo made, and may remove
EXAMPLE = "examples/01-hello"
JOB = "hello"
TICKS = 2
ENDED = ("Success", "Failed", "Cancelled", "Replaced")
KEEP_VALUES = "--reset-then-reuse-values"  # helm 3.14 and newer: the chart's new defaults, and what was set before
INSTALL_SECONDS = 180
TICKS_SECONDS = 240


class Client:
    """kubectl and helm on the demo's cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def kubectl(self, *words: str) -> list[str]:
        return [self.cluster.kubectl, "--kubeconfig", str(self.cluster.kubeconfig), *words]

    def helm(self, *words: str) -> list[str]:
        return [self.cluster.helm, "--kubeconfig", str(self.cluster.kubeconfig), *words]

    def get(self, *words: str) -> dict[str, Any] | None:
        text = output(self.kubectl("get", *words, "-o", "json", "--request-timeout=10s"))
        return json.loads(text) if text else None


def finished(job: dict[str, Any] | None) -> dict[str, str]:
    """Run key -> outcome of the runs that have ended, oldest first."""
    runs = ((job or {}).get("status") or {}).get("recentRuns") or []
    ended = {run["runKey"]: str(run["outcome"]) for run in runs if run.get("outcome") in ENDED}
    return dict(sorted(ended.items()))


def waiting_for(job: dict[str, Any] | None) -> str:
    """Why there is no result yet, in the words of the object's own status."""
    status = (job or {}).get("status") or {}
    for condition in status.get("conditions") or []:
        if condition.get("type") == "Ready" and condition.get("status") != "True":
            return f"{condition.get('reason')}: {condition.get('message')}"
    for run in status.get("recentRuns") or []:
        if run.get("outcome") not in ENDED and run.get("reason"):
            return f"{run.get('outcome')}, {run['reason']}: {run.get('message', '')}"
    return f"the next tick is {status.get('nextScheduleTime', 'not known yet')}"


def up(cache: Cache, progress: Progress) -> None:
    """Does all of the demo; each step does only what isn't done yet."""
    progress.say("step 1 of 5: a Kubernetes cluster")
    cluster = source.up(cache, NAME, progress)
    client = Client(cluster)
    _remember(cache, cluster)
    progress.say("step 2 of 5: the images")
    values = source.deliver(cluster, cache, progress)
    progress.say("step 3 of 5: LeasedJob and a small PostgreSQL, by helm")
    _install(client, values, cache, progress)
    progress.say(f"step 4 of 5: kubectl apply -f {EXAMPLE}/")
    _namespace(client, NAMESPACE, cache, progress)
    apply = client.kubectl("apply", "-n", NAMESPACE, "-f", str(REPOSITORY / EXAMPLE / "leasedjob.yaml"))
    progress.run(apply, what=f"applying {EXAMPLE}", log=cache.logs / "demo.log", timeout=60)
    progress.say(f"step 5 of 5: {TICKS} ticks; one is due at each full minute")
    _wait_for_ticks(client, progress)
    _show(client)
    print_next(cluster, progress)


def _remember(cache: Cache, cluster: Cluster) -> None:
    """So that demo-down finds a cluster that the user named."""
    if os.environ.get(source.KUBECONFIG_VARIABLE):
        cache.clusters.mkdir(parents=True, exist_ok=True)
        (cache.clusters / f"{NAME}.user.json").write_text(json.dumps({"kubeconfig": str(cluster.kubeconfig)}))


def _namespace(client: Client, name: str, cache: Cache, progress: Progress) -> None:
    """A namespace of the demo's own, under the restricted Pod Security profile."""
    found = client.get("namespace", name)
    if found is None:
        create = client.kubectl("create", "namespace", name)
        progress.run(create, what=f"creating the namespace {name}", log=cache.logs / "demo.log", timeout=60)
        labels = (f"{MARK}=true", "pod-security.kubernetes.io/enforce=restricted")
        label = client.kubectl("label", "namespace", name, *labels)
        progress.run(label, what=f"labelling the namespace {name}", log=cache.logs / "demo.log", timeout=60)
    elif found["metadata"].get("labels", {}).get(MARK) != "true":
        raise ClusterError(
            f"the cluster has a namespace {name} that the demo didn't make; is LeasedJob installed there already? "
            "The demo leaves it alone: use another cluster, or remove that namespace"
        )


def _install(client: Client, values: list[str], cache: Cache, progress: Progress) -> None:
    _namespace(client, SYSTEM, cache, progress)
    chart = str(REPOSITORY / "charts" / "leasedjob")
    settings = ["--set", "postgresql.embedded=true", "--set", "crds.keep=false", *values]
    wait = ["--wait", f"--timeout={INSTALL_SECONDS}s"]
    kept = _values_that_stay(client, settings, progress)
    argv = client.helm("upgrade", "--install", RELEASE, chart, "-n", SYSTEM, *kept, *settings, *wait)
    try:
        progress.run(argv, what="helm install", log=cache.logs / "demo.log", timeout=INSTALL_SECONDS + 60)
    except ClusterError as error:
        pods = output(client.kubectl("get", "pods", "-n", SYSTEM, "-o", "wide"))
        events = output(client.kubectl("get", "events", "-n", SYSTEM, "--sort-by=.lastTimestamp"))
        raise ClusterError(f"{error}\n\nPods:\n{pods}\nEvents:\n{events}") from error
    progress.say("  the operator is ready")


def _values_that_stay(client: Client, settings: list[str], progress: Progress) -> list[str]:
    """What keeps the values that somebody has given the release since the demo ran before; and says what becomes of
    them. `settings`: the demo's own, which hold in any case."""
    values = output(client.helm("get", "values", RELEASE, "-n", SYSTEM, "-o", "json"))
    if values is None:
        return []
    mine = {setting.partition("=")[0] for setting in settings}
    theirs = sorted(set(flat(json.loads(values) or {})) - mine)
    if KEEP_VALUES in (output(client.helm("upgrade", "--help")) or ""):
        if theirs:
            progress.say(f"  values that were set before stay: {', '.join(theirs)}")
        return [KEEP_VALUES]
    if theirs:
        progress.say(f"  this helm is older than 3.14: values that were set before are reset: {', '.join(theirs)}")
    return []


def flat(values: dict[str, Any], prefix: str = "") -> list[str]:
    """The paths of a tree of values, as `--set` names them."""
    found: list[str] = []
    for key, value in values.items():
        path = f"{prefix}{key}"
        found += flat(value, f"{path}.") if isinstance(value, dict) and value else [path]
    return found


def _wait_for_ticks(client: Client, progress: Progress) -> None:
    deadline = time.monotonic() + TICKS_SECONDS
    reported: set[str] = set()
    said = time.monotonic()
    while True:
        job = client.get("leasedjob", JOB, "-n", NAMESPACE)
        for key, outcome in finished(job).items():
            if key not in reported:
                reported.add(key)
                progress.say(f"  tick {key}: {outcome}")
        if len(reported) >= TICKS:
            return
        if time.monotonic() > deadline:
            pods = output(client.kubectl("get", "pods,events", "-n", NAMESPACE))
            raise ClusterError(
                f"waited {TICKS_SECONDS} s for {TICKS} ticks of {JOB}; {waiting_for(job)}\n{pods}\n"
                f"The operator's log: {shlex.join(client.kubectl('logs', '-n', SYSTEM, 'deployment/leasedjob'))}"
            )
        if time.monotonic() - said > 20:
            said = time.monotonic()
            progress.say(f"  ... {waiting_for(job)}")
        time.sleep(0.5)


def plugin_environment(cluster: Cluster) -> dict[str, str]:
    """kubectl finds the plugin `kubectl leasedjob` on PATH."""
    scripts = str(Path(sys.executable).parent)
    path = os.pathsep.join([scripts, str(Path(cluster.kubectl).parent), os.environ.get("PATH", "")])
    return clean_environment(KUBECONFIG=str(cluster.kubeconfig), PATH=path)


def _show(client: Client) -> None:
    environment = plugin_environment(client.cluster)
    commands = (
        ["kubectl", "get", "leasedjobs", "-n", NAMESPACE],
        ["kubectl", "leasedjob", "runs", JOB, "-n", NAMESPACE],
        ["kubectl", "logs", "-n", NAMESPACE, "-l", f"leasedjob.io/job={JOB}", "-c", JOB, "--tail=5"],
    )
    for command in commands:
        print(f"\n$ {shlex.join(command)}", flush=True)
        program = [client.cluster.kubectl, *command[1:]]
        subprocess.run(program, env=environment, stdin=subprocess.DEVNULL, timeout=60, check=False)


def print_next(cluster: Cluster, progress: Progress) -> None:
    scripts = Path(sys.executable).parent
    folders = [str(scripts)]
    if shutil.which("kubectl") != cluster.kubectl:
        folders.append(str(Path(cluster.kubectl).parent))
    print(
        f"""
done in {progress.elapsed:.0f} s. What to try next, in this shell:

  export KUBECONFIG={cluster.kubeconfig}
  export PATH={os.pathsep.join(folders)}:$PATH
  kubectl get leasedjobs -n {NAMESPACE} --watch
  kubectl leasedjob run {JOB} -n {NAMESPACE}                 # a run now, under the same lease
  kubectl apply -n {NAMESPACE} -f examples/03-retries/       # fails twice, succeeds at its third attempt
  kubectl apply -n {NAMESPACE} -f examples/04-drained/       # stop its Pod and see it drain
  kubectl describe leasedjob {JOB} -n {NAMESPACE}

{workload_images(cluster)}
A mistake of yours shows as READY False, or in `kubectl leasedjob runs NAME -o wide`; docs/reference/troubleshooting.md
goes on from there. `helm upgrade {RELEASE} charts/leasedjob -n {SYSTEM} {KEEP_VALUES} --set KEY=VALUE` changes a value.

  make demo-down                                        # removes all of it
""",
        flush=True,
    )


def workload_images(cluster: Cluster) -> str:
    """Which image a job of one's own may use, in words."""
    here = "is in the cluster already, and runs sh and python3"
    if cluster.source is source.Source.USER:
        here = "is what the examples use"
    return (
        f"For a job of your own: the image {PUBLIC_BASE_IMAGE} {here}. Any other one has to be\n"
        "pulled by the cluster; until it is there the run is Pending, ErrImagePull."
    )


def down(cache: Cache, progress: Progress) -> None:
    """Removes what the demo made: its own cluster, or what it put into a cluster of the user's."""
    remembered = cache.clusters / f"{NAME}.user.json"
    if remembered.exists():
        kubeconfig = json.loads(remembered.read_text())["kubeconfig"]
        cluster = source.find(cache, NAME, {source.KUBECONFIG_VARIABLE: kubeconfig})
        assert cluster is not None
        client = Client(cluster)
        log = cache.logs / "demo.log"
        names = [SYSTEM, NAMESPACE]
        mine = [
            n for n in names if ((client.get("namespace", n) or {}).get("metadata") or {}).get("labels", {}).get(MARK)
        ]
        if NAMESPACE in mine:
            gone = client.kubectl("delete", "namespace", NAMESPACE, "--timeout=120s")
            progress.run(gone, what=f"deleting the namespace {NAMESPACE}", log=log, timeout=150)
        if SYSTEM in mine:
            uninstall = client.helm("uninstall", RELEASE, "-n", SYSTEM, "--ignore-not-found", "--wait")
            progress.run(uninstall, what="helm uninstall", log=log, timeout=150)
            gone = client.kubectl("delete", "namespace", SYSTEM, "--timeout=120s")
            progress.run(gone, what=f"deleting the namespace {SYSTEM}", log=log, timeout=150)
        remembered.unlink()
        progress.say(f"the demo is removed from the cluster of {kubeconfig}; the cluster itself is yours")
    source.down(cache, NAME, progress)


def main(argv: list[str]) -> int:
    verbs = {"up": up, "down": down}
    if len(argv) != 1 or argv[0] not in verbs:
        return fail("usage: python -m tests.cluster.demo up|down")
    try:
        verbs[argv[0]](Cache.from_env(), Progress())
    except ClusterError as error:
        return fail(str(error))
    except KeyboardInterrupt:
        return fail("interrupted; run it again to go on, or `make demo-down` to remove what was made")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
