"""The Pod template: what is refused because the fence could not hold, or because a name or port is ours. Pure.

The template is kept as written. The shapes below name only what rules must see; everything else passes through, and
nothing is defaulted. `problems` repeats every rule for objects stored before the rule existed, and adds what a rule
can't see.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final

from pydantic import Field, GetJsonSchemaHandler, ValidationError
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from leasedjob import protocol
from leasedjob.api.problem import Problem, Reason
from leasedjob.api.structural import Int, ListMap, OpenShape, Rule, Rules, problems_of

if TYPE_CHECKING:
    from leasedjob.api.v1alpha1 import LeasedJobSpec

FIELD: Final = "spec.template"
# Kubernetes sets no such limits; the cost of a rule is estimated from them.
MAX_CONTAINERS: Final = 64
MAX_VOLUMES: Final = 256
MAX_PORTS: Final = 128
MAX_LABELS: Final = 256
_RESERVED_PORTS: Final = (protocol.PROBE_PORT, protocol.REPORT_PORT)
_LOOPBACK: Final = ("127.0.0.1", "localhost")


def _no_reserved_name(what: str) -> Rule:
    return Rule(
        cel=f"!self.startsWith('{protocol.RESERVED_PREFIX}')",
        holds=lambda name: not name.startswith(protocol.RESERVED_PREFIX),
        message=f"must not begin with {protocol.RESERVED_PREFIX}: such {what} are the operator's own",
    )


def _absent(field: str, attribute: str, why: str) -> Rule:
    return Rule(
        cel=f"!has(self.{field})",
        holds=lambda part: getattr(part, attribute) is None,
        field=field,
        message=f"is refused: {why}",
    )


_NO_RESERVED_KEYS: Final = Rule(
    cel=f"self.all(key, !key.startsWith('{protocol.GROUP}/'))",
    holds=lambda keys: not any(key.startswith(f"{protocol.GROUP}/") for key in keys),
    message=f"must not have keys that begin with {protocol.GROUP}/: the operator sets them on each Pod",
)
_NO_RESERVED_PORT: Final = Rule(
    cel=f"!(self in {list(_RESERVED_PORTS)})",
    holds=lambda port: port not in _RESERVED_PORTS,
    message=f"must not be {_RESERVED_PORTS[0]} or {_RESERVED_PORTS[1]}: the sidecar listens there",
)
_RESTARTED: Final = (
    "a container that the kubelet restarts runs outside its lease; backoffLimit repeats failed attempts, "
    "and a loop in the command of leasedjob exec repeats within one"
)
_NO_RESTART_RULES: Final = _absent(
    "restartPolicyRules",
    "restart_policy_rules",
    _RESTARTED,
)


class TemplateMetadata(OpenShape):
    labels: Annotated[dict[str, str], Field(max_length=MAX_LABELS), Rules((_NO_RESERVED_KEYS,))] | None = None
    annotations: Annotated[dict[str, str], Field(max_length=MAX_LABELS), Rules((_NO_RESERVED_KEYS,))] | None = None


class Port(OpenShape):
    container_port: Annotated[Int, Rules((_NO_RESERVED_PORT,))] | None = None
    name: Annotated[str, Field(max_length=63)] | None = None


class Mount(OpenShape):
    name: Annotated[str, Field(max_length=63), Rules((_no_reserved_name("volumes"),))] | None = None


class ProbeTarget(OpenShape):
    """Of an httpGet or a tcpSocket."""

    host: Annotated[str, Field(max_length=253)] | None = None

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel=f"!has(self.host) || self.host in {list(_LOOPBACK)}",
            holds=lambda target: target.host is None or target.host in _LOOPBACK,
            field="host",
            message="is refused: the lease's sidecar performs this probe inside the Pod, on 127.0.0.1",
        ),
    )


class WorkloadProbe(OpenShape):
    exec: dict[str, Any] | None = None
    grpc: dict[str, Any] | None = None
    http_get: ProbeTarget | None = None
    tcp_socket: ProbeTarget | None = None

    rules: ClassVar[tuple[Rule, ...]] = tuple(
        Rule(
            cel=f"!has(self.{cel})",
            holds=lambda probe, attribute=field: getattr(probe, attribute) is None,  # type: ignore[misc]
            field=field,
            message="is refused: the lease's sidecar performs it and can't do this one; use httpGet or tcpSocket, "
            "or let a check in the command of leasedjob exec end it",
        )
        for cel, field in (("exec", "exec"), ("grpc", "grpc"))
    )


class Container(OpenShape):
    name: Annotated[str, Field(min_length=1, max_length=63), Rules((_no_reserved_name("containers"),))]
    image: Annotated[str, Field(min_length=1)]
    restart_policy: Annotated[str, Field(max_length=63)] | None = None
    restart_policy_rules: list[dict[str, Any]] | None = None
    ports: Annotated[list[Port], Field(max_length=MAX_PORTS)] | None = None
    volume_mounts: Annotated[list[Mount], Field(max_length=MAX_VOLUMES)] | None = None
    volume_devices: Annotated[list[Mount], Field(max_length=MAX_VOLUMES)] | None = None


class InitContainer(Container):
    """Not fenced. `restartPolicy: Always` makes it a native sidecar of the user's own, which is ended in order."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="!has(self.restartPolicy) || self.restartPolicy in ['Always', 'Never']",
            holds=lambda container: container.restart_policy in (None, "Always", "Never"),
            field="restartPolicy",
            message="must be absent, Never, or Always (which makes the init container a sidecar)",
        ),
        _NO_RESTART_RULES,
    )


class WorkloadContainer(Container):
    startup_probe: dict[str, Any] | None = None
    liveness_probe: WorkloadProbe | None = None

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="!has(self.restartPolicy) || self.restartPolicy == 'Never'",
            holds=lambda container: container.restart_policy in (None, "Never"),
            field="restartPolicy",
            message=f"must be Never or absent: {_RESTARTED}",
        ),
        _NO_RESTART_RULES,
        _absent(
            "startupProbe",
            "startup_probe",
            "until it succeeds no liveness probe runs, so the fence could not stop the container; "
            "wait for what it needs in an init container, in the program, or in the command of leasedjob exec",
        ),
    )


class Volume(OpenShape):
    name: Annotated[str, Field(min_length=1, max_length=63), Rules((_no_reserved_name("volumes"),))]


class TemplateSpec(OpenShape):
    containers: Annotated[list[WorkloadContainer], ListMap("name"), Field(min_length=1, max_length=MAX_CONTAINERS)]
    init_containers: Annotated[list[InitContainer], ListMap("name"), Field(max_length=MAX_CONTAINERS)] | None = None
    ephemeral_containers: list[dict[str, Any]] | None = None
    volumes: Annotated[list[Volume], ListMap("name"), Field(max_length=MAX_VOLUMES)] | None = None
    restart_policy: Annotated[str, Field(max_length=63)] | None = None
    host_network: Annotated[bool, Field(strict=True)] | None = None
    termination_grace_period_seconds: Int | None = None

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="!has(self.restartPolicy) || self.restartPolicy == 'Never'",
            holds=lambda spec: spec.restart_policy in (None, "Never"),
            field="restartPolicy",
            message=f"must be Never or absent: {_RESTARTED}",
        ),
        Rule(
            cel="!has(self.hostNetwork) || !self.hostNetwork",
            holds=lambda spec: not spec.host_network,
            field="hostNetwork",
            message="is refused: the fence answers on the Pod's address; two Pods would share its ports",
        ),
        _absent("ephemeralContainers", "ephemeral_containers", "no Pod can be created with them"),
    )


class Template(OpenShape):
    """The PodTemplateSpec of a run's Pods, kept as written."""

    metadata: TemplateMetadata | None = None
    spec: TemplateSpec


class AsTemplate:
    """Annotated metadata: a dict that stays the user's own, with `Template`'s schema in the CRD."""

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return handler(Template.__pydantic_core_schema__)


PodTemplate = Annotated[dict[str, Any], AsTemplate()]


def workload_count(template: Mapping[str, Any]) -> int:
    """How many workload containers a template has; at least 1, since one without is refused anyway."""
    containers = (template.get("spec") or {}).get("containers")
    return max(1, len(containers)) if isinstance(containers, list) else 1


GRACE_RULE: Final = Rule(  # stands on spec, where both values can be seen
    cel="!has(self.template.spec.terminationGracePeriodSeconds) || "
    "self.template.spec.terminationGracePeriodSeconds == self.shutdown.terminationGracePeriodSeconds",
    field="template.spec.terminationGracePeriodSeconds",
    message="must be absent or equal to shutdown.terminationGracePeriodSeconds: the fence is computed from one budget",
)


def problems(template: Mapping[str, Any], spec: LeasedJobSpec) -> list[Problem]:
    """Every reason to refuse `template`, with the path as the user writes it; empty if it is good.

    Args:
        template: a PodTemplateSpec as the API server sent it.
        spec: the job that it belongs to, for the grace period.
    """
    try:
        shape = Template.model_validate(template)
    except ValidationError as error:
        return problems_of(error, FIELD)
    grace = spec.shutdown.termination_grace_period_seconds
    return [Problem(f"{FIELD}.{field}", Reason.INVALID_TEMPLATE, text) for field, text in _across(shape, grace)]


def _across(template: Template, grace_seconds: int) -> Iterator[tuple[str, str]]:
    """What needs more than one part of the template to be seen."""
    spec = template.spec
    grace = spec.termination_grace_period_seconds
    if grace is not None and grace != grace_seconds:
        yield "spec.terminationGracePeriodSeconds", GRACE_RULE.message
    seen: set[str] = set()
    for kind, containers in (("initContainers", spec.init_containers or []), ("containers", spec.containers)):
        for index, container in enumerate(containers):
            if container.name in seen:
                yield f"spec.{kind}[{index}].name", f"{container.name!r} is used by another container"
            seen.add(container.name)
    for index, workload in enumerate(spec.containers):
        yield from ((f"spec.containers[{index}].{field}", text) for field, text in _probe_ports(workload))
    names = [volume.name for volume in spec.volumes or []]
    for index, name in enumerate(names):
        if name in names[:index]:
            yield f"spec.volumes[{index}].name", f"{name!r} is used by another volume"


def _probe_ports(container: WorkloadContainer) -> Iterator[tuple[str, str]]:
    """The sidecar performs a workload's livenessProbe, and must therefore find its port as a number."""
    probe = container.liveness_probe
    if probe is None:
        return
    named = {port.name for port in container.ports or [] if port.name and port.container_port}
    for kind, target in (("httpGet", probe.http_get), ("tcpSocket", probe.tcp_socket)):
        if target is None:
            continue
        port = (target.model_extra or {}).get("port")
        field = f"livenessProbe.{kind}.port"
        if isinstance(port, str) and not port.isdecimal():
            if port not in named:
                yield field, f"{port!r} is not the name of a port of container {container.name}"
        elif not _is_port(port):
            yield field, f"is {port!r}, but must be from 1 to 65535 or the name of a port of the container"
    if probe.http_get is None and probe.tcp_socket is None:
        yield "livenessProbe", "must have httpGet or tcpSocket"


def _is_port(port: object) -> bool:
    """A port number, also one that was written as text, as Kubernetes' IntOrString allows."""
    if isinstance(port, str):
        return port.isascii() and port.isdecimal() and 1 <= int(port) <= 65535
    return isinstance(port, int) and not isinstance(port, bool) and 1 <= port <= 65535
