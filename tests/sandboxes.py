"""Helpers for tests of the sandbox: its settings, and the calls that it refuses."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import msgspec
import pytest
from msgspec.structs import asdict

from capsule_tasks.errors import CodeFailed, ExecutionFailed
from capsule_tasks.protocol.messages import Error, Result
from capsule_tasks.sessions import Session, SessionPool
from capsule_tasks.sessions.session import Completed
from capsule_tasks.settings import (
    ChildSettings,
    LimitSettings,
    PoolSettings,
    Profile,
    SandboxSettings,
    SessionConfig,
    scrubbed_environment,
)
from tests.sessions import HANG_S

MIB = 1024 * 1024
PACKAGES = tuple(filter(None, os.environ.get("CAPSULE_TEST_PACKAGES", "").split(":")))


def config(limits: LimitSettings | None = None, **sandbox: object) -> SessionConfig:
    sandbox.setdefault("readable", PACKAGES)
    child = ChildSettings(
        sandbox=SandboxSettings(**sandbox),  # type: ignore[arg-type]
        limits=limits or LimitSettings(),
    )
    return SessionConfig(child=child, env=environment())


def environment() -> dict[str, str]:
    """What a sandbox gets; as another user also where the packages of this run are."""
    return scrubbed_environment() | ({"PYTHONPATH": ":".join(PACKAGES)} if PACKAGES else {})


def code_pool(**changes: object) -> SessionPool:
    profile = Profile.sandbox(pool=PoolSettings(**changes))  # type: ignore[arg-type]
    return SessionPool({"code": msgspec.structs.replace(profile, session=config())})


class SentSandbox:
    """Runs code like a session does: sent to a worker, where each run has a session of its own."""

    def __init__(self, capsule: Any, profile: str, owner: int) -> None:
        self._capsule = capsule
        self._profile = profile
        self.owner = owner
        """The worker's process, which owns the sessions."""

    async def run(self, source: str, *, timeout_s: float | None = None) -> Completed:
        execution = self._send(source, timeout_s)
        try:
            value = await execution.aget(HANG_S)
        except CodeFailed as failed:
            error = Error(
                execution_id=execution.id,
                kind=failed.kind,
                type=failed.type,
                message=failed.message,
                traceback=failed.traceback,
                notes=tuple(failed.traceback.splitlines()),
            )
            raise ExecutionFailed(error, str(failed)) from None
        except Exception as lost:
            if type(lost).__name__ != "WorkerLostError":  # Celery cannot always be imported here
                raise
            error = Error(execution_id=execution.id, kind="lost", type="SessionLost", message="")
            raise ExecutionFailed(error, str(lost)) from None
        return Completed(value, "", "", Result(execution_id=execution.id, value=value))

    async def execute(self, source: str) -> AsyncIterator[object]:
        """The messages of a run, without the value."""
        async for event in self._send(source, None).aevents():
            yield event.message

    def _send(self, source: str, timeout_s: float | None) -> Any:
        # Not by `aexecute`: each thread has a result backend of its own, which nobody would close.
        return self._capsule.execute(source, profile=self._profile, timeout_s=timeout_s)


Sandbox = Session | SentSandbox
StartSandbox = Callable[..., AbstractAsyncContextManager[Sandbox]]
"""Takes what `config` takes."""


def owner_of(sandbox: Sandbox) -> int:
    """The process that owns the session in which the code runs."""
    return sandbox.owner if isinstance(sandbox, SentSandbox) else os.getpid()


@asynccontextmanager
async def started(limits: LimitSettings | None = None, **sandbox: object) -> AsyncIterator[Sandbox]:
    """A session of this process."""
    async with Session(config(limits, **sandbox)) as session:
        yield session


_SENT: list[tuple[LimitSettings, dict[str, object]]] = [
    (LimitSettings(), {}),
    (LimitSettings(), {"network": "open"}),
    (LimitSettings(), {"max_processes": 8}),
    (LimitSettings(), {"max_threads": 64}),
    (LimitSettings(), {"max_disk_bytes": 8 * MIB}),
    (LimitSettings(memory_bytes=400 * MIB), {}),
    (LimitSettings(memory_bytes=512 * MIB), {}),
    (LimitSettings(open_files=64), {}),
    (LimitSettings(cpu_time_s=0.2, output_bytes=1000), {}),
]
"""The sandboxes to whose code a worker can be sent: it knows its profiles when it starts."""


def sent_profiles() -> dict[str, dict[str, object]]:
    """The profiles of the worker that runs code for `SentSandbox`."""
    return {
        profile_name(limits, sandbox): {
            "limits": {name: value for name, value in asdict(limits).items() if value is not None},
            "sandbox": sandbox,
            "warm": 0,
        }
        for limits, sandbox in _SENT
    }


def profile_name(limits: LimitSettings | None, sandbox: dict[str, object]) -> str:
    """The name of a profile says what it allows."""
    return f"{limits or LimitSettings()} {sandbox}"


async def refused(session: Sandbox, source: str, *types: str) -> str:
    """The message of the error that the code must end with; the session must live on."""
    with pytest.raises(ExecutionFailed) as failure:
        await asyncio.wait_for(session.run(source), HANG_S)
    error = failure.value.error
    assert isinstance(error, Error)
    assert error.type in (types or ("PermissionError",)), error
    if isinstance(session, Session):
        assert (await session.run("1 + 1")).value == 2
    return error.message
