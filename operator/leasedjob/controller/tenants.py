"""The database credential of a namespace's sidecars: a LOGIN role per cluster and namespace, in a Secret.

The Secret is the truth. Whoever needs it reads it, or creates it with a new password (the API server lets one of
several creators win), and then sets the role's password to what the Secret says; so two replicas never disagree.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from psycopg import AsyncConnection
from psycopg.conninfo import conninfo_to_dict

from leasedjob.controller.kube import Kube, KubeError
from leasedjob.controller.settings import Settings
from leasedjob.lease.database import Credentials, connect_async
from leasedjob.lease.tenants import Slot, database_name, ensure_tenant, role_name, tenant_of
from leasedjob.protocol import LABEL_MANAGED

log = logging.getLogger(__name__)
LOOK_AGAIN: Final = 20.0  # seconds for which a namespace's Secret is taken to be what it was


class TenantSecrets:
    """Makes sure that a namespace has its credential before its Pods. Remembers what was done in this process: the
    database is asked again only when the Secret is another one, or when a Pod could not use what it says."""

    def __init__(self, settings: Settings, kube: Kube) -> None:
        self._settings = settings
        self._kube = kube
        self._done: dict[str, tuple[str, float]] = {}  # version of the Secret ("" if it isn't ours), last looked at
        self._locks: dict[str, asyncio.Lock] = {}

    def forget(self, namespace: str) -> None:
        """Check role and Secret of this namespace again at its next Pod (one could not take its lease)."""
        self._done.pop(namespace, None)

    async def ensure(self, namespace: str) -> None:
        """The Secret exists and its role can log in with it. Raises SecretError, KubeError or a database error."""
        if self._fresh(namespace):
            return
        async with self._locks.setdefault(namespace, asyncio.Lock()):
            if not self._fresh(namespace) and not await self._unchanged(namespace):
                await self._ensure(namespace)

    def _fresh(self, namespace: str) -> bool:
        _, at = self._done.get(namespace, ("", -LOOK_AGAIN))
        return time.monotonic() - at < LOOK_AGAIN

    async def _unchanged(self, namespace: str) -> bool:
        """Whether the Secret is the one that was agreed upon: somebody may delete it, or the whole namespace."""
        version, _ = self._done.get(namespace, ("", 0.0))
        if not version:
            return False
        existing = await self._kube.get_secret(namespace, self._settings.sidecar_secret)
        if existing is None or existing["metadata"]["resourceVersion"] != version:
            return False
        self._done[namespace] = version, time.monotonic()
        return True

    async def _ensure(self, namespace: str) -> None:
        if not self._settings.sidecar_secret_create:
            self._done[namespace] = "", time.monotonic()
            return  # the user supplies it: the kubelet's own message tells where it is missing
        credentials = Credentials.from_directory(self._settings.database_dir)
        connection = await connect_async(credentials, application_name="leasedjob-operator")
        async with connection:
            await self._agree(connection, namespace)

    async def _agree(self, connection: AsyncConnection[Any], namespace: str) -> None:
        name, cluster = self._settings.sidecar_secret, self._settings.cluster
        wanted = await self._wanted(connection, namespace)
        existing = await self._kube.get_secret(namespace, name)
        if existing is None:
            secret = {
                "apiVersion": "v1",
                "kind": "Secret",
                "metadata": {"name": name, "namespace": namespace, "labels": {LABEL_MANAGED: "true"}},
                "type": "Opaque",
                "data": encoded(wanted),
            }
            try:
                existing = await self._kube.create_secret(secret)
                log.info("wrote Secret %s/%s", namespace, name)
            except KubeError as e:
                if e.status != 409:
                    raise
                existing = await self._kube.get_secret(namespace, name)
        labels = (existing["metadata"].get("labels") or {}) if existing else {}
        if existing is None or labels.get(LABEL_MANAGED) != "true":
            self._done[namespace] = "", time.monotonic()
            return  # the user's own Secret: never touched
        data = existing.get("data") or {}
        if not data.get("password") or decoded(data).get("user") != wanted["user"]:
            existing = await self._kube.patch_secret(namespace, name, {"data": encoded(wanted)})
            data = existing["data"]
        await ensure_tenant(connection, cluster, namespace, password=decoded(data)["password"], slot=Slot.A)
        self._done[namespace] = existing["metadata"]["resourceVersion"], time.monotonic()

    async def _wanted(self, connection: AsyncConnection[Any], namespace: str) -> dict[str, str]:
        """The content of a new Secret."""
        base = conninfo_to_dict(Credentials.from_directory(self._settings.database_dir).conninfo())
        tenant = tenant_of(self._settings.cluster, namespace)
        values = {
            "host": self._settings.sidecar_database_host or str(base.get("host") or ""),
            "port": self._settings.sidecar_database_port or str(base.get("port") or "5432"),
            "dbname": str(base.get("dbname") or ""),
            "user": role_name(await database_name(connection), tenant, Slot.A),
            "password": secrets.token_urlsafe(32),
        }
        if mode := base.get("sslmode"):
            values["sslmode"] = str(mode)
        root = str(base.get("sslrootcert") or "")
        if root == "system":
            values["sslrootcert"] = root
        elif root:
            values["ca.crt"] = await asyncio.to_thread(Path(root).read_text)
        return values


def encoded(values: Mapping[str, str]) -> dict[str, str]:
    return {k: base64.b64encode(v.encode()).decode() for k, v in values.items()}


def decoded(data: Mapping[str, str]) -> dict[str, str]:
    return {k: base64.b64decode(v).decode("utf-8", "replace") for k, v in data.items()}
