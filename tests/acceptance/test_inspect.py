"""Replies of `inspect`: all that prefork gives, and what a pool of sessions adds."""

from __future__ import annotations

from tests.acceptance.workers import HANG_S, Worker, eventually, unique


def test_each_command_of_inspect_tells_where_a_task_is(worker: Worker) -> None:
    holds = [unique(), unique()]
    running = [worker.send("hold", key) for key in holds]
    pids = {int(worker.heard(key)) for key in holds}
    waiting = worker.send("set_mark", unique())
    revoked = worker.send("set_mark", unique())
    later = worker.send("set_mark", unique(), countdown=3600)

    # They are acknowledged when their streams are claimed, some milliseconds after they began.
    active = eventually(
        lambda: (
            len(active := worker.ask("active")) == 2
            and all(task["acknowledged"] for task in active)
            and active
        ),
        "both",
    )
    assert {task["id"] for task in active} == {result.id for result in running}
    assert {task["worker_pid"] for task in active} == pids
    for task in active:
        assert (task["name"], task["hostname"], task["acknowledged"]) == ("hold", worker.name, True)
        assert task["args"][0] in holds
        assert task["time_start"] > 0
        assert task["delivery_info"]["routing_key"] == worker.queue

    def reserved() -> set[str]:
        return {task["id"] for task in worker.ask("reserved")}

    def scheduled() -> set[str]:
        return {task["request"]["id"] for task in worker.ask("scheduled") if task["eta"]}

    # A message that comes after its revoke is dropped at once, and is neither.
    eventually(lambda: reserved() == {waiting.id, revoked.id}, "those that wait")
    eventually(lambda: later.id in scheduled(), "the one of later")
    worker.tell("revoke", revoked.id)
    worker.tell("revoke", later.id)
    assert reserved() == {waiting.id, revoked.id}
    assert later.id in scheduled()
    assert {revoked.id, later.id} <= set(worker.ask("revoked"))
    asked = worker.ask("query_task", [running[0].id, waiting.id, unique()])
    assert {task_id: state for task_id, (state, _) in asked.items()} == {
        running[0].id: "active",
        waiting.id: "reserved",
    }

    for key in holds:
        worker.go(key)
    assert waiting.get(timeout=HANG_S) == "marked"


def test_each_command_of_inspect_describes_the_worker(worker: Worker) -> None:
    assert worker.get("add", 1, 1) == 2
    registered = worker.ask("registered")
    assert {"add", "nap", "limited [rate_limit=60/m]"} <= set(registered)
    (queue,) = worker.ask("active_queues")
    assert queue["name"] == queue["routing_key"] == worker.queue
    conf = worker.ask("conf")
    assert conf["task_default_queue"] == worker.queue
    assert "TaskPool" in conf["worker_pool"] or worker.is_prefork
    assert worker.ask("ping") == {"ok": "pong"}
    assert worker.ask("clock")["clock"] > 0
    assert "software" in worker.ask("report")["ok"]
    stats = worker.ask("stats")
    assert stats["pid"] == worker.pid
    assert stats["total"]["add"] >= 1
    assert stats["broker"]["transport"] == "redis"
    assert stats["rusage"]["utime"] > 0
    assert stats["prefetch_count"] > 0
    assert stats["uptime"] >= 0
    pool = stats["pool"]
    assert pool["max-concurrency"] == len(pool["processes"]) == 2
    assert {"implementation", "max-tasks-per-child", "timeouts"} <= set(pool)
    if not worker.is_prefork:
        assert pool["capsule"]["healthy"] is True
        assert {session["pid"] for session in pool["sessions"]} == set(pool["processes"])
