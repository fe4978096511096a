"""Starts children from a template while there is one, and cold while there is none."""

from __future__ import annotations

import asyncio
import logging

from capsule_tasks.errors import TemplateLost, reason_of
from capsule_tasks.sessions.process.spawn import ChildDescriptors, ColdSpawner, Spawned
from capsule_tasks.sessions.process.template import Template
from capsule_tasks.settings import Profile, SessionConfig
from capsule_tasks.system.portable import IS_LINUX

log = logging.getLogger("capsule_tasks.sessions")

_MIN_RETRY_S = 0.5
_MAX_RETRY_S = 30.0


class TemplateSpawner:
    """Keeps one template loaded. Without it sessions start slower, but they start."""

    def __init__(self, profile: Profile, template: Template | None = None) -> None:
        """`template` is the first one, if it exists already; later templates are fresh."""
        self._profile = profile
        self._first = template
        self._cold = ColdSpawner()
        self._template: Template | None = None
        self._reloader: asyncio.Task[None] | None = None
        self._first_tried = asyncio.Event()
        """Set when the first template is loaded, or failed to, or there will be none."""
        self._is_stopped = False
        self.forks = 0
        self.cold_starts = 0
        self.templates_lost = 0
        self.last_error = ""

    @property
    def template_pid(self) -> int | None:
        template = self._template
        return template.pid if template is not None and template.is_usable else None

    async def start(self) -> None:
        """Load the first template; if that fails, children start cold and the load is retried."""
        if self._profile.start == "cold" or not IS_LINUX or self._is_stopped:
            return  # without a subreaper only the template could collect its children
        if self._reloader is None:
            self._reloader = asyncio.get_running_loop().create_task(self._reload_template())
            self._reloader.add_done_callback(lambda _: self._first_tried.set())
        await self._first_tried.wait()

    async def spawn(
        self, descriptors: ChildDescriptors, config: SessionConfig, marker: str
    ) -> Spawned:
        template = self._template
        if template is not None and template.is_usable:
            try:
                spawned = await template.spawn(descriptors, config, marker)
            except TemplateLost as error:
                log.warning("%s; starting cold", error)
            else:
                self.forks += 1
                return spawned
        self.cold_starts += 1
        return await self._cold.spawn(descriptors, config, marker)

    async def stop(self) -> None:
        self._is_stopped = True
        if self._reloader is not None:
            self._reloader.cancel()
            await asyncio.wait({self._reloader})
        for template in (self._template, self._first):
            if template is not None:
                template.stop()

    async def _reload_template(self) -> None:
        """Load a template, wait for its end, load the next; slower after each failure."""
        delay_s = _MIN_RETRY_S
        while True:
            try:
                template = await self._load()
            except (TemplateLost, OSError) as error:
                self.last_error = reason_of(error)
                log.warning(
                    "no template: %s; the next attempt is in %.1f s", self.last_error, delay_s
                )
            else:
                delay_s = _MIN_RETRY_S
                self._first_tried.set()
                self.last_error = await template.ended()
                self.templates_lost += 1
                log.warning("the template of %s ended: %s", template.name, self.last_error)
            self._first_tried.set()
            await asyncio.sleep(delay_s)
            delay_s = min(delay_s * 2, _MAX_RETRY_S)

    async def _load(self) -> Template:
        session = self._profile.session
        template, self._first = self._first, None
        if template is None:
            template = Template.fresh(self._profile.imports, python=session.python, env=session.env)
        try:
            await template.load(self._profile.template_timeout_s)
        except BaseException:
            template.stop()
            raise
        self._template = template
        return template
