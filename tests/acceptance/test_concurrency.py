"""How many children a worker has when no number is given."""

from __future__ import annotations

from pathlib import Path

import pytest
from celery.concurrency import prefork

from capsule_tasks.taskpool import TaskPool
from tests.acceptance.workers import Worker


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_auto_concurrency_honours_the_cpu_quota(
    redis_url: str, tmp_path: Path, pool: str, version: str
) -> None:
    if version == "v2":
        mine, group, quota = "0::/box\n", "box", {"cpu.max": "50000 100000\n"}
    else:
        mine, group = "1:cpu,cpuacct:/box\n", "cpu,cpuacct/box"
        quota = {"cpu.cfs_quota_us": "50000\n", "cpu.cfs_period_us": "100000\n"}
    directory = tmp_path / group
    directory.mkdir(parents=True)
    (tmp_path / "of_this_process").write_text(mine)
    for name, text in quota.items():
        (directory / name).write_text(text)
    with Worker(
        redis_url,
        tmp_path,
        "-c",
        "auto",
        pool=pool,
        app="tests.acceptance.quota_app",
        TEST_CGROUPS=str(tmp_path),
    ) as worker:
        # The machine of the test may have one CPU only, and then the count alone says nothing.
        assert "cgroup cpu quota=0.50" in worker.log
        assert worker.ask("stats")["pool"]["max-concurrency"] == 1


def test_nothing_of_preforks_pool_is_inherited() -> None:
    """The pool derives from prefork's for its size alone, and has none of its processes."""
    own = vars(prefork.TaskPool)
    methods = {name for name, value in own.items() if callable(value) or type(value) is property}
    inherited = {name for name in methods if getattr(TaskPool, name) is own[name]}
    assert inherited == {"Pool", "BlockingPool"}  # which only prefork's own `on_start` makes
