"""Flower as a process, and a headless Chromium that looks at it."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium import webdriver

from capsule_tasks.testing.servers import free_port
from tests.acceptance.workers import HANG_S, ROOT, Worker, eventually

WIDTH, HEIGHT = 1100, 800


@contextlib.contextmanager
def flower(worker: Worker, directory: Path) -> Iterator[str]:
    """Flower for the app of a worker; its address."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "celery", "-A", "tests.acceptance.app", "flower"]
    command.append("--inspect-timeout=4000")  # by itself it leaves out what takes over a second
    # Without it, and without a login, Flower's buttons answer 401.
    environment = worker.environment | {"FLOWER_UNAUTHENTICATED_API": "true"}
    with (directory / "flower.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, f"--port={port}", "--address=127.0.0.1"],
            cwd=ROOT,
            env=environment,
            stdout=log,
            stderr=log,
        )
    try:
        eventually(lambda: _answers(f"{url}/healthcheck"), "Flower")
        yield url
    finally:
        process.terminate()
        process.wait(HANG_S)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=HANG_S) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


@contextlib.contextmanager
def chromium(directory: Path) -> Iterator[webdriver.Chrome]:
    """Debian's Chromium, without a screen. In CI it must be there."""
    binary, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if binary is None or driver is None:
        missing = "no chromium, no chromedriver: install the packages chromium and chromium-driver"
        if os.environ.get("CI"):
            pytest.fail(missing)
        pytest.skip(missing)
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for option in (
        "headless=new",
        "no-sandbox",  # root has none; it looks at our own page only
        "disable-dev-shm-usage",
        "disable-gpu",
        "force-prefers-reduced-motion",  # where a page scrolls smoothly, its buttons move on
        "disable-background-networking",
        "hide-scrollbars",
        f"window-size={WIDTH},{HEIGHT}",
        f"user-data-dir={directory / 'profile'}",
        "host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    ):
        options.add_argument(f"--{option}")
    service = webdriver.ChromeService(driver, log_output=str(directory / "driver.log"))
    browser = webdriver.Chrome(options, service)
    try:
        browser.set_page_load_timeout(HANG_S)
        yield browser
    finally:
        browser.quit()
