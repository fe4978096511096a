"""A tour of what a session can do; every claim it makes is checked as it is made."""

from __future__ import annotations

import asyncio
import logging
import sys
import textwrap
import time
from collections.abc import AsyncIterator
from pathlib import Path

from capsule_tasks.errors import CapsuleError
from capsule_tasks.protocol.messages import Error, InputRequest, Message, Output, Result
from capsule_tasks.sessions.session import Session
from capsule_tasks.sessions.states import SessionState

_PATIENCE_S = 10.0
"""Grace where the tour shows an orderly stop: a busy machine may not turn it into a kill."""
_GRACE_S = 0.2
_HANG_S = 60.0
"""The whole of it takes about a second."""

_OUTPUT = """
import sys, time
for word in ("one", "two", "three"):
    print(word, end=" ", flush=True)
    time.sleep(0.05)
print("to stderr", file=sys.stderr)
40 + 2
"""
_KEEP = """
from datetime import date
visits = {"Ada": date(1843, 7, 10)}
def greet(name):
    return f"{name}, {visits[name]:%d %B %Y}"
"""
_COUNT = """
import asyncio
together = asyncio.Barrier(3)
async def count(name):
    await together.wait()  # until three of them are running
    for step in range(3):
        print(name, step)
        await asyncio.sleep(0.05)
    return f"{name} is done"
"""
_CLEANING_UP = """
import time
print("at work")
try:
    {work}
finally:
    print("cleaned up")
"""
_STUBBORN = """
import time
print("at work")
while True:
    try:
        time.sleep(60)
    except BaseException:
        pass  # it will not stop
"""


class Unexpected(Exception):
    """The tour saw something else than it promised."""


async def tour(session: Session) -> None:
    """All the stops, in order; Unexpected at the first that is not as it should be."""
    await _start(session)
    await _live_output(session)
    await _lasting_names(session)
    await _many_at_once(session)
    await _cancel(session, "a busy loop", "while True: pass")
    await _cancel(session, "a sleep", "time.sleep(60)")
    await _kill(session)
    await _input(session)
    await _checkpoint(session)
    await _crash(session)
    await _leave(session)


def main() -> int:
    """Run the tour; the exit status."""
    logging.getLogger("capsule_tasks").addHandler(logging.NullHandler())  # it crashes on purpose
    begun = time.monotonic()
    try:
        asyncio.run(_with_session())
    except (Unexpected, CapsuleError, TimeoutError) as error:
        sys.stderr.write(f"\nNOT AS EXPECTED: {type(error).__name__}: {error}\n")
        return 1
    _say(f"\nAll of it as expected, in {time.monotonic() - begun:.1f} s.")
    return 0


async def _with_session() -> None:
    session = Session()
    try:
        async with asyncio.timeout(_HANG_S):
            await tour(session)
    finally:
        await session.terminate()


# --- the stops ---------------------------------------------------------------------------------


async def _start(session: Session) -> None:
    _title("A session starts")
    _call("await session.start()")
    begun = time.monotonic()
    await session.start()
    elapsed_ms = (time.monotonic() - begun) * 1000
    info = session.info
    _came(
        f"{info.state} after {elapsed_ms:.0f} ms: Python {info.metadata['python']}, pid {info.pid}"
    )
    _expect(info.state is SessionState.READY, "the session to be ready")


async def _live_output(session: Session) -> None:
    _title("Output arrives as it is written")
    messages = await _run(session, _OUTPUT)
    first = next(m for m in messages if isinstance(m, Output))
    end = _result(messages)
    _expect(_text(messages) == "one two three ", "three words on stdout")
    _expect(_text(messages, "stderr") == "to stderr\n", "a line on stderr")
    _expect(first.timestamp < end.timestamp - 0.1, "the first word long before the end")
    _expect(end.value == 42, "the value of the last expression")


async def _lasting_names(session: Session) -> None:
    _title("Names last from one execution to the next")
    _result(await _run(session, _KEEP))
    end = _result(await _run(session, "greet('Ada')"))
    _expect(end.value == "Ada, 10 July 1843", "the function and the variable of before")
    _expect(isinstance((await _run(session, "1 / 0"))[-1], Error), "an error to end that execution")
    _expect(_result(await _run(session, "len(visits)")).value == 1, "an error to change nothing")


async def _many_at_once(session: Session) -> None:
    _title("With `await`, many run at once, each with its own output")
    _result(await _run(session, _COUNT))
    names = ("north", "south", "west")
    _call(f"three at once: await count(name) for name in {names}")
    begun = time.monotonic()
    streams = [session.execute(f"await count({name!r})") for name in names]
    told = await asyncio.gather(*(_follow(messages, begun) for messages in streams))
    for name, messages in zip(names, told, strict=True):
        wanted = "".join(f"{name} {step}\n" for step in range(3))
        _expect(_text(messages) == wanted, f"the output of {name} and no other's")
        _expect(_result(messages).value == f"{name} is done", f"the value of {name}")


async def _cancel(session: Session, what: str, work: str) -> None:
    _title(f"A cancel stops {what} at once, and in order")
    pid = session.info.pid
    source = _CLEANING_UP.format(work=work)
    messages, outcome = await _run_and_cancel(session, source, _PATIENCE_S)
    _expect(outcome == "interrupted", "the code to be interrupted")
    _expect(_text(messages) == "at work\ncleaned up\n", "its `finally` to run and to be heard")
    _expect(_result(await _run(session, "len(visits)")).value == 1, "the names to be kept")
    _expect(session.info.pid == pid, "the child to be the same")


async def _kill(session: Session) -> None:
    _title("Code that will not stop is killed, and its child replaced")
    pid = session.info.pid
    messages, outcome = await _run_and_cancel(session, _STUBBORN, _GRACE_S)
    end = messages[-1]
    _expect(outcome == "killed", "the code to be killed")
    _expect(isinstance(end, Error) and end.message == "cancelled (killed)", "an error that says so")
    end = _result(await _run(session, "'visits' in globals()"))
    _expect(end.value is False, "a new child without names")
    _expect(session.info.pid != pid and not _exists(pid), "the old child to be gone")


async def _input(session: Session) -> None:
    _title("input() waits for whoever watches")
    _call("async for message in session.execute(source)", "name = input('Who? ')\nname.upper()")
    begun = time.monotonic()
    messages: list[Message] = []
    async for message in session.execute("name = input('Who? ')\nname.upper()"):
        _tell(message, begun)
        messages.append(message)
        if isinstance(message, InputRequest):
            _call("await session.input_response('Grace', request_id=…, execution_id=…)")
            await session.input_response(
                "Grace", request_id=message.id, execution_id=message.execution_id
            )
    _expect(_result(messages).value == "GRACE", "the answer to arrive")


async def _checkpoint(session: Session) -> None:
    _title("A checkpoint outlives its child")
    _result(await _run(session, f"{_KEEP}import threading\nlock = threading.Lock()\n"))
    _call("saved = await session.checkpoint()")
    saved = await session.checkpoint()
    _came(f"{len(saved.data or b'')} bytes with {', '.join(saved.saved)}; skipped: {saved.skipped}")
    _expect("visits" in saved.saved and "lock" in saved.skipped, "what was saved and what was not")
    _call("await session.restart()")
    await session.restart()
    _came(f"{session.info.state}, pid {session.info.pid}")
    _call("await session.restore(saved)")
    _came(f"restored {', '.join(await session.restore(saved))}")
    end = _result(await _run(session, "greet('Ada')"))
    _expect(end.value == "Ada, 10 July 1843", "functions and values to be back")


async def _crash(session: Session) -> None:
    _title("A child that dies leaves nobody waiting")
    end = (await _run(session, "import os\nprint('last words', flush=True)\nos._exit(3)"))[-1]
    _expect(
        isinstance(end, Error) and end.kind == "lost" and "status 3" in end.message,
        "an error that names the exit status",
    )
    _expect(session.state is SessionState.ERROR, "the session to say that it is broken")
    _call("await session.restart()")
    await session.restart()
    _came(f"{session.info.state}, pid {session.info.pid}")
    _expect(_result(await _run(session, "6 * 7")).value == 42, "the session to work again")


async def _leave(session: Session) -> None:
    _title("Nothing stays behind")
    pid = session.info.pid
    _call("await session.shutdown()")
    await session.shutdown()
    _came(f"{session.state}; no process {pid}")
    _expect(session.state is SessionState.TERMINATED and not _exists(pid), "the child to be gone")


# --- running and telling -----------------------------------------------------------------------


async def _run(session: Session, source: str) -> list[Message]:
    _call("async for message in session.execute(source)", source)
    return await _follow(session.execute(source), time.monotonic())


async def _run_and_cancel(
    session: Session, source: str, grace_s: float
) -> tuple[list[Message], str]:
    """Run until the first output, then cancel."""
    _call("async for message in session.execute(source, execution_id='x')", source)
    execution_id = f"x{time.monotonic_ns()}"
    begun = time.monotonic()
    messages: list[Message] = []
    cancelling: asyncio.Task[str] | None = None
    async for message in session.execute(source, execution_id=execution_id):
        _tell(message, begun)
        messages.append(message)
        if isinstance(message, Output) and cancelling is None:
            _call(f"await session.cancel('x', grace_s={grace_s})")
            asked_at = time.monotonic()
            cancelling = asyncio.create_task(session.cancel(execution_id, grace_s))
    _expect(cancelling is not None, "output before the end")
    assert cancelling is not None
    elapsed_ms = (time.monotonic() - asked_at) * 1000
    outcome = await cancelling
    _came(f"{outcome}; {elapsed_ms:.1f} ms from the cancel to the last message")
    return messages, outcome


async def _follow(stream: AsyncIterator[Message], begun: float) -> list[Message]:
    messages: list[Message] = []
    async for message in stream:
        _tell(message, begun)
        messages.append(message)
    return messages


def _tell(message: Message, begun: float) -> None:
    """What came, and how long after the call."""
    what = type(message).__name__
    if isinstance(message, Output):
        what = f"{what} {message.stream} {message.data!r}"
    elif isinstance(message, InputRequest):
        what = f"{what} {message.prompt!r}"
    elif isinstance(message, Result):
        what = f"{what} {message.value!r}"
    elif isinstance(message, Error):
        what = f"{what} {message.kind}: {message.type}: {message.message}"
    _came(f"{(time.monotonic() - begun) * 1000:7.1f} ms  {what}")


def _result(messages: list[Message]) -> Result:
    end = messages[-1]
    if not isinstance(end, Result):
        raise Unexpected(f"a result was promised, and this came: {end}")
    return end


def _text(messages: list[Message], stream: str = "stdout") -> str:
    return "".join(m.data for m in messages if isinstance(m, Output) and m.stream == stream)


def _expect(holds: bool, what: str) -> None:
    if not holds:
        raise Unexpected(f"the tour promised {what}")


def _exists(pid: int | None) -> bool:
    return Path(f"/proc/{pid}").exists()


def _title(text: str) -> None:
    _say(f"\n── {text} ──")


def _call(text: str, source: str = "") -> None:
    _say(f">>> {text}")
    if source:
        _say(textwrap.indent(source.strip("\n"), "    | ", lambda _: True))


def _came(text: str) -> None:
    _say(f"    {text}")


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
