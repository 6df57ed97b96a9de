"""Every block of the documentation that can be checked without a database or a cluster is.

Those with Python, SQL and shell that need a database are run in tests/integration/test_docs.py; the steps of the
tutorial on a cluster in tests/e2e/test_tutorial.py.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import subprocess
from itertools import pairwise
from typing import Any

import click
import jsonschema
import pytest
import yaml
from tests.docs_blocks import LANGUAGES, ROOT, Block, blocks, commands, pages, words

from leasedjob.api import verdict
from leasedjob.api.v1alpha1 import LeasedJobSpec, parse_job
from leasedjob.cli import leasedjob
from leasedjob.cli.kubectl import plugin
from leasedjob.protocol import GROUP
from leasedjob.schedule import Schedule
from leasedjob.workload import verbs
from leasedjob.workload.outbox import verb as outbox

ALL = blocks()
SHELL = blocks("sh", "console")
YAML = blocks("yaml")
# What the pages ask readers to have; anything else is a typing error, or is to be added here on purpose.
PROGRAMS = {
    "argocd", "buildah", "cat", "cd", "curl", "export", "flux", "git", "grep", "head", "helm", "jq", "kubectl",
    "leasedjob", "make", "openssl", "pg_dump", "pg_restore", "pip", "podman", "psql", "python", "sed", "tail",
    "do", "done", "sleep", "true", "until",
}  # fmt: skip
# Of the same fields that a LeasedJob needs beside a fragment.
SAMPLE = {
    "apiVersion": f"{GROUP}/v1alpha1",
    "kind": "LeasedJob",
    "metadata": {"name": "sample"},
    "spec": {"schedule": "0 3 * * *", "template": {"spec": {"containers": [{"name": "main", "image": "i"}]}}},
}


def named(found: list[Block]) -> Any:
    return pytest.mark.parametrize("block", found, ids=str)


# --- all -----------------------------------------------------------------------------------------------------------


def test_every_block_is_in_a_language_that_is_known() -> None:
    assert len(ALL) > 100
    unknown = [f"{block}: {block.language}" for block in ALL if block.language not in LANGUAGES]
    assert not unknown
    for block in ALL:
        for mark in block.marks:
            known = mark.partition("=")[0] in ("run", "cluster", "fragment", "skip")
            assert known or mark.endswith((".py", ".yaml")), f"{block}: {mark}"
        if (why := block.mark("skip")) is not None:
            assert len(why) > 10, f"{block}: say why it is skipped"


def test_fences_are_closed() -> None:
    for page in pages():
        fences = re.findall(r"^ *```", page.read_text(encoding="utf-8"), re.MULTILINE)
        assert len(fences) % 2 == 0, page


# --- YAML ----------------------------------------------------------------------------------------------------------


def document(block: Block) -> list[Any]:
    return [entry for entry in yaml.safe_load_all(block.text) if entry is not None]


@named(YAML)
def test_a_manifest_would_be_accepted(block: Block) -> None:
    for entry in document(block):
        kind = block.mark("fragment") or _guess(entry)
        match kind:
            case "manifest":
                if str(entry["apiVersion"]).startswith(f"{GROUP}/"):
                    assert not verdict(entry), f"{block}: {verdict(entry)}"
                else:
                    assert entry["kind"], block
                    assert entry.get("metadata", {}).get("name") or entry["kind"] == "Kustomization", block
            case "spec":
                spec = {**SAMPLE["spec"], **entry.get("spec", entry)}  # type: ignore[dict-item]
                if "schedules" in spec:
                    del spec["schedule"]
                problems = verdict({**SAMPLE, "spec": spec})
                assert not problems, f"{block}: {problems}"
            case "run-spec":
                body = {"apiVersion": f"{GROUP}/v1alpha1", "kind": "LeasedJobRun", "metadata": {"name": "x"}, **entry}
                assert not verdict(body), f"{block}: {verdict(body)}"
            case "values":
                _values(entry, block)
            case "other":
                pass
            case _:
                raise AssertionError(f"{block}: fragment={kind} is not known")


def _guess(entry: Any) -> str:
    """What a fragment without a mark is, by its fields."""
    if "apiVersion" in entry:
        return "manifest"
    if set(entry) == {"spec"}:
        return "run-spec" if "jobName" in entry["spec"] else "spec"
    return "values"


def _values(entry: Any, block: Block) -> None:
    schema = json.loads((ROOT / "charts/leasedjob/values.schema.json").read_text(encoding="utf-8"))
    jsonschema.Draft7Validator(schema).validate(entry)
    _known(entry, yaml.safe_load((ROOT / "charts/leasedjob/values.yaml").read_text(encoding="utf-8")), str(block))


def _known(given: Any, default: Any, where: str) -> None:
    """Each key is one of values.yaml; what is empty there takes any."""
    if isinstance(given, dict) and isinstance(default, dict) and default:
        for key, value in given.items():
            assert key in default, f"{where}: {key} is no value of the chart"
            _known(value, default[key], f"{where}.{key}")


def test_a_wrong_fragment_would_be_noticed() -> None:
    def block(text: str, *marks: str) -> Block:
        return Block("p", 1, "yaml", marks, text)

    for text, marks in (
        ("lease: {durationSeconds: 30}", ("fragment=spec",)),
        ("scheduel: 0 3 * * *", ("fragment=spec",)),
        ("metrics: {podMonitr: {enabled: true}}", ()),
        (f"apiVersion: {GROUP}/v1alpha1\nkind: LeasedJob\nmetadata: {{name: x}}\nspec: {{schedule: 61 * * * *}}", ()),
    ):
        with pytest.raises((AssertionError, jsonschema.ValidationError)):
            test_a_manifest_would_be_accepted(block(text, *marks))


def test_the_presets_are_what_the_page_says() -> None:
    """docs/reference/failover.md: each preset is accepted, and means what its row says."""
    page = (ROOT / "docs/reference/failover.md").read_text(encoding="utf-8")
    for block in (b for b in YAML if b.page == "docs/reference/failover.md"):
        (entry,) = document(block)
        spec = parse_job({**SAMPLE, "spec": {**SAMPLE["spec"], **entry}})  # type: ignore[dict-item]
        assert isinstance(spec, LeasedJobSpec)
        name = block.text.partition("\n")[0].removeprefix("# ")
        (row,) = [line for line in page.splitlines() if line.startswith(f"| {name} ")]
        t = spec.timing
        assert (
            f"| {int(t.trust)} s | {int(t.tolerated_outage)} s | {t.duration - t.heartbeat} to {t.duration} s |" in row
        )


# --- shell ---------------------------------------------------------------------------------------------------------


@named(SHELL)
def test_a_shell_block_is_shell(block: Block) -> None:
    lines = list(commands(block))
    assert lines or block.language == "console", block
    done = subprocess.run(
        ["bash", "-n"], input="\n".join(lines), capture_output=True, text=True, check=False, timeout=20
    )
    assert done.returncode == 0, f"{block}: {done.stderr}"
    for line in lines:
        for command in words(line):
            while command and re.fullmatch(r"\w+=.*", command[0]):
                command.pop(0)
            if command:
                _command(command, f"{block}: {line}", block)


def _command(command: list[str], where: str, block: Block) -> None:
    program, *rest = command
    if block.language == "console" and program not in PROGRAMS:
        return  # what a program on the page prints may begin with "$"
    assert program in PROGRAMS, where
    match program:
        case "leasedjob":
            _leasedjob(rest, where)
        case "make":
            makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
            for target in (word for word in rest if "=" not in word and not word.startswith("-")):
                assert re.search(rf"^{re.escape(target)}:", makefile, re.MULTILINE), where
        case "helm":
            _helm(rest, where)
        case "pip":
            extras = set(re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE))
            for extra in re.findall(r"(?:leasedjob|\.)\[([\w,]+)\]", " ".join(rest)):
                assert set(extra.split(",")) <= extras, where
        case "kubectl":
            _kubectl(rest, where)
        case "python":
            if rest[0].endswith(".py") and "/" in rest[0]:
                assert (ROOT / rest[0]).exists(), where


def _leasedjob(rest: list[str], where: str) -> None:
    if rest[:1] == ["--help"] or rest[:1] == [verbs.EXEC]:
        return
    said, code = io.StringIO(), None
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        try:
            if rest[0] == verbs.RUN_EXCLUSIVE:
                verbs._run_exclusive_parser().parse_args(rest[1 : rest.index("--")])
            elif rest[0] == outbox.VERB:
                outbox.parser().parse_args(rest[1:])
            else:
                leasedjob.parser().parse_args(rest)
        except SystemExit as ended:
            code = ended.code
    assert not code, f"{where}: {said.getvalue()}"


def _kubectl(rest: list[str], where: str) -> None:
    if rest[:1] == ["leasedjob"]:
        context = plugin.make_context("kubectl leasedjob", rest[1:], resilient_parsing=rest[1:2] == ["--help"])
        if rest[1:2] != ["--help"]:
            name, command, more = plugin.resolve_command(context, [*context._protected_args, *context.args])
            assert command is not None, where
            command.make_context(name, more, parent=context)
        return
    for flag, path in pairwise(rest):
        if flag in ("-f", "--filename") and path.startswith(("examples/", "crds/", "docs/")):
            assert (ROOT / path).exists(), where


def _helm(rest: list[str], where: str) -> None:
    values = yaml.safe_load((ROOT / "charts/leasedjob/values.yaml").read_text(encoding="utf-8"))
    for flag, value in pairwise(rest):
        if flag in ("--set", "--set-string", "--set-json", "--set-file"):
            node: Any = values
            for key in re.sub(r"\[\d+\]", "", value.partition("=")[0].replace(r"\.", "\0")).split("."):
                if not isinstance(node, dict) or not node:
                    break
                assert key in node, f"{where}: {key} is no value of the chart"
                node = node[key]
    for word in rest:
        if word.startswith("charts/"):
            assert (ROOT / word).is_dir(), where


def test_a_wrong_command_line_would_be_noticed() -> None:
    for text in (
        "leasedjob prune --older-then 90d",
        "kubectl leasedjob why",
        "helm install x charts/leasedjob --set databse.existingSecret=x",
        "make tset",
        "kubctl get pods",
        "kubectl apply -f examples/99-nothing/",
        "pip install 'leasedjob[nothing]'",
    ):
        with pytest.raises((AssertionError, click.ClickException)):
            test_a_shell_block_is_shell(Block("p", 1, "sh", (), text))


# --- the rest ------------------------------------------------------------------------------------------------------


@named(blocks("crontab"))
def test_a_crontab_has_schedules(block: Block) -> None:
    lines = [line for line in block.text.splitlines() if line and not re.match(r"#|\w+=", line)]
    assert lines
    for line in lines:
        Schedule.parse(" ".join(line.split()[:5]))


def test_python_is_a_file_of_a_guide() -> None:
    """Those are run: tests/integration/test_guide_library.py and test_guide_workload.py."""
    for block in blocks("python"):
        assert block.page in ("docs/guide-library.md", "docs/guide-workload.md"), f"{block}: nobody runs it"
        assert len(block.marks) == 1, f"{block}: name its file"
        compile(block.text, str(block), "exec")
