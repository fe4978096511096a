"""Two installed copies of the package with different schema versions share one store."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import capsule_tasks
from capsule_tasks import SyncHistory
from capsule_tasks.runs import CURRENT_SCHEMA_VERSION, SUPPORTED_SCHEMA_VERSIONS
from capsule_tasks.settings import HistorySettings, RunSettings
from capsule_tasks.storage.runs.store import SyncRunStore

NEXT = "9.0"
SCRIPT = Path(__file__).with_name("mixed_worker.py")
CHANGES = {
    "runs/schema.py": [
        ("}\n\"\"\"In the order", f'    "{NEXT}": "Notes.",\n}}\n"""In the order'),
        ('}\n"""By the version that each',
         (f', "{CURRENT_SCHEMA_VERSION}": lambda fields: '
          '{**fields, "notes": "migrated"}}\n"""By the version that each')),
    ],
    "runs/state.py": [
        ("    code: CodeSession | None = None\n\n    def to_json",
         ('    code: CodeSession | None = None\n    notes: str = ""\n\n'
         "    def to_json")),
    ],
}  # fmt: skip


class Worker:
    """A process that has one of the copies."""

    def __init__(self, copy: Path, url: str, prefix: str) -> None:
        command = [sys.executable, str(SCRIPT), url, prefix, copy.name]
        environment = {**os.environ, "PYTHONPATH": str(copy)}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def ask(self, *words: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()
        found: dict[str, Any] = json.loads(self.process.stdout.readline())
        return found

    def do(self, *words: Any) -> Any:
        reply = self.ask(*words)
        assert "error" not in reply, reply
        return reply["answer"]


def installed(folder: Path, changes: dict[str, list[tuple[str, str]]]) -> Path:
    """A copy of the package in a folder, with changes."""
    package = Path(capsule_tasks.__file__).parent
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(package, folder / "capsule_tasks", ignore=ignored)
    for name, replacements in changes.items():
        path = folder / "capsule_tasks" / name
        text = path.read_text()
        for before, after in replacements:
            assert text.count(before) == 1, (name, before)
            text = text.replace(before, after)
        path.write_text(text)
    return folder


@pytest.fixture
def workers(tmp_path: Path, valkey_url: str, prefix: str) -> Iterator[tuple[Worker, Worker]]:
    copies = installed(tmp_path / "old", {}), installed(tmp_path / "new", CHANGES)
    old, new = (Worker(copy, valkey_url, prefix) for copy in copies)
    yield old, new
    for worker in (old, new):
        with worker.process:
            worker.process.kill()


@pytest.fixture
def store(valkey_url: str, prefix: str) -> Iterator[SyncRunStore]:
    with SyncRunStore(valkey_url, settings=RunSettings(prefix=prefix)) as store:
        yield store


def test_neither_harms_the_records_of_the_other(
    workers: tuple[Worker, Worker], store: SyncRunStore
) -> None:
    old, new = workers
    assert (old.do("version"), new.do("version")) == (CURRENT_SCHEMA_VERSION, NEXT)
    new.do("start", "newer", {"notes": "for the new"})
    before = store.read("newer")
    reply = old.ask("turn", "newer", False)
    assert reply["error"] == "UnreadableSchema"
    assert f"'{NEXT}'" in reply["text"]
    assert ", ".join(SUPPORTED_SCHEMA_VERSIONS) in reply["text"]
    assert store.read("newer") == before, "a worker that cannot read it has touched it"
    assert new.do("turn", "newer", True) == {
        "status": "completed",
        "read": NEXT,
        "notes": "for the new",
    }

    old.do("start", "older", {})
    assert old.do("turn", "older", False)["status"] == "queued"
    taken = new.do("turn", "older", False)
    assert (taken["read"], taken["notes"]) == (CURRENT_SCHEMA_VERSION, "migrated")
    before = store.read("older")
    assert before.schema == NEXT
    assert old.ask("turn", "older", False)["error"] == "UnreadableSchema"
    assert store.read("older") == before
    assert new.do("turn", "older", True)["notes"] == "migrated"


def test_runs_offered_to_both_at_once_are_all_done_and_none_fails(
    workers: tuple[Worker, Worker], store: SyncRunStore, valkey_url: str, prefix: str
) -> None:
    runs = [f"run-{number}" for number in range(12)]
    for number, run_id in enumerate(runs):
        workers[number % 2].do("start", run_id, {})
    allowed = {"UnreadableSchema", "RunClaimed", "RunEnded"}

    def offered(worker: Worker) -> None:
        """Every run twice, as often as needed until the last turn was done by somebody."""
        for run_id in runs * 2:
            reply = worker.ask("turn", run_id, False)
            assert reply.get("error") in {None, *allowed}, reply

    with ThreadPoolExecutor(2) as both:
        list(both.map(offered, workers))
    for run_id in runs:
        workers[1].do("turn", run_id, True)
        record = store.read(run_id)
        assert (record.status, record.schema) == ("completed", NEXT)
        session = f"s-{run_id}"
        with SyncHistory(session, valkey_url, settings=HistorySettings(prefix=prefix)) as history:
            turns = [item["turn"] for item in history.get_items()]
        assert turns == list(range(1, record.turn + 1)), "a turn was lost or stored twice"
