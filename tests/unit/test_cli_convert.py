"""A CronJob as a LeasedJob: field by field what stays, what is warned of, what is refused."""

from __future__ import annotations

import copy
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from leasedjob.api import verdict
from leasedjob.cli.cronjob import Conversion, Severity, Wishes, convert
from leasedjob.cli.exits import Exit
from leasedjob.cli.kubectl import PROGRAM, plugin

Object = dict[str, Any]
NOW = datetime(2026, 7, 20, tzinfo=UTC)
JOB = "spec.jobTemplate.spec"
TEMPLATE = f"{JOB}.template"

# Every field of CronJobSpec and JobSpec in Kubernetes 1.37 (k8s.io/api v0.37, batch/v1).
CRON_JOB_SPEC = {
    "schedule", "timeZone", "startingDeadlineSeconds", "concurrencyPolicy", "suspend", "jobTemplate",
    "successfulJobsHistoryLimit", "failedJobsHistoryLimit",
}  # fmt: skip
JOB_SPEC = {
    "parallelism", "completions", "activeDeadlineSeconds", "podFailurePolicy", "successPolicy", "backoffLimit",
    "backoffLimitPerIndex", "maxFailedIndexes", "selector", "manualSelector", "template", "ttlSecondsAfterFinished",
    "completionMode", "suspend", "podReplacementPolicy", "managedBy", "scheduling",
}  # fmt: skip


def cron_job(
    job: Object | None = None, pod: Object | None = None, container: Object | None = None, **spec: Any
) -> Object:
    """A CronJob with a zone without clock changes, and what a test adds; None takes a field away."""
    body = {
        "apiVersion": "batch/v1",
        "kind": "CronJob",
        "metadata": {"name": "nightly"},
        "spec": {
            "schedule": "0 3 * * *",
            "timeZone": "Etc/UTC",
            **spec,
            "jobTemplate": {
                "spec": {
                    "backoffLimit": 0,
                    **(job or {}),
                    "template": {
                        "spec": {
                            "restartPolicy": "Never",
                            **(pod or {}),
                            "containers": [{"name": "main", "image": "example/main:1", **(container or {})}],
                        }
                    },
                }
            },
        },
    }
    return pruned(body)


def pruned(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: pruned(child) for key, child in value.items() if child is not None}
    return [pruned(child) for child in value] if isinstance(value, list) else value


def of(body: Object, wishes: Wishes | None = None) -> Conversion:
    before = copy.deepcopy(body)
    conversion = convert(body, NOW, wishes or Wishes())
    assert body == before, "the input was changed"
    if conversion.job is not None:
        assert verdict(conversion.job) == []
    return conversion


def spec_of(body: Object, wishes: Wishes | None = None) -> Object:
    job = of(body, wishes).job
    assert job is not None
    spec: Object = job["spec"]
    return spec


def said(conversion: Conversion, severity: Severity) -> dict[str, str]:
    return {finding.field: finding.message for finding in conversion.findings if finding.severity is severity}


# --- what stays -------------------------------------------------------------------------------------------------------


def test_the_plainest_one_says_nothing_and_writes_out_cronjob_s_defaults() -> None:
    conversion = of(cron_job(job={"backoffLimit": None}))
    assert conversion.findings == ()
    assert conversion.job == {
        "apiVersion": "leasedjob.io/v1alpha1",
        "kind": "LeasedJob",
        "metadata": {"name": "nightly"},
        "spec": {
            "schedule": "0 3 * * *",
            "timeZone": "Etc/UTC",
            "concurrencyPolicy": "Allow",
            "backoffLimit": 6,
            "shutdown": {"preStopSeconds": 0, "terminationGracePeriodSeconds": 30},
            "template": {
                "spec": {"restartPolicy": "Never", "containers": [{"name": "main", "image": "example/main:1"}]}
            },
        },
    }


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (cron_job(startingDeadlineSeconds=200), {"startingDeadlineSeconds": 200}),
        (cron_job(concurrencyPolicy="Allow"), {"concurrencyPolicy": "Allow"}),
        (cron_job(concurrencyPolicy="Forbid"), {"concurrencyPolicy": "Forbid"}),
        (cron_job(concurrencyPolicy="Replace"), {"concurrencyPolicy": "Replace"}),
        (cron_job(suspend=True), {"suspend": True}),
        (cron_job(successfulJobsHistoryLimit=7), {"successfulRunsHistoryLimit": 7}),
        (cron_job(failedJobsHistoryLimit=0), {"failedRunsHistoryLimit": 0}),
        (cron_job({"backoffLimit": 4}), {"backoffLimit": 4}),
        (cron_job({"activeDeadlineSeconds": 60}), {"activeDeadlineSeconds": 60}),
        (
            cron_job(pod={"terminationGracePeriodSeconds": 45}),
            {"shutdown": {"preStopSeconds": 0, "terminationGracePeriodSeconds": 45}},
        ),
        (cron_job(schedule="@hourly"), {"schedule": "@hourly"}),
        # JSON from some languages
        (cron_job({"backoffLimit": 4.0}), {"backoffLimit": 4}),
    ],
)
def test_what_is_carried_over(body: Object, expected: Object) -> None:
    assert spec_of(body).items() >= expected.items()


@pytest.mark.parametrize(
    "job",
    [
        {"parallelism": 1, "completions": 1, "completionMode": "NonIndexed", "suspend": False},
        {"podReplacementPolicy": "Failed", "managedBy": "kubernetes.io/job-controller", "manualSelector": False},
        {"parallelism": 1},
    ],
)
def test_what_only_says_the_default_is_no_difference(job: Object) -> None:
    conversion = of(cron_job(job, successfulJobsHistoryLimit=3, failedJobsHistoryLimit=1, suspend=False))
    assert conversion.findings == ()
    assert "suspend" not in conversion.job["spec"]  # type: ignore[index]


def test_the_template_is_kept_as_written() -> None:
    pod = {"serviceAccountName": "shop", "nodeSelector": {"a": "b"}, "volumes": [{"name": "v", "emptyDir": {}}]}
    kept = spec_of(cron_job(pod=pod, container={"readinessProbe": {"exec": {"command": ["true"]}}}))["template"]["spec"]
    assert kept.items() >= pod.items()
    assert kept["containers"][0]["readinessProbe"] == {"exec": {"command": ["true"]}}


# --- schedule and zone ------------------------------------------------------------------------------------------------


def test_without_a_zone_the_likely_one_is_written_and_warned_of() -> None:
    body = cron_job(timeZone=None)
    assert spec_of(body)["timeZone"] == "Etc/UTC"
    assert "--default-time-zone" in said(of(body), Severity.WARNING)["spec.timeZone"]


def test_without_a_zone_the_user_may_name_it() -> None:
    conversion = of(cron_job(timeZone=None), Wishes(zone="Asia/Tokyo"))
    assert conversion.findings == ()
    assert conversion.job is not None
    assert conversion.job["spec"]["timeZone"] == "Asia/Tokyo"
    assert spec_of(cron_job(timeZone="Etc/UTC"), Wishes(zone="Asia/Tokyo"))["timeZone"] == "Etc/UTC"


def test_a_zone_whose_clock_changes_keeps_cronjob_s_nights() -> None:
    body = cron_job(timeZone="Europe/Rome")
    assert spec_of(body)["clockChangePolicy"] == "Kubernetes"
    assert "RunOnce" in said(of(body), Severity.WARNING)["spec.timeZone"]
    assert "clockChangePolicy" not in spec_of(cron_job(timeZone="Asia/Tokyo"))


@pytest.mark.parametrize("prefix", ["TZ", "CRON_TZ"])
def test_a_zone_in_the_schedule_moves_to_its_field(prefix: str) -> None:
    body = cron_job(schedule=f"{prefix}=Asia/Tokyo 0 3 * * *", timeZone=None)
    spec = spec_of(body)
    assert (spec["schedule"], spec["timeZone"]) == ("0 3 * * *", "Asia/Tokyo")
    assert "Asia/Tokyo" in said(of(body), Severity.WARNING)["spec.schedule"]


def test_two_zones_are_refused() -> None:
    body = cron_job(schedule="TZ=Asia/Tokyo 0 3 * * *", timeZone="Etc/UTC")
    assert "spec.schedule" in said(of(body), Severity.ERROR)


@pytest.mark.parametrize(
    ("schedule", "hint"),
    [
        ("@every 5m", "*/5 * * * *"),
        ("@every 1m", "* * * * *"),
        ("@every 2h", "0 */2 * * *"),
        ("@every 1h", "0 * * * *"),
        ("@every 1h30m", "no such schedule"),
        ("@every 45m", "no such schedule"),
        ("*/90 * * * *", "wider than"),
        ("0 4 31 6 *", "never fires"),
        ("TZ=Mars/Base 0 1 * * *", "not an IANA time zone"),
        ("TZ=", ""),
    ],
)
def test_schedules_that_mean_something_else_are_refused(schedule: str, hint: str) -> None:
    errors = said(of(cron_job(schedule=schedule, timeZone=None)), Severity.ERROR)
    assert errors.keys() <= {"spec.schedule", "spec.timeZone"}
    assert hint in " ".join(errors.values())
    assert errors


def test_not_before() -> None:
    assert spec_of(cron_job(), Wishes(not_before="2026-08-01T00:00:00Z"))["notBefore"] == "2026-08-01T00:00:00Z"


# --- differences ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "field", "text"),
    [
        (cron_job(suspend=True), "spec.suspend", "replays none"),
        (cron_job(concurrencyPolicy="Forbid"), "spec.concurrencyPolicy", "skips it for good"),
        (cron_job(concurrencyPolicy="Replace"), "spec.concurrencyPolicy", "has stopped"),
        (cron_job({"activeDeadlineSeconds": 60, "backoffLimit": 2}), f"{JOB}.activeDeadlineSeconds", "up to 3 of them"),
        (cron_job({"ttlSecondsAfterFinished": 60}), f"{JOB}.ttlSecondsAfterFinished", "by number"),
        (cron_job({"podReplacementPolicy": "TerminatingOrFailed"}), f"{JOB}.podReplacementPolicy", "has ended"),
        (cron_job(pod={"terminationGracePeriodSeconds": 1}), f"{TEMPLATE}.spec.terminationGracePeriodSeconds", "5 s"),
        (cron_job(successfulJobsHistoryLimit=5000), "spec.successfulJobsHistoryLimit", "1000"),
        (cron_job(pod={"initContainers": [{"name": "i", "image": "i"}]}), f"{TEMPLATE}.spec.initContainers", "fenced"),
        (cron_job(pod={"resources": {"limits": {"cpu": 1}}}), f"{TEMPLATE}.spec.resources", "three containers"),
        (
            cron_job(container={"livenessProbe": {"httpGet": {"port": 80}}}),
            f"{TEMPLATE}.spec.containers[0].livenessProbe",
            "whole Pod",
        ),
    ],
)
def test_what_is_warned_of(body: Object, field: str, text: str) -> None:
    conversion = of(body)
    assert conversion.job is not None
    assert text in said(conversion, Severity.WARNING)[field]


def test_a_native_sidecar_is_no_init_container_to_warn_of() -> None:
    pod = {"initContainers": [{"name": "proxy", "image": "i", "restartPolicy": "Always"}]}
    assert of(cron_job(pod=pod)).findings == ()


def test_a_deadline_without_retries_is_no_difference() -> None:
    assert of(cron_job({"activeDeadlineSeconds": 60, "backoffLimit": 0})).findings == ()


def test_labels_of_jobs_are_left_out_and_those_of_pods_stay() -> None:
    body = cron_job()
    body["spec"]["jobTemplate"]["metadata"] = {"labels": {"a": "b"}, "annotations": {"c": "d"}}
    body["spec"]["jobTemplate"]["spec"]["template"]["metadata"] = {"labels": {"e": "f"}}
    conversion = of(body)
    assert set(said(conversion, Severity.WARNING)) == {
        "spec.jobTemplate.metadata.labels",
        "spec.jobTemplate.metadata.annotations",
    }
    assert conversion.job is not None
    assert conversion.job["spec"]["template"]["metadata"] == {"labels": {"e": "f"}}


# --- refusals ---------------------------------------------------------------------------------------------------------

REFUSED: list[tuple[Object, str]] = [
    (cron_job({"parallelism": 3}), f"{JOB}.parallelism"),
    (cron_job({"parallelism": 0}), f"{JOB}.parallelism"),
    (cron_job({"completions": 2}), f"{JOB}.completions"),
    (cron_job({"completionMode": "Indexed", "completions": 1}), f"{JOB}.completionMode"),
    (cron_job({"podFailurePolicy": {"rules": []}}), f"{JOB}.podFailurePolicy"),
    (cron_job({"successPolicy": {"rules": []}}), f"{JOB}.successPolicy"),
    (cron_job({"backoffLimitPerIndex": 1}), f"{JOB}.backoffLimitPerIndex"),
    (cron_job({"maxFailedIndexes": 1}), f"{JOB}.maxFailedIndexes"),
    (cron_job({"selector": {"matchLabels": {"a": "b"}}}), f"{JOB}.selector"),
    (cron_job({"manualSelector": True}), f"{JOB}.manualSelector"),
    (cron_job({"suspend": True}), f"{JOB}.suspend"),
    (cron_job({"managedBy": "kueue.x-k8s.io/multikueue"}), f"{JOB}.managedBy"),
    (cron_job({"scheduling": {"schedulingPolicy": {"gang": {}}}}), f"{JOB}.scheduling"),
    (cron_job({"podReplacementPolicy": "Never"}), f"{JOB}.podReplacementPolicy"),
    (cron_job({"somethingNew": 1}), f"{JOB}.somethingNew"),
    (cron_job(somethingNew=1), "spec.somethingNew"),
    (cron_job(startingDeadlineSeconds=5), "spec.startingDeadlineSeconds"),
    (cron_job(concurrencyPolicy="Sometimes"), "spec.concurrencyPolicy"),
    (cron_job(pod={"restartPolicy": "OnFailure"}), f"{TEMPLATE}.spec.restartPolicy"),
    (cron_job(pod={"restartPolicy": "Always"}), f"{TEMPLATE}.spec.restartPolicy"),
    (cron_job(pod={"restartPolicy": None}), f"{TEMPLATE}.spec.restartPolicy"),
    (cron_job(pod={"terminationGracePeriodSeconds": 61}), f"{TEMPLATE}.spec.terminationGracePeriodSeconds"),
    (cron_job(pod={"hostNetwork": True}), f"{TEMPLATE}.spec.hostNetwork"),
    (cron_job(pod={"os": {"name": "windows"}}), f"{TEMPLATE}.spec"),
    (cron_job(pod={"nodeSelector": {"kubernetes.io/os": "windows"}}), f"{TEMPLATE}.spec"),
    (cron_job(container={"restartPolicy": "OnFailure"}), f"{TEMPLATE}.spec.containers[0].restartPolicy"),
    (cron_job(container={"startupProbe": {"httpGet": {"port": 1}}}), f"{TEMPLATE}.spec.containers[0].startupProbe"),
    (
        cron_job(container={"livenessProbe": {"exec": {"command": ["true"]}}}),
        f"{TEMPLATE}.spec.containers[0].livenessProbe.exec",
    ),
    (
        cron_job(
            container={"env": [{"name": "J", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['job-name']"}}}]}
        ),
        f"{TEMPLATE}.spec.containers[0].env[0].valueFrom.fieldRef.fieldPath",
    ),
    (
        cron_job(pod={"topologySpreadConstraints": [{"matchLabelKeys": ["batch.kubernetes.io/controller-uid"]}]}),
        f"{TEMPLATE}.spec.topologySpreadConstraints[0].matchLabelKeys[0]",
    ),
    (
        cron_job(pod={"topologySpreadConstraints": [{"labelSelector": {"matchLabels": {"job-name": "x"}}}]}),
        f"{TEMPLATE}.spec.topologySpreadConstraints[0].labelSelector.matchLabels[job-name]",
    ),
]


@pytest.mark.parametrize(("body", "field"), REFUSED, ids=[field for _, field in REFUSED])
def test_what_is_refused_is_named(body: Object, field: str) -> None:
    conversion = of(body)
    assert conversion.job is None
    assert set(said(conversion, Severity.ERROR)) == {field}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"spec": None}, "spec"),
        ({"spec": {"schedule": "@daily"}}, "spec.jobTemplate"),
        ({"spec": {"schedule": "@daily", "jobTemplate": {"spec": {}}}}, f"{JOB}.template"),
        ({"apiVersion": "batch/v2alpha1"}, "apiVersion"),
        ({"metadata": {"generateName": "nightly-"}}, "metadata.name"),
    ],
)
def test_what_is_no_cronjob(change: Object, field: str) -> None:
    conversion = of({**cron_job(), **change})
    assert conversion.job is None
    assert set(said(conversion, Severity.ERROR)) == {field}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (cron_job(schedule=5), "spec.schedule"),
        (cron_job(suspend="true"), "spec.suspend"),
        (cron_job({"parallelism": "2"}), f"{JOB}.parallelism"),
        (cron_job({"backoffLimit": True}), f"{JOB}.backoffLimit"),
        (cron_job({"backoffLimit": -1}), f"{JOB}.backoffLimit"),
        (cron_job({"activeDeadlineSeconds": 0}), f"{JOB}.activeDeadlineSeconds"),
        (cron_job(timeZone=["UTC"]), "spec.timeZone"),
    ],
)
def test_a_value_of_the_wrong_type_names_its_field(body: Object, field: str) -> None:
    assert set(said(of(body), Severity.ERROR)) == {field}


def test_one_fault_hides_no_other_one() -> None:
    body = cron_job(
        {"parallelism": 2},
        {"restartPolicy": "OnFailure"},
        {"startupProbe": {"httpGet": {"port": 1}}},
        schedule="@every 5m",
    )
    assert set(said(of(body), Severity.ERROR)) == {
        "spec.schedule",
        f"{JOB}.parallelism",
        f"{TEMPLATE}.spec.restartPolicy",
        f"{TEMPLATE}.spec.containers[0].startupProbe",
    }


@pytest.mark.parametrize("field", sorted(CRON_JOB_SPEC | JOB_SPEC))
def test_every_field_of_kubernetes_1_37_has_an_answer(field: str) -> None:
    """Nothing that CronJob has is called unknown, and nothing is dropped in silence."""
    strange = {"schedule": "@weekly", "jobTemplate": None, "template": None}
    value: Any = strange.get(field, "x")
    body = cron_job()
    for part, names in ((body["spec"], CRON_JOB_SPEC), (body["spec"]["jobTemplate"]["spec"], JOB_SPEC)):
        if field in names and value is not None:
            part[field] = value
    conversion = of(body)
    assert "is not known" not in " ".join(said(conversion, Severity.ERROR).values())
    assert conversion.findings or field in strange


# --- what a cluster sends ---------------------------------------------------------------------------------------------


def test_a_live_object_loses_what_only_the_server_and_other_tools_say() -> None:
    body = cron_job(
        pod={
            "dnsPolicy": "ClusterFirst",
            "schedulerName": "default-scheduler",
            "securityContext": {},
            "terminationGracePeriodSeconds": 30,
            "serviceAccount": "shop",
            "serviceAccountName": "shop",
        },
        container={
            "resources": {},
            "terminationMessagePath": "/dev/termination-log",
            "terminationMessagePolicy": "FallbackToLogsOnError",
            "imagePullPolicy": "Always",
        },
    )
    body["metadata"] |= {
        "uid": "1",
        "resourceVersion": "2",
        "generation": 3,
        "creationTimestamp": "2026-01-01T00:00:00Z",
        "managedFields": [],
        "namespace": "shop",
        "labels": {"app": "shop", "kustomize.toolkit.fluxcd.io/name": "shop"},
        "annotations": {
            "kubectl.kubernetes.io/last-applied-configuration": "{}",
            "argocd.argoproj.io/tracking-id": "x",
            "note": "kept",
        },
        "ownerReferences": [{"kind": "Shop"}],
    }
    body["status"] = {"lastScheduleTime": "2026-01-01T00:00:00Z"}
    body["spec"]["jobTemplate"]["spec"]["template"]["metadata"] = {"creationTimestamp": "null"}
    conversion = of(body)
    assert conversion.job is not None
    assert conversion.job["metadata"] == {
        "name": "nightly",
        "namespace": "shop",
        "labels": {"app": "shop"},
        "annotations": {"note": "kept"},
    }
    assert conversion.job["spec"]["template"] == {
        "spec": {
            "restartPolicy": "Never",
            "serviceAccountName": "shop",
            "containers": [
                {
                    "name": "main",
                    "image": "example/main:1",
                    "imagePullPolicy": "Always",
                    "terminationMessagePolicy": "FallbackToLogsOnError",
                }
            ],
        }
    }
    assert set(said(conversion, Severity.WARNING)) == {
        "metadata.labels[kustomize.toolkit.fluxcd.io/name]",
        "metadata.annotations[argocd.argoproj.io/tracking-id]",
        "metadata.ownerReferences",
    }


# --- the verb ---------------------------------------------------------------------------------------------------------


def call(*words: str, stdin: str | None = None) -> Result:
    result = CliRunner().invoke(plugin, ["convert", *words], prog_name=PROGRAM, input=stdin)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def as_yaml(*bodies: Object) -> str:
    return "---\n".join(yaml.safe_dump(body) for body in bodies)


def named(body: Object, name: str) -> Object:
    return {**body, "metadata": {"name": name}}


def test_many_documents_and_other_kinds(tmp_path: Path) -> None:
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "web"}}
    (tmp_path / "all.yaml").write_text(as_yaml(named(cron_job(), "one"), service, named(cron_job(), "two")))
    result = call("-f", str(tmp_path / "all.yaml"))
    assert result.exit_code == Exit.OK
    assert [job["metadata"]["name"] for job in yaml.safe_load_all(result.stdout)] == ["one", "two"]
    assert "service/web is left out" in result.stderr
    assert result.stderr.count("note: where several clusters share a database") == 1


def test_those_that_can_be_converted_are_and_the_exit_code_tells_of_the_others(tmp_path: Path) -> None:
    (tmp_path / "all.yaml").write_text(as_yaml(named(cron_job(), "one"), named(cron_job({"parallelism": 2}), "two")))
    result = call(str(tmp_path / "all.yaml"))
    assert result.exit_code == Exit.INVALID
    assert [job["metadata"]["name"] for job in yaml.safe_load_all(result.stdout)] == ["one"]
    assert f"error: cronjob/two: {JOB}.parallelism: is 2" in result.stderr
    assert result.stderr.splitlines()[-1].endswith("something else: cronjob/two")


def test_standard_input_json_and_quiet() -> None:
    result = call("-o", "json", "-q", stdin=json.dumps(cron_job(timeZone=None)))
    assert (result.exit_code, result.stderr) == (Exit.OK, "")
    assert json.loads(result.stdout)["kind"] == "LeasedJob"
    both = call("-", "-o", "json", "-q", stdin=as_yaml(named(cron_job(), "one"), named(cron_job(), "two")))
    assert [item["metadata"]["name"] for item in json.loads(both.stdout)["items"]] == ["one", "two"]
    assert call("-o", "name", "-q", stdin=as_yaml(cron_job())).stdout == "leasedjob.leasedjob.io/nightly\n"


def test_lists_of_both_kinds() -> None:
    item = {"metadata": {"name": "a"}, "spec": cron_job()["spec"]}
    typed = {"apiVersion": "batch/v1", "kind": "CronJobList", "items": [item]}
    assert call("-o", "name", "-q", stdin=json.dumps(typed)).stdout == "leasedjob.leasedjob.io/a\n"
    mixed = {"apiVersion": "v1", "kind": "List", "items": [named(cron_job(), "b")]}
    assert call("-o", "name", "-q", stdin=json.dumps(mixed)).stdout == "leasedjob.leasedjob.io/b\n"


def test_a_folder_is_read_file_by_file(tmp_path: Path) -> None:
    (tmp_path / "b.yml").write_text(as_yaml(named(cron_job(), "b")))
    (tmp_path / "a.json").write_text(json.dumps(named(cron_job(), "a")))
    (tmp_path / "c.txt").write_text("not a manifest")
    assert call("-f", str(tmp_path), "-o", "name", "-q").stdout.split() == [
        "leasedjob.leasedjob.io/a",
        "leasedjob.leasedjob.io/b",
    ]


def test_a_script_stays_readable() -> None:
    script = "set -e\necho one\necho two\n"
    shown = call("-q", stdin=as_yaml(cron_job(container={"args": [script]}))).stdout
    assert "- |\n" in shown
    assert yaml.safe_load(shown)["spec"]["template"]["spec"]["containers"][0]["args"] == [script]


def test_yaml_is_read_as_kubernetes_reads_it() -> None:
    body = as_yaml(cron_job()).replace(
        "  name: nightly\n", "  name: nightly\n  annotations: {day: 2026-07-20, at: 1:30}\n"
    )
    assert yaml.safe_load(call("-q", stdin=body).stdout)["metadata"]["annotations"] == {
        "day": "2026-07-20",
        "at": "1:30",
    }


@pytest.mark.parametrize(
    ("text", "code", "message"),
    [
        ("", Exit.USAGE, "the input is empty"),
        ("a: [", Exit.USAGE, "standard input: line 1, column 5:"),
        ("kind: CronJob\nkind: Job\n", Exit.USAGE, "line 2, column 1: the key 'kind' is given twice"),
        ("just text", Exit.USAGE, "is no Kubernetes object"),
        ("kind: Service\n", Exit.USAGE, "there is no CronJob in it"),
        ("\x00", Exit.USAGE, "special characters"),
    ],
)
def test_bad_input_is_one_line(text: str, code: Exit, message: str) -> None:
    result = call(stdin=text)
    assert result.exit_code == code
    assert message in result.stderr
    assert sum(line.startswith("Error:") for line in result.stderr.splitlines()) == 1
    assert result.stdout == ""


def test_a_file_that_is_not_there_and_how_a_live_one_is_written(tmp_path: Path) -> None:
    assert call("-f", str(tmp_path / "none.yaml")).exit_code == Exit.NOT_FOUND
    result = call("nightly")
    assert result.exit_code == Exit.NOT_FOUND
    assert "cronjob/nightly" in result.stderr
