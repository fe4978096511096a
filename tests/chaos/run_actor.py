"""One process of many that work on the same runs at random, and its log of the replies.

    python -m tests.chaos.run_actor URL PREFIX NAME

Each line of its input is a round: the id of a run and a seed. Each line of its output is a log.
"""

from __future__ import annotations

import json
import random
import sys
import time
from typing import Any

from capsule_tasks.errors import CapsuleError, DecisionExpired
from capsule_tasks.settings import LeaseSettings, RetrySettings, RunSettings
from capsule_tasks.storage import SyncConnections
from capsule_tasks.storage.runs.store import SyncLease, SyncRunStore
from capsule_tasks.storage.runs.types import ApprovalRequest, Claim

STEPS = 7
PATIENCE = RetrySettings(attempts=100, first_delay_s=0.001, max_delay_s=0.02)
CALLS = ("c1", "c2", "c3", "c4")


class Actor:
    """Knows its latest claim and an older one, which is stale if all is well."""

    def __init__(self, url: str, prefix: str, name: str) -> None:
        self._connections = SyncConnections(url)
        settings = RunSettings(prefix=prefix, retry=PATIENCE)
        self.runs = SyncRunStore(self._connections, settings=settings)
        self._prefix = prefix
        self._name = name
        self._lives = 0
        self._lease = self._new_lease()

    def play(self, run_id: str, seed: str) -> list[dict[str, Any]]:
        chance = random.Random(f"{seed} {self._name}")
        self._claims: list[Claim] = []
        log = []
        kinds = ["claim"] * 4 + ["commit"] * 3 + ["park"] * 3 + ["decide"] * 5
        kinds += ["expire", "expire", "die", "stale", "stale", "cancel", "finish"]
        for _ in range(STEPS):
            entry: dict[str, Any] = {"kind": chance.choice(kinds), "actor": self._name}
            try:
                getattr(self, f"_{entry['kind']}")(run_id, chance, entry)
                entry["reply"] = "done"
            except DecisionExpired as late:
                entry |= {"reply": "expired", "updated": late.updated_us, "resume": late.resume}
            except CapsuleError as error:
                entry["reply"] = type(error).__name__
            entry["ended_at"] = time.time()
            log.append(entry)
        return log

    def _claim(self, run_id: str, chance: random.Random, entry: dict[str, Any]) -> None:
        claim = self.runs.claim(run_id, self._lease.core.incarnation)
        self._claims.append(claim)
        # A claim repeated after a lost reply returns the state of now, and the token of its moment.
        entry |= {"updated": claim.token, "token": claim.token}
        entry |= {"revision": claim.revision, "owner": self._lease.core.incarnation}
        entry["decided"] = sorted(each.call for each in claim.decisions.exact)

    def _commit(self, run_id: str, chance: random.Random, entry: dict[str, Any]) -> None:
        self._committed(chance, entry, "running", [])

    def _park(self, run_id: str, chance: random.Random, entry: dict[str, Any]) -> None:
        approval_requests = [
            ApprovalRequest(
                call_id=call,
                tool="bare:pay",
                agent="a",
                fingerprint="f",
                expires_in_s=chance.choice([None, None, 0.001, 0.02]),
                on_expiry=chance.choice(["reject", "approve", "cancel"]),
            )
            for call in chance.sample(CALLS, chance.randint(1, 3))
        ]
        self._committed(chance, entry, "interrupted", approval_requests)

    def _finish(self, run_id: str, chance: random.Random, entry: dict[str, Any]) -> None:
        self._committed(chance, entry, chance.choice(["completed", "failed"]), [])

    def _stale(self, run_id: str, chance: random.Random, entry: dict[str, Any]) -> None:
        self._committed(chance, entry, "running", [], *self._claims[:1])

    def _decide(self, run_id: str, chance: random.Random, entry: dict[str, Any]) -> None:
        call = chance.choice(CALLS)
        entry |= {"call": call, "approved": chance.random() < 0.5, "always": chance.random() < 0.2}
        options = {"always": entry["always"], "by": self._name}
        decide: Any = (
            self.runs.approvals.approve if entry["approved"] else self.runs.approvals.reject
        )
        resolved = decide(run_id, call, **options)
        entry |= {"updated": resolved.updated_us, "status": resolved.status}
        entry["resume"] = resolved.resume

    def _expire(self, run_id: str, chance: random.Random, entry: dict[str, Any]) -> None:
        expired = self.runs.approvals.expire(run_id)
        entry |= {"calls": list(expired.calls), "resume": expired.resume}
        if expired.calls:
            entry |= {"updated": expired.updated_us, "status": expired.status}

    def _cancel(self, run_id: str, chance: random.Random, entry: dict[str, Any]) -> None:
        if chance.random() < 0.4:
            cancelled = self.runs.cancel(run_id, by=self._name)
            entry |= {"updated": cancelled.updated_us, "status": cancelled.status}

    def _die(self, run_id: str, chance: random.Random, entry: dict[str, Any]) -> None:
        entry |= {"died": self._lease.core.incarnation, "began_at": time.time()}
        self._lease.release()
        self._lease = self._new_lease()

    def _committed(
        self,
        chance: random.Random,
        entry: dict[str, Any],
        status: Any,
        approval_requests: list[ApprovalRequest],
        claim: Claim | None = None,
    ) -> None:
        if not self._claims:
            entry["kind"] = "nothing"
            return
        claim = claim or self._claims[-1]
        items = [{"by": self._name, "n": chance.getrandbits(40)}]
        snapshot = b"%s %d" % (self._name.encode(), chance.getrandbits(40))
        entry |= {"token": claim.token, "revision": claim.revision, "turn": claim.turn + 1}
        entry |= {"wanted": status, "asks": [asdict_of(ask) for ask in approval_requests]}
        entry |= {"items": items, "snapshot": snapshot.decode()}
        done = self.runs.commit(
            claim,
            snapshot,
            turn=claim.turn + 1,
            status=status,
            approval_requests=approval_requests,
            items=items,
        )
        self._claims.append(done.claim)
        entry |= {"updated": done.claim.updated_us, "status": done.status}
        entry["cancelled_by"] = done.claim.cancelled_by

    def _new_lease(self) -> SyncLease:
        self._lives += 1
        name = f"{self._name}-{self._lives}"
        settings = LeaseSettings(lease_s=3600)
        lease = SyncLease(name, self._connections, settings=settings, prefix=self._prefix)
        while True:
            try:
                lease.acquire(operation_id=name)
            except CapsuleError:
                continue  # cut too often in a row
            return lease


def asdict_of(ask: ApprovalRequest) -> dict[str, Any]:
    return {name: getattr(ask, name) for name in ask.__struct_fields__}


def main(url: str, prefix: str, name: str) -> None:
    actor = Actor(url, prefix, name)
    for line in sys.stdin:
        run_id, seed = json.loads(line)
        sys.stdout.write(json.dumps(actor.play(run_id, seed)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
