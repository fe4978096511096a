"""Compactions of any history, with any changes of others meanwhile, against a plain list."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from capsule_tasks import SyncHistory
from capsule_tasks.runs.compaction import OldItems, compact_sync, summary_message
from capsule_tasks.runs.compaction.cutting import cut, is_waiting, size_of
from capsule_tasks.runs.models import ModelReply
from capsule_tasks.runs.records import Item
from tests.integration.histories import own_settings
from tests.unit.runs.compaction.test_cutting import histories, user


@dataclass
class Interrupted:
    """A compactor with one answer, while others change the history."""

    made: Item
    interfere: Callable[[], Awaitable[None]]
    keep_last: int = 0

    async def compacted(self, _: OldItems) -> ModelReply:
        await self.interfere()
        return ModelReply(items=[self.made])


MEANWHILE = st.lists(st.sampled_from(["append", "append", "pop", "clear"]), max_size=3)


def test_any_history_is_compacted_as_a_plain_list_would_be(valkey_url: str) -> None:
    with SyncHistory("s", valkey_url, settings=own_settings()) as history:

        @given(histories(), st.integers(0, 5), MEANWHILE)
        @settings(deadline=None, max_examples=200)
        def check(numbered: Any, keep_last: int, meanwhile: list[str]) -> None:
            items = [item for _, item in numbered]
            history.clear_session()
            history.add_items(items)
            after, is_removed = list(items), False

            async def interfere() -> None:
                nonlocal is_removed
                for what in meanwhile:
                    is_removed |= what != "append" and bool(after)
                    if what == "append":
                        history.add_items([user("late")])
                        after.append(user("late"))
                    elif what == "pop":
                        history.pop_item()
                        after[-1:] = []
                    else:
                        history.clear_session()
                        after.clear()

            made = summary_message("")
            report = compact_sync(history, Interrupted(made, interfere), keep_last=keep_last)
            found = cut(items, keep_last)
            if is_waiting(items):
                assert report.outcome == "waiting"
            elif found is None:
                assert report.outcome == "nothing"
            elif size_of([made]) >= size_of(found.old):
                assert report.outcome == "not_smaller"
            elif is_removed:
                assert report.outcome == "conflict"
            else:
                assert report.outcome == "replaced"
                after[: found.stop] = [made, *found.waiting]
            assert history.get_items() == after

        check()
