"""A restart of the pool: how children are started from now on, tried before the old ones go.

Celery reloads what the worker itself has imported, if it is asked to, and then asks the pool for
new children. Those import the app anew. If they cannot, since somebody has saved half an edit, the
pool goes on with the children that it has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from capsule_tasks.sessions.process.template_spawner import TemplateSpawner
from capsule_tasks.sessions.session import Session
from capsule_tasks.settings import Profile


def reloaded_profiles(profiles: Mapping[str, Profile], app: Any) -> dict[str, Profile]:
    """How children are started whose app is imported anew, with all that the worker imported."""
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
    """What starts such children, once one of them was ready; raises what that one failed with."""
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
