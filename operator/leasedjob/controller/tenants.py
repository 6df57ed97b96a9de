"""The database credential of a namespace's sidecars: a LOGIN role per cluster and namespace, in a Secret.

The Secret is the truth. Whoever needs a password writes it there first (the API server lets one of several writers
win), and then sets the role's password to what the Secret says; so two replicas never disagree. Which slot is current
and how old it is, the database says. What is to be done next, `credential.decide` says.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, assert_never

from psycopg import AsyncConnection
from psycopg.conninfo import conninfo_to_dict

from leasedjob.controller import credential
from leasedjob.controller.credential import NEXT_PASSWORD, NEXT_USER, PASSWORD, USER, WHERE, Step, decoded, encoded
from leasedjob.controller.kube import Kube, KubeError
from leasedjob.controller.metrics import Metrics
from leasedjob.controller.settings import Settings
from leasedjob.errors import DatabaseRefusedError, DatabaseUnavailableError
from leasedjob.lease.database import Credentials, FaultKind, connect_async
from leasedjob.lease.tenants import (
    Slot,
    TenantState,
    database_name,
    end_overdue_sessions,
    ensure_tenant,
    retire_slot,
    role_name,
    switch_slot,
    tenant_of,
    tenant_state,
    tenants_with_news,
)
from leasedjob.protocol import LABEL_MANAGED

log = logging.getLogger(__name__)
LOOK_AGAIN: Final = 20.0  # seconds for which a namespace's Secret is taken to be what it was
STEPS_MOST: Final = 12  # in one look; a rotation takes four, and another replica may be at the same one
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Agreed:
    """What was found to be right: the version of the Secret ("" where it is the user's own), where it says the database
    is, and when it was last looked at."""

    version: str
    where: Mapping[str, str]
    at: float


class TenantSecrets:
    """Makes sure that a namespace has its credential before its Pods. Remembers what was done in this process: the
    database is asked again only when the Secret is another one, or when a Pod could not use what it says."""

    def __init__(self, settings: Settings, kube: Kube, metrics: Metrics | None = None) -> None:
        self._settings = settings
        self._kube = kube
        self._metrics = metrics
        self._done: dict[str, _Agreed] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    def forget(self, namespace: str) -> None:
        """Check role and Secret of this namespace again at its next Pod (one could not take its lease)."""
        self._done.pop(namespace, None)

    async def ensure(self, namespace: str) -> None:
        """The Secret exists and its role can log in with it. Raises KubeError or a database error."""
        if self._fresh(namespace):
            return
        async with self._locks.setdefault(namespace, asyncio.Lock()):
            if not self._fresh(namespace) and not await self._unchanged(namespace):
                if self._settings.sidecar_secret_create:
                    async with await self._connect() as connection:
                        # Nothing that a Pod need not wait for.
                        await self._look(connection, namespace, timedelta(0), retire=False)
                else:
                    # The user supplies it: the kubelet's own message tells where it is missing.
                    self._remember(namespace, "", {})

    async def renew(self, namespaces: Collection[str]) -> Mapping[str, str]:
        """Rotates the credentials that are old enough, disables those that rotations have left behind, and ends
        sessions that disturb others. What went wrong, by namespace: the others are done all the same.

        Args:
            namespaces: those with LeasedJobs. Elsewhere an old credential is disabled, and no new one is written.
        """
        if not self._settings.sidecar_secret_create:
            return {}
        rotate_after = timedelta(days=self._settings.rotate_after_days)
        trouble: dict[str, str] = {}
        async with await self._connect() as connection:
            for role in await end_overdue_sessions(connection):
                log.warning("ended a session of database role %s: its transaction had been open for too long", role)
            found = await tenants_with_news(
                connection, self._settings.cluster, in_use=namespaces, rotate_after=rotate_after
            )
            for namespace in found:
                if self._settings.namespaces and namespace not in self._settings.namespaces:
                    continue
                try:
                    if namespace in namespaces:
                        async with self._locks.setdefault(namespace, asyncio.Lock()):
                            await self._look(connection, namespace, rotate_after, retire=True)
                    else:
                        await self._lay_down(connection, namespace)
                except (KubeError, DatabaseRefusedError) as e:
                    trouble[namespace] = str(e)
                except DatabaseUnavailableError as e:
                    if e.kind != FaultKind.BUSY:
                        raise
        return trouble

    async def _lay_down(self, connection: AsyncConnection[Any], namespace: str) -> None:
        """Without LeasedJobs, perhaps without its namespace: nobody needs a credential until one comes."""
        cluster = self._settings.cluster
        state = await tenant_state(connection, cluster, namespace)
        if state.retirable or await switch_slot(connection, cluster, namespace, overlap=timedelta(0), decided_on=state):
            if await retire_slot(connection, cluster, namespace):
                log.info("disabled the database credential of namespace %s, which has no LeasedJobs", namespace)
            self.forget(namespace)

    def _fresh(self, namespace: str) -> bool:
        done = self._done.get(namespace)
        return done is not None and time.monotonic() - done.at < LOOK_AGAIN

    def _remember(self, namespace: str, version: str, where: Mapping[str, str]) -> None:
        self._done[namespace] = _Agreed(version, where, time.monotonic())

    async def _unchanged(self, namespace: str) -> bool:
        """Whether the Secret is the one that was agreed upon: somebody may delete it, or the whole namespace."""
        done = self._done.get(namespace)
        if done is None or not done.version or done.where != await self._where():
            return False
        existing = await self._kube.get_secret(namespace, self._settings.sidecar_secret)
        if existing is None or existing["metadata"]["resourceVersion"] != done.version:
            return False
        self._remember(namespace, done.version, done.where)
        return True

    async def _connect(self) -> AsyncConnection[Any]:
        credentials = Credentials.from_directory(self._settings.database_dir)
        return await connect_async(credentials, application_name="leasedjob-operator")

    async def _look(
        self, connection: AsyncConnection[Any], namespace: str, rotate_after: timedelta, *, retire: bool
    ) -> None:
        """Step by step until nothing is left to do. Each step carries the state that it was decided on (the Secret's
        resource version, the database's generation); where that is no longer true everything is read again."""
        cluster, name = self._settings.cluster, self._settings.sidecar_secret
        tenant, database = tenant_of(cluster, namespace), await database_name(connection)
        names = {role_name(database, tenant, slot): slot for slot in Slot}
        where = await self._where()
        promoted = ""  # the version of the Secret whose password its role has just been given
        for _ in range(STEPS_MOST):
            secret = await self._kube.get_secret(namespace, name)
            if secret is not None and not credential.is_ours(secret):
                self._remember(namespace, "", {})
                return
            state = await tenant_state(connection, cluster, namespace)
            seen = None if secret is None else credential.view(secret, names, where)
            next_ = credential.decide(seen, state, rotate_after)
            if next_.step is Step.NOTHING or (next_.step is Step.RETIRE and not retire):
                assert secret is not None
                version = secret["metadata"]["resourceVersion"]
                if version == promoted or await self._agreed(connection, namespace, secret, state):
                    self._remember(namespace, version, where)
                    return
                continue
            user = next(role for role, slot in names.items() if slot is next_.slot)
            try:
                version = await self._take(connection, namespace, next_, secret, state, user, where)
                promoted = version or promoted
            except KubeError as e:
                if e.status != 409 or "being terminated" in e.message:
                    raise
        raise DatabaseUnavailableError(f"the credential of {namespace} is being changed elsewhere", FaultKind.BUSY)

    async def _agreed(self, connection: AsyncConnection[Any], namespace: str, secret: Json, state: TenantState) -> bool:
        """The current role has the password that the Secret says. Asked of the database once for each version."""
        done = self._done.get(namespace)
        if done is not None and done.version == secret["metadata"]["resourceVersion"]:
            return True
        password = decoded(secret["data"])[PASSWORD]
        return await _current(
            lambda: ensure_tenant(
                connection, self._settings.cluster, namespace, password=password, slot=state.slot, decided_on=state
            )
        )

    async def _take(
        self,
        connection: AsyncConnection[Any],
        namespace: str,
        next_: credential.Next,
        secret: Json | None,
        state: TenantState,
        user: str,
        where: Mapping[str, str],
    ) -> str:
        """One step. A KubeError 409: the Secret has changed meanwhile. Of a promotion the Secret's new version."""
        cluster = self._settings.cluster
        match next_.step:
            case Step.STAGE:
                staged = {NEXT_USER: user, NEXT_PASSWORD: secrets.token_urlsafe(32)}
                if secret is None:
                    await self._create(namespace, {**where, **staged})
                else:
                    await self._patch(secret, encoded(staged))
            case Step.PROMOTE:
                assert secret is not None
                password = decoded(secret["data"])[NEXT_PASSWORD]
                # Crash window: its role has the staged password, the Secret names the old one still. Both work.
                if await _current(
                    lambda: ensure_tenant(
                        connection, cluster, namespace, password=password, slot=next_.slot, decided_on=state
                    )
                ):
                    values = encoded({**where, USER: user, PASSWORD: password})
                    return await self._patch(secret, {**values, NEXT_USER: None, NEXT_PASSWORD: None})
            case Step.SWITCH:
                # Crash window: the Secret names the new slot, the database the old one. Whoever looks next switches.
                overlap = timedelta(seconds=self._settings.rotation_overlap_seconds)
                if await switch_slot(connection, cluster, namespace, overlap=overlap, decided_on=state):
                    log.info("rotated the database credential of namespace %s", namespace)
                    if self._metrics is not None:
                        self._metrics.credential_rotations.inc()
            case Step.READDRESS:
                assert secret is not None
                values = encoded(where)
                await self._patch(secret, {key: values.get(key) for key in WHERE})
            case Step.RETIRE:
                if not await retire_slot(connection, cluster, namespace):
                    raise DatabaseUnavailableError(f"sessions of {namespace} have not ended yet", FaultKind.BUSY)
                log.info("disabled the former database credential of namespace %s", namespace)
            case Step.NOTHING:
                pass
            case never:
                assert_never(never)
        return ""

    async def _create(self, namespace: str, values: Mapping[str, str]) -> None:
        name = self._settings.sidecar_secret
        await self._kube.create_secret(
            {
                "apiVersion": "v1",
                "kind": "Secret",
                "metadata": {"name": name, "namespace": namespace, "labels": {LABEL_MANAGED: "true"}},
                "type": "Opaque",
                "data": encoded(values),
            }
        )
        log.info("wrote Secret %s/%s", namespace, name)

    async def _patch(self, secret: Json, data: Mapping[str, str | None]) -> str:
        """Changes the Secret if it is still the one that was read (else KubeError 409); its new version."""
        meta = secret["metadata"]
        body = {"metadata": {"resourceVersion": meta["resourceVersion"]}, "data": data}
        changed = await self._kube.patch_secret(meta["namespace"], meta["name"], body)
        return str(changed["metadata"]["resourceVersion"])

    async def _where(self) -> dict[str, str]:
        """Where the database is, for sidecars."""
        base = conninfo_to_dict(Credentials.from_directory(self._settings.database_dir).conninfo())
        values = {
            "host": self._settings.sidecar_database_host or str(base.get("host") or ""),
            "port": self._settings.sidecar_database_port or str(base.get("port") or "5432"),
            "dbname": str(base.get("dbname") or ""),
            "sslmode": str(base.get("sslmode") or ""),
        }
        root = str(base.get("sslrootcert") or "")
        if root == "system":
            values["sslrootcert"] = root
        elif root:
            values["ca.crt"] = await asyncio.to_thread(Path(root).read_text)
        return {key: value for key, value in values.items() if value}


async def _current(step: Callable[[], Any]) -> bool:
    """Takes a step; False if the state that it was decided on holds no more."""
    try:
        await step()
    except DatabaseUnavailableError as e:
        if e.kind != FaultKind.BUSY:
            raise
        return False
    return True


class Rotator:
    """The loop that keeps credentials young.

    Args:
        namespaces: those with LeasedJobs; None while that isn't known.
    """

    def __init__(self, tenants: TenantSecrets, namespaces: Callable[[], Collection[str] | None]) -> None:
        self._tenants = tenants
        self._namespaces = namespaces
        self._trouble: Mapping[str, str] = {}

    async def step(self) -> None:
        """One look at all of them; what goes wrong is logged when it is news."""
        namespaces = self._namespaces()
        if namespaces is None:
            return
        trouble = await self._tenants.renew(namespaces)
        for namespace, why in trouble.items():
            if self._trouble.get(namespace) != why:
                log.warning("the database credential of namespace %s can't be rotated: %s", namespace, why)
        self._trouble = trouble
