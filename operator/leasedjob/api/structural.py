"""From pydantic models to the structural OpenAPI v3 schema that a CustomResourceDefinition wants.

Also the rules: a `Rule` is one refusal, said twice side by side, once in CEL for the API server and once in Python for
objects that were stored before the rule existed. `tests/contract/crd-rules.yaml` holds both to the same.

The structural subset (kubernetes.io, "Specifying a structural schema"): no `$ref`, no `title`, every node has a type,
no `type`, `default` or `nullable` below `anyOf`. Nothing is nullable here: the API server drops a null of such a field,
as it does for its own kinds, and `Shape` does the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
    model_validator,
)
from pydantic.alias_generators import to_camel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from leasedjob.api.problem import Problem, reason_for

Json = dict[str, Any]
VALIDATIONS: Final = "x-kubernetes-validations"
PRESERVE: Final = "x-kubernetes-preserve-unknown-fields"
MAX_INT32: Final = 2_147_483_647
_RULE_ERROR: Final = "leasedjob_rule"
_KEY_ORDER: Final = (
    "description",
    "type",
    "format",
    "enum",
    "default",
    "minimum",
    "maximum",
    "minLength",
    "maxLength",
    "pattern",
    "minItems",
    "maxItems",
    "maxProperties",
    "required",
    "x-kubernetes-list-type",
    "x-kubernetes-list-map-keys",
    "x-kubernetes-map-type",
    "x-kubernetes-int-or-string",
    PRESERVE,
    VALIDATIONS,
    "anyOf",
    "items",
    "additionalProperties",
    "properties",
)


@dataclass(frozen=True, slots=True)
class Rule:
    """One refusal.

    Attributes:
        cel: the expression that holds for a good value (`self`; `oldSelf` makes it a transition rule).
        message: why it is refused, without the field's name (see `leasedjob.api.problem`).
        holds: the same predicate in Python, on the validated value; None for a transition rule, which only the API
            server can judge.
        field: the path to blame, relative to the value that the rule stands on; "" is the value itself.
        explain: the message with what was found in it, from the value.
        explain_cel: the same text in CEL. Numbers get into it by one outermost `format`: the API server takes
            `string(int)` for a text of any length, so that joining it to another one would exceed the cost limit.
    """

    cel: str
    message: str
    holds: Callable[[Any], bool] | None = None
    field: str = ""
    explain: Callable[[Any], str] | None = None
    explain_cel: str = ""

    def to_json(self) -> Json:
        """The entry of `x-kubernetes-validations`."""
        entry: Json = {"rule": self.cel, "message": self.message}
        if self.explain_cel:
            entry["messageExpression"] = self.explain_cel
        if self.field:
            entry["fieldPath"] = f".{self.field}"
        return entry


def _broken(rules: tuple[Rule, ...], value: object) -> list[tuple[str, str]]:
    return [
        (rule.field, rule.explain(value) if rule.explain else rule.message)
        for rule in rules
        if rule.holds is not None and not rule.holds(value)
    ]


def _refuse(broken: list[tuple[str, str]]) -> PydanticCustomError:
    return PydanticCustomError(
        _RULE_ERROR, "{text}", {"text": "; ".join(message for _, message in broken), "broken": broken}
    )


@dataclass(frozen=True, slots=True)
class Rules:
    """Annotated metadata that puts rules on a scalar, list or map."""

    rules: tuple[Rule, ...]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        json_schema = handler(schema)
        return {**json_schema, VALIDATIONS: json_schema.get(VALIDATIONS, []) + [rule.to_json() for rule in self.rules]}

    def _check(self, value: Any) -> Any:
        if broken := _broken(self.rules, value):
            raise _refuse(broken)
        return value


@dataclass(frozen=True, slots=True)
class ListMap:
    """Annotated metadata: the list is a map by `key`, so that appliers merge it by item and duplicates are refused."""

    key: str

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {
            **handler(schema),
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": [self.key],
        }


class Shape(BaseModel):
    """Base of the models: camelCase on the wire, frozen, unknown fields pruned as the API server prunes them."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        frozen=True,
        extra="ignore",
        use_attribute_docstrings=True,
        hide_input_in_errors=True,
    )
    rules: ClassVar[tuple[Rule, ...]] = ()

    @model_validator(mode="before")
    @classmethod
    def _as_the_server_reads(cls, value: Any) -> Any:
        """Nulls are absent, and 900.0 is the integer 900, which is how some languages write it."""
        if not isinstance(value, Mapping):
            return value
        return {k: int(v) if isinstance(v, float) and v.is_integer() else v for k, v in value.items() if v is not None}

    @model_validator(mode="after")
    def _check_rules(self) -> Any:
        if broken := [*_broken(self.rules, self), *self.more_problems()]:
            raise _refuse(broken)
        return self

    def more_problems(self) -> list[tuple[str, str]]:
        """(relative field path, message) of what no rule can say; checked after the rules."""
        return []

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        json_schema = handler(schema)
        if cls.rules:
            handler.resolve_ref_schema(json_schema)[VALIDATIONS] = [rule.to_json() for rule in cls.rules]
        return json_schema

    def to_json(self) -> Json:
        """The object as the API server takes it: camelCase, nothing that is absent."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


class OpenShape(Shape):
    """A part of somebody else's type: only what rules must see is named, everything else is kept."""

    model_config = ConfigDict(extra="allow", populate_by_name=False)


Int = Annotated[int, Field(strict=True)]
Bool = Annotated[bool, Field(strict=True)]


class StructuralSchema(GenerateJsonSchema):
    """Pydantic's generator, without what a structural schema forbids; `structural()` does the rest."""

    def nullable_schema(self, schema: core_schema.NullableSchema) -> JsonSchemaValue:
        return self.generate_inner(schema["schema"])

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        if schema.get("default") is None:  # absent, a factory, or "not set", which is no default of the API server's
            return self.generate_inner(schema["schema"])
        return super().default_schema(schema)


def structural(model: type[BaseModel]) -> Json:
    """The structural schema of `model`."""
    raw = model.model_json_schema(by_alias=True, mode="validation", schema_generator=StructuralSchema)
    return cast(Json, _tidy(raw, raw.get("$defs", {})))


def _tidy(node: Any, definitions: Mapping[str, Json]) -> Any:
    """Inline references, drop titles, collapse descriptions, turn "anything else is allowed" into the extension."""
    if isinstance(node, list):
        return [_tidy(item, definitions) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        target = definitions[node["$ref"].removeprefix("#/$defs/")]
        node = {**target, **{k: v for k, v in node.items() if k != "$ref"}}
    result: Json = {}
    for key, value in node.items():
        match key:
            case "title" | "$defs":
                continue
            case "description":
                result[key] = " ".join(value.split())
            case "additionalProperties" if value is True:
                result[PRESERVE] = True
            case "additionalProperties" if value is False:
                continue
            case "properties":
                result[key] = {name: _tidy(child, definitions) for name, child in value.items()}
            case "default" | "enum" | "required" | "anyOf" | "x-kubernetes-list-map-keys":
                result[key] = value
            case _ if key == VALIDATIONS:
                result[key] = value
            case _:
                result[key] = _tidy(value, definitions)
    if result.get("type") == "integer":
        result["format"] = "int32" if result.get("maximum", MAX_INT32 + 1) <= MAX_INT32 else "int64"
    return dict(sorted(result.items(), key=lambda item: _KEY_ORDER.index(item[0])))


def problems_of(error: ValidationError, prefix: str) -> list[Problem]:
    """Pydantic's errors in the user's words. `prefix` is where the validated value stands, e.g. `spec`."""
    found: dict[tuple[str, str], Problem] = {}
    for field, message in _lines(error):
        path = f"{prefix}{'' if not field or field.startswith('[') else '.'}{field}"
        found.setdefault((path, message), Problem(path, reason_for(path), message))
    return list(found.values())


def _lines(error: ValidationError) -> Iterator[tuple[str, str]]:
    for line in error.errors(include_url=False):
        at = _path(line["loc"])
        if line["type"] == _RULE_ERROR:
            for field, message in line["ctx"]["broken"]:
                yield f"{at}{'.' if at and field else ''}{field}", message
        else:
            yield at, _sentence(line["type"], line["msg"], line.get("ctx") or {}, line["input"])


def _path(loc: tuple[int | str, ...]) -> str:
    path = ""
    for part in loc:
        path += f"[{part}]" if isinstance(part, int) else f"{'.' if path else ''}{part}"
    return path


def _sentence(kind: str, msg: str, ctx: Mapping[str, Any], value: object) -> str:
    shown = repr(value)
    shown = shown if len(shown) <= 64 else shown[:61] + "…"
    match kind:
        case "missing":
            return "is required"
        case "greater_than_equal":
            return f"is {shown}, but must be at least {ctx['ge']}"
        case "less_than_equal":
            return f"is {shown}, but must be at most {ctx['le']}"
        case "enum":
            return f"is {shown}, but must be {ctx['expected']}"
        case "string_too_short":
            return "must not be empty"
        case "string_too_long" | "too_long":
            return f"is too long: at most {ctx['max_length']}"
        case "too_short":
            return f"needs at least {ctx['min_length']} item"
        case _:
            return f"is {shown}: {msg[:1].lower()}{msg[1:]}"
