"""A worker of the copy of the package it is started with; reads commands, one per line.

python mixed_worker.py URL PREFIX INCARNATION
"""

from __future__ import annotations

import json
import sys
from typing import Any

from capsule_tasks.errors import CapsuleError
from capsule_tasks.runs import CURRENT_SCHEMA_VERSION, AgentId, RunState, Spent
from capsule_tasks.runs.parking import parked, readable_versions, resumed
from capsule_tasks.settings import LeaseSettings, RunSettings
from capsule_tasks.storage.runs.store import SyncLease, SyncRunStore


class Worker:
    """The commands about runs, as this release carries them out."""

    def __init__(self, url: str, prefix: str, incarnation: str) -> None:
        self._store = SyncRunStore(url, settings=RunSettings(prefix=prefix))
        self._incarnation = incarnation
        settings = LeaseSettings(lease_s=600)
        SyncLease(incarnation, url, settings=settings, prefix=prefix).acquire()

    def start(self, run_id: str, extra: dict[str, Any]) -> str:
        """Make a run; `extra` are fields that only this release may know."""
        agent = AgentId("triage")
        parts = parked(RunState(run_id=run_id, start_agent=agent, agent=agent, **extra))
        status: str = self._store.create(
            run_id, f"s-{run_id}", parts.snapshot, **parts.header
        ).status
        return status

    def turn(self, run_id: str, last: bool) -> dict[str, Any]:
        """Do one turn of a run, or say why not."""
        claim = self._store.claim(run_id, self._incarnation, readable=readable_versions())
        state = resumed(claim)
        parts = parked(state.with_usage(state.agent, Spent(requests=1, input_tokens=1)))
        done = self._store.commit(
            claim,
            parts.snapshot,
            turn=claim.turn + 1,
            status="completed" if last else "queued",
            items=[{"turn": claim.turn + 1}],
            **parts.header,
        )
        return {"status": done.status, "read": claim.schema, "notes": getattr(state, "notes", None)}

    def version(self) -> str:
        return CURRENT_SCHEMA_VERSION


def main(url: str, prefix: str, incarnation: str) -> None:
    worker = Worker(url, prefix, incarnation)
    for line in sys.stdin:
        name, *args = json.loads(line)
        try:
            answer = {"answer": getattr(worker, name)(*args)}
        except CapsuleError as error:
            answer = {"error": type(error).__name__, "text": str(error)}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
