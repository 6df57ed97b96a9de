"""Three judges of one manifest: the API server with the definitions, the operator, and the verdict without a cluster.

The API server never refuses what the operator accepts, and the offline verdict is what both say together.
"""

from __future__ import annotations

import json
import random
import ssl
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest
from kubernetes import client

from leasedjob.api import verdict
from tests.controller.control_plane import GROUP, VERSION, ControlPlane
from tests.properties.test_schedule_robfig import an_expression
from tests.unit import controller_builders as builders

# ruff: noqa: E501
# CRON-08, 10, 11, 12, 18 and their kin.
KNOWN = (
    "0 6 L * *", "0 6 15W * *", "0 6 * * 2#3", "0 6 ? * 1", "0 6 * * 7", "5/20 * * * *", "0 22-2 * * *", "*/0 * * * *",
    "0 0 6 * * *", "61 * * * *", "@weekly", "  0  6 * * 1 ", "0\t6\t*\t*\t1", "0 6 * * mon-fri", "10 3 29 2 5",
    "0 4 31 6,9 *", "5 5 30 2 *", "0 0 29 2 *", "CRON_TZ=Asia/Tokyo", "TZ=", "TZ=Europe/Oslo 30 1 * * *", "@every 45m",
    "@every 0s", "@Daily", "@reboot", " @hourly ", "H * * * *", "H/15 H(1-5) * * *", "H(29-31) 0 H(29-31) 2 *", "h 1 * * *",
    "*/90 * * * *", "*/60 */24 * * *", "0-5/7 * * * *", "1,,3, 0 * * *", ", 0 * * *", "*-5 * * * *", "0 0 * 13 *",
    "0 0 0 * *", "0 24 * * *", "+5 007 * * *", "0 0 1-mon * *", "0 0 * * 1-wed", "0 0 * feb-jan *", "0 0 * * sun-7",
    "0 0 31 2,4 1", "0 0 31 2,4 *", "H H H 2 *", "0 3 * *", "", " ", "* * * * *", "0\u00a03 * * *", "0\u30003 * * *", "\x0b0 3 * * *",
    "0 3 * * *\n", "\uff10 3 * * *", "0 3 * * \u0661", "0 3 * * *  # nightly", "0 3 * * * @daily", "99999999999 * * * *",
)  # fmt: skip
ALPHABET = "0123456789*/-,? @LWH#()ajsun7+"
ZONES = (
    "Europe/Rome", "UTC", "Etc/GMT+3", "IST", "CEST", "europe/rome", "../../etc/passwd", "", "Local", "local", "Mars/Base",
    "America/Argentina/ComodRivadavia", "+02:00", "Europe/Rome ", "US/Eastern",
)  # fmt: skip


def mutilated(dice: random.Random) -> str:
    text = list(an_expression(dice))
    for _ in range(dice.choice([0, 1, 1, 2])):
        place = dice.randrange(len(text))
        text[place : place + dice.randint(0, 1)] = dice.choice(ALPHABET)
    return "".join(text)


def changes() -> list[dict[str, Any]]:
    """More than 200 schedules, in the forms that a spec may have."""
    dice = random.Random(20_270_101)
    found: list[dict[str, Any]] = [{"schedule": text} for text in KNOWN]
    found += [{"schedule": mutilated(dice)} for _ in range(120)]
    found += [{"timeZone": zone} for zone in ZONES]
    found += [
        {
            "schedule": None,
            "schedules": [dice.choice(KNOWN), *(an_expression(dice) for _ in range(dice.randint(0, 10)))],
        }
        for _ in range(40)
    ]
    instants = (
        "2026-07-20T03:00:00Z",
        "2026-02-30T03:00:00Z",
        "2026-07-20T03:00:00+00:00",
        "2027-01-01T00:00:00Z",
        "soon",
    )
    for _ in range(30):
        bounds = {"notBefore": dice.choice(instants), "notAfter": dice.choice(instants)}
        jitter = {"jitterSeconds": dice.choice([0, 1, 600, 86_400, 86_401, -1, "5", 1.0, 1.5, None])}
        found.append({**bounds, **jitter} if dice.random() < 0.7 else jitter)
    found += [{"schedules": ["@daily"]}, {"schedule": None}, {"schedule": None, "schedules": []}]
    return found


def manifest(change: dict[str, Any]) -> dict[str, Any]:
    body = builders.job_body(change)
    body["metadata"] = {"name": "judged", "namespace": "default"}
    body["spec"] = {key: value for key, value in body["spec"].items() if value is not None}
    return body


def operator_says(body: dict[str, Any]) -> str | None:
    found = builders.entry(builders.job_body() | {"spec": body["spec"]})
    return None if found.problem is None else found.problem[1]


@pytest.fixture(scope="module")
def server_says(plane: ControlPlane) -> Callable[[dict[str, Any]], str | None]:
    api = plane.custom()

    def asking(body: dict[str, Any]) -> str | None:
        try:
            api.create_namespaced_custom_object(
                GROUP, VERSION, "default", "leasedjobs", body, dry_run="All", field_validation="Strict"
            )
        except client.ApiException as refusal:
            if refusal.status not in (400, 422):
                raise
            return str(refusal.body)
        return None

    return asking


def test_three_judges_agree(server_says: Callable[[dict[str, Any]], str | None]) -> None:
    counts = {"all accept": 0, "all refuse": 0, "the operator alone refuses": 0}
    asked = changes()
    assert len(asked) > 200
    for change in asked:
        body = manifest(change)
        server, operator, offline = server_says(body), operator_says(body), verdict(body)
        assert server is None or operator is not None, (change, server)
        assert (offline == []) is (server is None and operator is None), (change, server, operator, offline)
        if operator is None:
            counts["all accept"] += 1
        else:
            counts["all refuse" if server is not None else "the operator alone refuses"] += 1
    assert min(counts.values()) > 15, counts


def test_unknown_fields_are_refused_by_both(server_says: Callable[[dict[str, Any]], str | None]) -> None:
    """As kubectl asks the API server; an operator finds them pruned."""
    for change in ({"startingDeadlineSecond": 30}, {"lease": {"duration": 900}}, {"jobTemplate": {}}):
        body = manifest(change)
        assert server_says(body) is not None
        assert [problem.reason for problem in verdict(body)] == ["UnknownField"]


def test_the_column_shows_whichever_form_there_is(plane: ControlPlane) -> None:
    api = plane.custom()
    for name, change in (
        ("column-one", {"schedule": "0 3 1 1 *"}),
        ("column-many", {"schedule": None, "schedules": ["0 3 1 1 *", "0 4 1 1 *"]}),
        ("column-none", {"schedule": None, "type": "Initial", "suspend": True}),
    ):
        body = manifest(change)
        body["metadata"]["name"] = name
        api.create_namespaced_custom_object(GROUP, VERSION, "default", "leasedjobs", body)
    asked = urllib.request.Request(
        f"https://127.0.0.1:{plane.port}/apis/{GROUP}/{VERSION}/namespaces/default/leasedjobs",
        headers={"Accept": "application/json;as=Table;v=v1;g=meta.k8s.io", "Authorization": f"Bearer {plane.token}"},
    )
    trusted = ssl.create_default_context(cafile=str(plane.folder / "ca.crt"))
    with urllib.request.urlopen(asked, context=trusted, timeout=60) as answer:
        table = json.load(answer)
    place = [column["name"] for column in table["columnDefinitions"]].index("Schedule")
    shown = {row["object"]["metadata"]["name"]: row["cells"][place] for row in table["rows"]}
    for name in shown:
        api.delete_namespaced_custom_object(GROUP, VERSION, "default", "leasedjobs", name)
    assert shown["column-one"] == "0 3 1 1 *"
    assert "0 3 1 1 *" in str(shown["column-many"])
    assert "0 4 1 1 *" in str(shown["column-many"])
    assert not shown["column-none"]
