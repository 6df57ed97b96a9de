"""The API server, as the operator uses it: JSON in, JSON out, one error type.

Bodies are plain dicts: the typed models drop fields that they don't know, and a Pod template must be kept as written.
"""

from __future__ import annotations

import asyncio
import builtins
import json
import time
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any, Final, Self

import aiohttp
from kubernetes.aio import config
from kubernetes.aio.client import Configuration
from kubernetes.aio.client.rest import RESTClientObject

from leasedjob import __version__
from leasedjob.api import deep
from leasedjob.protocol import GROUP, VERSION

Json = dict[str, Any]
REQUEST_SECONDS: Final = 30.0
CRD_BASE: Final = f"/apis/{GROUP}/{VERSION}"
PAGE: Final = 500
KEEP_SECONDS: Final = 80.0  # an idle connection: over a minute, so that the next tick needs no handshakes


class KubeError(Exception):
    """The API server's refusal, or no answer (status 0)."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"{reason or status}: {message}" if message else reason or str(status))
        self.status = status
        self.reason = reason
        self.message = message

    @property
    def transient(self) -> bool:
        """Worth another try as it stands: no answer, too many requests, or a fault of the server itself."""
        return self.status in (0, 408, 429) or self.status >= 500


class Kube:
    """A client for the few calls that the operator makes. Use as an async context manager."""

    def __init__(self, kubeconfig: str = "", *, connections: int = 120) -> None:
        self._kubeconfig = kubeconfig
        self._connections = connections
        self._settings: Configuration
        self._session: aiohttp.ClientSession
        self._options: dict[str, Any] = {}
        self.answered_at: float | None = None  # by time.monotonic(), whatever the answer was
        self.silence = ""  # why the last request got no answer; "" if it got one

    async def __aenter__(self) -> Self:
        settings = Configuration()
        if self._kubeconfig:
            await config.load_kube_config(config_file=self._kubeconfig, client_configuration=settings)
        else:
            config.load_incluster_config(client_configuration=settings)
        self._settings = settings
        # Configuration and TLS are the client library's; its requests cost several times what a request needs.
        transport = RESTClientObject(settings)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=self._connections, ssl=transport.ssl_context, keepalive_timeout=KEEP_SECONDS
            ),
            headers={"Accept": "application/json", "User-Agent": f"leasedjob-operator/{__version__}"},
            trust_env=bool(urllib.request.getproxies_environment()),
            read_bufsize=2**18,
            timeout=aiohttp.ClientTimeout(total=None),  # each call has its own
        )
        extra = {
            "server_hostname": settings.tls_server_name,
            "proxy": transport.proxy,
            "proxy_headers": transport.proxy_headers,
        }
        self._options = {name: value for name, value in extra.items() if value}
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        query: Mapping[str, str] | None = None,
        content_type: str = "application/json",
        seconds: float = REQUEST_SECONDS,
        begin_only: bool = False,
    ) -> Json:
        """One request; raises KubeError. Cancellation is passed on. `begin_only`: what follows a good answer's head is
        not read."""
        try:
            # Asked for each time: a token is renewed.
            token = await self._settings.get_api_key_with_prefix("BearerToken", alias="authorization")
            headers = {"Authorization": token} if token else {}
            data = None
            if body is not None:
                headers["Content-Type"] = content_type
                data = json.dumps(body, separators=(",", ":")).encode()
            async with asyncio.timeout(seconds):
                response = await self._session.request(
                    method, self._settings.host + path, params=query, headers=headers, data=data, **self._options
                )
                if begin_only and response.status < 400:
                    self._heard()
                    response.close()
                    return {}
                data = await response.read()
        except (OSError, TimeoutError, aiohttp.ClientError) as e:
            raise self._silent(method, path, e) from e
        self._heard()
        try:
            parsed = deep.loads(data) if data else {}
        except ValueError:
            parsed = {"message": data[:500].decode("utf-8", "replace")}
        if response.status >= 400:
            raise KubeError(response.status, parsed.get("reason") or "", parsed.get("message") or "")
        return parsed

    def _heard(self) -> None:
        self.answered_at, self.silence = time.monotonic(), ""

    def _silent(self, method: str, path: str, why: Exception) -> KubeError:
        error = KubeError(0, "NoAnswer", f"{method} {path}: {type(why).__name__} {why}".strip())
        self.silence = str(error)
        return error

    # --- paths -------------------------------------------------------------------------------------------------------

    @staticmethod
    def _path(base: str, plural: str, namespace: str | None, name: str = "", sub: str = "") -> str:
        where = f"{base}/namespaces/{namespace}/{plural}" if namespace else f"{base}/{plural}"
        return where + (f"/{name}" if name else "") + (f"/{sub}" if sub else "")

    async def list(
        self,
        base: str,
        plural: str,
        namespace: str | None,
        *,
        label_selector: str = "",
        keep: Callable[[Json], Mapping[str, Any]] = lambda body: body,
    ) -> tuple[int, builtins.list[Mapping[str, Any]]]:
        """Every object, page by page, and the resource version of the list. `keep`: what is kept of each."""
        token, at_version = "", 0
        found: builtins.list[Mapping[str, Any]] = []
        while True:
            query = {"limit": str(PAGE)}
            if token:
                query["continue"] = token
            if label_selector:
                query["labelSelector"] = label_selector
            page = await self.call("GET", self._path(base, plural, namespace), query=query)
            found += map(keep, page.get("items") or [])
            meta = page.get("metadata") or {}
            at_version = at_version or int(meta.get("resourceVersion") or 0)
            token = meta.get("continue") or ""
            if not token:
                return at_version, found

    async def try_watch(
        self, base: str, plural: str, namespace: str | None, *, label_selector: str, since: int
    ) -> None:
        """Begins a watch and lets it end at once: raises KubeError where it is refused."""
        query = {"watch": "true", "timeoutSeconds": "5", "resourceVersion": str(since)}
        if label_selector:
            query["labelSelector"] = label_selector
        await self.call("GET", self._path(base, plural, namespace), query=query, begin_only=True)

    async def _get(self, path: str) -> Json | None:
        """What is there, or None."""
        try:
            return await self.call("GET", path)
        except KubeError as e:
            if e.status == 404:
                return None
            raise

    # --- Pods --------------------------------------------------------------------------------------------------------

    async def create_pod(self, pod: Json) -> Json:
        return await self.call("POST", self._path("/api/v1", "pods", pod["metadata"]["namespace"]), pod)

    async def get_pod(self, namespace: str, name: str) -> Json | None:
        """The Pod as the API server has it now, or None."""
        return await self._get(self._path("/api/v1", "pods", namespace, name))

    async def delete_pod(self, namespace: str, name: str, uid: str) -> bool:
        """Ask for the Pod's graceful deletion, that UID only; False if it is gone or another one by now."""
        body = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": uid}}
        try:
            await self.call("DELETE", self._path("/api/v1", "pods", namespace, name), body)
        except KubeError as e:
            if e.status in (404, 409):
                return False
            raise
        return True

    # --- LeasedJobs and LeasedJobRuns --------------------------------------------------------------------------------

    async def patch_status(self, plural: str, namespace: str, name: str, status: Json, resource_version: str) -> Json:
        """Merges `status` if the object is still at `resource_version` (else KubeError 409)."""
        body = {"metadata": {"resourceVersion": resource_version}, "status": status}
        return await self.call(
            "PATCH",
            self._path(CRD_BASE, plural, namespace, name, "status"),
            body,
            content_type="application/merge-patch+json",
        )

    async def get_object(self, plural: str, namespace: str, name: str) -> Json | None:
        return await self._get(self._path(CRD_BASE, plural, namespace, name))

    # --- the rest ----------------------------------------------------------------------------------------------------

    async def create_event(self, event: Json) -> None:
        await self.call("POST", self._path("/api/v1", "events", event["metadata"]["namespace"]), event)

    async def patch_event(self, namespace: str, name: str, body: Json) -> Json:
        """A merge patch; the Event as it is then."""
        path = self._path("/api/v1", "events", namespace, name)
        return await self.call("PATCH", path, body, content_type="application/merge-patch+json")

    async def get_secret(self, namespace: str, name: str) -> Json | None:
        return await self._get(self._path("/api/v1", "secrets", namespace, name))

    async def create_secret(self, secret: Json) -> Json:
        return await self.call("POST", self._path("/api/v1", "secrets", secret["metadata"]["namespace"]), secret)

    async def patch_secret(self, namespace: str, name: str, body: Json) -> Json:
        return await self.call(
            "PATCH",
            self._path("/api/v1", "secrets", namespace, name),
            body,
            content_type="application/merge-patch+json",
        )

    async def patch_config_map(self, namespace: str, name: str, data: Mapping[str, str], resource_version: str) -> Json:
        """Merges `data` if the object is still at `resource_version` (else KubeError 409)."""
        body = {"metadata": {"resourceVersion": resource_version}, "data": data}
        path = self._path("/api/v1", "configmaps", namespace, name)
        return await self.call("PATCH", path, body, content_type="application/merge-patch+json")

    async def namespace_uid(self, name: str) -> str:
        return str((await self.call("GET", f"/api/v1/namespaces/{name}"))["metadata"]["uid"])
