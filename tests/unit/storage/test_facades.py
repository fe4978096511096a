"""Both facades of a store have the operations of its core as methods of their own kind."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

from capsule_tasks.storage.facades import AsyncFacade, Facade, Method, SyncFacade, Target
from capsule_tasks.storage.operations import Operation


class Core:
    def double(self, number: int) -> Operation[int]:
        """Twice the number."""
        return 2 * number
        yield


class Store:
    """Connections that no operation of the core needs."""

    is_closed = False
    run = run_blocking = None


class Shared(Facade[Target]):
    def __init__(self, redis: Target) -> None:
        super().__init__(redis)
        self.core = Core()

    double = Method(Core.double)


class Awaited(Shared[Any], AsyncFacade):
    pass


class Blocking(Shared[Any], SyncFacade):
    pass


class Louder(Awaited):
    async def double(self, number: int) -> int:
        return 10 * await super().double(number)


class Quiet(Louder):
    pass


def test_one_facade_awaits_and_the_other_blocks() -> None:
    assert asyncio.run(Awaited(Store()).double(3)) == 6
    assert Blocking(Store()).double(number=3) == 6


def test_a_method_looks_like_an_ordinary_function_to_inspect() -> None:
    assert inspect.iscoroutinefunction(Awaited.double)
    assert inspect.isfunction(Blocking.double)
    for kind in (Awaited, Blocking):
        assert inspect.getdoc(kind.double) == "Twice the number."
        assert "number" in inspect.signature(kind.double).parameters


def test_a_method_that_a_subclass_overrides_stays_overridden_in_its_subclasses() -> None:
    assert asyncio.run(Louder(Store()).double(3)) == 60
    assert asyncio.run(Quiet(Store()).double(3)) == 60
