"""Four processes work on one run at random, over connections that are cut. Their calls, played
again one by one in that order by the same scripts, give the same replies and the same run.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis

from capsule_tasks import SyncHistory
from capsule_tasks.errors import CapsuleError, DecisionExpired, RunClaimLost
from capsule_tasks.settings import HistorySettings, LeaseSettings, RunSettings
from capsule_tasks.storage.runs.store import SyncLease, SyncRunStore
from capsule_tasks.storage.runs.types import ApprovalRequest, Claim, RunRecord
from tests.clocks import ClockedStore
from tests.cutting_proxy import CuttingProxy
from tests.servers import fresh_prefix

ROOT = Path(__file__).parents[2]
ROUNDS = max(40, int(1000 * float(os.environ.get("CAPSULE_TEST_SCALE", "0.1"))))
SEED = os.environ.get("CAPSULE_CHAOS_SEED") or str(random.SystemRandom().randrange(2**32))
ACTORS = ("ann", "bob", "cid", "dot")
SESSION = "user-42"

pytestmark = pytest.mark.chaos

Entry = dict[str, Any]


class Model:
    """The same changes one after the other, each at the time that the logs tell of it."""

    def __init__(self, client: redis.Redis, created_us: int) -> None:
        self._store = ClockedStore(client, created_us)
        self._prefix = fresh_prefix()
        self._leases: dict[str, SyncLease] = {}
        self.runs = SyncRunStore(self._store, settings=RunSettings(prefix=self._prefix))
        self.runs.create("r", SESSION, b"new", schema="1", agent="a")
        self._claims: dict[int, Claim] = {}

    def claim(self, owner: str) -> Claim:
        """Every claim succeeds here; `check` decides whether the real claim was allowed."""
        holder = self.runs.read("r").owner
        if holder is not None:
            self._leases[holder].release()
        if owner not in self._leases:
            self._leases[owner] = self.runs.lease(owner, LeaseSettings(lease_s=3600))
            self._leases[owner].acquire()
        claim: Claim = self.runs.claim("r", owner)
        return claim

    def play(self, entry: Entry) -> None:
        """Do what was done, and compare the replies."""
        self._store.now_us = entry["updated"]
        kind = entry["kind"]
        if kind == "claim":
            claim = self.claim(entry["owner"])
            assert claim.revision == entry["revision"], entry
            assert {each.call for each in claim.decisions.exact} <= set(entry["decided"]), entry
            self._claims[entry["token"]] = claim
        elif "wanted" in entry:
            self._commit(entry)
        elif kind == "decide":
            self._decide(entry)
        elif kind == "expire":
            expired = self.runs.approvals.expire("r")
            reply = (list(expired.calls), expired.resume, expired.status)
            assert reply == (entry["calls"], entry["resume"], entry["status"]), entry
        elif kind == "cancel":
            assert self.runs.cancel("r", by=entry["actor"]).status == entry["status"], entry

    def _commit(self, entry: Entry) -> None:
        done = self.runs.commit(
            self._claims[entry["token"]],
            entry["snapshot"].encode(),
            turn=entry["turn"],
            status=entry["wanted"],
            approval_requests=[ApprovalRequest(**ask) for ask in entry["asks"]],
            items=entry["items"],
        )
        reply = (done.status, done.claim.revision - 1, done.claim.cancelled_by)
        assert reply == (entry["status"], entry["revision"], entry["cancelled_by"]), entry
        self._claims[entry["token"]] = done.claim

    def _decide(self, entry: Entry) -> None:
        approvals = self.runs.approvals
        decide: Any = approvals.approve if entry["approved"] else approvals.reject
        about = {"always": entry["always"], "by": entry["actor"]}
        if entry["reply"] == "expired":
            with pytest.raises(DecisionExpired) as late:
                decide("r", entry["call"], **about)
            assert late.value.resume == entry["resume"], entry
            return
        resolved = decide("r", entry["call"], **about)
        assert (resolved.status, resolved.resume) == (entry["status"], entry["resume"]), entry

    def items(self) -> list[Any]:
        settings = HistorySettings(prefix=self._prefix)
        return SyncHistory(SESSION, self._store, settings=settings).get_items()


@contextmanager
def actors(url: str, prefix: str) -> Iterator[list[subprocess.Popen[str]]]:
    with ExitStack() as stack:
        started = []
        for name in ACTORS:
            command = [sys.executable, "-m", "tests.chaos.run_actor", url, prefix, name]
            process = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            stack.callback(ended, process)
            started.append(process)
        yield started


def ended(process: subprocess.Popen[str]) -> None:
    with process:
        process.kill()


def played(processes: list[subprocess.Popen[str]], run_id: str, seed: str) -> list[Entry]:
    for process in processes:
        assert process.stdin is not None
        process.stdin.write(json.dumps([run_id, seed]) + "\n")
        process.stdin.flush()
    log: list[Entry] = []
    for process in processes:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, "an actor died"
        log.extend(json.loads(line))
    return log


def seen(record: RunRecord) -> tuple[Any, ...]:
    """All fields of a run except times and tokens, which differ between two servers."""
    waiting = [(each.call_id, each.on_expiry, each.expires_at is None) for each in record.pending]
    head = (record.status, record.revision, record.turn, record.owner, record.cancelled_by)
    return (*head, record.snapshot, record.agent, waiting)


def check(
    client: redis.Redis, real: SyncRunStore, run_id: str, items: list[Any], log: list[Entry]
) -> None:
    record = real.read(run_id)
    changes = sorted((each for each in log if each.get("updated")), key=lambda e: e["updated"])
    assert len({each["updated"] for each in changes}) == len(changes), changes
    created_us = int(record.created_at.timestamp() * 1e6)
    model = Model(client, created_us)
    deaths = {each["died"]: each["began_at"] for each in log if "died" in each}
    owner: str | None = None
    for entry in changes:
        if entry["kind"] == "claim":
            if model.runs.read("r").status == "running":
                assert owner in deaths, f"the run was taken from {owner}, who lived: {entry}"
                assert deaths[owner] <= entry["ended_at"]
            owner = entry["owner"]
        model.play(entry)
    assert seen(model.runs.read("r")) == seen(record)
    assert model.items() == items
    assert not changes or record.updated_us == changes[-1]["updated"], "a change without a reply"


def test_any_interleaving_ends_as_one_after_the_other_would(valkey_url: str) -> None:
    print(f"CAPSULE_CHAOS_SEED={SEED}")  # noqa: T201  shown when the test fails
    chance = random.Random(SEED)
    port = int(valkey_url.rpartition(":")[2].partition("/")[0])
    counts: dict[str, int] = {}
    with CuttingProxy(port) as proxy, redis.Redis.from_url(valkey_url) as client:
        prefix = fresh_prefix()
        with actors(proxy.url, prefix) as processes:
            for number in range(ROUNDS):
                settings = RunSettings(prefix=f"{prefix}")
                run_id, session = f"run-{number}", f"{SESSION}-{number}"
                with SyncRunStore(valkey_url, settings=settings) as real:
                    real.create(run_id, session, b"new", schema="1", agent="a")
                    proxy.plan(chance.choices(["pass", "before", "after"], [8, 1, 1], k=100))
                    log = played(processes, run_id, f"{SEED} {number}")
                    proxy.plan([])
                    history = SyncHistory(
                        session, valkey_url, settings=HistorySettings(prefix=prefix)
                    )
                    with history:
                        check(client, real, run_id, history.get_items(), log)
                for entry in log:
                    key = f"{entry['kind']} {entry['reply']}"
                    counts[key] = counts.get(key, 0) + 1
        assert proxy.cuts > ROUNDS
    assert counts["stale RunClaimLost"] > 0, "no stale owner tried to commit"
    for key in ("claim done", "commit done", "park done", "decide done", "expire done"):
        assert counts[key] >= ROUNDS / 20, counts


def test_the_model_refuses_a_commit_of_a_stale_owner(valkey_url: str) -> None:
    """So that a stale commit which the server took would be found out above."""
    with redis.Redis.from_url(valkey_url) as client:
        model = Model(client, 1_000_000_000_000_000)
        first = model.claim("ann")
        model.claim("bob")
        with pytest.raises(RunClaimLost):
            model.runs.commit(first, b"x", turn=1)
    assert issubclass(RunClaimLost, CapsuleError)
