"""Questions that running code asks: in every place, answered, unanswered, and at the end."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from capsule_tasks.errors import UnknownInputRequest
from capsule_tasks.protocol.messages import (
    Error,
    ErrorKind,
    InputClosed,
    InputRequest,
    Result,
)
from capsule_tasks.sessions import Session
from capsule_tasks.settings import (
    ChildSettings,
    InputSettings,
    OutputSettings,
    SessionConfig,
    TimeoutSettings,
)
from tests.sessions import HANG_S, Watched, collect, eventually, text


async def requests(watched: Watched, count: int) -> list[InputRequest]:
    """The first so many questions an execution asked."""

    def asked() -> list[InputRequest]:
        return [m for m in watched.messages if isinstance(m, InputRequest)]

    await eventually(lambda: len(asked()) >= count)
    return asked()


async def respond(session: Session, request: InputRequest, answer: str, **options: Any) -> None:
    await session.input_response(
        answer, request_id=request.id, execution_id=request.execution_id, **options
    )


IN_COROUTINE = """
import asyncio
async def ask(prompt):
    return await asyncio.to_thread(input, prompt)
await ask('name? ')
"""
IN_THREAD = """
import threading
thread = threading.Thread(target=lambda: setattr(thread, 'said', input('name? ')))
thread.start()
thread.join()
thread.said
"""
ASK = {
    "input": ("input('name? ')", "name? ", False),
    "input without a prompt": ("input()", "", False),
    "input with an object": ("input(42)", "42", False),
    "getpass": ("import getpass\ngetpass.getpass('key: ')", "key: ", True),
    "getpass by name": ("from getpass import getpass\ngetpass()", "Password: ", True),
    "stdin": ("import sys\nsys.stdin.readline().rstrip('\\n')", "", False),
    "bytes": ("import sys\nsys.stdin.buffer.readline().decode().rstrip('\\n')", "", False),
    "a loop over stdin": ("import sys\nnext(iter(sys.stdin)).rstrip('\\n')", "", False),
    "a function": ("def ask(p):\n    return input(p)\nask('name? ')", "name? ", False),
    "a coroutine": (
        IN_COROUTINE,
        "name? ",
        False,
    ),
    "a coroutine, on its loop": ("import asyncio\nawait asyncio.sleep(0)\ninput()", "", False),
    "a thread": (
        IN_THREAD,
        "name? ",
        False,
    ),
}


@pytest.mark.parametrize(("source", "prompt", "password"), ASK.values(), ids=ASK.keys())
async def test_a_watcher_is_asked_and_answers(
    session: Session, source: str, prompt: str, password: bool
) -> None:
    await session.run("'so that this is not the first execution'")
    for answer in ("first", "sécond ✓", ""):
        watched = Watched(session, source)
        request = await watched.until(InputRequest)
        assert request.execution_id == watched.execution_id
        assert (request.prompt, request.password) == (prompt, password)
        assert request.timeout_s is None
        await respond(session, request, answer)
        terminal = await watched.ended()
        assert isinstance(terminal, Result), terminal
        assert terminal.value == answer
        closed = [m for m in watched.messages if isinstance(m, InputClosed)]
        assert [(m.request_id, m.reason) for m in closed] == [(request.id, "answered")]


async def test_after_a_warmup_and_after_a_restart() -> None:
    async with Session(SessionConfig(warmup="import getpass, sys\nprint('warm')")) as session:
        for _ in range(2):
            watched = Watched(session, "input('a') + getpass.getpass('b') + sys.stdin.readline()")
            for number in range(3):
                await respond(session, (await requests(watched, number + 1))[-1], str(number))
            assert (await watched.ended()).value == "012\n"
            await session.restart()


async def test_text_comes_before_the_question_it_belongs_to(session: Session) -> None:
    watched = Watched(session, "print('Dear user,')\nprint('now:', end=' ')\ninput('name? ')")
    request = await watched.until(InputRequest)
    before = watched.messages[: watched.messages.index(request)]
    assert text(before) == "Dear user,\nnow: "
    await respond(session, request, "x")
    assert (await watched.ended()).value == "x"


async def test_two_threads_are_answered_in_either_order(session: Session) -> None:
    watched = Watched(
        session,
        "import threading\n"
        "answers = {}\n"
        "def ask(n):\n"
        "    answers[n] = input(n)\n"
        "threads = [threading.Thread(target=ask, args=(n,)) for n in 'ab']\n"
        "for t in threads: t.start()\n"
        "for t in threads: t.join()\n"
        "answers",
    )
    by_prompt = {request.prompt: request for request in await requests(watched, 2)}
    assert session.info.inputs.pending == 2
    await respond(session, by_prompt["b"], "for b")
    await eventually(lambda: session.info.inputs.pending == 1)
    await respond(session, by_prompt["a"], "for a")
    assert (await watched.ended()).value == {"a": "for a", "b": "for b"}


async def test_answers_are_routed_by_execution(session: Session) -> None:
    source = "import asyncio\nawait asyncio.to_thread(input, 'same? ')"
    names = [f"e{n}" for n in range(5)]
    watched = {name: Watched(session, source, execution_id=name) for name in names}
    asked = {name: await one.until(InputRequest) for name, one in watched.items()}
    with pytest.raises(UnknownInputRequest):
        await session.input_response("x", request_id=asked["e0"].id, execution_id="e1")
    for name in reversed(names):
        await respond(session, asked[name], f"for {name}")
    assert {n: (await w.ended()).value for n, w in watched.items()} == {
        name: f"for {name}" for name in names
    }


async def test_a_question_is_answered_once(session: Session) -> None:
    for _ in range(50):
        watched = Watched(session, "input()")
        request = await watched.until(InputRequest)
        first, second = await asyncio.gather(
            respond(session, request, "first"),
            respond(session, request, "second"),
            return_exceptions=True,
        )
        assert first is None
        assert isinstance(second, UnknownInputRequest)
        assert (second.request_id, second.execution_id) == (request.id, watched.execution_id)
        assert (await watched.ended()).value == "first"
        with pytest.raises(UnknownInputRequest):
            await respond(session, request, "third")


async def test_a_response_without_a_question_is_refused(session: Session) -> None:
    with pytest.raises(UnknownInputRequest, match="'nothing'"):
        await session.input_response("x", request_id="nothing", execution_id="nobody")
    with pytest.raises(UnknownInputRequest):
        await Session().input_response("x", request_id="nothing", execution_id="nobody")


async def test_the_end_of_input(session: Session) -> None:
    for source, expected in (
        ("try:\n    input()\nexcept EOFError:\n    answer = 'eof'\nanswer", "eof"),
        ("import sys\nsys.stdin.readline()", ""),
        ("import sys\nsys.stdin.read()", ""),
        ("import sys\nsys.stdin.buffer.read()", b""),
        ("import sys\nlist(sys.stdin)", []),
    ):
        watched = Watched(session, source)
        await respond(session, await watched.until(InputRequest), "", eof=True)
        assert (await watched.ended()).value == expected
    watched = Watched(session, "input()")
    request = await watched.until(InputRequest)
    await respond(session, request, "", eof=True)
    terminal = await watched.ended()
    assert (terminal.kind, terminal.type) == (ErrorKind.RAISED, "EOFError")
    assert any(watched.execution_id in n and request.id in n for n in terminal.notes)


async def test_standard_input_is_read_line_by_line_to_its_end(session: Session) -> None:
    watched = Watched(session, "import sys\nsys.stdin.read()")
    for number in range(3):
        await respond(session, (await requests(watched, number + 1))[-1], f"line {number}")
    await respond(session, (await requests(watched, 4))[-1], "", eof=True)
    assert (await watched.ended()).value == "line 0\nline 1\nline 2\n"


def with_timeout(timeout_s: float) -> Session:
    child = ChildSettings(input=InputSettings(timeout_s=timeout_s))
    return Session(SessionConfig(child=child))


@pytest.mark.parametrize(
    "source",
    [
        "input('name? ')",
        "import sys\nsys.stdin.readline()",
        "import getpass\ngetpass.getpass()",
        "import asyncio\nawait asyncio.to_thread(input)",
    ],
)
async def test_after_the_timeout_the_error_names_execution_request_and_timeout(
    source: str,
) -> None:
    async with with_timeout(0.05) as session:
        watched = Watched(session, source, execution_id="patient")
        request = await watched.until(InputRequest)
        assert request.timeout_s == 0.05
        terminal = await watched.ended()
        assert isinstance(terminal, Error)
        assert (terminal.kind, terminal.type) == (ErrorKind.RAISED, "TimeoutError")
        (note,) = terminal.notes
        assert "patient" in note
        assert request.id in note
        assert "0.05" in note
        assert note in terminal.traceback
        closed = await watched.until(InputClosed)
        assert (closed.request_id, closed.reason) == (request.id, "timeout")
        with pytest.raises(UnknownInputRequest):
            await respond(session, request, "too late")
        inputs = session.info.inputs
        assert (inputs.pending, inputs.timeouts, inputs.cancels) == (0, 1, 0)


async def test_a_timeout_may_be_caught_and_the_question_asked_again() -> None:
    async with with_timeout(0.2) as session:
        watched = Watched(
            session,
            "try:\n    input('first')\nexcept TimeoutError:\n    print('again')\n"
            "while True:\n    try:\n        answer = input('second')\n        break\n"
            "    except TimeoutError: pass\nanswer",
        )
        await watched.until_output("again")
        count = 1
        while not isinstance(watched.messages[-1], Result):
            count += 1
            request = (await requests(watched, count))[-1]
            try:
                await respond(session, request, "yes")
            except UnknownInputRequest:
                continue
            closed = await eventually(
                lambda r=request: [
                    m
                    for m in watched.messages
                    if isinstance(m, InputClosed) and m.request_id == r.id
                ]
            )
            if closed[0].reason == "answered":
                break
        assert (await watched.ended()).value == "yes"


async def test_a_question_is_not_held_up_by_unread_output() -> None:
    child = ChildSettings(output=OutputSettings(window_bytes=1000))
    async with Session(SessionConfig(child=child)) as session:
        messages = session.execute("print('x' * 900)\ninput('name? ')", execution_id="e")
        await anext(messages)
        await eventually(lambda: session.info.inputs.pending == 1)
        async for message in messages:
            if isinstance(message, InputRequest):
                await respond(session, message, "found")
        assert isinstance(message, Result)
        assert message.value == "found"


async def test_outcomes_of_questions_are_counted(session: Session) -> None:
    counts = session.info.inputs
    assert (counts.pending, counts.high_water, counts.timeouts, counts.cancels) == (0, 0, 0, 0)
    source = "import asyncio\nawait asyncio.to_thread(input)"
    watched = [Watched(session, source) for _ in range(4)]
    asked = [await one.until(InputRequest) for one in watched]
    counts = session.info.inputs
    assert (counts.pending, counts.high_water) == (4, 4)
    await respond(session, asked[0], "x")
    await watched[0].ended()
    await session.cancel(watched[1].execution_id, grace_s=HANG_S)
    await watched[1].ended()
    await respond(session, asked[2], "", eof=True)
    await watched[2].ended()
    counts = session.info.inputs
    assert (counts.pending, counts.high_water, counts.answered) == (1, 4, 1)
    assert (counts.timeouts, counts.cancels) == (0, 2)
    with pytest.raises(UnknownInputRequest):
        await respond(session, asked[1], "too late")
    await session.cancel(watched[3].execution_id, grace_s=HANG_S)
    await watched[3].ended()
    assert session.info.inputs.pending == 0


CATCHES_EOF = """
def ask(name):
    try:
        input(name)
    except EOFError as error:
        print('eof for', name, *error.__notes__)
"""


async def test_a_shutdown_ends_input_with_eof_at_once() -> None:
    timeouts = TimeoutSettings(shutdown_s=HANG_S)
    async with Session(SessionConfig(timeouts=timeouts)) as session:
        watched = Watched(session, CATCHES_EOF + "ask('main')\nprint('went on')")
        request = await watched.until(InputRequest)
        async with asyncio.timeout(HANG_S / 2):
            await session.shutdown()
        await watched.ended()
        said = text(watched.messages)
        assert said.startswith("eof for main")
        assert "went on" in said
        assert request.id in said
        assert watched.execution_id in said


async def test_a_shutdown_ends_input_in_threads_and_coroutines() -> None:
    timeouts = TimeoutSettings(shutdown_s=HANG_S)
    async with Session(SessionConfig(timeouts=timeouts)) as session:
        source = f"import asyncio\n{CATCHES_EOF}await asyncio.to_thread(ask, 'me')\n'went on'"
        watched = [Watched(session, source) for _ in range(3)]
        for one in watched:
            await one.until(InputRequest)
        async with asyncio.timeout(HANG_S / 2):
            await session.shutdown()
        for one in watched:
            assert (await one.ended()).value == "went on"
            assert text(one.messages).startswith("eof for me")


async def test_code_that_does_not_catch_it_ends_because_of_the_shutdown() -> None:
    async with Session() as session:
        watched = Watched(session, "input()")
        await watched.until(InputRequest)
        await session.shutdown()
        terminal = await watched.ended()
        assert (terminal.kind, terminal.type) == (ErrorKind.SHUTDOWN, "EOFError")


@pytest.mark.parametrize(
    "source",
    [
        "while True: ask('me')",
        "from threading import *\nThread(target=ask, args='m').start()\nEvent().wait()",
    ],
    ids=["asks again", "its thread asked"],
)
async def test_code_that_goes_on_after_the_end_of_input_is_still_stopped(
    source: str,
) -> None:
    timeouts = TimeoutSettings(shutdown_s=HANG_S)
    async with Session(SessionConfig(timeouts=timeouts)) as session:
        watched = Watched(session, CATCHES_EOF + source)
        await watched.until(InputRequest)
        async with asyncio.timeout(HANG_S / 2):
            await session.shutdown()
        terminal = await watched.ended()
        assert isinstance(terminal, Error)
        assert terminal.kind == ErrorKind.SHUTDOWN


async def test_a_thread_that_still_asks_when_its_execution_ends_gets_eof(
    session: Session,
) -> None:
    await collect(
        session,
        "import threading\n"
        "outcome = []\n"
        "def ask():\n"
        "    try:\n"
        "        input('late')\n"
        "    except EOFError:\n"
        "        outcome.append('eof')\n"
        "t = threading.Thread(target=ask)\n"
        "t.start()",
    )
    assert (await session.run("t.join()\noutcome")).value == ["eof"]
    assert session.info.inputs.pending == 0
