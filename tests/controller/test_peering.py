"""Another kopf operator's peering is no concern of this one."""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime

import pytest
from kubernetes import client

from tests.controller.control_plane import Bench, Json, wait_until

GROUP = "kopf.dev"
KINDS = {"ClusterKopfPeering": ("clusterkopfpeerings", "Cluster"), "KopfPeering": ("kopfpeerings", "Namespaced")}


def definition(kind: str) -> Json:
    """As kopf's documentation has users create it: an object whose status operators of one name share."""
    plural, scope = KINDS[kind]
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    return {
        "metadata": {"name": f"{plural}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": scope,
            "names": {"kind": kind, "plural": plural, "singular": kind.lower()},
            "versions": [{"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}],
        },
    }


@pytest.mark.parametrize("namespaces", ["", "own"], ids=["whole cluster", "some namespaces"])
def test_a_stranger_of_higher_priority_freezes_nothing(bench: Bench, namespaces: str) -> None:
    """In the peerings that every kopf operator joins unless told otherwise, and alive all the while."""
    definitions = client.ApiextensionsV1Api(bench.plane.api())
    stranger = {"priority": 1000, "lastseen": datetime.now(UTC).isoformat(), "lifetime": 3600, "namespace": None}
    peering = {"apiVersion": f"{GROUP}/v1", "metadata": {"name": "default"}, "status": {"stranger": stranger}}
    try:
        for kind, (plural, scope) in KINDS.items():
            definitions.create_custom_resource_definition(definition(kind))
            body = {**peering, "kind": kind}

            def made(plural: str = plural, scope: str = scope, body: Json = body) -> bool:
                with contextlib.suppress(client.ApiException):
                    if scope == "Cluster":
                        bench.custom.create_cluster_custom_object(GROUP, "v1", plural, body)
                    else:
                        bench.custom.create_namespaced_custom_object(GROUP, "v1", bench.namespace, plural, body)
                    return True
                return False

            wait_until(f"{plural} are served", made)
        where = {"LEASEDJOB_NAMESPACES": bench.namespace if namespaces else ""}
        operators = [bench.operator(f"op-{n}", **where) for n in range(2)]
        bench.apply("job", suspend=True)
        bench.whole_run("job")
        operators[0].kill()
        bench.whole_run("job")
        seen = bench.custom.get_cluster_custom_object(GROUP, "v1", "clusterkopfpeerings", "default")
        assert seen["status"].keys() == {"stranger"}, "and none of them has joined"
    finally:
        for plural, _ in KINDS.values():
            with contextlib.suppress(client.ApiException):
                definitions.delete_custom_resource_definition(f"{plural}.{GROUP}")
                wait_until(f"{plural} are gone", lambda plural=plural: _gone(definitions, plural))


def _gone(definitions: client.ApiextensionsV1Api, plural: str) -> bool:
    try:
        definitions.read_custom_resource_definition(f"{plural}.{GROUP}")
    except client.ApiException as e:
        return e.status == 404
    return False
