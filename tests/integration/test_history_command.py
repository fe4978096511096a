"""`python -m capsule_tasks.storage history …`, as somebody types it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import redis

from capsule_tasks import SyncHistory
from capsule_tasks.settings import HistorySettings
from tests.servers import fresh_prefix

ITEMS = [{"role": "user", "content": f"Nachricht {n} ä\ud800"} for n in range(30)]


class Shell:
    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self.folder = folder
        self.prefix = fresh_prefix()
        self.key = f"{self.prefix}:{{S:user%3A42}}:items"

    def run(
        self, *words: str, stdin: bytes = b"", url: str | None = None, **environment: str
    ) -> subprocess.CompletedProcess[bytes]:
        where = [] if environment else ["--url", url or self.url]
        command = [sys.executable, "-m", "capsule_tasks.storage", "history", *words, *where]
        return subprocess.run(
            [*command, "--prefix", self.prefix], env=os.environ | environment,
            input=stdin, capture_output=True, timeout=60, check=False, cwd=self.folder,
        )  # fmt: skip

    def history(self) -> SyncHistory:
        return SyncHistory("user:42", self.url, settings=HistorySettings(prefix=self.prefix))


@pytest.fixture
def shell(valkey_url: str, tmp_path: Path) -> Shell:
    return Shell(valkey_url, tmp_path)


def lines(output: bytes) -> list[Any]:
    return [json.loads(line) for line in output.splitlines()]


def test_export_and_import_are_each_others_inverse(shell: Shell) -> None:
    with shell.history() as history:
        history.add_items(ITEMS)
        exported = shell.run("export", "user:42")
        assert exported.returncode == 0
        assert lines(exported.stdout) == ITEMS
        assert shell.run("export", "user:42", "--to", "items.jsonl").returncode == 0
        assert (shell.folder / "items.jsonl").read_bytes() == exported.stdout
        assert shell.run("clear", "user:42", "--yes").returncode == 0
        assert history.get_items() == []
        assert shell.run("import", "user:42", "--from", "items.jsonl").returncode == 0
        assert history.get_items() == ITEMS
        assert shell.run("import", "user:42", stdin=exported.stdout).returncode == 0
        assert history.get_items() == ITEMS * 2


def test_bad_records_and_lines_are_counted(shell: Shell) -> None:
    with shell.history() as history, redis.Redis.from_url(shell.url) as client:
        history.add_items(ITEMS[:1])
        client.rpush(shell.key, b"\xff", b"null")
        exported = shell.run("export", "user:42")
        assert (exported.returncode, lines(exported.stdout)) == (1, ITEMS[:1])
        assert b"2 corrupt records skipped" in exported.stderr
        text = b'{"n":1}\n\n{"n":\n7\n\xff\n{"n":2}\n'
        strict = shell.run("import", "user:42", "--strict", stdin=text)
        assert strict.returncode == 1
        assert len(history.get_items()) == 1
        loaded = shell.run("import", "user:42", stdin=text)
        assert loaded.returncode == 1
        assert b"2 items imported, 3 bad lines skipped" in loaded.stderr
        assert b"line 3" in loaded.stderr
        assert history.get_items()[1:] == [{"n": 1}, {"n": 2}]


def test_show_tells_about_it_and_its_latest_items(shell: Shell) -> None:
    with shell.history() as history:
        history.add_items(ITEMS)
    shown = shell.run("show", "user:42", "--last", "2")
    assert shown.returncode == 0
    head, _, tail = shown.stdout.partition(b"\n\n")
    assert b"items        30 (" in head
    assert lines(tail) == ITEMS[-2:]
    missing = shell.run("show", "nobody")
    assert (missing.returncode, missing.stdout) == (1, b"")
    assert b"nobody" in missing.stderr


def test_show_prints_an_odd_id_in_one_line_of_ascii(shell: Shell) -> None:
    odd = "ü\nitems        99"
    assert shell.run("import", odd, stdin=b'{"n":1}').returncode == 0
    shown = shell.run("show", odd)
    assert shown.returncode == 0
    assert shown.stdout.splitlines()[0] == b"session      \\xfc\\nitems        99"
    assert shown.stdout.splitlines()[1].startswith(b"items        1 ")


def test_clear_asks_first(shell: Shell) -> None:
    with shell.history() as history:
        history.add_items(ITEMS)
        asked = shell.run("clear", "user:42")
        assert asked.returncode == 1
        assert b"30 items" in asked.stderr
        assert len(history.get_items()) == 30


def test_a_password_need_not_stand_in_the_list_of_processes(shell: Shell) -> None:
    with shell.history() as history:
        history.add_items(ITEMS)
    assert lines(shell.run("export", "user:42", CAPSULE_REDIS_URL=shell.url).stdout) == ITEMS


@pytest.mark.parametrize(
    ("words", "url", "said"),
    [
        (["show", ""], None, b"session id '' must not be empty"),
        (["show", "s"], "http://x", b"url = 'http://x'"),
        (["import", "s", "--from", "missing"], None, b"missing"),
    ],
)
def test_an_error_is_one_line(shell: Shell, words: list[str], url: str | None, said: bytes) -> None:
    ended = shell.run(*words, url=url)
    assert ended.returncode == 1
    assert ended.stderr.startswith(b"error: ")
    assert said in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
