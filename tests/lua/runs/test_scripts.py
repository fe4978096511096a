"""The scripts of runs, leases and steps, by what lies in Redis afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import redis

from capsule_tasks import SyncHistory
from capsule_tasks.client import Steps
from capsule_tasks.errors import CapsuleError, RunTooLarge
from capsule_tasks.settings import HistorySettings, LeaseSettings, RunSettings, StepSettings
from capsule_tasks.storage.keys import ApprovalKeys, RunKeys, run_location
from capsule_tasks.storage.runs.store import SyncLease, SyncRunStore
from capsule_tasks.storage.runs.types import ApprovalRequest, Claim, PlannedCall
from capsule_tasks.storage.scripts import Code
from tests.servers import fresh_prefix

STORES = ("valkey_url", "redis62_url")
unpack = msgspec.msgpack.decode


class Scene:
    """A store with one run in each status, and all that Redis holds of it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.prefix = fresh_prefix()
        self.client = redis.Redis.from_url(url)
        self.runs = SyncRunStore(url, settings=RunSettings(prefix=self.prefix))
        self.small = SyncRunStore(
            self.runs.store, settings=RunSettings(prefix=self.prefix, max_journal_bytes=10)
        )
        for worker in ("w1", "w2"):
            settings = LeaseSettings(lease_s=600)
            SyncLease(worker, url, settings=settings, prefix=self.prefix).acquire()
        self.claim = self.claimed("running")
        self.runs.start_calls(self.claim, [PlannedCall("made", "f"), PlannedCall("begun", "f")])
        self.runs.finish_calls(self.claim, {"made": b"out"})
        self.claim = self.runs.commit(self.claim, b"one", turn=1).claim
        parked = self.claimed("parked")
        approval_requests = [
            ask("free", expires_in_s=600),
            ask("kept", may_decide=("ann",)),
            ask("done"),
        ]
        self.runs.commit(
            parked,
            b"p",
            turn=1,
            status="interrupted",
            approval_requests=approval_requests,
            items=[{"n": 1}],
        )
        self.stale = parked
        over = self.claimed("over")
        self.runs.commit(over, b"o", turn=1, status="completed")
        self.make("queued")
        self.runs.release(self.runs.claim("queued", "w2"))

    def make(self, run_id: str) -> None:
        self.runs.create(run_id, "user-42", b"new", schema="1.2", agent="a")

    def claimed(self, run_id: str) -> Claim:
        self.make(run_id)
        claim: Claim = self.runs.claim(run_id, "w1")
        return claim

    def keys(self) -> list[bytes]:
        return sorted(self.client.scan_iter(f"{self.prefix}:*"))

    def state(self) -> dict[bytes, Any]:
        """All that is stored, except the operation log, and the index of runs: it may hold more."""
        index = f"{self.prefix}:{{runs}}:".encode()
        kept = [
            key
            for key in self.keys()
            if not key.endswith(b":operations") and not key.startswith(index)
        ]
        return {key: self.client.dump(key) for key in kept}


def ask(call_id: str, **changes: Any) -> ApprovalRequest:
    return ApprovalRequest(call_id=call_id, tool="bare:pay", agent="a", fingerprint="f", **changes)


@pytest.fixture(params=STORES)
def scene(request: pytest.FixtureRequest) -> Iterator[Scene]:
    scene = Scene(request.getfixturevalue(request.param))
    yield scene
    scene.runs.close()
    scene.client.close()


REFUSED: dict[str, Callable[[Scene], Any]] = {
    "create: taken": lambda s: s.make("queued"),
    "claim: held": lambda s: s.runs.claim("running", "w2"),
    "claim: over": lambda s: s.runs.claim("over", "w2"),
    "claim: waits": lambda s: s.runs.claim("parked", "w2"),
    "claim: unreadable": lambda s: s.runs.claim("queued", "w2", readable=["9"]),
    "commit: stale": lambda s: s.runs.commit(s.stale, b"x", turn=2, items=[{}]),
    "commit: revision": lambda s: s.runs.commit(
        msgspec_replaced(s.claim, revision=1), b"x", turn=2, items=[{}]
    ),
    "commit: back": lambda s: s.runs.commit(s.claim, b"x", turn=0, items=[{}]),
    "commit: full": lambda s: s.runs.commit(
        s.claim,
        b"x",
        turn=2,
        items=[{}] * 5,
        history=SyncHistory(
            "user-42", s.url, settings=HistorySettings(prefix=s.prefix, max_items=3)
        ),
    ),
    "decide: unknown": lambda s: s.runs.approvals.approve("parked", "ghost"),
    "decide: denied": lambda s: s.runs.approvals.approve("parked", "kept", by="bob"),
    "decide: over": lambda s: s.runs.approvals.approve("over", "any"),
    "cancel: over": lambda s: s.runs.cancel("over"),
    "release: stale": lambda s: s.runs.release(s.stale),
    "start: stale": lambda s: s.runs.start_calls(s.stale, [PlannedCall("new", "f")]),
    "start: changed": lambda s: s.runs.start_calls(
        s.claim, [PlannedCall("new", "f"), PlannedCall("made", "other")]
    ),
    "start: nothing new": lambda s: s.runs.start_calls(
        s.claim, [PlannedCall("made", "f"), PlannedCall("begun", "f")]
    ),
    "start: changed, with a reply": lambda s: s.runs.start_calls(
        s.claim, [PlannedCall("new", "f"), PlannedCall("made", "other")], replies={"m1": b"1"}
    ),
    "start: revision of a reply": lambda s: s.runs.start_calls(
        msgspec_replaced(s.claim, revision=1), [PlannedCall("new", "f")], replies={"m1": b"1"}
    ),
    "start: too large replies": lambda s: s.small.start_calls(
        s.claim, [PlannedCall("new", "f")], replies={"m1": b"123456", "m2": b"7890a"}
    ),
    "start: too large reply": lambda s: s.small.start_calls(
        s.claim, [PlannedCall("new", "f")], replies={"m1": b"more than ten bytes"}
    ),
    "finish: unknown": lambda s: s.runs.finish_calls(s.claim, {"begun": b"1", "ghost": b"2"}),
    "finish: other output": lambda s: s.runs.finish_calls(s.claim, {"begun": b"1", "made": b"2"}),
    "journal: stale": lambda s: s.runs.journal(s.stale, "m1", b"reply"),
    "journal: revision": lambda s: s.runs.journal(
        msgspec_replaced(s.claim, revision=1), "m1", b"reply"
    ),
    "journal: too large": lambda s: s.small.journal(s.claim, "m1", b"more than ten bytes"),
    "expire: nothing due": lambda s: s.runs.approvals.expire("parked"),
    "lease: had its own": lambda s: SyncLease("w1", s.url, prefix=s.prefix).acquire(),
    "lease: of another": lambda s: SyncLease("w1", s.url, prefix=s.prefix).renew(),
}


def msgspec_replaced(claim: Claim, **changes: Any) -> Claim:
    return Claim(**{**vars(claim), **changes})


def test_a_start_leaves_its_replies_whatever_becomes_of_its_calls(scene: Scene) -> None:
    keys = RunKeys("user-42", "running", scene.prefix)
    scene.small.journal(scene.claim, "m1", b"1234")
    planned = [PlannedCall("made", "f"), PlannedCall("begun", "f"), PlannedCall("new", "f")]
    starts = scene.small.start_calls(scene.claim, planned, replies={"m1": b"12", "m2": b"\x00\xff"})
    assert [each.state for each in starts.calls] == ["finished", "uncertain", "go"]
    assert scene.client.hgetall(keys.journal) == {b"m1": b"12", b"m2": b"\x00\xff"}
    assert scene.client.hget(keys.run, "journal_bytes") == b"4"
    assert scene.client.pttl(keys.journal) > 0
    # Under the same operation, as if the reply of the first call had been lost; and without calls.
    for _ in range(2):
        scene.small.start_calls(scene.claim, [], replies={"m3": b"123456"}, operation_id="again")
    with pytest.raises(RunTooLarge, match="journal of the turn has 11 bytes, over the limit of 10"):
        scene.small.start_calls(scene.claim, [], replies={"m4": b"x"})
    claim = scene.small.commit(scene.claim, b"two", turn=2).claim
    assert scene.client.exists(keys.journal) == 0
    assert scene.small.start_calls(claim, [], replies={"m1": b"0123456789"}).calls == []


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_call_changes_nothing(scene: Scene, name: str) -> None:
    before = scene.state()
    try:
        REFUSED[name](scene)
    except CapsuleError:
        pass
    else:
        assert name in ("start: nothing new", "expire: nothing due")
    assert scene.state() == before


def test_a_call_whose_place_in_the_index_may_be_gone_does_not_wait(scene: Scene) -> None:
    """A writer that was stopped for half a minute between the index and the run."""
    from capsule_tasks.storage.runs import scripts

    keys = RunKeys("user-42", "running", scene.prefix)
    before = scene.state()
    late_ms = int(scene.client.time()[0]) * 1000 - 31_000
    packed = msgspec.msgpack.encode([{"call": "c", "tool": "t", "agent": "a", "fingerprint": "f"}])
    claim = scene.claim
    commit = scripts.run_commit.call(
        keys,
        operation_id="op",
        ttl_ms=1000,
        run_id="running",
        token=claim.token,
        revision=claim.revision,
        turn=2,
        status="interrupted",
        schema="1",
        agent="a",
        snapshot=b"x",
        result=b"",
        usage=b"",
        error=b"",
        requests=packed,
        indexed_ms=late_ms,
        listed=msgspec.msgpack.encode({}),
        channel="channel",
        history_ttl_ms=1000,
        max_items=10,
        max_bytes=1000,
        records=[],
    )
    reply = scene.runs.store.run_blocking(commit)
    assert reply == [Code.LATE]
    assert scene.state() == before


def test_a_turn_leaves_exactly_this(scene: Scene) -> None:
    scene.runs.commit(scene.claim, b"two", turn=2, agent="b", items=[{"n": 2}, {"n": 3}])
    keys = RunKeys("user-42", "running", scene.prefix)
    record = scene.client.hgetall(keys.run)
    for name in (b"created", b"updated", b"token"):
        assert int(record.pop(name)) > 10**15
    assert int(record.pop(b"listed")) > 10**12
    assert unpack(record.pop(b"pending")) == []
    assert record == {
        b"status": b"running",
        b"revision": b"3",
        b"turn": b"2",
        b"owner": b"w1",
        b"cancel": b"",
        b"schema": b"1.2",
        b"agent": b"b",
        b"snapshot": b"two",
        b"usage": b"\x80",
        b"message": b"",
        b"unsent": b"",
    }
    assert scene.client.lrange(keys.items, 0, -1) == [b'{"n":1}', b'{"n":2}', b'{"n":3}']
    ledger = scene.client.hgetall(keys.ledger)
    assert ledger.keys() == {b"call:made", b"call:begun", b"output:made"}
    assert ledger[b"output:made"] == b"out"


def test_a_journal_leaves_exactly_this_until_the_turn_is_committed(scene: Scene) -> None:
    keys = RunKeys("user-42", "running", scene.prefix)
    scene.small.journal(scene.claim, "m1", b"123456789")
    scene.small.journal(scene.claim, "m1", b"1234567")
    scene.small.journal(scene.claim, "m2", b"890")
    before = scene.state()
    with pytest.raises(RunTooLarge, match="journal of the turn has 11 bytes, over the limit of 10"):
        scene.small.journal(scene.claim, "m2", b"8901")
    assert scene.state() == before
    assert scene.client.hgetall(keys.journal) == {b"m1": b"1234567", b"m2": b"890"}
    assert scene.client.hget(keys.run, "journal_bytes") == b"10"
    assert scene.client.pttl(keys.journal) > 0
    claim = scene.runs.commit(scene.claim, b"two", turn=2).claim
    assert scene.client.exists(keys.journal) == 0
    assert scene.small.journal(claim, "m1", b"0123456789") is None


def test_decisions_within_a_turn_come_with_each_claim_until_it_is_over(scene: Scene) -> None:
    claim = scene.claimed("within")
    for call in ("first", "second"):
        scene.runs.commit(
            claim, b"new", turn=0, status="interrupted", approval_requests=[ask(call)]
        )
        scene.runs.approvals.approve("within", call)
        claim = scene.runs.claim("within", "w1")
    assert [each.call for each in claim.decisions.exact] == ["first", "second"]
    after = scene.runs.commit(claim, b"one", turn=1).claim
    scene.runs.release(after)
    assert scene.runs.claim("within", "w1").decisions.exact == ()


def test_a_decision_leaves_exactly_this(scene: Scene) -> None:
    scene.runs.approvals.reject("parked", "kept", message="no", by="ann", always=True)
    ledger = scene.client.hgetall(RunKeys("user-42", "parked", scene.prefix).ledger)
    decision = unpack(ledger[b"decision:kept"])
    assert decision.pop("at") > 10**12
    assert decision == {
        "call": "kept",
        "tool": "bare:pay",
        "agent": "a",
        "fingerprint": "f",
        "approved": False,
        "message": "no",
        "by": "ann",
    }
    (standing,) = unpack(ledger[b"standing"])
    assert (standing["tool"], standing["agent"], standing["approved"]) == ("bare:pay", "a", False)
    index = ApprovalKeys(scene.prefix)
    orders = (index.all, index.order("a", None), index.order(None, "bare:pay"))
    for order in (*orders, index.order("a", "bare:pay")):
        assert scene.client.zrange(order, 0, -1) == [b'["parked","free"]', b'["parked","done"]']
    assert scene.client.zrange(index.due, 0, -1) == [b'["parked","free"]']


def test_every_key_has_a_time_to_live(scene: Scene) -> None:
    scene.runs.approvals.approve("parked", "free", always=True)
    scene.runs.cancel("running")
    steps = Steps(scene.runs.store, execution_id="task", settings=StepSettings(prefix=scene.prefix))
    assert steps.step("one", lambda: 1) == 1
    keys = scene.keys()
    assert len(keys) > 12
    assert {key: scene.client.pttl(key) for key in keys if scene.client.pttl(key) <= 0} == {}


def test_a_turn_is_one_command_and_with_tools_three(scene: Scene) -> None:
    def calls() -> int:
        stats = scene.client.info("commandstats")
        return sum(
            stats.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("eval", "evalsha")
        )

    before = calls()
    claim = scene.runs.commit(scene.claim, b"2", turn=2, items=[{}]).claim
    assert calls() - before == 1
    planned = [PlannedCall(f"tool-{number}", "f") for number in range(20)]
    scene.runs.start_calls(claim, planned)
    scene.runs.finish_calls(claim, {each.call_id: b"out" for each in planned})
    scene.runs.commit(claim, b"3", turn=3, items=[{}])
    assert calls() - before == 4


def test_the_expiry_of_a_run_is_renewed_by_any_caller_and_never_shortened(scene: Scene) -> None:
    place, year_ms = run_location("parked", scene.prefix), 365 * 86_400_000

    def read(ttl_s: float) -> int:
        other = SyncRunStore(scene.url, settings=RunSettings(prefix=scene.prefix, ttl_s=ttl_s))
        assert other.read("parked").status == "interrupted"
        other.close()
        return int(scene.client.pttl(place))

    assert read(86400 * 365) > 9 * year_ms
    assert read(60) > 9 * year_ms
    scene.client.pexpire(place, 60_000)
    assert year_ms < read(60) < 9 * year_ms
