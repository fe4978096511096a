"""Output and credit with a real child, where both sides once counted differently."""

from __future__ import annotations

import pytest

from capsule_tasks.protocol.messages import Gap, InputRequest, Output, Result
from capsule_tasks.sessions import Session
from capsule_tasks.sessions.states import SessionState
from capsule_tasks.settings import OutputSettings
from tests.sessions import Watched, child_config, collect, end_of, eventually, text


@pytest.mark.parametrize("character", ["😀", "\\ud800"], ids=ascii)
async def test_an_unread_flood_of_wide_characters_does_not_end_the_session(
    character: str,
) -> None:
    settings = OutputSettings(backpressure="drop_oldest", window_bytes=200_000)
    async with Session(child_config(output=settings)) as session:
        messages = session.execute(f"for n in range(100): print('{character}' * 10_000)")
        said = [await anext(messages)]
        await eventually(lambda: session.state is not SessionState.BUSY)
        said += [message async for message in messages]
        assert isinstance(said[-1], Result)
        lost = sum(m.lost_bytes for m in said if isinstance(m, Gap))
        width = len("😀".encode()) if character == "😀" else len("\\ud800")
        assert lost > 0
        assert lost + len(text(said).encode()) == 100 * (10_000 * width + 1)
        assert (await end_of(session, "1")).value == 1


@pytest.mark.parametrize("mode", ["block", "drop_oldest"])
async def test_the_smallest_window_works(mode: str) -> None:
    settings = OutputSettings(backpressure=mode, window_bytes=1, chunk_bytes=1)
    async with Session(child_config(output=settings)) as session:
        said = await collect(session, "print('abc')\n7")
        assert said[-1].value == 7
        lost = sum(m.lost_bytes for m in said if isinstance(m, Gap))
        assert lost + len(text(said)) == len("abc\n")
        assert mode == "drop_oldest" or lost == 0


async def test_a_prompt_of_megabytes_is_a_question_like_any_other(session: Session) -> None:
    asking = Watched(session, "input('x' * 20_000_000 + 'name? ')")
    request = await asking.until(InputRequest)
    assert request.prompt.endswith("name? ")
    await session.input_response("Ada", request_id=request.id, execution_id=asking.execution_id)
    assert (await asking.ended()).value == "Ada"


CHATTY = """
import threading, time
def chat():
    while True:
        print("x" * 200)
        time.sleep(0.0005)
threading.Thread(target=chat, daemon=True).start()
"""


async def test_a_thread_that_talks_on_uses_up_nothing(session: Session) -> None:
    """Its text around the end of an execution was paid by one side and credited to another."""
    await collect(session, CHATTY, execution_id="same")
    for _ in range(200):
        said = await collect(session, "1", execution_id="same")
        assert not [m for m in said if isinstance(m, Output)]
    before = session.metrics["late_output_bytes"]
    await eventually(lambda: session.metrics["late_output_bytes"] > before + 20_000)
    assert not [m for m in session._child.router.session_messages if isinstance(m, Gap)]


async def test_a_warning_of_the_compiler_belongs_to_the_execution(session: Session) -> None:
    said = await collect(session, "1 is 1")
    assert said[-1].value is True
    assert "SyntaxWarning" in text(said, "stderr")
