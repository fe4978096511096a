"""A restart of the pool: new children import the app again, and a trial child comes first.

Celery reloads the modules of the worker itself, if asked to, and then restarts the pool. If the new
children cannot import the app, because of an edit half saved, say, the pool keeps its children.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from capsule_tasks.sessions.process.template import TemplateSpawner
from capsule_tasks.sessions.session import Session
from capsule_tasks.settings import Profile


def reloaded_profiles(profiles: Mapping[str, Profile], app: Any) -> dict[str, Profile]:
    """Profiles of children that import the app again, with all modules that the worker imported."""
    modules = {type(task).__module__ for task in app.tasks.values()} | set(app.loader.task_modules)
    include = sorted({*app.conf.include, *modules})
    return {kind: _reloaded(profile, include) for kind, profile in profiles.items()}


def _reloaded(profile: Profile, include: list[str]) -> Profile:
    child = profile.session.child
    assert child.tasks is not None
    lane = msgspec.structs.replace(
        child.tasks, conf={**child.tasks.conf, "include": include}, is_reloaded=True
    )
    child = msgspec.structs.replace(child, tasks=lane)
    session = msgspec.structs.replace(profile.session, child=child)
    return msgspec.structs.replace(profile, session=session)


async def start_trial_child(
    profile: Profile, on_new: Callable[[Session], object]
) -> TemplateSpawner:
    """Return a spawner of such children once one was ready; raise the error of its start."""
    spawner = TemplateSpawner(profile)
    try:
        await spawner.start()
        session = Session(profile.session, spawner=spawner)
        on_new(session)
        try:
            await session.start()
        finally:
            await session.terminate()
    except BaseException:
        await spawner.stop()
        raise
    return spawner
