"""The plugin's way to a cluster: the kubeconfig, objects as dicts, and errors made readable.

Importing this module imports the `kubernetes` client (about half a second), so verbs import it when they need it.
Dicts are used because typed models drop the fields that they don't know.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final
from urllib.parse import quote

import urllib3
from kubernetes import client, config

from leasedjob.api import deep
from leasedjob.cli.exits import Exit, Failure
from leasedjob.protocol import FIELD_MANAGER, GROUP, VERSION

Object = dict[str, Any]

SERVICE_ACCOUNT_NAMESPACE: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_PAGE: Final = 500
_OURS: Final = f"/apis/{GROUP}/{VERSION}"
_MANAGER: Final = {"fieldManager": f"kubectl-{FIELD_MANAGER}"}
_NO_QUERY: Final[Mapping[str, object]] = {}


@dataclass(frozen=True, slots=True)
class Resource:
    """A kind of object: the path of its API, and its name there."""

    kind: str
    api: str
    plural: str

    @property
    def is_ours(self) -> bool:
        """It comes with the chart."""
        return self.api == _OURS


_RESOURCES: Final = {
    resource.plural: resource
    for resource in (
        Resource("LeasedJob", _OURS, "leasedjobs"),
        Resource("LeasedJobRun", _OURS, "leasedjobruns"),
        Resource("CronJob", "/apis/batch/v1", "cronjobs"),
        Resource("Pod", "/api/v1", "pods"),
        Resource("Namespace", "/api/v1", "namespaces"),
        Resource("ConfigMap", "/api/v1", "configmaps"),
    )
}

# urllib3 logs a warning for each attempt that fails; the one line that matters is the Failure's.
logging.getLogger("urllib3").setLevel(logging.ERROR)
logging.getLogger("kubernetes").setLevel(logging.CRITICAL)
# insecure-skip-tls-verify is the user's own choice, which kubectl doesn't comment on either.
urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)


@dataclass(frozen=True, slots=True)
class Cluster:
    """One cluster and namespace, as the flags chose them. Every method raises `Failure` and nothing else."""

    api: Any
    namespace: str
    where: str  # for messages: the context, or the server

    PATIENT: ClassVar = (10.0, 60.0)  # seconds to connect, to answer
    QUICK: ClassVar = (2.0, 5.0)  # for completion: a person waits at the prompt

    @classmethod
    def connect(cls, kubeconfig: str | None, context: str | None, namespace: str | None) -> Cluster:
        """Reads the kubeconfig (or, in a Pod, the service account); talks to nobody yet.

        Raises:
            Failure: UNREACHABLE where there is neither, where the file is unreadable or the context is unknown.
        """
        settings = client.Configuration()
        try:
            if kubeconfig is None and context is None and _in_a_pod():
                config.load_incluster_config(client_configuration=settings)
                own, where = SERVICE_ACCOUNT_NAMESPACE.read_text(encoding="utf-8").strip(), "this Pod's cluster"
            else:
                contexts, current = config.list_kube_config_contexts(kubeconfig)
                chosen = current if context is None else next((c for c in contexts if c["name"] == context), None)
                if chosen is None:
                    known = ", ".join(sorted(c["name"] for c in contexts)) or "none"
                    raise Failure(Exit.UNREACHABLE, f"the kubeconfig has no context {context!r} (it has: {known})")
                config.load_kube_config(kubeconfig, context=chosen["name"], client_configuration=settings)
                own, where = chosen["context"].get("namespace"), f"context {chosen['name']}"
        except Failure:
            raise
        except config.ConfigException as error:
            said = _one_line(error)
            if "No configuration found" in said:
                said = (
                    f"nothing in {kubeconfig or f'{config.KUBE_CONFIG_DEFAULT_LOCATION} ($KUBECONFIG, --kubeconfig)'}"
                )
            raise Failure(Exit.UNREACHABLE, f"no usable kubeconfig: {said}") from error
        except Exception as error:  # whatever a file of the wrong shape, or YAML, raises
            raise Failure(Exit.UNREACHABLE, f"the kubeconfig can't be read: {_one_line(error)}") from error
        settings.retries = False  # a person waits: the first failure is the answer
        return cls(client.ApiClient(settings), namespace or own or "default", where)

    def user(self) -> str:
        """Who the API server takes this user for; "" where it doesn't say."""
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}
        with contextlib.suppress(Failure), self._translated("namespaces"):
            answer = self._ask("POST", "/apis/authentication.k8s.io/v1/selfsubjectreviews", _MANAGER, body)
            return str(((answer.get("status") or {}).get("userInfo") or {}).get("username") or "")
        return ""

    def close(self) -> None:
        """Closes the connections."""
        self.api.close()

    # --- reading ------------------------------------------------------------------------------------------------------

    def get(self, plural: str, name: str, *, timeout: tuple[float, float] = PATIENT) -> Object:
        """One object; Failure NOT_FOUND where it isn't there."""
        with self._translated(plural, name):
            return self._ask("GET", self._path(plural, name), timeout=timeout)

    def list_all(
        self,
        plural: str,
        *,
        all_namespaces: bool = False,
        labels: str | None = None,
        timeout: tuple[float, float] = PATIENT,
    ) -> list[Object]:
        """All objects of the namespace, or of the cluster, page by page. labels: a selector."""
        items: list[Object] = []
        resource = _RESOURCES[plural]
        path = f"{resource.api}/{plural}" if all_namespaces else self._path(plural)
        query: dict[str, object] = {"limit": _PAGE, **({"labelSelector": labels} if labels else {})}
        while True:
            with self._translated(plural):
                page = self._ask("GET", path, query, timeout=timeout)
            # The API server leaves both out of the items of a list of its own kinds.
            given = {"apiVersion": page.get("apiVersion"), "kind": resource.kind}
            items += [{**given, **item} for item in page["items"]]
            following = page["metadata"].get("continue")
            if not following:
                return items
            query["continue"] = following

    def names(self, plural: str) -> list[str]:
        """Names only, for completion."""
        return [item["metadata"]["name"] for item in self.list_all(plural, timeout=self.QUICK)]

    def namespaces(self) -> list[str]:
        """Names of the cluster's namespaces, for completion."""
        items = self.list_all("namespaces", all_namespaces=True, timeout=self.QUICK)
        return [item["metadata"]["name"] for item in items]

    def log(self, pod: str, container: str, *, follow: bool, tail: int | None, timestamps: bool) -> Iterator[bytes]:
        """What a container has written, in pieces as they come; with `follow` to its end.

        Raises `Failure` NOT_FOUND where the Pod is gone, REFUSED where the container has not begun to write.
        """
        query: dict[str, object] = {"container": container}
        query |= {"follow": "true"} if follow else {}
        query |= {"tailLines": tail} if tail is not None else {}
        query |= {"timestamps": "true"} if timestamps else {}
        with self._translated("pods", pod):
            # A program may be silent for hours; TCP keepalives tell when nobody is there any more.
            timeout = (self.PATIENT[0], None) if follow else self.PATIENT
            response = self._open("GET", f"{self._path('pods', pod)}/log", query, timeout=timeout)
            try:
                while chunk := response.read1(65536):
                    yield chunk
            finally:
                response.close()

    def follow(self, plural: str, name: str, seconds: float | None) -> Iterator[Object]:
        """The object as it is and then at every change, until the caller stops or `seconds` are over.

        A watch that breaks or goes silent is begun again from a fresh read. Raises `Failure` NOT_FOUND when the
        object is gone.
        """
        end = None if seconds is None else time.monotonic() + seconds
        broken = 0
        while True:
            current = self.get(plural, name)
            yield current
            left = 300.0 if end is None else min(300.0, end - time.monotonic())
            if left <= 0:
                return
            started = time.monotonic()
            try:
                for event in self._watch(plural, current, left):
                    if event["type"] == "DELETED":
                        raise Failure(Exit.NOT_FOUND, f"{_RESOURCES[plural].kind} {name} was deleted")
                    broken = 0
                    yield event["object"]
                if time.monotonic() - started < min(1.0, left):  # cut at once, perhaps by a proxy
                    raise _Passing
            except _Passing:
                broken += 1
                # Not a poll: only a watch that failed gets here, and it must not be a busy loop.
                time.sleep(min(2.0**broken * 0.1, 5.0, max(0.0, left)))

    def _watch(self, plural: str, current: Object, seconds: float) -> Iterator[Object]:
        """The watch events of one object after `current`, at most for so long; `_Passing` where the watch breaks.

        Not the client's own Watch: it can't tell an ERROR event when it is asked for dicts.
        """
        name = current["metadata"]["name"]
        with self._translated(plural, name, passing=True):
            query = {
                "watch": "true",
                "fieldSelector": f"metadata.name={name}",
                "resourceVersion": current["metadata"]["resourceVersion"],
                "timeoutSeconds": math.ceil(seconds),
            }
            response = self._open("GET", self._path(plural), query, timeout=(10.0, seconds + 10.0))
            try:
                for line in _lines(response):
                    event: Object = deep.loads(line)
                    if event["type"] == "ERROR":
                        code = event["object"].get("code")
                        raise client.ApiException(status=code, reason=event["object"].get("message"))
                    yield event
            finally:
                response.close()  # the rest of the stream is not wanted, so the connection can't be used again

    # --- writing ------------------------------------------------------------------------------------------------------

    def create(self, plural: str, body: Object) -> Object:
        """Creates the object in the namespace and returns it as the API server stored it."""
        with self._translated(plural):
            return self._ask("POST", self._path(plural), {**_MANAGER, "fieldValidation": "Strict"}, body)

    def merge(self, plural: str, name: str, patch: Object) -> Object:
        """A JSON merge patch."""
        with self._translated(plural, name):
            return self._ask("PATCH", self._path(plural, name), _MANAGER, patch, content="application/merge-patch+json")

    def discard(self, plural: str, name: str) -> None:
        """Deletes an object that this command made for itself. A failure is no matter: its owner's end removes it."""
        with contextlib.suppress(Failure), self._translated(plural, name):
            self._ask("DELETE", self._path(plural, name))

    # --- requests -----------------------------------------------------------------------------------------------------

    def _path(self, plural: str, name: str | None = None) -> str:
        path = f"{_RESOURCES[plural].api}/namespaces/{quote(self.namespace, safe='')}/{plural}"
        if name is None:
            return path
        if name.strip(".") == "":  # such a path would be another one
            raise Failure(Exit.USAGE, f"{name!r} is no name of a {_RESOURCES[plural].kind}")
        return f"{path}/{quote(name, safe='')}"

    def _ask(
        self,
        method: str,
        path: str,
        query: Mapping[str, object] = _NO_QUERY,
        body: Object | None = None,
        *,
        content: str = "application/json",
        timeout: tuple[float, float] = PATIENT,
    ) -> Object:
        response = self._open(method, path, query, body, content=content, timeout=timeout)
        answer: Object = deep.loads(response.data)
        return answer

    def _open(
        self,
        method: str,
        path: str,
        query: Mapping[str, object] = _NO_QUERY,
        body: Object | None = None,
        *,
        content: str = "application/json",
        timeout: tuple[float, float | None] = PATIENT,
    ) -> urllib3.BaseHTTPResponse:
        """The answer, if it is a good one, with its body unread; else raises ApiException.

        The client's own methods for each kind are not used: they would double the time that importing takes, and can't
        read a watch or a log as it comes.
        """
        headers = {"Accept": "application/json, */*", **({} if body is None else {"Content-Type": content})}
        request = self.api.param_serialize(
            method,
            path,
            query_params=list(query.items()),
            header_params=headers,
            body=body,
            auth_settings=["BearerToken"],
        )
        response: urllib3.BaseHTTPResponse = self.api.call_api(*request, _request_timeout=timeout).response
        if not 200 <= response.status <= 299:
            try:
                raise client.ApiException(http_resp=response, body=response.data.decode(errors="replace"))
            finally:
                response.close()
        return response

    # --- errors -------------------------------------------------------------------------------------------------------

    @contextmanager
    def _translated(self, plural: str, name: str | None = None, *, passing: bool = False) -> Iterator[None]:
        try:
            yield
        except client.ApiException as error:
            if passing and (error.status in (410, 429) or (error.status or 0) >= 500):
                raise _Passing from error
            raise self._answered(error, plural, name) from error
        except urllib3.exceptions.HTTPError as error:
            if passing:
                raise _Passing from error
            message = f"no answer from the API server ({self.where}): {_reason(error)}"
            raise Failure(Exit.UNREACHABLE, message) from error

    def _answered(self, error: client.ApiException, plural: str, name: str | None) -> Failure:
        said = _status(error)
        message = said.get("message") or _one_line(error.reason or error)
        kind, place = _RESOURCES[plural].kind, f"namespace {self.namespace} ({self.where})"
        match error.status:
            case 401:
                return Failure(Exit.NO_ACCESS, f"not logged in ({self.where}): the API server refuses the credentials")
            case 403 if said.get("reason") == "Forbidden" and "is forbidden: User" in message:
                return Failure(Exit.NO_ACCESS, f"no access: {message}")
            case 403:  # admission: a quota, a policy, a terminating namespace
                return Failure(Exit.REFUSED, f"refused: {message}")
            case 404:
                details = said.get("details") or {}
                if details.get("kind") == "namespaces":
                    return Failure(Exit.NOT_FOUND, f"namespace {self.namespace} not found ({self.where})")
                if name is not None and (details.get("name") == name or not _RESOURCES[plural].is_ours):
                    return Failure(Exit.NOT_FOUND, f"{kind} {name} not found in {place}")
                return Failure(
                    Exit.NOT_INSTALLED,
                    f"the cluster ({self.where}) has no {kind}s of {GROUP}/{VERSION}: is the chart installed there?",
                )
            case _:
                return Failure(Exit.REFUSED, f"the API server answers {error.status}: {message}")


class _Passing(Exception):
    """A fault of a watch that a fresh read gets over."""


def _lines(response: urllib3.BaseHTTPResponse) -> Iterator[bytes]:
    rest = b""
    while chunk := response.read1(65536):  # what has arrived, without waiting for more
        *whole, rest = (rest + chunk).split(b"\n")
        yield from (line for line in whole if line.strip())


def context_names(kubeconfig: str | None) -> list[str]:
    """The kubeconfig's contexts, for completion."""
    return [context["name"] for context in config.list_kube_config_contexts(kubeconfig)[0]]


def _in_a_pod() -> bool:
    files = config.KUBE_CONFIG_DEFAULT_LOCATION.split(os.pathsep)
    return SERVICE_ACCOUNT_NAMESPACE.exists() and not any(Path(file).expanduser().exists() for file in files if file)


def _status(error: client.ApiException) -> Object:
    """The answer's metav1.Status, or {} where a proxy or an unknown path answered."""
    try:
        status = json.loads(error.body or "")
    except (ValueError, TypeError):
        return {}
    return status if isinstance(status, dict) else {}


def _reason(error: Exception) -> str:
    """The innermost cause that urllib3 wrapped, without its object addresses."""
    inner: object = error
    while (deeper := getattr(inner, "reason", None)) is not None and isinstance(deeper, Exception):
        inner = deeper
    text = _one_line(inner)
    return text.rpartition(">: ")[2] if ">: " in text else text


def _one_line(error: object) -> str:
    return " ".join(str(error).split()) or type(error).__name__
