"""Helpers for tests of the sandbox: its settings, and the calls that it refuses."""

from __future__ import annotations

import asyncio
import os

import msgspec
import pytest

from capsule_tasks.errors import ExecutionFailed
from capsule_tasks.protocol.messages import Error
from capsule_tasks.sessions import Session, SessionPool
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


async def refused(session: Session, source: str, *types: str) -> str:
    """The message of the error that the code must end with; the session must live on."""
    with pytest.raises(ExecutionFailed) as failure:
        await asyncio.wait_for(session.run(source), HANG_S)
    error = failure.value.error
    assert isinstance(error, Error)
    assert error.type in (types or ("PermissionError",)), error
    assert (await session.run("1 + 1")).value == 2
    return error.message
