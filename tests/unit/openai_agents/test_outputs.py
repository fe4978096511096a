"""Outputs of tools come back from the ledger as the model would have got them."""

from __future__ import annotations

from typing import Any

import pytest
from agents import ShellCommandOutput, ShellResult, ToolOutputImage, ToolOutputText
from agents.editor import ApplyPatchResult
from pydantic import BaseModel

from capsule_tasks.openai_agents.outputs import decoded, encoded


@pytest.mark.parametrize(
    "output",
    [
        "text",
        "",
        None,
        7,
        {"type": "text", "text": "é"},
        [1, [2, {"a": None}]],
        ToolOutputText(text="a"),
        [ToolOutputText(text="a"), ToolOutputImage(image_url="https://x")],
        ShellResult(output=[ShellCommandOutput(stdout="ran", command="ls")]),
        ApplyPatchResult(status="failed", output="no such file"),
    ],
    ids=str,
)
def test_an_output_comes_back_as_it_was(output: Any) -> None:
    assert decoded(encoded(output)) == output
    assert type(decoded(encoded(output))) is type(output)


class Receipt(BaseModel):
    euros: int


def test_an_output_of_another_type_comes_back_as_the_text_that_the_model_gets() -> None:
    assert decoded(encoded(Receipt(euros=9))) == str(Receipt(euros=9))
    assert decoded(encoded((1, 2))) == "(1, 2)"
    assert decoded(encoded({1: 2})) == "{1: 2}"
    assert decoded(encoded([Receipt(euros=9), "x"])) == [str(Receipt(euros=9)), "x"]
