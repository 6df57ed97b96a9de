"""Each rule of the CRDs, put to a real API server by `kubectl apply --dry-run=server`.

The cases are those of tests/contract/crd-rules.yaml, which the models answer alike (tests/unit/test_api_rules.py). All
cases of a kind go in one call of kubectl, which reports object by object.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from leasedjob.api.v1alpha1 import Condition, LeasedJobSpec, LeasedJobStatus, RunStatus, parse_job
from leasedjob.lease.trust import Timing, default_heartbeat
from tests.contract.crd_rules import TABLE, spec_of

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]


def job(case: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": "leasedjob.io/v1alpha1",
        "kind": "LeasedJob",
        "metadata": {"name": case["name"]},
        "spec": spec_of(case),
    }


def request(name: str, **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "leasedjob.io/v1alpha1",
        "kind": "LeasedJobRun",
        "metadata": {"name": name},
        "spec": {"jobName": "j", **spec},
    }


class Kubectl:
    """kubectl in one namespace of the cluster that KUBECONFIG names."""

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        self.program = os.environ.get("KUBECTL") or shutil.which("kubectl") or "kubectl"

    def __call__(self, *words: str, objects: list[dict[str, Any]] | None = None) -> subprocess.CompletedProcess[str]:
        text = None if objects is None else "\n---\n".join(json.dumps(entry, ensure_ascii=False) for entry in objects)
        return subprocess.run(
            [self.program, "-n", self.namespace, *words], input=text, capture_output=True, text=True, timeout=120
        )

    def ok(self, *words: str, objects: list[dict[str, Any]] | None = None) -> str:
        done = self(*words, objects=objects)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def apply(self, *objects: dict[str, Any]) -> tuple[set[str], dict[str, str]]:
        """Dry run on the server: (names accepted, name -> why refused)."""
        done = self("apply", "--dry-run=server", "-f", "-", objects=list(objects))
        accepted = set(re.findall(r"^\S+?/(\S+) \S+ \(server dry run\)", done.stdout, re.MULTILINE))
        # one refusal is reported as `The LeasedJob "x" is invalid: …`, one of several with a prefix
        said = r'^(?:The |Error from server \(Invalid\): .*?)LeasedJob\S* "([^"]+)" is invalid: '
        parts = re.split(said, done.stderr, flags=re.MULTILINE)
        assert not parts[0].strip(), parts[0][:1000]
        return accepted, dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.fixture(scope="module")
def kubectl() -> Iterator[Kubectl]:
    if not os.environ.get("KUBECONFIG"):
        if os.environ.get("CI") == "true":
            pytest.fail("KUBECONFIG names no cluster")
        pytest.skip("KUBECONFIG names no cluster")
    tool = Kubectl(f"crd-rules-{uuid.uuid4().hex[:8]}")
    for plural in ("leasedjobs", "leasedjobruns"):
        if tool("get", "crd", f"{plural}.leasedjob.io").returncode:
            tool.ok("apply", "--server-side", "-f", str(ROOT / "crds" / f"{plural}.yaml"))
        tool.ok("wait", "--for=condition=Established", f"crd/{plural}.leasedjob.io", "--timeout=30s")
    tool.ok("create", "namespace", tool.namespace)
    tool.ok("label", "namespace", tool.namespace, "leasedjob.io/test=true")
    yield tool
    tool("delete", "namespace", tool.namespace, "--wait=false")


@pytest.fixture(scope="module")
def verdicts(kubectl: Kubectl) -> tuple[set[str], dict[str, str]]:
    return kubectl.apply(*(job(case) for kind in ("accepted", "refused", "reported") for case in TABLE[kind]))


def cases(*kinds: str) -> list[Any]:
    return [pytest.param(case, id=case["name"]) for kind in kinds for case in TABLE[kind]]


@pytest.mark.parametrize("case", cases("accepted", "reported"))
def test_accepts(verdicts: tuple[set[str], dict[str, str]], case: dict[str, Any]) -> None:
    accepted, refused = verdicts
    assert case["name"] in accepted, refused.get(case["name"])


@pytest.mark.parametrize("case", cases("refused"))
def test_refuses_with_a_message_that_names_the_field(
    verdicts: tuple[set[str], dict[str, str]], case: dict[str, Any]
) -> None:
    accepted, refused = verdicts
    assert case["name"] not in accepted
    assert case["field"] in refused[case["name"]]
    assert case["says"] in refused[case["name"]]


def test_the_rule_for_the_trust_window_is_the_librarys(kubectl: Kubectl) -> None:
    """Both sides of the boundary, for every width of the probe's rounding."""
    objects, wanted = [], {}
    tens = range(20, 211, 10)  # the detection changes at a ten
    for duration in (*tens, *(ten + 9 for ten in tens), 301, 900, 86_400):
        for grace in (5, 17):
            edge = max(1, int(Timing(duration, 1, grace, 0).trust // 2))
            for heartbeat in (edge, edge + 1):
                name = f"t{duration}-{grace}-{heartbeat}"
                lease = {"durationSeconds": duration, "heartbeatSeconds": heartbeat}
                shutdown = {"preStopSeconds": 0, "terminationGracePeriodSeconds": grace}
                objects.append(job({"name": name, "spec": {"lease": lease, "shutdown": shutdown}}))
                wanted[name] = Timing(duration, heartbeat, grace, 0).problem() is None
    accepted, refused = kubectl.apply(*objects)
    assert {name: name in accepted for name in wanted} == wanted
    assert all("spec.lease.durationSeconds" in text for text in refused.values())


def test_the_default_heartbeat_is_the_librarys(kubectl: Kubectl) -> None:
    objects, wanted = [], {}
    for duration in range(60, 301, 11):
        for grace in (5, 30, 60):
            name = f"d{duration}-{grace}"
            shutdown = {"preStopSeconds": 0, "terminationGracePeriodSeconds": grace}
            objects.append(job({"name": name, "spec": {"lease": {"durationSeconds": duration}, "shutdown": shutdown}}))
            wanted[name] = Timing(duration, default_heartbeat(duration), grace, 0).problem() is None
    accepted, _ = kubectl.apply(*objects)
    assert {name: name in accepted for name in wanted} == wanted
    assert 0 < len(accepted) < len(objects)


@pytest.mark.parametrize("mode", ["client-side", "server-side"])
def test_the_template_is_kept_as_written_and_the_rest_has_its_defaults(kubectl: Kubectl, mode: str) -> None:
    written = job(
        {
            "name": f"kept-{mode}",
            "metadata": {
                "labels": {"app": "x"},
                "annotations": {"a/b": ""},
                "creationTimestamp": "2026-01-01T00:00:00Z",
            },
            "pod": {
                "initContainers": [{"name": "i", "image": "i:1", "restartPolicy": "Always", "x": {}}],
                "volumes": [{"name": "v", "emptyDir": {}, "unknown": [1, {"y": False}]}],
                "nodeSelector": {},
                "fieldOfTomorrow": {"deep": [{"a": 0}, [], ""]},
            },
            "container": {
                "command": [],
                "ports": [{"containerPort": 80, "protocol": "TCP"}],
                "livenessProbe": {"httpGet": {"path": "/", "port": "web", "httpHeaders": []}, "periodSeconds": 3},
                "resources": {"limits": {"cpu": 1, "memory": "64Mi"}},
            },
        }
    )
    flags = ["--server-side"] if mode == "server-side" else []
    kubectl.ok("apply", *flags, "--validate=strict", "-f", "-", objects=[written])
    stored = json.loads(kubectl.ok("get", "lj", written["metadata"]["name"], "-o", "json"))
    assert stored["spec"]["template"] == written["spec"]["template"]
    assert {key: value for key, value in stored["spec"].items() if key != "template"} == {
        "type": "Schedule",
        "schedule": TABLE["base"]["schedule"],
        "timeZone": "Etc/UTC",
        "clockChangePolicy": "RunOnce",
        "suspend": False,
        "concurrencyPolicy": "Forbid",
        "missedRunPolicy": "RunLatest",
        "missedRunLimit": 100,
        "backoffLimit": 0,
        "pendingDeadlineSeconds": 900,
        "lease": {"durationSeconds": 900},
        "shutdown": {"preStopSeconds": 10, "terminationGracePeriodSeconds": 60, "exitZeroOnStop": "Retry"},
        "successfulRunsHistoryLimit": 3,
        "failedRunsHistoryLimit": 1,
    }
    del stored["spec"]["template"]["spec"]["containers"][0]["livenessProbe"]  # its port has no such name
    assert isinstance(parse_job(stored), LeasedJobSpec)


def test_a_template_of_200_kib_is_accepted(kubectl: Kubectl) -> None:
    env = [{"name": f"V{number}", "value": "x" * 1000} for number in range(200)]
    kubectl.ok("apply", "-f", "-", objects=[job({"name": "large", "container": {"env": env}})])


@pytest.mark.parametrize(
    ("name", "first", "then", "field"),
    [
        ("code-change", {"code": "a"}, {"code": "b"}, "spec.code"),
        ("code-set", {}, {"code": "b"}, "spec.code"),
        ("code-unset", {"code": "a"}, {}, "spec.code"),
        ("type-change", {}, {"type": "Initial", "schedule": None}, "spec.type"),
    ],
)
def test_code_and_type_are_immutable(
    kubectl: Kubectl, name: str, first: dict[str, Any], then: dict[str, Any], field: str
) -> None:
    kubectl.ok("apply", "-f", "-", objects=[job({"name": name, "spec": first})])
    accepted, refused = kubectl.apply(job({"name": name, "spec": then}))
    assert not accepted
    assert field in refused[name]
    assert "immutable" in refused[name]


def test_everything_else_may_change(kubectl: Kubectl) -> None:
    everything = next(case for case in TABLE["accepted"] if case["name"] == "everything")
    kubectl.ok("apply", "-f", "-", objects=[job({"name": "change", "spec": {"code": everything["spec"]["code"]}})])
    accepted, refused = kubectl.apply(job({**everything, "name": "change"}))
    assert accepted == {"change"}, refused


def test_a_run_may_be_cancelled_and_nothing_else(kubectl: Kubectl) -> None:
    tick = "2026-07-20T03:00:00Z"
    kubectl.ok(
        "apply", "-f", "-", objects=[request("r1", tick=tick, reason="why"), request("r2"), request("r3", cancel=True)]
    )
    assert kubectl.apply(request("r1", tick=tick, reason="why", cancel=True))[0] == {"r1"}
    for entry, field in (
        (request("r1", tick=tick), "spec.reason"),
        (request("r1", reason="why"), "spec.tick"),
        (request("r1", tick="2026-07-20T04:00:00Z", reason="why"), "spec.tick"),
        (request("r2", tick=tick), "spec.tick"),
        (request("r2", jobName="other"), "spec.jobName"),
        (request("r3"), "spec.cancel"),
    ):
        accepted, refused = kubectl.apply(entry)
        assert not accepted
        assert field in refused[entry["metadata"]["name"]]


def test_a_run_names_its_job_and_an_instant_in_utc(kubectl: Kubectl) -> None:
    accepted, refused = kubectl.apply(
        request("good"),
        request("good-tick", tick="2026-07-20T03:00:00Z"),
        request("offset", tick="2026-07-20T03:00:00+02:00"),
        request("fraction", tick="2026-07-20T03:00:00.5Z"),
        request("words", tick="yesterday"),
        request("month", tick="2026-13-20T03:00:00Z"),
        request("no-job", jobName=""),
    )
    assert accepted == {"good", "good-tick"}
    assert set(refused) == {"offset", "fraction", "words", "month", "no-job"}
    assert all("spec.tick" in refused[name] for name in ("offset", "fraction", "words", "month"))
    assert "spec.jobName" in refused["no-job"]


def test_what_kubectl_get_shows(kubectl: Kubectl) -> None:
    kubectl.ok(
        "apply", "-f", "-", objects=[job({"name": "shown", "spec": {"timeZone": "Europe/Paris"}}), request("run")]
    )
    status = LeasedJobStatus(
        code="ns/shown",
        conditions=[
            Condition(
                type=kind,
                status=truth,
                reason=reason,
                message="m",
                last_transition_time=datetime(2026, 1, 1, tzinfo=UTC),
            )
            for kind, truth, reason in (("Other", "True", "Elsewhere"), ("Ready", "False", "CodeConflict"))
        ],
        active_count=1,
        last_result="Success",
        holder="here/ns/shown-1",
        last_schedule_time=datetime.now(UTC) - timedelta(hours=25),
        next_schedule_time=datetime(2099, 1, 1, tzinfo=UTC),
    )
    patch = json.dumps({"status": status.to_json()})
    kubectl.ok("patch", "lj", "shown", "--subresource=status", "--type=merge", "-p", patch)
    stored, lines = shown(kubectl, "leasedjobs", "shown", "-o", "wide")
    columns = ["NAME", "SCHEDULE", "TIME ZONE", "SUSPEND", "READY", "ACTIVE", "LAST SCHEDULE", "LAST RESULT", "AGE"]
    wide = ["NEXT", "REASON", "HOLDER", "ATTEMPT", "CODE"]
    places = [lines[0].index(name) for name in (*columns, *wide)]
    row = [lines[1][start:end].strip() for start, end in zip(places, [*places[1:], None], strict=True)]
    age = row.pop(columns.index("AGE"))
    assert re.fullmatch(r"[0-9]+[smh].*", age)
    seen = stored["status"]
    ready = next(c for c in seen["conditions"] if c["type"] == "Ready")
    assert row == [
        "shown",
        TABLE["base"]["schedule"],
        "Europe/Paris",
        "false",
        ready["status"],
        str(seen.get("activeCount", "")),
        "25h" if "lastScheduleTime" in seen else "",
        seen.get("lastResult", ""),
        seen.get("nextScheduleTime", ""),
        ready["reason"],
        seen.get("holder", ""),
        str((seen.get("recentRuns") or [{}])[0].get("attempt", "")),
        seen["code"],
    ]
    assert re.split(r" {2,}", kubectl.ok("get", "lj", "shown").splitlines()[0].strip()) == columns
    for words in (("leased",), ("lj,ljr",), ("leasedjobs,leasedjobruns",)):
        names = kubectl.ok("get", *words, "-o", "name")
        assert "leasedjob.leasedjob.io/shown" in names
        assert "leasedjobrun.leasedjob.io/run" in names


def shown(kubectl: Kubectl, *words: str) -> tuple[dict[str, Any], list[str]]:
    """The object and the table of one moment: an operator in this cluster may write its status meanwhile."""
    for _ in range(20):
        before = json.loads(kubectl.ok("get", *words[:2], "-o", "json"))
        lines = kubectl.ok("get", *words).splitlines()
        if json.loads(kubectl.ok("get", *words[:2], "-o", "json")) == before:
            return before, lines
    raise AssertionError("the status never came to rest")


def test_status_is_a_subresource_whose_fields_are_all_declared(kubectl: Kubectl) -> None:
    """A dry run: what is stored is the operator's, if there is one."""
    kubectl.ok("apply", "-f", "-", objects=[job({"name": "status"})])
    wanted = full_status().to_json()
    patch = json.dumps({"status": wanted, "spec": {"suspend": True}})
    words = ("--subresource=status", "--type=merge", "--dry-run=server", "-o", "json", "-p", patch)
    result = json.loads(kubectl.ok("patch", "lj", "status", *words))
    assert result["status"] == wanted, "nothing is pruned"
    assert result["spec"]["suspend"] is False
    ignored = json.loads(kubectl.ok("patch", "lj", "status", *words[1:]))
    assert ignored["spec"]["suspend"] is True
    assert ignored.get("status", {}).get("code") != wanted["code"]


def test_conditions_are_merged_by_type(kubectl: Kubectl) -> None:
    kubectl.ok("apply", "-f", "-", objects=[job({"name": "conditions"})])

    def apply(kind: str, *flags: str) -> set[str]:
        condition = Condition(type=kind, status="True", reason="R", last_transition_time=datetime.now(UTC))
        entry = {
            "apiVersion": "leasedjob.io/v1alpha1",
            "kind": "LeasedJob",
            "metadata": {"name": "conditions"},
            "status": {"conditions": [condition.to_json()]},
        }
        words = ("--server-side", f"--field-manager={kind}", "--subresource=status", "-o", "json", "-f", "-")
        result = json.loads(kubectl.ok("apply", *flags, *words, objects=[entry]))
        return {condition["type"] for condition in result["status"]["conditions"]}

    # an operator in this cluster may write its own conditions over the first one, once
    tries = (apply("One") and {"One", "Two"} <= apply("Two", "--dry-run=server") for _ in range(5))
    assert any(tries)


def full_status() -> LeasedJobStatus:
    """Every field, as long as it can be."""
    now = datetime(2026, 7, 20, 3, tzinfo=UTC)
    huge = '<"\n\x00é😀' * 60_000
    run = RunStatus(
        run_key=huge,
        attempt=3,
        outcome=huge,
        reason=huge,
        message=huge,
        holder=huge,
        pod_name=huge,
        scheduled_time=now,
        start_time=now,
        completion_time=now,
    )
    condition = Condition(
        type="Ready", status="False", observed_generation=1, last_transition_time=now, reason="R" * 99, message=huge
    )
    return LeasedJobStatus(
        observed_generation=1,
        code=huge,
        conditions=[condition.model_copy(update={"type": f"T{number}"}) for number in range(8)],
        next_schedule_time=now,
        next_schedule_times=[now] * 5,
        last_schedule_time=now,
        last_successful_time=now,
        last_failure_time=now,
        last_result=huge,
        active_count=2,
        holder=huge,
        active=[run] * 10,
        recent_runs=[run] * 10,
    )
