"""How messages come to be run, or not: stamps, expiry, rate limits, lost workers, bulk canvas."""

from __future__ import annotations

import os
import signal
import time
from itertools import pairwise
from typing import Any

import pytest
from celery.canvas import StampingVisitor, chunks, group, xmap, xstarmap
from celery.exceptions import TaskRevokedError, WorkerLostError

from tests.acceptance.workers import HANG_S, Worker, eventually, unique


class Stamps(StampingVisitor):  # type: ignore[misc]
    """Marks every task of a canvas with one batch."""

    def __init__(self, batch: str) -> None:
        self._batch = batch

    def on_signature(self, sig: Any, **_: Any) -> dict[str, str]:
        return {"batch": self._batch}


def stamped(worker: Worker, batch: str, name: str, *args: Any, **options: Any) -> Any:
    sig = worker.sig(name, *args)
    sig.stamp(Stamps(batch))
    return sig.apply_async(**options)


def fill(worker: Worker) -> list[str]:
    """Both children are busy until the test releases them."""
    keys = [unique(), unique()]
    for key in keys:
        worker.send("hold", key)
        worker.heard(key)
    return keys


def test_stamps_arrive_with_every_task_of_a_canvas(worker: Worker) -> None:
    batch = unique()
    canvas = group([worker.sig("stamps"), worker.sig("stamps")], app=worker.app)
    canvas.stamp(Stamps(batch))
    assert canvas.apply_async().get(timeout=HANG_S) == [{"batch": batch}] * 2


def test_a_revoke_by_stamp_hits_running_and_waiting_tasks_of_that_stamp(worker: Worker) -> None:
    batch, mine, other = unique(), unique(), unique()
    running = stamped(worker, batch, "hold", mine)
    neighbour = stamped(worker, unique(), "hold", other)
    worker.heard(mine)
    worker.heard(other)
    # Two: one is begun when the child is free again, the other may wait still.
    waiting = [stamped(worker, batch, "add", 1, n) for n in range(2)]
    eventually(lambda: len(worker.ask("reserved")) == 2, "both in the worker")
    said = worker.tell(
        "revoke_by_stamped_headers", {"batch": [batch]}, terminate=True, signal="SIGTERM"
    )
    assert batch in said["ok"]
    for result in (running, *waiting):
        with pytest.raises(TaskRevokedError):
            result.get(timeout=HANG_S)
    worker.go(other)
    assert neighbour.get(timeout=HANG_S) > 0


def test_a_reserved_task_that_expires_does_not_run(worker: Worker) -> None:
    keys = fill(worker)
    end = time.time() + 0.5
    result = worker.send("add", 1, 1, expires=0.4)
    lasting = worker.send("add", 1, 2, expires=60)
    eventually(lambda: len(worker.ask("reserved")) == 2, "both in the worker")
    eventually(lambda: time.time() > end)
    for key in keys:
        worker.go(key)
    with pytest.raises(TaskRevokedError, match="expired"):
        result.get(timeout=HANG_S)
    assert lasting.get(timeout=HANG_S) == 3


def test_a_task_with_a_countdown_is_scheduled_and_can_be_revoked(worker: Worker) -> None:
    result = worker.send("add", 1, 1, countdown=3600)
    (entry,) = eventually(lambda: worker.ask("scheduled"), "the schedule")
    assert entry["request"]["id"] == result.id
    ((state, request),) = worker.ask("query_task", result.id).values()
    assert (state, request["id"]) == ("scheduled", result.id)
    worker.tell("revoke", result.id)
    with pytest.raises(TaskRevokedError):
        result.get(timeout=HANG_S)


def test_a_rate_limit_holds(worker: Worker) -> None:
    results = [worker.send("limited") for _ in range(3)]
    began = sorted(result.get(timeout=HANG_S) for result in results)
    assert all(later - earlier > 0.9 for earlier, later in pairwise(began))


def test_maps_and_chunks(worker: Worker) -> None:
    pairs = [(n, 1) for n in range(7)]
    add = worker.sig("add")
    mapped = xmap(worker.sig("total"), [[1, 2], [3]], app=worker.app)
    assert mapped.apply_async(queue=worker.queue).get(timeout=HANG_S) == [3, 3]
    starred = xstarmap(add, pairs, app=worker.app)
    assert starred.apply_async(queue=worker.queue).get(timeout=HANG_S) == list(range(1, 8))
    cut = chunks(add, pairs, 3, app=worker.app).group()
    assert cut.apply_async(queue=worker.queue).get(timeout=HANG_S) == [[1, 2, 3], [4, 5, 6], [7]]


def test_a_task_whose_worker_was_lost_is_retried_if_configured(worker: Worker) -> None:
    assert worker.get("lost_once", unique()) == 1
    key = unique()
    with pytest.raises(WorkerLostError):
        worker.get("lost_always", key)
    assert int(worker.app.backend.client.get(key)) == 2


def test_a_request_class_of_the_app_is_called_for_every_end(worker: Worker) -> None:
    result = worker.send("with_own_request", "")
    with pytest.raises(ValueError, match="its own"):
        result.get(timeout=HANG_S)
    assert worker.heard(f"on_failure:{result.id}") == "ValueError"
    result = worker.send("with_own_request", unique(), soft_time_limit=0.3, time_limit=1.5)
    assert worker.heard(f"on_timeout:{result.id}") == "soft"
    assert worker.heard(f"on_timeout:{result.id}") == "hard"
    assert worker.heard(f"on_failure:{result.id}") == "TimeLimitExceeded"


def is_held(worker: Worker, result: Any) -> bool:
    held = worker.app.backend.client.hvals("unacked")
    return any(result.id.encode() in message for message in held)


def test_a_failure_that_is_not_acknowledged_is_no_more_delivered(worker: Worker) -> None:
    """Without a dead letter queue, which Redis has not, it is as good as acknowledged."""
    key = unique()
    result = worker.send("unacked_late", key, "failure")
    with pytest.raises(ValueError, match="its own"):
        result.get(timeout=HANG_S)
    eventually(lambda: not is_held(worker, result), "the end of the message")
    assert worker.get("add", 1, 1) == 2
    assert (int(worker.app.backend.client.get(key)), result.state) == (1, "FAILURE")


def test_a_timeout_that_is_not_acknowledged_is_delivered_again(worker: Worker) -> None:
    key = unique()
    result = worker.send("unacked_late", key, "timeout", time_limit=0.5)
    fresh_result = worker.app.AsyncResult  # a result keeps the first end that it has seen

    eventually(lambda: fresh_result(result.id).state == "SUCCESS", "the second delivery")
    assert fresh_result(result.id).get(timeout=HANG_S) == 2
    eventually(lambda: not is_held(worker, result), "the acknowledgement")
    assert int(worker.app.backend.client.get(key)) == 2


def test_a_stored_failure_that_is_not_acknowledged_is_no_more_delivered(worker: Worker) -> None:
    """The child has stored the result, and dies before the worker receives the end."""
    result = worker.send("linger_unacked")
    os.kill(int(worker.heard(f"stored:{result.id}")), signal.SIGKILL)
    eventually(lambda: not is_held(worker, result), "the end of the message")
    assert worker.get("add", 1, 1) == 2
    assert result.state == "FAILURE"
    assert not worker.app.backend.client.exists(f"mark:stored:{result.id}")


@pytest.mark.parametrize("serializer", ["msgpack", "yaml", "pickle"])
def test_any_serializer_that_is_configured(worker: Worker, serializer: str) -> None:
    value = {"a": [1, 2.5, "ä"], "b": None}
    assert worker.get("add", [value], [], serializer=serializer) == [value]


def test_a_message_that_cannot_be_sent_to_a_child_fails_and_is_not_redelivered(
    worker: Worker,
) -> None:
    """A failure that is a lost worker's would have it delivered again at once, and for ever."""
    if worker.is_prefork:
        pytest.skip("it pickles what it sends")
    result = worker.send("hold_late", unique(), headers={"too_big": 2**70})
    with pytest.raises(Exception, match=r"is not delivered again: .*2\*\*64"):
        result.get(timeout=HANG_S)
    assert worker.get("add", 1, 1) == 2
    assert worker.log.count(f"hold_late[{result.id}] received") == 1
