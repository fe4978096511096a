"""Ids that callers choose: however long and whatever is in them, the task has its result."""

from __future__ import annotations

import pytest
from celery import chain, chord, group
from celery.exceptions import TaskRevokedError

from tests.acceptance.workers import HANG_S, Worker, unique

ODD = {
    "long": "i" * 600,
    "braces": "{a}{}:b",
    "lines": "a\nb\r\tc",
    "quotes": "a'b\"c\\d",
    "letters": "\u00fc \u2603 %s *?[a]",
}


@pytest.fixture(params=list(ODD))
def odd(request: pytest.FixtureRequest) -> str:
    return f"{ODD[request.param]}{unique()}"


def test_a_task_has_its_result(worker: Worker, odd: str) -> None:
    assert worker.get("add", 1, 2, task_id=odd) == 3
    assert worker.get("request", task_id=f"{odd}-1")["id"] == f"{odd}-1"
    with pytest.raises(ValueError, match="why"):
        worker.get("fail", "why", task_id=f"{odd}-2")
    assert worker.get("retry", 1, task_id=f"{odd}-3") == 1
    if not worker.is_prefork:
        assert worker.get("async_retry", 1, task_id=f"{odd}-4") == 1
    assert worker.get("reject", unique(), task_id=f"{odd}-5") == "done"


def test_output_under_an_odd_id_is_logged(worker: Worker, odd: str) -> None:
    assert worker.get("speak", "word", task_id=odd) > 0
    assert worker.get("say_late", 1, 3, task_id=f"{odd}-1") == 1


def test_a_task_with_an_odd_id_can_be_terminated(worker: Worker, odd: str) -> None:
    key = unique()
    result = worker.send("tidy", key, task_id=odd)
    worker.heard(key)
    worker.tell("revoke", odd, terminate=True)
    with pytest.raises(TaskRevokedError):
        result.get(timeout=HANG_S)


def test_a_group_and_a_chord_have_theirs(worker: Worker, odd: str) -> None:
    s = worker.sig
    several = group([s("add", n, 1) for n in range(3)], app=worker.app)
    result = several.apply_async(task_id=odd)
    assert result.id == odd
    assert result.get(timeout=HANG_S) == [1, 2, 3]
    header = group([s("add", n, 1) for n in range(3)], app=worker.app).set(task_id=f"{odd}-1")
    summed = chord(header, s("total"), app=worker.app)
    assert summed.apply_async(task_id=f"{odd}-2").get(timeout=HANG_S) == 6
    first = chain(s("add", 1, 1).set(task_id=f"{odd}-3"), s("add", 1), app=worker.app)
    assert first.apply_async().get(timeout=HANG_S) == 3
