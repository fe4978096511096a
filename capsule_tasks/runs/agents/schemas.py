"""JSON schemas of types, and values of these types decoded from what a model wrote.

msgspec makes the schemas and decodes. A class of pydantic works wherever a type does: it is known
by its methods, so pydantic is not imported here.

Definitions are put in place of the references to them, as not every server follows references; only
a type that contains itself keeps its definition. A strict schema is what OpenAI's strict mode
accepts: every object is closed and requires all of its properties. A property with a default may be
null there, and null is decoded as its default. Limits that strict mode does not know, as the length
of a text, are left out of the strict schema; decoding checks them all the same.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import msgspec

from capsule_tasks.errors import InvalidSetting

Schema = dict[str, Any]

_STRICT_KEYWORDS = frozenset(
    {"type", "description", "enum", "const", "anyOf", "items", "minItems", "maxItems", "pattern"}
    | {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "format"}
    | {"properties", "required", "additionalProperties", "$defs"}
)
_STRICT_FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid"}
)
_MAX_SHOWN_DEFAULT = 200
_JSON_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}


class NotStrict(Exception):
    """A schema cannot be made strict, because of the part at `path`."""

    def __init__(self, path: tuple[str, ...], reason: str) -> None:
        super().__init__(reason)
        self.path = path
        self.reason = reason


class Unfit(Exception):
    """A text does not fit the schema; the message says why, for the model that wrote it."""


class Codec:
    """A type that is decoded from JSON, with its schema as its author declared it."""

    def __init__(self, kind: Any) -> None:
        """Raises TypeError for a type that cannot be decoded from JSON."""
        self._kind = kind
        self.schema = schema_of(kind)
        self._definitions: Schema = self.schema.get("$defs", {})

    def decode(self, text: str) -> Any:
        """The value of a JSON text. Raises Unfit."""
        try:
            value = msgspec.json.decode(text)
            if "null" in text:
                _drop_nulls(value, self.schema, self._definitions)
            return msgspec.convert(value, self._kind, str_keys=True, dec_hook=_decode_custom)
        except msgspec.ValidationError as error:
            raise Unfit(str(error)) from None
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise Unfit(f"not JSON: {error}") from None
        except Exception as error:
            # A class of the author checks its values, and may raise anything.
            raise Unfit(f"{type(error).__name__}: {error}") from error


def codec_of(kind: Any, name: str) -> Codec:
    """A codec. InvalidSetting names a type that cannot be decoded from JSON."""
    try:
        return Codec(kind)
    except Exception as error:  # noqa: BLE001  msgspec, or an author's class, may raise anything
        must = f"a type that JSON can be decoded into ({error})"
        raise InvalidSetting(name, kind, must) from None


def as_json(value: Any) -> Any:
    """JSON values for what a tool or a run has returned. Raises TypeError that names its type."""
    return msgspec.to_builtins(value, str_keys=True, enc_hook=_encode_custom)


def as_json_text(value: Any) -> str:
    """JSON for what a tool or a run has returned. Raises TypeError that names its type."""
    return msgspec.json.encode(value, enc_hook=_encode_custom).decode()


def schema_of(kind: Any) -> Schema:
    """The JSON schema of a type. Raises TypeError for a type that JSON cannot be decoded into."""
    (root,), definitions = msgspec.json.schema_components([kind], schema_hook=_custom_schemas())
    inlining = _Inlining()
    schema = inlining.node(root, definitions)
    if "$ref" in schema:  # a type that contains itself
        schema = {**inlining.definitions[_name_in(schema["$ref"])], **schema}
        del schema["$ref"]
    return {**schema, "$defs": inlining.definitions} if inlining.definitions else schema


def strict_schema(schema: Schema) -> Schema:
    """The schema for OpenAI's strict mode. Raises NotStrict if that would refuse other values."""
    return _strict(schema, (), schema.get("$defs", {}))


def made_strict(schema: Schema, strict: bool | None = None) -> tuple[Schema, bool]:
    """The strict schema if there is one, or else the schema as it is; and whether it is strict.

    `strict=True` raises NotStrict if there is none, and with `strict=False` it is never strict.
    """
    if strict is False:
        return schema, False
    try:
        return strict_schema(schema), True
    except NotStrict:
        if strict:
            raise
        return schema, False


def with_default(schema: Schema, default: Any) -> Schema:
    """The schema of a property that has a default; one that is not JSON is not shown."""
    try:
        shown = as_json(default)
        is_short = len(as_json_text(shown)) <= _MAX_SHOWN_DEFAULT
    except Exception:  # noqa: BLE001  the default may be any object
        return schema
    return {**schema, "default": shown} if is_short else schema


# --- classes of pydantic -------------------------------------------------------------------------


def _custom_schemas() -> Callable[[type], Schema]:
    @cache
    def schema(kind: type) -> Schema:
        if not callable(getattr(kind, "model_json_schema", None)):
            raise TypeError(f"{kind!r} cannot be decoded from JSON")
        made: Schema = kind.model_json_schema()  # type: ignore[attr-defined]
        return made

    return schema


def _decode_custom(kind: Any, value: Any) -> Any:
    try:
        return kind.model_validate(value)
    except ValueError as error:
        listed = getattr(error, "errors", None)
        if not callable(listed):
            raise
        found = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in listed()]
        raise ValueError("; ".join(found)) from None


def _encode_custom(value: Any) -> Any:
    dump = getattr(value, "model_dump", None)
    if not callable(dump):
        raise TypeError(f"{type(value).__module__}.{type(value).__qualname__} is not JSON")
    return dump(mode="json")


# --- walking through schemas ---------------------------------------------------------------------

_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "not", "contains", "propertyNames")
_BY_NAME = ("properties", "patternProperties", "$defs")


def _mapped(node: Schema, change: Callable[[Schema, tuple[str, ...]], Schema]) -> Schema:
    """The node with each schema in it changed; `change` is told the names of properties, too."""
    mapped = dict(node)
    for keyword, value in node.items():
        if keyword in _BY_NAME:
            mapped[keyword] = {name: change(each, (name,)) for name, each in value.items()}
        elif keyword in _LISTS:
            mapped[keyword] = [change(each, ()) for each in value]
        elif keyword in _SINGLE and isinstance(value, dict):
            mapped[keyword] = change(value, ())
    return mapped


_NOT_INLINED = ("$ref", "$defs", "title", "discriminator")
"""A discriminator refers to definitions, too; the tags of its variants say the same."""


class _Inlining:
    """Puts definitions in place of references; those of types that contain themselves are kept."""

    def __init__(self) -> None:
        self.definitions: Schema = {}
        self._open: dict[int, str | None] = {}
        """By the id of a definition that is being put in place: its name, once it is needed."""
        self._kept: dict[int, str] = {}

    def node(self, node: Schema, scope: Schema) -> Schema:
        scope = {**scope, **node.get("$defs", {})}
        rest = {key: value for key, value in node.items() if key not in _NOT_INLINED}
        if "$ref" in node:
            name = _name_in(node["$ref"])
            return {**self._definition(name, scope), **rest}
        if len(parts := rest.get("allOf", ())) == 1:
            del rest["allOf"]
            return {**self.node(parts[0], scope), **rest}
        if "enum" in rest and "type" not in rest:
            types = list(dict.fromkeys(_JSON_TYPES.get(type(each), "") for each in rest["enum"]))
            if "" not in types:
                rest = {"type": types[0] if len(types) == 1 else types, **rest}
        return _mapped(rest, lambda child, _names: self.node(child, scope))

    def _definition(self, name: str, scope: Schema) -> Schema:
        target = scope[name]
        if id(target) in self._kept:
            return {"$ref": f"#/$defs/{self._kept[id(target)]}"}
        if id(target) in self._open:
            taken = {*self.definitions, *self._open.values()}
            unused = f"{name}_{len(taken)}" if name in taken else name
            kept = self._open[id(target)] = self._open[id(target)] or unused
            return {"$ref": f"#/$defs/{kept}"}
        self._open[id(target)] = None
        made = self.node(target, scope)
        kept_as = self._open.pop(id(target))
        if kept_as is None:
            return made
        self.definitions[kept_as] = made
        self._kept[id(target)] = kept_as
        return {"$ref": f"#/$defs/{kept_as}"}


def _name_in(reference: str) -> str:
    return reference.rpartition("/")[2]


# --- strict schemas ------------------------------------------------------------------------------


def _strict(node: Schema, path: tuple[str, ...], definitions: Schema) -> Schema:
    if "$ref" in node:
        return {"$ref": node["$ref"]}  # strict mode allows nothing beside a reference
    if "oneOf" in node:
        node = {**node, "anyOf": [*node.get("anyOf", ()), *node["oneOf"]]}
    kept = {key: value for key, value in node.items() if key in _STRICT_KEYWORDS}
    if kept.get("format") not in _STRICT_FORMATS:
        kept.pop("format", None)
    if not kept.keys() & {"type", "anyOf", "const"}:
        raise NotStrict(path, "it allows any value")
    has_elements = isinstance(node.get("items"), dict) and "prefixItems" not in node
    if "array" in _types(node) and not has_elements:
        raise NotStrict(path, "it has an array whose elements are of several or unknown types")
    if "object" in _types(node):
        if "properties" not in node or node.get("additionalProperties", False) is not False:
            raise NotStrict(path, "it has an object with keys of any name")
        kept["properties"] = {
            name: each if name in node.get("required", ()) else _nullable(each, definitions)
            for name, each in kept["properties"].items()
        }
        kept["required"] = list(kept["properties"])
        kept["additionalProperties"] = False
    return _mapped(kept, lambda child, names: _strict(child, (*path, *names), definitions))


def _types(node: Schema) -> list[str]:
    types = node.get("type", [])
    return [types] if isinstance(types, str) else types


def _nullable(node: Schema, definitions: Schema) -> Schema:
    """The schema of a property with a default, which is required in strict mode: it may be null."""
    text = node.get("description", "")
    if node.get("default") is not None:
        shown = f"Default: {as_json_text(node['default'])}"
        text = f"{text} ({shown})" if text else shown
    about = {"description": text} if text else {}
    if _accepts_null(node, definitions):
        return {**node, **about}
    plain = {key: value for key, value in node.items() if key not in ("description", "default")}
    choices = plain["anyOf"] if plain.keys() == {"anyOf"} else [plain]
    return {"anyOf": [*choices, {"type": "null"}], **about}


# --- nulls that stand for defaults ---------------------------------------------------------------


def _resolved(node: Schema, definitions: Schema) -> Schema:
    reference = node.get("$ref")
    return node if reference is None else definitions[_name_in(reference)]


def _variants(node: Schema, definitions: Schema) -> list[Schema]:
    node = _resolved(node, definitions)
    inner = [each for keyword in ("anyOf", "oneOf") for each in node.get(keyword, ())]
    return [node, *(found for each in inner for found in _variants(each, definitions))]


def _accepts_null(node: Schema, definitions: Schema) -> bool:
    """Whether null is a value of its own for a property."""
    for each in _variants(node, definitions):
        says_type = each.keys() & {"type", "anyOf", "oneOf", "allOf", "enum", "const"}
        if "null" in _types(each) or not says_type:
            return True
    return False


def _drop_nulls(value: Any, node: Schema, definitions: Schema) -> None:
    """Remove properties of objects whose null stands for their default."""
    if isinstance(value, list):
        for variant in _variants(node, definitions):
            for index, each in enumerate(value):
                _drop_nulls(each, _element(variant, index), definitions)
    elif isinstance(value, dict):
        for variant in _variants(node, definitions):
            if _is_tagged_as(value, variant):
                _drop_nulls_of_object(value, variant, definitions)


def _element(node: Schema, index: int) -> Schema:
    first = node.get("prefixItems", ())
    items = first[index] if index < len(first) else node.get("items")
    return items if isinstance(items, dict) else {}


def _is_tagged_as(value: Schema, node: Schema) -> bool:
    for name, each in node.get("properties", {}).items():
        tags = [each["const"]] if "const" in each else each.get("enum", ())
        if len(tags) == 1 and name in value and value[name] not in (None, *tags):
            return False
    return True


def _drop_nulls_of_object(value: Schema, node: Schema, definitions: Schema) -> None:
    properties, others = node.get("properties", {}), node.get("additionalProperties")
    for name in list(value):
        child = properties.get(name, others if isinstance(others, dict) else {})
        if value[name] is not None:
            _drop_nulls(value[name], child, definitions)
        elif (
            name in properties
            and name not in node.get("required", ())
            and not _accepts_null(child, definitions)
        ):
            del value[name]
