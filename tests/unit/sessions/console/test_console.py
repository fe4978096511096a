"""The console's blocks of code, and its prompt behind a pipe."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import PipeInput, create_pipe_input
from prompt_toolkit.output import DummyOutput

from capsule_tasks.sessions.console.blocks import is_complete
from capsule_tasks.sessions.console.frontend import ANSWER_PROMPT, FIRST_PROMPT
from capsule_tasks.sessions.console.terminal import Terminal

HANG_S = 30


@pytest.mark.parametrize(
    ("text", "complete"),
    [
        ("", True),
        ("1", True),
        (":names", True),
        ("await x", True),
        ("1 +", True),  # an error, which the child reports
        ("x = (1,", False),
        ("if x:", False),
        ("if x:\n    y", False),
        ("if x:\n    y\n", True),
        ("if x:\n    y\nz", True),
        ("if x:\n    y\nelse:", False),
        ("def f():\n    g()\ndef g():", False),
        ("@f", False),
        ("'''\n:names", False),
    ],
)
def test_a_text_is_complete_with_the_end_of_its_last_block(text: str, complete: bool) -> None:
    assert is_complete(text) is complete


@pytest.fixture
def keys() -> Iterator[PipeInput]:
    with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
        yield keys


class Prompt(Terminal):
    """A terminal that notes the commands that are typed while nothing is asked for."""

    def __init__(self) -> None:
        self.commands: list[str] = []
        super().__init__(self._note)

    def _note(self, line: str) -> bool:
        if line.startswith(":"):
            self.commands.append(line)
        return line.startswith(":")


async def lines(prompt: Prompt, asked_with: str, count: int) -> list[str | None]:
    async with asyncio.timeout(HANG_S):
        return [await prompt.next_line(asked_with) for _ in range(count)]


async def test_a_block_comes_line_by_line_once_it_is_complete(keys: PipeInput) -> None:
    prompt = Prompt()
    prompt.start()
    keys.send_text("if x:\r\ty\r\r")
    assert await lines(prompt, FIRST_PROMPT, 3) == ["if x:", "    y", ""]
    await prompt.close()


async def test_lines_typed_while_nothing_is_asked_for_wait_and_commands_do_not(
    keys: PipeInput,
) -> None:
    prompt = Prompt()
    prompt.start()
    keys.send_text("1\r:stack\r2\r")
    assert await lines(prompt, FIRST_PROMPT, 2) == ["1", "2"]
    assert prompt.commands == [":stack"]
    await prompt.close()


async def test_an_answer_that_looks_like_a_command_is_an_answer(keys: PipeInput) -> None:
    prompt = Prompt()
    prompt.start()
    keys.send_text(":stack\r")
    assert await lines(prompt, ANSWER_PROMPT, 1) == [":stack"]
    assert not prompt.commands
    await prompt.close()


async def test_the_history_has_code_and_no_answers(keys: PipeInput) -> None:
    prompt = Prompt()
    prompt.start()
    keys.send_text("first\r")
    assert await lines(prompt, FIRST_PROMPT, 1) == ["first"]
    keys.send_text("private\r")
    assert await lines(prompt, ANSWER_PROMPT, 1) == ["private"]
    assert prompt._prompt.history.get_strings() == ["first"]
    await prompt.close()


async def test_the_end_of_input_ends_one_question_and_no_more(keys: PipeInput) -> None:
    prompt = Prompt()
    prompt.start()
    keys.send_text("\x04")
    assert await lines(prompt, ANSWER_PROMPT, 1) == [None]
    keys.send_text("1\r")
    assert await lines(prompt, FIRST_PROMPT, 1) == ["1"]
    await prompt.close()


async def test_a_terminal_that_goes_away_is_the_end_of_input(keys: PipeInput) -> None:
    prompt = Prompt()
    prompt.start()
    keys.close()
    assert await lines(prompt, FIRST_PROMPT, 1) == [None]
    await prompt.close()
