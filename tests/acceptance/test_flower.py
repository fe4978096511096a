"""Flower in a real browser: the worker, its pool and its sessions, tasks and their states.

With CAPSULE_SCREENSHOTS=docs/images the pictures of the guide are taken anew.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium.common.exceptions import WebDriverException
from selenium.webdriver.common.by import By

from tests.acceptance.browser import HEIGHT, WIDTH, chromium, flower
from tests.acceptance.workers import HANG_S, Worker, eventually, is_running, unique

_REOPEN_S = 2.0
"""A page that does not change by itself may have been opened too early; others draw themselves."""

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def worker(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    worker = Worker(redis_url, tmp_path_factory.mktemp("worker"), "-E")
    worker.name = "worker@example"  # as the guide's pictures show it
    with worker:
        yield worker


class Page:
    """What a person sees and does."""

    def __init__(self, browser: Any, url: str, pictures: Path) -> None:
        self._browser, self._url, self._pictures = browser, url, pictures

    def open(self, path: str) -> None:
        self._browser.get(self._url + path)

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

        return str(eventually(has_all, f"{words} on the page"))

    def click(self, button: str) -> None:
        eventually(lambda: self._click(button), f"the button {button}")

    def _click(self, button: str) -> bool:
        try:
            self._browser.find_element(By.ID, button).click()
        except WebDriverException:
            return False
        return True

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


def test_the_workers_page_counts_what_the_worker_did(worker: Worker, page: Page) -> None:
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


def test_the_pools_page_shows_sessions_and_its_buttons_work(worker: Worker, page: Page) -> None:
    path = f"/worker/{worker.name}"
    before = pool_of(worker)
    page.open(path)
    shown = page.shows("TaskPool", "Sessions", *(str(pid) for pid in before["processes"]))
    assert "blocking" in shown
    page.picture("flower-pool", height=1220)
    page.click("worker-pool-grow")
    grown = eventually(
        lambda: (pool := pool_of(worker)) and len(pool["processes"]) == 3 and pool, "a third child"
    )
    assert grown["max-concurrency"] == 3
    page.click("worker-pool-shrink")
    eventually(lambda: len(pool_of(worker)["processes"]) == 2, "the shrinking")
    before = set(pool_of(worker)["processes"])
    page.click("worker-group")
    page.click("worker-pool-restart")
    eventually(lambda: not any(map(is_running, before)), "new children")
    assert worker.get("signalled") not in before


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
