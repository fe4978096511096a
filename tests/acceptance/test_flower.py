"""Flower in a real browser: every page, and every button with its effect on the worker.

With CAPSULE_SCREENSHOTS=docs/images the pictures of the guide are taken again.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery.exceptions import SoftTimeLimitExceeded, TaskRevokedError, TimeLimitExceeded
from selenium.common.exceptions import WebDriverException
from selenium.webdriver.common.by import By

from capsule_tasks.testing.servers import PrivateServer
from tests.acceptance.browser import HEIGHT, WIDTH, chromium, flower
from tests.acceptance.workers import HANG_S, Worker, eventually, is_running, unique

_REOPEN_S = 2.0
"""A page that does not change by itself may have been opened too early; others draw themselves."""

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of its own: of the revokes that are kept there, a page shows fifty at most."""
    with PrivateServer(tmp_path_factory.mktemp("redis")) as server:
        yield server.url


@pytest.fixture(scope="module")
def worker(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    worker = Worker(redis_url, tmp_path_factory.mktemp("worker"), "-E")
    worker.name = "worker@example"  # as the guide's pictures show it
    with worker:
        yield worker


class Page:
    """The pages of Flower, as a person sees and uses them."""

    def __init__(self, browser: Any, url: str, pictures: Path) -> None:
        self._browser, self._url, self._pictures = browser, url, pictures

    def open(self, path: str) -> None:
        """After a `#` comes the name of a worker's tab."""
        path, _, tab = path.partition("#")
        self._browser.get(self._url + path)
        if tab:
            self.click(f"worker-tab-{tab}")

    def text(self) -> str:
        return str(self._browser.find_element(By.TAG_NAME, "body").text)

    def shows(self, *words: str, again: str | None = None) -> str:
        """Wait until the page has these words; `again` is opened every few seconds until then."""
        opened_at = time.monotonic() - 2 * _REOPEN_S

        def has_all() -> str | None:
            nonlocal opened_at
            if again is not None and time.monotonic() - opened_at > _REOPEN_S:
                self.open(again)
                opened_at = time.monotonic()
            try:
                text = self.text()
            except WebDriverException:  # it was being replaced
                return None
            seen = _without_breaks(text)
            return text if all(_without_breaks(word) in seen for word in words) else None

        try:
            return str(eventually(has_all))
        except AssertionError:
            raise AssertionError(f"not all of {words} on the page:\n{self.text()}") from None

    def click(self, button: str) -> None:
        self.press(f'[id="{button}"]')

    def press(self, selector: str) -> None:
        """A button that a selector of CSS names."""
        eventually(lambda: self._press(selector), f"the button {selector}")

    def _press(self, selector: str) -> bool:
        try:
            self._browser.find_element(By.CSS_SELECTOR, selector).click()
        except WebDriverException:
            return False
        return True

    def has(self, selector: str) -> None:
        """Wait until there is something that a selector of CSS names."""
        eventually(lambda: self._browser.find_elements(By.CSS_SELECTOR, selector), selector)

    def write(self, field: str, text: str) -> None:
        """Into a field that a selector of CSS names."""

        def write() -> bool:
            try:
                element = self._browser.find_element(By.CSS_SELECTOR, field)
                element.clear()
                element.send_keys(text)
            except WebDriverException:  # not shown yet
                return False
            return element.get_attribute("value") == text

        eventually(write, f"{text} in {field}")

    def limit(self, worker: Worker, button: str, task: str, value: int) -> None:
        """Write it beside one of the buttons of a task's limits, and press that."""
        # Flower leaves out what a worker has not reported within a second.
        # Of the tasks of a worker it shows fifty, in the order of their names.
        self.shows(task, "Soft", "Hard", again=f"/worker/{worker.name}#limits")
        kind = {"task-rate-limit": "Rate limit"}.get(button, "Timeout")
        self.write(f'[aria-label^="{kind} for {task}"]', str(value))
        # A task that has a rate limit says so in its name.
        self.click(next(one for one in self.ids(f"{button}-{task}") if one))

    def ids(self, start: str) -> list[str]:
        found = self._browser.find_elements(By.CSS_SELECTOR, f'[id^="{start}"]')
        return [str(element.get_attribute("id")) for element in found]

    def rows(self) -> set[str]:
        """The tasks in the table."""
        try:
            found = self._browser.find_elements(By.CSS_SELECTOR, "#tasks-table tr[id]")
            return {str(row.get_attribute("id")) for row in found}
        except WebDriverException:  # it was being replaced
            return set()

    def picture(self, name: str, height: int = HEIGHT) -> None:
        self._browser.set_window_size(WIDTH, height)
        self._browser.save_screenshot(str(self._pictures / f"{name}.png"))


def _without_breaks(text: str) -> str:
    """Long names are shown in pieces."""
    return "".join(text.split())


@pytest.fixture(scope="module")
def page(worker: Worker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    directory = tmp_path_factory.mktemp("browser")
    pictures = Path(os.environ.get("CAPSULE_SCREENSHOTS") or directory)
    pictures.mkdir(parents=True, exist_ok=True)
    with flower(worker, directory) as url, chromium(directory) as browser:
        page = Page(browser, url, pictures)
        page.shows(worker.name, "Online", again="/workers")
        yield page


def pool_of(worker: Worker) -> Any:
    return worker.ask("stats")["pool"]


def children(worker: Worker) -> list[int]:
    """The children of slots; coroutines of another test may have a child of their own."""
    sessions = pool_of(worker)["sessions"]
    return [session["pid"] for session in sessions if session["kind"] == "blocking"]


def test_the_page_of_the_worker_counts_its_tasks(worker: Worker, page: Page) -> None:
    worker.get("add", 1, 1)
    with pytest.raises(ValueError, match="seen"):
        worker.get("fail", "seen")
    # Active, processed, failed, succeeded.
    page.shows(worker.name, "Online 0 2 1 1", again="/workers")
    page.picture("flower-workers")


def test_a_tasks_page_tells_its_state_and_can_end_it(worker: Worker, page: Page) -> None:
    key = unique()
    result = worker.send("tidy", key)
    worker.heard(key)
    page.shows("tidy", result.id, "STARTED", again=f"/task/{result.id}")
    page.click("task-terminate")
    worker.heard(f"{key}:finally")
    page.shows("tidy", "REVOKED", again=f"/task/{result.id}")
    assert result.state == "REVOKED"
    failed = worker.send("fail", "shown")
    page.shows("fail", "FAILURE", "ValueError", "shown", again=f"/task/{failed.id}")
    page.picture("flower-task")
    done = worker.send("add", 2, 3)
    page.shows("add", "SUCCESS", again=f"/task/{done.id}")


def test_the_tasks_page_lists_them(worker: Worker, page: Page) -> None:
    results = [worker.send("add", n, n) for n in range(3)]
    for result in results:
        result.get(timeout=HANG_S)
    page.shows("add", "SUCCESS", *(result.id[:8] for result in results), again="/tasks")


def test_the_tasks_page_filters_them_by_state(worker: Worker, page: Page) -> None:
    key = unique()
    results = {
        "STARTED": worker.send("hold", key),
        "SUCCESS": worker.send("add", 1, 1),
        "FAILURE": worker.send("fail", "filtered"),
        "RETRY": worker.send("retry_elsewhere"),
    }
    worker.heard(key)
    ids = {result.id for result in results.values()}
    for state, result in results.items():
        page.shows(state, again=f"/task/{result.id}")
    page.open("/tasks")
    for state, result in results.items():
        page.press(f'.task-state-filter[data-task-state="{state}"]')
        page.has(f'.task-state-filter.active[data-task-state="{state}"]')
        eventually(lambda one=result: ids & page.rows() == {one.id}, f"those that are {state}")
    page.press('.task-state-filter[data-task-state=""]')
    eventually(lambda: ids <= page.rows(), "all of them")
    worker.go(key)


def test_values_on_the_page_of_a_task_can_be_copied(worker: Worker, page: Page) -> None:
    failed = worker.send("fail", "copied")
    page.shows("FAILURE", "ValueError", again=f"/task/{failed.id}")
    for button in (".task-uuid-copy", ".task-traceback-copy"):
        page.press(button)
        page.has(f"{button}.copied")


def test_the_theme_is_switched_and_kept(page: Page) -> None:
    for theme in ("dark", "light"):
        page.open("/workers")
        page.click("theme-toggle")
        page.press(f'[data-bs-theme-value="{theme}"]')
        page.has(f'html[data-bs-theme="{theme}"]')
        page.open("/broker")
        page.has(f'html[data-bs-theme="{theme}"]')
    page.click("theme-toggle")
    page.press('[data-bs-theme-value="system"]')
    page.has("#theme-toggle-icon[href$=system]")


def test_a_task_that_waits_is_revoked_from_its_page(worker: Worker, page: Page) -> None:
    holds, key = [unique(), unique()], unique()
    for hold in holds:
        worker.send("hold", hold)
        worker.heard(hold)
    result = worker.send("set_mark", key)
    page.shows("set_mark", "RECEIVED", again=f"/task/{result.id}")
    page.click("task-revoke")
    eventually(lambda: result.id in worker.ask("revoked"), "the revoke")
    for hold in holds:
        worker.go(hold)
    with pytest.raises(TaskRevokedError):
        result.get(timeout=HANG_S)
    page.shows("set_mark", "REVOKED", again=f"/task/{result.id}")
    assert not worker.app.backend.client.exists(f"mark:{key}")


def test_each_tab_of_a_workers_page_is_filled(worker: Worker, page: Page) -> None:
    holds = [unique(), unique()]
    running = [worker.send("hold", hold) for hold in holds]
    for hold in holds:
        worker.heard(hold)
    waiting, scheduled = worker.send("add", 1, 1), worker.send("add", 1, 1, countdown=600)
    # A revoke that comes before its task has the worker discard the task at once.
    eventually(lambda: scheduled.id in str(worker.ask("scheduled")), "the schedule")
    worker.tell("revoke", scheduled.id)
    path = f"/worker/{worker.name}"
    ids = (waiting.id, scheduled.id, *(one.id for one in running))

    def has_all() -> bool:  # it is scheduled, and revoked
        shown = page.shows(*ids, again=f"{path}#tasks")
        return _without_breaks(shown).count(scheduled.id) == 2

    eventually(has_all, "each in its table")
    page.shows("Actions", "Max concurrency 2", str(worker.pid), again=f"{path}#pool")
    page.shows("Transport", "redis", again=f"{path}#broker")
    page.shows(worker.queue, "Cancel Consumer", again=f"{path}#queues")
    page.shows("async_hold", "Soft", "Hard", again=f"{path}#limits")
    page.shows("worker_pool", "capsule_tasks.taskpool:TaskPool", again=f"{path}#config")
    page.shows("utime", "maxrss", again=f"{path}#system")
    page.shows("uptime", again=f"{path}#other")
    page.open(path)
    page.click("worker-group")
    page.click("worker-refresh")
    page.shows("Successfully refreshed")
    page.click("worker-group")
    page.click("worker-refresh-all")
    page.shows("Refreshed All Workers")
    for hold in holds:
        worker.go(hold)
    assert waiting.get(timeout=HANG_S) == 2


def test_the_other_pages_open(worker: Worker, page: Page) -> None:
    page.shows(worker.name, "Online", again="/")
    page.shows("redis://", worker.queue, again="/broker")
    page.shows("flower_worker_online", worker.name, again="/metrics")
    page.shows("page not found", again="/nowhere")
    page.shows("You have been logged out", again="/logout")
    page.shows("page not found", again="/login")  # where no login is needed


def test_a_queue_is_added_and_cancelled(worker: Worker, page: Page) -> None:
    queue, path = unique("q"), f"/worker/{worker.name}#queues"

    def queues() -> list[str]:
        return [one["name"] for one in worker.ask("active_queues")]

    page.open(path)
    page.write("#add-consumer-name", queue)
    page.click("worker-add-consumer")
    page.shows(f"add consumer {queue}")
    assert queue in queues()
    assert worker.sig("add", 1, 2).set(queue=queue).apply_async().get(timeout=HANG_S) == 3
    page.shows(queue, again=path)
    page.click(f"worker-cancel-consumer-{queue}")
    eventually(lambda: queue not in queues(), "the end of the consumer")
    worker.sig("add", 1, 2).set(queue=queue).apply_async()
    assert worker.get("add", 2, 2) == 4
    assert worker.app.backend.client.llen(queue) == 1


def test_time_limits_and_rate_limits_are_set(worker: Worker, page: Page) -> None:
    page.limit(worker, "task-timeout-soft", "async_hold", 1)
    page.shows("time limits set successfully")
    assert worker.get("async_hold", unique()) == "tidied"
    page.limit(worker, "task-timeout-hard", "hold", 1)
    page.shows("time limits set successfully")
    with pytest.raises(TimeLimitExceeded):
        worker.get("hold", unique())
    page.limit(worker, "task-timeout-soft", "blip", 1)
    page.shows("time limits set successfully")
    with pytest.raises(SoftTimeLimitExceeded):
        worker.get("blip", 1, 30)
    page.limit(worker, "task-timeout-hard", "async_blip", 1)
    page.shows("time limits set successfully")
    with pytest.raises(TimeLimitExceeded):
        worker.get("async_blip", 1, 30)
    for name in ("async_hold", "hold", "blip", "async_blip"):
        worker.tell("time_limit", name, soft=None, hard=None)
    worker.tell("rate_limit", "limited", "1000/s")
    page.limit(worker, "task-rate-limit", "limited", 1)
    page.shows("new rate limit set successfully")
    times = [one.get(timeout=HANG_S) for one in [worker.send("limited") for _ in range(3)]]
    assert max(times) - min(times) > 1.5


def test_the_pools_page_shows_sessions_and_its_buttons_work(worker: Worker, page: Page) -> None:
    path = f"/worker/{worker.name}"
    eventually(lambda: len(children(worker)) == 2, "both children")
    shown = page.shows("TaskPool", "Sessions", *map(str, children(worker)), again=path)
    assert "blocking" in shown
    page.picture("flower-pool", height=1220)
    page.write("#pool-size", "2")
    page.click("worker-pool-grow")
    eventually(lambda: len(children(worker)) == 4, "more children")
    assert pool_of(worker)["max-concurrency"] == 4
    page.click("worker-pool-shrink")
    eventually(lambda: len(children(worker)) == 2, "the shrinking")
    before = set(children(worker))
    page.click("worker-group")
    page.click("worker-pool-restart")
    eventually(lambda: not any(map(is_running, before)), "new children")
    assert worker.get("signalled") not in before


def test_the_range_of_an_autoscaler_is_set(
    redis_url: str, tmp_path: Path, worker: Worker, page: Page
) -> None:
    options = {"TEST_CONF": json.dumps({"worker_pool_restarts": False})}
    with Worker(redis_url, tmp_path, "-E", "--autoscale=3,1", **options) as scaled:
        path = f"/worker/{scaled.name}"
        page.shows(scaled.name, "Autoscaler options", again=path)
        page.write("#min-autoscale", "2")
        page.write("#max-autoscale", "4")
        page.click("worker-pool-autoscale")
        page.shows("(min=2, max=4)")
        autoscaler = scaled.ask("stats")["autoscaler"]
        assert (autoscaler["min"], autoscaler["max"]) == (2, 4)
        eventually(lambda: len(children(scaled)) == 2, "a second child")
        # What Celery refuses is said.
        page.click("worker-pool-grow")
        page.shows("not supported with autoscale")
        page.click("worker-group")
        page.click("worker-pool-restart")
        page.shows("Pool restarts not enabled")
        assert scaled.stop() == 0


def test_a_worker_is_shut_down_from_its_page(worker: Worker, page: Page) -> None:
    """The last one: afterwards there is no worker."""
    key = unique()
    result = worker.send("hold", key)
    worker.heard(key)
    page.open(f"/worker/{worker.name}")
    page.click("worker-group")
    page.click("worker-shutdown")
    eventually(lambda: "Got shutdown from remote" in worker.log, "the shutdown")
    worker.go(key)
    assert worker.process is not None
    assert worker.process.wait(HANG_S) == 0
    assert result.get(timeout=HANG_S) > 0
    page.shows(worker.name, "Offline", again="/workers")
