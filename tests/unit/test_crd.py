"""The generated CRDs: current, structural, described, and usable as a chart template."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from leasedjob.api import crd
from leasedjob.api.structural import PRESERVE, VALIDATIONS

OWN_LINES = "  annotations:\n    helm.sh/resource-policy: keep\n"
JOB, RUN = (kind.to_json() for kind in crd.KINDS)


def schema_of(document: dict[str, Any]) -> dict[str, Any]:
    schema: dict[str, Any] = document["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return schema


def nodes(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from nodes(child, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            yield from nodes(schema[key], f"{path}[]")


NODES = [pytest.param(path, node, id=path or ".") for kind in (JOB, RUN) for path, node in nodes(schema_of(kind))]


def at(schema: dict[str, Any], path: str) -> dict[str, Any]:
    for name in path.split("."):
        schema = schema["properties"][name] if name != "[]" else schema["items"]
    return schema


def test_the_files_of_the_repository_are_current() -> None:
    assert crd.stale(crd.ROOT) == []


def test_a_stale_file_is_noticed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert crd.main(["--check", "--root", str(tmp_path)]) == 1
    assert "make generate" in capsys.readouterr().err
    assert crd.main(["--root", str(tmp_path)]) == 0
    assert crd.main(["--check", "--root", str(tmp_path)]) == 0
    path = tmp_path / "crds" / "leasedjobs.yaml"
    path.write_text(path.read_text(encoding="utf-8").replace("default: 900", "default: 901"), encoding="utf-8")
    assert crd.main(["--check", "--root", str(tmp_path)]) == 1
    assert "+++ crds/leasedjobs.yaml (generated)" in capsys.readouterr().err


def test_yaml_says_what_was_meant_and_is_the_same_each_time() -> None:
    for kind in crd.KINDS:
        text = crd.to_yaml(kind.to_json())
        assert yaml.safe_load(text) == kind.to_json()
        assert text == crd.to_yaml(kind.to_json())


@pytest.mark.parametrize(("path", "node"), NODES)
def test_every_node_is_structural(path: str, node: dict[str, Any]) -> None:
    assert "type" in node or "x-kubernetes-int-or-string" in node, path
    forbidden = {"$ref", "$defs", "title", "nullable", "allOf", "oneOf", "const", "examples", "exclusiveMinimum"}
    assert not forbidden & node.keys(), path
    assert not ("properties" in node and "additionalProperties" in node), path
    if node.get("type") == "array":
        assert node["items"], path


@pytest.mark.parametrize(("path", "node"), NODES)
def test_what_rules_walk_is_bounded(path: str, node: dict[str, Any]) -> None:
    """The cost of a rule is estimated from these limits; without them the API server refuses the CRD."""
    inside = path.startswith(".spec")
    if inside and node.get("type") == "array" and "restartPolicyRules" not in path and "ephemeral" not in path:
        assert "maxItems" in node, path
    if inside and node.get("type") == "string" and VALIDATIONS in node:
        assert "maxLength" in node or "enum" in node, path


@pytest.mark.parametrize(("path", "node"), NODES)
def test_every_rule_is_about_a_field_and_leaves_its_name_to_the_api_server(path: str, node: dict[str, Any]) -> None:
    for rule in node.get(VALIDATIONS, []):
        assert rule["rule"]
        assert rule["message"]
        assert "\n" not in rule["message"]
        field = rule.get("fieldPath", path).removeprefix(".")
        leaf = field.split(".")[-1].removesuffix("[]")
        assert not re.match(rf"(\S*\.)?{leaf}\b", rule["message"]), (path, rule["message"])
        if "fieldPath" in rule:
            assert at(node, field)


def test_nothing_of_the_template_is_pruned_or_defaulted() -> None:
    template = at(schema_of(JOB), "spec.template")
    for path, node in nodes(template):
        assert "default" not in node, path
        if node.get("type") == "object" and "additionalProperties" not in node:
            assert node[PRESERVE] is True, path


def test_everything_of_spec_and_status_is_described() -> None:
    undescribed = [
        path
        for kind in (JOB, RUN)
        for path, node in nodes(schema_of(kind))
        if path.count(".") > 1 and not path.startswith(".spec.template.") and "[]" not in path.rpartition(".")[2]
        if not node.get("description")
    ]
    assert undescribed == []


def test_the_pages_name_every_field_and_every_refusal() -> None:
    for kind, document in zip(crd.KINDS, (JOB, RUN), strict=True):
        page = crd.files()[f"docs/reference/{kind.kind.lower()}.md"]
        for path, node in nodes(schema_of(document)):
            if path.count(".") > 1 and not path.startswith(".spec.template.") and not path.endswith("[]"):
                assert f"| `{path.rpartition('.')[2]}` |" in page, path
            if path not in (".spec.schedule", ".spec.schedules[]", ".spec.timeZone"):  # told in cron.md
                for rule in node.get(VALIDATIONS, []):
                    assert rule["message"] in page, path


def test_lists_that_appliers_share_are_maps() -> None:
    for schema, path, key in (
        (schema_of(JOB), "status.conditions", "type"),
        (schema_of(RUN), "status.conditions", "type"),
        (schema_of(JOB), "spec.template.spec.containers", "name"),
        (schema_of(JOB), "spec.template.spec.initContainers", "name"),
        (schema_of(JOB), "spec.template.spec.volumes", "name"),
        (schema_of(JOB), "spec.sidecar.imagePullSecrets", "name"),
    ):
        node = at(schema, path)
        assert (node["x-kubernetes-list-type"], node["x-kubernetes-list-map-keys"]) == ("map", [key])
        assert key in node["items"]["required"]


def test_names_and_columns() -> None:
    assert JOB["metadata"]["name"] == "leasedjobs.leasedjob.io"
    assert RUN["metadata"]["name"] == "leasedjobruns.leasedjob.io"
    assert [kind["spec"]["names"]["shortNames"] for kind in (JOB, RUN)] == [["lj"], ["ljr"]]
    for kind in (JOB, RUN):
        names = kind["spec"]["names"]
        assert not {names["plural"], names["singular"], *names["shortNames"]} & set(names["categories"]), (
            "kubectl would expand the resource's own name to the category"
        )
        assert kind["spec"]["versions"][0]["subresources"] == {"status": {}}
    columns = JOB["spec"]["versions"][0]["additionalPrinterColumns"]
    assert [c["name"] for c in columns if not c.get("priority")] == [
        "Schedule",
        "Time Zone",
        "Suspend",
        "Ready",
        "Active",
        "Last Schedule",
        "Last Result",
        "Age",
    ]
    assert [c["name"] for c in columns if c.get("priority")] == ["Next", "Reason", "Holder", "Attempt", "Code"]
    assert next(c for c in columns if c["name"] == "Next")["type"] == "string", "a date column can't print the future"


@pytest.mark.parametrize("kind", crd.KINDS, ids=lambda kind: kind.plural)
def test_columns_show_declared_fields(kind: crd.Kind) -> None:
    schema = schema_of(kind.to_json())
    for column in kind.columns:
        if column.path.startswith(".status.conditions"):
            field = column.path.rpartition(".")[2]
            assert column.path == f'.status.conditions[?(@.type=="Ready")].{field}'
            assert at(schema, f"status.conditions.[].{field}")["type"] == column.type
        elif column.name == "Schedule":  # whichever of the two there is
            assert column.path == ".spec['schedule','schedules']"
            assert {"schedule", "schedules"} <= set(at(schema, "spec")["properties"])
        elif not column.path.startswith(".metadata"):
            node = at(schema, column.path.removeprefix(".").replace("[0]", ".[]"))
            assert column.type == {"date": "string"}.get(column.type, node["type"]) or node.get("format") == "date-time"


def test_the_charts_copy_is_the_crd_within_the_values_conditions() -> None:
    for kind in crd.KINDS:
        text = crd.chart_copy(kind)
        assert text.startswith("{{- if .Values.crds.enabled }}\n")
        assert text.endswith("{{- end }}\n")
        document = yaml.safe_load(
            "\n".join(line for line in text.splitlines() if "{{" not in line).replace(OWN_LINES, "")
        )
        assert document == kind.to_json()
        assert len(re.findall(r"\{\{- (?:if|with)", text)) == len(re.findall(r"\{\{- end", text))


def test_client_side_apply_can_store_its_copy() -> None:
    """kubectl apply keeps the object in an annotation, which may have 256 KiB."""
    assert all(len(crd.to_yaml(kind.to_json())) < 100_000 for kind in crd.KINDS)
