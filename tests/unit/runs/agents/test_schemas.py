"""JSON schemas of types, strict ones, and values decoded by them."""

import dataclasses
import enum
import json
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Annotated, Any, Literal, NotRequired, Optional, TypedDict
from uuid import UUID

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta

from capsule_tasks.runs.agents.schemas import (
    Codec,
    NotStrict,
    Unfit,
    as_json,
    as_json_text,
    strict_schema,
)


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclasses.dataclass
class Line:
    article: str
    count: int = 1
    tags: list[str] = dataclasses.field(default_factory=list)


class Address(TypedDict):
    street: str
    zip: NotRequired[str]


class Tree(msgspec.Struct):
    name: str
    parts: list["Tree"] = []
    above: "Tree | None" = None


class Card(msgspec.Struct, tag="card"):
    number: str
    cvc: int | None = 7


class Cash(msgspec.Struct, tag="cash"):
    euros: int = 5


class Everything(msgspec.Struct, forbid_unknown_fields=True):
    color: Color
    line: Line
    address: Address
    pay: Card | Cash
    at: datetime
    took: timedelta
    price: Decimal
    id: UUID
    size: Literal["s", "m", 3] | None
    raw: bytes
    names: set[str]
    ratio: float
    of: Annotated[list[int], Meta(min_length=1, description="Some.")]
    tree: Tree
    two: tuple[int, ...] = ()
    maybe: str | None = None


def wrapped(kind: Any) -> Codec:
    return Codec(msgspec.defstruct("Arguments", [("v", kind)]))


def allowed(schema: dict[str, Any]) -> None:
    """The demands of OpenAI's strict mode on every object."""
    if schema.get("type") == "object":
        assert schema["additionalProperties"] is False
        assert schema["required"] == list(schema["properties"])
        assert "default" not in schema
    for value in schema.values():
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, dict):
                allowed(each)


def test_references_are_replaced_except_in_types_that_contain_themselves() -> None:
    schema = Codec(Everything).schema
    assert schema["properties"]["color"] == {"type": "string", "enum": ["blue", "red"]}
    assert schema["properties"]["tree"] == {"$ref": "#/$defs/Tree"}
    assert list(schema["$defs"]) == ["Tree"]
    both = msgspec.defstruct("Both", [("one", Tree), ("two", Tree)])
    assert list(Codec(both).schema["$defs"]) == ["Tree"]


def test_a_root_that_contains_itself_is_an_object() -> None:
    schema = strict_schema(Codec(Tree).schema)
    assert schema["type"] == "object"
    assert schema["properties"]["above"] == {"anyOf": [{"$ref": "#/$defs/Tree"}, {"type": "null"}]}


def test_every_object_of_a_strict_schema_is_closed() -> None:
    schema = strict_schema(Codec(Everything).schema)
    allowed(schema)
    json.dumps(schema)
    line = schema["properties"]["line"]["properties"]
    assert line["count"]["anyOf"] == [{"type": "integer"}, {"type": "null"}]
    assert line["count"]["description"] == "Default: 1"
    assert schema["properties"]["price"] == {"type": "string"}
    assert schema["properties"]["id"] == {"type": "string", "format": "uuid"}
    assert schema["properties"]["of"]["description"] == "Some."


@pytest.mark.parametrize(
    "kind", [dict, dict[str, int], Any, list, tuple[int, str], list[dict[str, int]]], ids=str
)
def test_what_has_no_strict_schema_is_named(kind: Any) -> None:
    with pytest.raises(NotStrict) as caught:
        strict_schema(wrapped(kind).schema)
    assert caught.value.path == ("v",)


def test_null_stands_for_a_default_unless_it_is_a_value() -> None:
    line = Codec(Line).decode('{"article": "a", "count": null, "tags": null}')
    assert line == Line("a")
    assert wrapped(Card | Cash).decode('{"v": {"type": "cash", "euros": null}}').v == Cash()
    assert wrapped(Card | Cash).decode('{"v": {"type": "card", "number": "1", "cvc": null}}').v == (
        Card("1", None)
    )
    tree = Codec(Tree).decode('{"name": "a", "parts": [{"name": "b", "parts": null}]}')
    assert tree == Tree("a", [Tree("b")])
    assert wrapped(dict[str, Line]).decode('{"v": {"k": {"article": "a", "tags": null}}}').v == {
        "k": Line("a")
    }
    assert wrapped(tuple[int, Line]).decode('{"v": [1, {"article": "a", "tags": null}]}').v == (
        (1, Line("a"))
    )
    assert wrapped(Address).decode('{"v": {"street": "s", "zip": null}}').v == {"street": "s"}


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ('{"article": 1}', "Expected `str`, got `int` - at `$.article`"),
        ("{}", "missing required field `article`"),
        ("[1]", "Expected `object`, got `array`"),
        ('{"article"', "not JSON"),
        ("", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ('{"article": null}', "Expected `str`, got `null`"),
        ("\ud800", "not JSON"),
    ],
)
def test_what_does_not_fit_is_described(text: str, part: str) -> None:
    with pytest.raises(Unfit) as caught:
        Codec(Line).decode(text)
    assert part in str(caught.value)


def test_a_class_that_raises_an_odd_error_is_described() -> None:
    class Odd(msgspec.Struct):
        a: int

        def __post_init__(self) -> None:
            raise KeyError(self.a)

    with pytest.raises(Unfit, match="KeyError: 3"):
        Codec(Odd).decode('{"a": 3}')


def test_what_is_not_json_is_named() -> None:
    with pytest.raises(TypeError, match=r"builtins\.object is not JSON"):
        as_json_text([object()])
    with pytest.raises(TypeError, match="cannot be decoded from JSON"):
        Codec(object)


# --- values of many types ------------------------------------------------------------------------

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
VALUES: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(-(2**60), 2**60),
    str: texts,
    bool: st.booleans(),
    float: st.floats(allow_nan=False, allow_infinity=False),
    None: st.none(),
    Color: st.sampled_from(Color),
    Line: st.builds(Line, texts, st.integers(0, 9), st.lists(texts, max_size=2)),
    Tree: st.recursive(
        st.builds(Tree, texts),
        lambda inner: st.builds(Tree, texts, st.lists(inner, max_size=2), st.none() | inner),
        max_leaves=3,
    ),
    Address: st.fixed_dictionaries({"street": texts}, optional={"zip": texts}),
    Card | Cash: st.builds(Card, texts, st.none() | st.integers(0, 9))
    | st.builds(Cash, st.integers(0, 9)),
    UUID: st.uuids(),
    Decimal: st.decimals(allow_nan=False, allow_infinity=False),
    datetime: st.datetimes(),
    bytes: st.binary(max_size=5),
    Literal["a", 1]: st.sampled_from(["a", 1]),
    Annotated[int, Meta(ge=0)]: st.integers(0, 9),
}


Typed = tuple[Any, st.SearchStrategy[Any]]
"""A type, and its values."""


def lists(inner: Typed) -> Typed:
    kind, values = inner
    return list[kind], st.lists(values, max_size=3)


def mappings(inner: Typed) -> Typed:
    kind, values = inner
    return dict[str, kind], st.dictionaries(texts, values, max_size=3)


def pairs(inner: tuple[Typed, Typed]) -> Typed:
    (one, ones), (two, twos) = inner
    return tuple[one, two], st.tuples(ones, twos)


def optional(inner: Typed) -> Typed:
    kind, values = inner
    return Optional[kind], st.none() | values  # noqa: UP045  of any annotation


typed = st.recursive(
    st.sampled_from(list(VALUES.items())),
    lambda inner: (
        st.one_of(inner.map(lists), inner.map(mappings), st.tuples(inner, inner).map(pairs))
        | inner.map(optional)
    ),
    max_leaves=4,
)


@given(st.data())
def test_a_value_comes_back_from_its_json(data: st.DataObject) -> None:
    kind, values = data.draw(typed)
    codec = wrapped(kind)
    value = data.draw(values)
    assert codec.decode(as_json_text({"v": value})).v == value
    assert codec.decode(json.dumps(as_json({"v": value}))).v == value
    try:
        allowed(strict_schema(codec.schema))
    except NotStrict as error:
        assert error.path[0] == "v"  # noqa: PT017
