"""A named session as what a console runs code in: `celery capsule shell`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from capsule_tasks.cli import views
from capsule_tasks.client import NamedSession, SessionExecution
from capsule_tasks.errors import SessionUnknown
from capsule_tasks.protocol.messages import InputRequest
from capsule_tasks.sessions.console.commands import Command, commands_of, namespace_table
from capsule_tasks.sessions.console.frontend import Frontend
from capsule_tasks.sessions.console.target import Shown

_NOTE_WAIT_AFTER_S = 1.0


class ShellTarget:
    """Each block is a call of the session, which goes on when the console is left."""

    def __init__(self, session: NamedSession) -> None:
        self.session = session
        self.commands = COMMANDS
        self._execution: SessionExecution | None = None

    async def start(self, frontend: Frontend, is_idle: Callable[[], bool]) -> str:  # noqa: ARG002
        self._frontend = frontend
        try:
            info = await self.session.ainfo()
        except SessionUnknown:
            return f"session {self.session.id}, which is new: profile {self.session.profile}."
        return f"session {self.session.id}: {views.session_summary(info)}."

    async def stop(self) -> None:
        """The session does not belong to this console."""

    async def kill(self) -> None:
        """The session does not belong to this console."""

    async def execute(self, source: str, execution_id: str) -> AsyncGenerator[Shown, None]:
        self._execution = None
        execution = await self.session.aexecute(source, call_id=execution_id)
        self._execution = execution
        timer = asyncio.get_running_loop().call_later(_NOTE_WAIT_AFTER_S, self._note_wait)
        try:
            async with aclosing(execution.aevents()) as events:
                async for event in events:
                    timer.cancel()
                    yield event.message
        finally:
            timer.cancel()

    async def answer(self, question: InputRequest, line: str | None) -> None:
        if self._execution is not None:
            await self._execution.arespond(line or "", request_id=question.id, eof=line is None)

    async def cancel(self, execution_id: str) -> str:
        """Also for a call whose submission has not been answered: it ends before it begins."""
        execution = self._execution or SessionExecution(execution_id, app=self.session.app)
        await execution.acancel()
        return ""

    def _note_wait(self) -> None:
        execution = self._execution
        if execution is None:
            return
        others = execution.submission.waiting - 1
        reason = (
            "no worker has the session yet"
            if not execution.submission.owner
            else (f"{others} other calls are before it" if others > 0 else "another call runs")
        )
        self._frontend.note(f"the call waits: {reason}; Ctrl-C cancels it")


# --- commands ------------------------------------------------------------------------------------


async def _info(target: ShellTarget) -> str:
    return views.session_details(await target.session.ainfo())


async def _interrupt(target: ShellTarget) -> str:
    answer = await target.session.ainterrupt()
    return "nothing is running" if answer == "over" else "interrupted"


async def _stack(target: ShellTarget) -> str:
    info = await target.session.ainfo()
    if not info.begun_call:
        return "nothing is running"
    return await SessionExecution(info.begun_call, app=target.session.app).astack()


async def _names(target: ShellTarget) -> str:
    listed = await target.session.anamespace()
    return namespace_table(listed.entries, listed.total)


async def _checkpoint(target: ShellTarget) -> str:
    made = await target.session.acheckpoint()
    lines = [f"saved {len(made.saved)} names ({made.size} bytes)"]
    lines += [f"not saved: {name}: {reason}" for name, reason in made.skipped.items()]
    return "\n".join(lines)


async def _restart(target: ShellTarget) -> str:
    await target.session.arestart()
    return "the session has a new child, which has no names"


COMMANDS = commands_of(
    Command(":info", "owner, calls, times, checkpoint", _info, works_while_running=True),
    Command(":names", "names, types and sizes", _names, works_while_running=True),
    Command(":stack", "where the code that runs is", _stack, works_while_running=True),
    Command(":checkpoint", "save the namespace, as soon as no call runs", _checkpoint),
    Command(":interrupt", "KeyboardInterrupt in what runs", _interrupt, works_while_running=True),
    Command(":restart", "go on with an empty namespace", _restart, works_while_running=True),
)
