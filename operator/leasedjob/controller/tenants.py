"""The database credential of a namespace's sidecars: a LOGIN role per cluster and namespace, in a Secret.

The Secret is the truth. Whoever needs it reads it, or creates it with a new password (the API server lets one of
several creators win), and then sets the role's password to what the Secret says; so two replicas never disagree.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import secrets
from collections.abc import Mapping
from typing import Any, Final

from psycopg import AsyncConnection

from leasedjob.controller.kube import Kube, KubeError
from leasedjob.controller.settings import Settings
from leasedjob.lease.database import Credentials, connect_async
from leasedjob.lease.tenants import ensure_tenant, role_name
from leasedjob.protocol import LABEL_MANAGED

log = logging.getLogger(__name__)
SLOT: Final = "a"


class SecretError(Exception):
    """The namespace's sidecar Secret can't be had; the message says why and what to do."""


class TenantSecrets:
    """Makes sure that a namespace has its credential before its first Pod. Remembers what was done in this process."""

    def __init__(self, settings: Settings, kube: Kube) -> None:
        self._settings = settings
        self._kube = kube
        self._done: set[str] = set()
        self._locks: dict[str, asyncio.Lock] = {}

    def forget(self, namespace: str) -> None:
        """Check this namespace again at its next Pod (its Secret was seen to change, or a Pod could not adopt)."""
        self._done.discard(namespace)

    async def ensure(self, namespace: str) -> None:
        """The Secret exists and its role can log in with it. Raises SecretError, KubeError or a database error."""
        if namespace in self._done:
            return
        async with self._locks.setdefault(namespace, asyncio.Lock()):
            if namespace in self._done:
                return
            await self._ensure(namespace)
            self._done.add(namespace)
            self._locks.pop(namespace, None)

    async def _ensure(self, namespace: str) -> None:
        name = self._settings.sidecar_secret
        if not self._settings.sidecar_secret_create:
            return  # the user supplies it: the kubelet's own message tells where it is missing
        existing = await self._kube.get_secret(namespace, name)
        if existing is None:
            try:
                existing = await self._kube.create_secret(self._secret(namespace, name))
                log.info("wrote Secret %s/%s", namespace, name)
            except KubeError as e:
                if e.status != 409:
                    raise
                existing = await self._kube.get_secret(namespace, name)
        data = (existing or {}).get("data") or {}
        labels = ((existing or {}).get("metadata") or {}).get("labels") or {}
        if labels.get(LABEL_MANAGED) != "true":
            return  # the user's own Secret: never touched
        password = base64.b64decode(data.get("password", "")).decode()
        user = base64.b64decode(data.get("user", "")).decode()
        if not password or user != role_name(self._settings.cluster, namespace, slot=SLOT):
            wanted = self._secret(namespace, name)
            existing = await self._kube.patch_secret(namespace, name, {"data": wanted["data"]})
            password = base64.b64decode(existing["data"]["password"]).decode()
        connection: AsyncConnection[Any] = await connect_async(Credentials.from_directory(self._settings.database_dir))
        async with connection:
            await ensure_tenant(connection, self._settings.cluster, namespace, password=password, slot=SLOT)

    def _secret(self, namespace: str, name: str) -> dict[str, Any]:
        base = Credentials.from_directory(self._settings.database_dir).parameters()
        values: dict[str, str] = {
            "host": self._settings.sidecar_database_host or base.get("host", ""),
            "port": self._settings.sidecar_database_port or base.get("port", "5432"),
            "dbname": base.get("dbname", ""),
            "user": role_name(self._settings.cluster, namespace, slot=SLOT),
            "password": secrets.token_urlsafe(32),
        }
        for key in ("sslmode",):
            if base.get(key):
                values[key] = base[key]
        certificate = self._settings.database_dir / "ca.crt"
        if certificate.exists():
            values["ca.crt"] = certificate.read_text()
        return {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": name, "namespace": namespace, "labels": {LABEL_MANAGED: "true"}},
            "type": "Opaque",
            "data": encoded(values),
        }


def encoded(values: Mapping[str, str]) -> dict[str, str]:
    return {k: base64.b64encode(v.encode()).decode() for k, v in values.items()}
