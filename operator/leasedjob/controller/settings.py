"""The operator's settings, from its environment, which the chart writes."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final

from leasedjob.controller.page.hosts import parse_hosts
from leasedjob.controller.ping_hosts import PingHosts

# As the chart has it: what stands in names of tenants and in the database.
CLUSTER_NAME: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")


class SettingsError(ValueError):
    """A setting that can't be used; the message names the variable."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What one operator process was told.

    `cluster` is empty until it is resolved to the kube-system namespace's UID (see main).
    """

    cluster: str = ""
    namespaces: tuple[str, ...] = ()  # empty: all
    exclude_namespaces: tuple[str, ...] = ()  # patterns with "*", of namespaces that another operator serves
    database_dir: Path = Path("/etc/leasedjob/database")
    sidecar_image: str = "leasedjob/sidecar"
    sidecar_pull_policy: str = "IfNotPresent"
    sidecar_resources: Mapping[str, Any] = field(
        default_factory=lambda: {
            "requests": {"cpu": "10m", "memory": "48Mi"},
            "limits": {"cpu": "500m", "memory": "128Mi"},
        }
    )
    image_pull_secrets: tuple[str, ...] = ()
    sidecar_secret: str = "leasedjob-sidecar"
    sidecar_secret_create: bool = True
    sidecar_database_host: str = ""  # what Pods use to reach the database, if not what the operator uses
    sidecar_database_port: str = ""
    rotate_after_days: float = 30.0  # age at which a namespace's credential is replaced; 0: never
    rotation_overlap_seconds: int = 900  # for which the former credential works: every kubelet has synced by then
    rotation_check_seconds: int = 30
    retention_days: float = 0.0  # age at which ended runs are deleted; 0: never
    ledger_days: float = 90.0  # age at which what says of ticks why they did not run is deleted; 0: never
    shared_codes: frozenset[str] = frozenset()
    metrics_port: int = 8081
    health_port: int = 8080
    page_port: int = 0  # of the status page; 0: it isn't served
    page_address: str = "127.0.0.1"
    page_hosts: frozenset[str] = frozenset()  # names that it may be asked by, beside localhost
    ping_hosts: PingHosts = field(default_factory=PingHosts)  # that `spec.monitoring` may name
    monitoring_secret: str = "leasedjob-monitoring"
    otlp_endpoint: str = ""  # where traces go, by OTLP over HTTP; empty: nowhere
    metrics_jobs: int = 500  # LeasedJobs with series of their own, at most
    identity: str = "leasedjob-operator"
    cordoned: bool = False  # it takes no new runs
    cluster_takeover: str = ""  # UID of a cluster whose name this one takes over
    release: str = ""  # as namespace/name
    own_namespace: str = ""  # where the operator's Pods are
    own_secrets: frozenset[str] = frozenset()  # of that namespace, with the operator's credentials
    own_account: str = ""  # the operator's ServiceAccount
    pod_concurrency: int = 100  # Pods created at the same time
    pods_per_second: int = 1000  # Pods created in a second, on average, at most; 0: no limit
    database_connections: int = 8
    compare_seconds: int = 60  # between two comparisons of what the watch delivered with a list
    kubeconfig: str = ""  # outside a cluster (tests); empty: in-cluster

    def serves(self, namespace: str) -> bool:
        """Whether LeasedJobs of this namespace are this operator's concern."""
        return not any(fnmatchcase(namespace, pattern) for pattern in self.exclude_namespaces)

    @classmethod
    def from_environment(cls, env: Mapping[str, str] | None = None) -> Settings:
        """Settings from `env` (default: os.environ).

        Raises SettingsError, which names the variable, for a value that can't be read.
        """
        env = os.environ if env is None else env

        def read(name: str, default: str = "") -> str:
            return env.get(name, "").strip() or default

        def listed(name: str) -> tuple[str, ...]:
            return tuple(n for n in (p.strip() for p in read(name).split(",")) if n)

        def parsed(name: str, kind: type, default: Any) -> Any:
            text = read(name)
            if not text:
                return default
            try:
                value = json.loads(text)
            except ValueError as e:
                raise SettingsError(f"{name} is not JSON: {e}") from e
            if not isinstance(value, kind):
                raise SettingsError(f"{name} must be a JSON {'object' if kind is dict else 'list'}")
            return value

        def number(name: str, default: int) -> int:
            text = read(name, str(default))
            if not text.isdecimal():
                raise SettingsError(f"{name} must be a whole number, not {text!r}")
            return int(text)

        def positive(name: str, default: int) -> int:
            if not (value := number(name, default)):
                raise SettingsError(f"{name} must be at least 1")
            return value

        def days(name: str, default: float) -> float:
            try:
                value = float(read(name, str(default)))
            except ValueError:
                value = -1.0
            if not 0 <= value < 36500:
                raise SettingsError(f"{name} must be a number of days, not {read(name)!r}")
            return value

        def flag(name: str, default: bool) -> bool:
            text = read(name, str(default)).lower()
            if text not in ("true", "false"):
                raise SettingsError(f"{name} must be true or false, not {text!r}")
            return text == "true"

        def url(name: str) -> str:
            text = read(name)
            if text and not text.startswith(("http://", "https://")):
                raise SettingsError(f"{name} must be an http or https URL, not {text!r}")
            return text

        def names(name: str) -> frozenset[str]:
            try:
                return parse_hosts(listed(name))
            except ValueError as e:
                raise SettingsError(f"{name}: {e}") from e

        def address(name: str, default: str) -> str:
            text = read(name, default)
            try:
                return str(ip_address(text))
            except ValueError as e:
                raise SettingsError(f"{name} must be an IP address, not {text!r}") from e

        def hosts(name: str) -> PingHosts:
            try:
                return PingHosts.parse(listed(name))
            except ValueError as e:
                raise SettingsError(f"{name}: {e}") from e

        def cluster(name: str) -> str:
            text = read(name)
            if text and not CLUSTER_NAME.fullmatch(text):
                raise SettingsError(
                    f"{name} (clusterName): 1 to 253 letters, digits, '.', '_' and '-', a letter or digit first and "
                    f"last, not {text!r}"
                )
            return text

        base = cls()
        return cls(
            cluster=cluster("LEASEDJOB_CLUSTER"),
            cordoned=flag("LEASEDJOB_CORDONED", base.cordoned),
            cluster_takeover=read("LEASEDJOB_CLUSTER_TAKEOVER"),
            release=read("LEASEDJOB_RELEASE"),
            namespaces=listed("LEASEDJOB_NAMESPACES"),
            exclude_namespaces=listed("LEASEDJOB_EXCLUDE_NAMESPACES"),
            database_dir=Path(read("LEASEDJOB_DATABASE_DIR", str(base.database_dir))),
            sidecar_image=read("LEASEDJOB_SIDECAR_IMAGE", base.sidecar_image),
            sidecar_pull_policy=read("LEASEDJOB_SIDECAR_PULL_POLICY", base.sidecar_pull_policy),
            sidecar_resources=parsed("LEASEDJOB_SIDECAR_RESOURCES", dict, base.sidecar_resources),
            image_pull_secrets=tuple(parsed("LEASEDJOB_IMAGE_PULL_SECRETS", list, [])),
            sidecar_secret=read("LEASEDJOB_SIDECAR_SECRET", base.sidecar_secret),
            sidecar_secret_create=flag("LEASEDJOB_SIDECAR_SECRET_CREATE", base.sidecar_secret_create),
            sidecar_database_host=read("LEASEDJOB_SIDECAR_DATABASE_HOST"),
            sidecar_database_port=read("LEASEDJOB_SIDECAR_DATABASE_PORT"),
            rotate_after_days=days("LEASEDJOB_ROTATE_AFTER_DAYS", base.rotate_after_days),
            rotation_overlap_seconds=number("LEASEDJOB_ROTATION_OVERLAP_SECONDS", base.rotation_overlap_seconds),
            rotation_check_seconds=number("LEASEDJOB_ROTATION_CHECK_SECONDS", base.rotation_check_seconds),
            retention_days=days("LEASEDJOB_RETENTION_DAYS", base.retention_days),
            ledger_days=days("LEASEDJOB_LEDGER_DAYS", base.ledger_days),
            shared_codes=frozenset(parsed("LEASEDJOB_SHARED_CODES", list, [])),
            metrics_port=number("LEASEDJOB_METRICS_PORT", base.metrics_port),
            health_port=number("LEASEDJOB_HEALTH_PORT", base.health_port),
            page_port=number("LEASEDJOB_PAGE_PORT", base.page_port),
            page_address=address("LEASEDJOB_PAGE_ADDRESS", base.page_address),
            page_hosts=names("LEASEDJOB_PAGE_HOSTS"),
            ping_hosts=hosts("LEASEDJOB_PING_HOSTS"),
            monitoring_secret=read("LEASEDJOB_MONITORING_SECRET", base.monitoring_secret),
            otlp_endpoint=url("LEASEDJOB_OTLP_ENDPOINT"),
            metrics_jobs=number("LEASEDJOB_METRICS_JOBS", base.metrics_jobs),
            identity=read("POD_NAME", base.identity),
            own_namespace=read("POD_NAMESPACE"),
            own_secrets=frozenset(listed("LEASEDJOB_OWN_SECRETS")),
            own_account=read("LEASEDJOB_OWN_ACCOUNT"),
            pod_concurrency=positive("LEASEDJOB_POD_CONCURRENCY", base.pod_concurrency),
            pods_per_second=number("LEASEDJOB_PODS_PER_SECOND", base.pods_per_second),
            database_connections=number("LEASEDJOB_DATABASE_CONNECTIONS", base.database_connections),
            compare_seconds=number("LEASEDJOB_COMPARE_SECONDS", base.compare_seconds),
            kubeconfig=read("LEASEDJOB_KUBECONFIG"),
        )
