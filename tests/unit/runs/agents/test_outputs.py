"""Outputs of tools for a model, and final outputs of agents."""

import dataclasses
from typing import Annotated, Any

import msgspec
import pydantic
import pytest

from capsule_tasks.errors import InvalidSetting, ModelMisbehaved, OutputNotStorable
from capsule_tasks.runs.agents.outputs import OutputType, output_text, output_type_of


@dataclasses.dataclass
class Answer:
    text: str
    score: float = 0.5


class Page(pydantic.BaseModel):
    title: str
    links: list["Page"] = []


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("as it is", "as it is"),
        (None, "null"),
        (3, "3"),
        ({"a": [1, True]}, '{"a":[1,true]}'),
        (Answer("x"), '{"text":"x","score":0.5}'),
        (Page(title="x"), '{"title":"x","links":[]}'),
        ([{"type": "other"}], '[{"type":"other"}]'),
        ([], "[]"),
    ],
    ids=str,
)
def test_what_is_no_text_becomes_json(value: Any, text: str) -> None:
    assert output_text("tool", value) == text


def test_parts_stay_parts() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": "data:"}]
    assert output_text("tool", parts) == parts


@pytest.mark.parametrize(
    "value", [object(), [object()], (each for each in "a")], ids=["o", "l", "g"]
)
def test_what_is_not_json_is_named(value: Any) -> None:
    with pytest.raises(OutputNotStorable, match=r"'tool' was made.*(object|generator)"):
        output_text("tool", value)


def test_text_is_no_schema() -> None:
    for kind in (str, None):
        output = OutputType(kind)
        assert output.is_text
        assert output.decode("any {") == "any {"


def test_an_object_is_decoded_by_a_strict_schema() -> None:
    output = output_type_of(Answer)
    assert output_type_of(Answer) is output
    assert output_type_of(output) is output
    assert output.schema is not None
    assert (output.schema.strict, output.schema.parameters["required"]) == (True, ["text", "score"])
    assert output.decode('{"text": "a", "score": null}') == Answer("a")


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (list[int], '{"response": [1]}', [1]),
        (int | None, '{"response": null}', None),
        (Annotated[int, ["unhashable"]], '{"response": 3}', 3),
        (dict[str, int], '{"a": 3}', {"a": 3}),
        (Page, '{"title": "a", "links": null}', Page(title="a")),
        (list[Page], '{"response": [{"title": "a"}]}', [Page(title="a")]),
    ],
    ids=str,
)
def test_other_types_are_decoded(kind: Any, text: str, value: Any) -> None:
    output = output_type_of(kind)
    assert output.schema is not None
    assert output.schema.parameters["type"] == "object"
    assert output.schema.strict is (kind != dict[str, int])
    assert output.decode(text) == value


@pytest.mark.parametrize("text", ["", "no json", "[]", '{"score": 1}', '{"text": 3}'])
def test_an_output_of_another_type_is_misbehaviour(text: str) -> None:
    with pytest.raises(ModelMisbehaved, match="final output is not of type Answer: "):
        OutputType(Answer).decode(text)


def test_strictness_is_chosen() -> None:
    loose = OutputType(Answer, strict=False)
    assert loose.schema is not None
    assert (loose.schema.strict, loose.schema.parameters["required"]) == (False, ["text"])
    with pytest.raises(InvalidSetting, match=r"output_type = dict.*strict schema"):
        OutputType(dict[str, int], strict=True)


@pytest.mark.parametrize("kind", [object, Answer | Page, 3, msgspec.Struct | dict])
def test_what_is_no_type_is_named(kind: Any) -> None:
    with pytest.raises(InvalidSetting, match="output_type = "):
        output_type_of(kind)
