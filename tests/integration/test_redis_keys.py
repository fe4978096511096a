"""Everything is written once: the keys are those of the table in docs/architecture.md.

After each call of a script the server is looked at: each key has the type and the time to live that
the table says, from its first write on.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
import redis

from capsule_tasks import settings
from capsule_tasks.client import Steps
from capsule_tasks.protocol.events import Accepted, CancelCommand, Ended, Outcome, encode_event
from capsule_tasks.protocol.messages import Output
from capsule_tasks.protocol.namespaces import SavedNamespace
from capsule_tasks.settings import (
    AppSettings,
    ExecutionSettings,
    HistorySettings,
    LeaseSettings,
    NamedSessionSettings,
    RunSettings,
    StepSettings,
)
from capsule_tasks.storage import (
    ApprovalRequest,
    AsyncConnections,
    History,
    Lease,
    PlannedCall,
    RunStore,
)
from capsule_tasks.storage.drivers import drive
from capsule_tasks.storage.executions.forgetting import forget, forget_unfinished
from capsule_tasks.storage.executions.holds import HoldStore
from capsule_tasks.storage.executions.store import ExecutionStore
from capsule_tasks.storage.executions.types import RecentEntry
from capsule_tasks.storage.history.core import CHUNK_ITEMS
from capsule_tasks.storage.losses import LossCore
from capsule_tasks.storage.revokes import RevokeCore
from capsule_tasks.storage.scripts import Call
from capsule_tasks.storage.sessions.checkpoints import CheckpointStore
from capsule_tasks.storage.sessions.store import NamedSessionStore
from capsule_tasks.storage.sessions.types import SessionEntry
from tests.architecture_page import Key, key_rows
from tests.attempts import append, claim
from tests.unit.test_architecture import SCRIPTS, written_shapes

ROWS = [row for row in key_rows() if row.shape.startswith("capsule:")]
LEASE = LeaseSettings(lease_s=40_000)
"""Long enough that the time to live of a lease is mistaken for no other."""
PRINT = "0123456789abcdef"
PROFILE = "sandbox"
NOT_CALLED = {
    "runs/approvals_postpone",  # changes only what is there already, as the next
    "runs/index_postpone",
    "sessions/checkpoint_unstage",  # removes what a writer has given up
    "workers/unacked_claim",  # of kombu's keys
}
TTL = re.compile(
    r"`(?P<section>\w+Settings)\.(?P<field>\w+)`(?: \+ `\w+\.(?P<more>\w+)`)?"
    r"|(?P<number>\d+) (?P<unit>minutes|days)|`(?P<revokes>capsule_revoke_ttl_s)`"
)


def seconds_of(match: re.Match[str]) -> float:
    if match["revokes"]:
        return AppSettings().revoke_ttl_s
    if match["number"]:
        return int(match["number"]) * {"minutes": 60, "days": 86_400}[match["unit"]]
    section = (
        LEASE if match["section"] == "LeaseSettings" else getattr(settings, match["section"])()
    )
    more: float = getattr(section, match["more"]) if match["more"] else 0
    return float(getattr(section, match["field"])) + more


def ttls_of(row: Key) -> set[float]:
    return {seconds_of(match) for match in TTL.finditer(row.ttl)}


ALL_TTLS = sorted({ttl for row in ROWS for ttl in ttls_of(row)})


class Watched:
    """Connections that look at the server after each call."""

    def __init__(self, url: str, prefix: str) -> None:
        self._connections = AsyncConnections(url)
        self._client = redis.Redis.from_url(url)
        self._prefix = prefix
        self.called: set[str] = set()
        self.seen: set[str] = set()
        """Shapes of keys."""
        self.is_next_left = False
        """Whether the caller of the next call leaves before its reply."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connections, name)

    async def run(self, call: Call) -> Any:
        if self.is_next_left:
            self.is_next_left = False
            raise KeyError("the caller leaves")
        reply = await self._connections.run(call)
        self.called.add(call.script.name)
        self.look(call.script.name)
        return reply

    def look(self, after: str) -> None:
        for found in self._client.scan_iter(match=f"{self._prefix}:*", count=1000):
            key = found.decode()
            (row,) = [row for row in ROWS if self._is_of(row, key)]
            kind, left_s = self._client.type(found).decode(), self._client.pttl(found) / 1000
            if not self._client.exists(found):
                continue  # it has expired since the scan
            assert kind == row.type, key
            assert left_s > 0, f"{key} has no time to live after {after}"
            # Some of it has passed by now: the next higher one of all that there are was set.
            assert min(ttl for ttl in ALL_TTLS if left_s <= ttl) in ttls_of(row), (key, left_s)
            self.seen.add(row.shape)

    def _is_of(self, row: Key, key: str) -> bool:
        pattern = re.sub(r"<\w+>", "[^:{}]+", re.sub(r"([{}])", r"\\\1", row.shape))
        return bool(re.fullmatch(pattern.replace("capsule", re.escape(self._prefix), 1), key))

    async def close(self) -> None:
        self._client.close()
        await self._connections.close()


@pytest.fixture
async def watched(valkey_url: str, prefix: str) -> AsyncIterator[Watched]:
    store = Watched(valkey_url, prefix)
    yield store
    await store.close()


async def test_stored_keys_are_those_of_the_table(
    watched: Watched, valkey_url: str, prefix: str
) -> None:
    await write_executions(watched, prefix)
    await write_workers(watched, prefix)
    await write_steps(watched, prefix)
    await write_history(watched, prefix, valkey_url)
    await write_runs(watched, prefix)
    await write_sessions(watched, prefix)
    assert watched.seen == {row.shape for row in ROWS}
    assert watched.called | NOT_CALLED >= {name for name in SCRIPTS if written_shapes(name)}


async def write_executions(store: Watched, prefix: str) -> None:
    executions = ExecutionStore(store, settings=ExecutionSettings(prefix=prefix))
    await executions.send_command("early", CancelCommand())
    claimed = await claim(executions, "early", owner="w", claim="c", group="g", index=0)
    loud = [encode_event(Accepted(pid=1)), encode_event(Output(stream="stdout", data="said"))]
    await append(executions, "early", claimed.attempt, 2, loud, has_stream_content=True)
    end = [encode_event(Ended(outcome=Outcome.FAILED, message="broken"))]
    ended: Any = {"state": "ended", "outcome": "failed"}
    await append(executions, "early", claimed.attempt, 4, end, **ended)
    quiet = await claim(executions, "quiet", owner="w", claim="c")
    await append(executions, "quiet", quiet.attempt, 2, end, **ended)
    lost = await claim(executions, "lost", owner="w", claim="c")
    assert await executions.reap("lost", "w", lost.attempt, Ended(outcome=Outcome.LOST), "lost")
    await executions.record_recent([(1, RecentEntry("early", 0.0, "failed"))])
    await executions.record_group_ends("g", [(0, "failed", "early", "broken")])
    await forget(executions, ["lost"])
    end = Ended(outcome=Outcome.LOST)
    await forget_unfinished(executions, "forgotten", unclaimed=end, claimed=end)


async def write_workers(store: Watched, prefix: str) -> None:
    lease: Any = Lease("w", store, settings=LEASE, prefix=prefix)
    await lease.acquire()
    await lease.renew()
    holdings: Any = HoldStore(store, ExecutionSettings(prefix=prefix))
    await holdings.hold("w", lease.core.token, ["early", "lost"], [])
    await holdings.register_worker("w", 15)
    await lease.release()
    await holdings.held_by("w", ["lost"])
    await drive(LossCore("early", "0", prefix).add("a"), store)
    await drive(LossCore("early", "0", prefix).add("b"), store)
    await drive(LossCore("early", "0", prefix).drop("a"), store)
    await drive(RevokeCore(AppSettings().revoke_ttl_s, prefix).add(["early"]), store)


async def write_steps(store: Watched, prefix: str) -> None:
    async def charge() -> int:
        return 42

    steps = Steps(store, execution_id="early", settings=StepSettings(prefix=prefix))
    assert await steps.step("charge", charge) == 42


async def write_history(store: Watched, prefix: str, url: str) -> None:
    history = History("s", store, settings=HistorySettings(prefix=prefix))
    await history.add_items([{"n": n} for n in range(3)])
    with redis.Redis.from_url(url) as client:
        client.rpush(f"{prefix}:{{S:s}}:items", b"\xff")  # no reader can decode it
    assert await history.pop_item() == {"n": 2}
    assert await history.pop_suffix([{"n": 1}])
    read = await history.read()
    await history.replace(read.version, [{"n": n} for n in range(CHUNK_ITEMS + 1)])
    store.is_next_left = True
    with pytest.raises(KeyError):
        await history.add_items([{"n": -1}])
    await history.clear_session()


async def write_runs(store: Watched, prefix: str) -> None:
    runs = RunStore(store, settings=RunSettings(prefix=prefix))
    lease: Any = Lease("runner", store, settings=LEASE, prefix=prefix)
    await lease.acquire()
    await runs.create(
        "asks", "s", b"{}", schema="1", agent="a", approval_requests=[ask("call", 1000)]
    )
    await runs.approvals.expire("asks")
    await runs.approvals.approve("asks", "call")
    claim = await runs.claim("asks", "runner")
    await runs.start_calls(claim, [PlannedCall("call", PRINT)])
    await runs.finish_calls(claim, {"call": b"done"})
    await runs.journal(claim, "m1", b"reply")
    done = await runs.commit(
        claim, b"{}", turn=1, approval_requests=[ask("next")], items=[{"n": 1}]
    )
    await runs.release(done.claim)
    last = await runs.claim("asks", "runner")
    await runs.commit(last, b"{}", turn=2, status="completed")
    await runs.create("cancelled", "s", b"{}", schema="1", agent="a")
    cancelled = await runs.cancel("cancelled")
    await runs.note_sent("cancelled", cancelled.updated_us)
    await runs.create("deleted", "s", b"{}", schema="1", agent="a")
    await runs.delete("deleted")
    await lease.release()
    assert (await runs.requeue_lapsed()).requeued == []


async def write_sessions(store: Watched, prefix: str) -> None:
    sessions: Any = NamedSessionStore(store, settings=NamedSessionSettings(prefix=prefix))
    lease: Any = Lease("host", store, settings=LEASE, prefix=prefix)
    await lease.acquire()
    for call in ("c1", "c2"):
        await sessions.submit("named", call, b"", profile=PROFILE, tenant="t")
    ((wanted,), _) = await sessions.take_wanted(PROFILE, 1)
    await sessions.hold("host", lease.core.token, ["named", "other"])
    taken = await sessions.take("named", "host", profile=PROFILE)
    assert await sessions.unwant(PROFILE, wanted)
    checkpoints: Any = CheckpointStore(store, settings=NamedSessionSettings(prefix=prefix))
    for pieces in ((b"1", b"2"), (b"3",)):
        await checkpoints.write("named", taken.token, SavedNamespace(pieces=pieces))
    await sessions.tenants.reserve("t", "named", max_sessions=1, lease_s=60)
    await sessions.tenants.renew_reservations("t", ["named"], lease_s=60)
    await sessions.tenants.add_usage("t", 5)
    entry = SessionEntry("named", PROFILE, "t")
    await sessions.index.record([entry])
    for number in range(2):
        await sessions.request("named", b"", request_id=f"r{number}")
    page = await sessions.take_requests("named", taken.token)
    await sessions.reply("named", taken.token, page.requests[0], b"")
    begun = await sessions.begin("named", taken.token)
    await sessions.done("named", taken.token, begun.seq, cpu_ms=1)
    await sessions.restart("named", taken.token)
    await checkpoints.delete("named")
    await sessions.release("named", taken.token, even_unfinished=True)
    await lease.release()
    await sessions.held_sessions("host", ["other"])
    await sessions.close_session("named")
    await sessions.take("named", "host", profile=PROFILE)
    for _ in range(2):
        await sessions.start_forgetting("named")
    await sessions.reap("named", "host")
    await sessions.forget_session("named")
    await sessions.tenants.unreserve("t", ["named"])
    await sessions.tenants.forget("t")


def ask(call_id: str, expires_in_s: float | None = None) -> ApprovalRequest:
    return ApprovalRequest(
        call_id=call_id, tool="bare:pay", agent="a", fingerprint=PRINT, expires_in_s=expires_in_s
    )
