"""Each script of executions directly: seed, call, and look at everything that is there then."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import redis

from capsule_tasks.storage.executions import core
from capsule_tasks.storage.keys import ExecutionKeys, GroupKeys, RecentKeys
from capsule_tasks.storage.scripts import Code, Script
from tests.servers import fresh_prefix

BY_NAME = {v.name: v for v in vars(core).values() if isinstance(v, Script)}
AGE_MS, KEPT_MS, QUIET_MS, CONTROL_MS = 600_000, 60_000, 20_000, 300_000
MARK_BYTES = 100


def limits(live: int = 1000, kept: int = 400) -> str:
    return f"{MARK_BYTES} {live} {kept} {AGE_MS} {KEPT_MS} {QUIET_MS}"


class Bench:
    """One execution's keys on a server, and scripts called as they are."""

    def __init__(self, client: redis.Redis) -> None:
        self.client = client
        self.prefix = fresh_prefix()
        self.keys: Any = ExecutionKeys("e", self.prefix)

    def call(self, name: str, *args: Any, keys: Any = None) -> list[Any]:
        """What it replies; whatever it has left expires."""
        script = BY_NAME[name]
        names = [getattr(keys or self.keys, key) for key in script.keys]
        reply: list[Any] = self.client.eval(script.source, len(names), *names, *args)
        for key in names:
            assert self.client.pttl(key) != -1, key
        return reply

    def claim(
        self,
        claim: str = "c1",
        owner: str = "w1",
        held_by: str = "",
        *events: str,
        state: str = "",
        outcome: str = "",
        loud: int = 0,
    ) -> list[Any]:
        about = msgspec.msgpack.encode(["late", "task", "worker", "g", "3", limits()])
        return self.call(
            "executions/claim",
            *(claim, owner, held_by, about, state, outcome, loud),
            *(self.keys.channel, "LOST", "BEGUN", *events),
        )

    def append(
        self,
        attempt: Any,
        first_seq: int,
        *events: str,
        state: str = "",
        outcome: str = "",
        loud: int = 0,
        live: int = 1000,
        kept: int = 400,
    ) -> list[Any]:
        return self.call(
            "executions/append",
            *(attempt, first_seq, state, outcome, loud, limits(live, kept)),
            *(self.keys.channel, *events),
        )

    def control(self, command: str = "k1", data: str = "CANCEL") -> list[Any]:
        bells = f"{self.prefix}:bell:"
        return self.call("executions/send_command", command, CONTROL_MS, bells, "e", data)

    def reap(self, owner: str, attempt: Any, outcome: str) -> list[Any]:
        return self.call(
            "executions/reap",
            *(owner, attempt, outcome, limits(), self.keys.channel, "REAPED"),
        )

    def read(self, after: str = "", count: int = 100) -> list[Any]:
        return self.call("executions/read", after, count)

    def said(self, after: str = "", count: int = 100) -> list[str]:
        return [data.decode() for data in self.read(after, count)[8::3]]

    def ids(self) -> list[str]:
        return [data.decode() for data in self.read()[6::3]]

    def meta(self) -> dict[str, str]:
        found = self.client.hgetall(self.keys.meta)
        return {k.decode(): v.decode() for k, v in found.items()}

    def kinds(self) -> dict[str, str]:
        """Every key of the execution with its type; each has a time to live."""
        found = {}
        for key in self.client.scan_iter(match=f"{self.prefix}:*"):
            assert self.client.pttl(key) > 0, key
            found[key.decode().rpartition("}:")[2]] = self.client.type(key).decode()
        return found


@pytest.fixture(params=["valkey_url", "redis62_url"])
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    with redis.Redis.from_url(request.getfixturevalue(request.param)) as client:
        yield Bench(client)


def test_a_claim_makes_a_record_with_its_event_and_no_stream(bench: Bench) -> None:
    reply = bench.claim()
    meta = bench.meta()
    assert reply == [Code.DONE, meta["attempt"].encode(), 1]
    first = f"{meta['attempt']}-1"
    assert meta.pop(first).partition(":")[2] == "BEGUN"
    assert int(meta.pop("claimed")) == pytest.approx(int(meta["attempt"]), abs=1000)
    assert meta == {
        "state": "running",
        "attempt": meta["attempt"],
        "seq": "1",
        "owner": "w1",
        "claim": "c1",
        "ack": "late",
        "worker": "worker",
        "task": "task",
        "group": "g",
        "index": "3",
        "inline": first,
    }
    assert bench.kinds() == {"meta": "hash"}


def test_the_same_claim_again_is_the_same_attempt(bench: Bench) -> None:
    first = bench.claim()
    before = bench.meta()
    assert bench.claim() == first
    assert bench.meta() == before


@pytest.mark.parametrize("loud", [0, 1])
@pytest.mark.parametrize(("state", "outcome"), [("ended", "failed"), ("waiting", "")])
def test_a_claim_may_bring_the_whole_attempt_and_be_repeated(
    bench: Bench, state: str, outcome: str, loud: int
) -> None:
    whole: Any = ("c1", "w1", "-", "A", "END")
    first = bench.claim(*whole, state=state, outcome=outcome, loud=loud)
    assert first == [Code.DONE, bench.meta()["attempt"].encode(), 3]
    before = bench.meta()
    assert (before["state"], before.get("outcome", "")) == (state, outcome)
    assert "owner" not in before
    assert bench.claim(*whole, state=state, outcome=outcome, loud=loud) == first
    assert bench.meta() == before
    assert bench.said() == ["BEGUN", "A", "END"]
    assert bench.kinds() == {"meta": "hash", **({"events": "stream"} if loud else {})}
    most = {"waiting": AGE_MS, "ended": KEPT_MS if loud else QUIET_MS}[state]
    assert most / 2 < bench.client.pttl(bench.keys.meta) <= most


def test_who_found_nobody_there_takes_it_from_nobody(bench: Bench) -> None:
    attempt = bench.claim("c1", "w1", held_by="-")[1]
    before = bench.meta()
    assert bench.claim("c1", "w1", held_by="-")[:2] == [Code.DONE, attempt]
    assert bench.claim("c2", "w2", held_by="-") == [Code.STALE, attempt, b"c1"]
    assert bench.meta() == before
    bench.append(attempt, 2, "LEFT", state="waiting")
    attempt = bench.claim("c3", "w3", held_by="-")[1]
    assert bench.said() == ["BEGUN", "LEFT", "BEGUN"]
    bench.append(attempt, 2, "END", state="ended", outcome="succeeded")
    assert bench.claim("c4", "w4", held_by="-") == [Code.ENDED, b"succeeded"]


def test_a_claim_that_ends_tells_what_was_told(bench: Bench) -> None:
    bench.control("k1", "ONE")
    assert bench.claim("c1", "w1", "-", "END", state="ended", outcome="succeeded")[4:] == [b"ONE"]
    assert bench.client.pttl(bench.keys.control) <= QUIET_MS


def test_another_claim_is_a_later_attempt_and_says_that_the_first_was_lost(bench: Bench) -> None:
    first = int(bench.claim()[1])
    second = bench.claim("c2", "w2")
    assert int(second[1]) > first
    assert second[2] == 2
    assert bench.said() == ["BEGUN", "LOST", "BEGUN"]
    assert bench.meta()["owner"] == "w2"
    assert bench.append(first, 2, "late") == [Code.STALE, second[1], b"c2"]
    assert bench.said() == ["BEGUN", "LOST", "BEGUN"]


def test_an_attempt_is_later_also_where_the_clock_went_back(bench: Bench) -> None:
    bench.claim()
    ahead = 9_000_000_000_000
    bench.client.hset(bench.keys.meta, "attempt", ahead)
    assert int(bench.claim("c2")[1]) == ahead + 1


def test_a_claim_returns_what_waited_for_it(bench: Bench) -> None:
    assert bench.control("k1", "ONE") == [Code.DONE, b""]
    assert bench.control("k2", "TWO") == [Code.DONE, b""]
    assert bench.kinds() == {"control": "stream"}
    reply = bench.claim()
    assert reply[4::2] == [b"ONE", b"TWO"]
    assert bench.claim()[4::2] == [b"ONE", b"TWO"]


def test_a_claim_that_names_the_holder_takes_from_nobody_else(bench: Bench) -> None:
    assert bench.claim("c1", "w1", held_by="w0") == [Code.STALE, b"0", b""]
    assert bench.kinds() == {}
    first = bench.claim("c1", "w1")[1]
    assert bench.claim("c2", "w2", held_by="w0") == [Code.STALE, first, b"c1"]
    assert bench.claim("c2", "w2", held_by="w1")[0] == Code.DONE
    assert bench.said() == ["BEGUN", "LOST", "BEGUN"]


def test_an_ended_execution_is_not_claimed(bench: Bench) -> None:
    attempt = bench.claim()[1]
    bench.append(attempt, 2, "END", state="ended", outcome="succeeded")
    before = bench.meta()
    assert bench.claim("c2", "w2") == [Code.ENDED, b"succeeded"]
    assert bench.meta() == before


def test_quiet_events_need_no_stream_and_vanish_soon_after_the_end(bench: Bench) -> None:
    attempt = bench.claim()[1]
    assert bench.append(attempt, 2, "ACC") == [Code.DONE, 2]
    assert bench.append(attempt, 3, "END", state="ended", outcome="failed") == [Code.DONE, 3]
    assert bench.kinds() == {"meta": "hash"}
    assert bench.said() == ["BEGUN", "ACC", "END"]
    assert bench.client.pttl(bench.keys.meta) <= QUIET_MS
    meta = bench.meta()
    assert (meta["state"], meta["outcome"]) == ("ended", "failed")
    assert "owner" not in meta


def test_the_first_loud_event_moves_all_to_a_stream_in_order(bench: Bench) -> None:
    attempt = bench.claim()[1].decode()
    bench.append(attempt, 2, "ACC")
    bench.append(attempt, 3, "OUT", loud=1)
    bench.append(attempt, 4, "MORE")
    assert bench.kinds() == {"meta": "hash", "events": "stream"}
    entries = bench.client.xrange(bench.keys.events)
    assert [(i.decode(), f[b"d"]) for i, f in entries] == [
        (f"{attempt}-1", b"BEGUN"),
        (f"{attempt}-2", b"ACC"),
        (f"{attempt}-3", b"OUT"),
        (f"{attempt}-4", b"MORE"),
    ]
    assert "inline" not in bench.meta()
    assert bench.said(f"{attempt}-2") == ["OUT", "MORE"]
    assert bench.said(count=1) == ["BEGUN"]


def test_many_quiet_attempts_become_a_stream(bench: Bench) -> None:
    for number in range(8):
        attempt = bench.claim(f"c{number}")[1]
        bench.append(attempt, 2, f"RETRY{number}", state="waiting")
    assert bench.said() == [x for n in range(8) for x in ("BEGUN", f"RETRY{n}")]
    assert bench.kinds() == {"meta": "hash", "events": "stream"}
    attempt = bench.claim("last")[1]
    bench.append(attempt, 2, "END", state="ended", outcome="failed")
    assert bench.said()[-1] == "END"
    assert bench.client.pttl(bench.keys.meta) <= QUIET_MS
    assert bench.client.pttl(bench.keys.events) <= QUIET_MS


def test_what_is_said_after_many_quiet_attempts_is_kept_as_what_was_said(bench: Bench) -> None:
    for number in range(8):
        attempt = bench.claim(f"c{number}")[1]
        bench.append(attempt, 2, f"RETRY{number}", state="waiting")
    attempt = bench.claim("last")[1]
    bench.append(attempt, 2, "OUT", loud=1)
    bench.append(attempt, 3, "END", state="ended", outcome="failed")
    assert bench.said()[-3:] == ["BEGUN", "OUT", "END"]
    for key in (bench.keys.meta, bench.keys.events):
        assert QUIET_MS < bench.client.pttl(key) <= KEPT_MS


@pytest.mark.parametrize("loud", [0, 1])
def test_a_repeat_adds_only_what_is_missing(bench: Bench, loud: int) -> None:
    attempt = bench.claim()[1]
    assert bench.append(attempt, 2, "A", "B", loud=loud) == [Code.DONE, 3]
    assert bench.append(attempt, 2, "A", "B", loud=loud) == [Code.DONE, 3]
    assert bench.append(attempt, 3, "B", "C", loud=loud) == [Code.DONE, 4]
    assert bench.said() == ["BEGUN", "A", "B", "C"]


@pytest.mark.parametrize("loud", [0, 1])
def test_the_end_can_be_repeated_and_nothing_follows_it(bench: Bench, loud: int) -> None:
    attempt = bench.claim()[1]
    end = (attempt, 2, "A", "END")
    options: Any = {"state": "ended", "outcome": "succeeded", "loud": loud}
    assert bench.append(*end, **options) == [Code.DONE, 3]
    assert bench.append(*end, **options) == [Code.DONE, 3]
    assert bench.append(attempt, 4, "MORE") == [Code.ENDED, b"succeeded"]
    assert bench.said() == ["BEGUN", "A", "END"]
    ttl = bench.client.pttl(bench.keys.meta)
    assert (QUIET_MS < ttl <= KEPT_MS) if loud else ttl <= QUIET_MS


def test_a_hole_is_refused(bench: Bench) -> None:
    attempt = bench.claim()[1]
    assert bench.append(attempt, 3, "B") == [Code.CONFLICT, 1]
    assert bench.said() == ["BEGUN"]


def test_nothing_is_written_for_what_nobody_claimed(bench: Bench) -> None:
    assert bench.append(1, 1, "A") == [Code.MISSING]
    assert bench.reap("w1", 1, "lost") == [Code.MISSING]
    assert bench.read() == [Code.MISSING]
    assert bench.call("executions/record") == [Code.MISSING]
    assert bench.kinds() == {}


def test_a_waiting_execution_is_claimed_by_whoever_comes(bench: Bench) -> None:
    attempt = bench.claim()[1]
    bench.append(attempt, 2, "RETRY", state="waiting")
    assert bench.meta()["state"] == "waiting"
    assert bench.append(attempt, 3, "LATE") == [Code.ENDED, b""]
    assert bench.claim("c2", "w2")[2] == 1
    assert bench.said() == ["BEGUN", "RETRY", "BEGUN"]


def test_the_oldest_events_are_trimmed_by_size_and_what_is_left_says_so(bench: Bench) -> None:
    attempt = bench.claim()[1].decode()
    for seq in range(2, 102):
        bench.append(attempt, seq, f"{seq:050d}", loud=1, live=1000)
        size = sum(len(fields[b"d"]) for _, fields in bench.client.xrange(bench.keys.events))
        assert size <= 1000 + 100
    left = bench.ids()
    assert bench.meta()["first_kept_id"] == left[0]
    assert left[-1] == f"{attempt}-101"
    assert 15 <= len(left) <= 22
    bench.append(attempt, 102, "END", state="ended", outcome="succeeded", kept=400)
    size = sum(len(fields[b"d"]) for _, fields in bench.client.xrange(bench.keys.events))
    assert 200 <= size <= 400 + 100
    assert bench.said()[-1] == "END"
    marks = [name for name in bench.meta() if name.startswith("trim")]
    assert len(marks) <= 6


def test_the_end_leaves_little_of_much_in_one_call(bench: Bench) -> None:
    attempt = bench.claim()[1].decode()
    whole = [f"{n:0100d}" for n in range(2000)]
    for first in range(0, len(whole), 100):
        bench.append(attempt, first + 2, *whole[first : first + 100], loud=1, live=250_000)
    assert "first_kept_id" not in bench.meta()
    end: Any = {"state": "ended", "outcome": "succeeded", "live": 250_000, "kept": 400}
    bench.append(attempt, len(whole) + 2, "END", **end)
    assert bench.said() == [*whole[-3:], "END"]
    meta = bench.meta()
    assert meta["first_kept_id"] == bench.ids()[0] == f"{attempt}-1999"
    marks = {name for name in meta if name.startswith("trim")}
    assert marks == {f"trim{n}" for n in range(int(meta["low"]), int(meta["high"]) + 1)}


def test_an_event_larger_than_what_is_kept_is_not_kept(bench: Bench) -> None:
    attempt = bench.claim()[1].decode()
    bench.append(attempt, 2, "A" * 300, "B" * 300, "C" * 5000, loud=1, live=10_000)
    bench.append(attempt, 5, "END", state="ended", outcome="succeeded", kept=400)
    assert bench.said() == ["END"]


def test_a_claim_hears_the_newest_of_more_commands_than_are_kept(bench: Bench) -> None:
    for number in range(1250):
        bench.control(f"k{number}", str(number))
    told = bench.claim()[4::2]
    assert told == [str(number).encode() for number in range(250, 1250)]


def test_a_command_is_kept_once_and_rings_the_owner(bench: Bench) -> None:
    bench.claim()
    with bench.client.pubsub() as bell:
        bell.subscribe(f"{bench.prefix}:bell:w1")
        assert bell.get_message(timeout=10)["type"] == "subscribe"
        assert bench.control("k1") == [Code.DONE, b"running"]
        assert bench.control("k1") == [Code.DONE, b"running"]
        assert bell.get_message(timeout=10)["data"] == b"e"
    told = bench.call("executions/commands", "")
    assert told[2:] == [b"CANCEL"]
    assert bench.call("executions/commands", told[1]) == [Code.DONE]


def test_a_command_rings_every_worker_where_no_owner_is_known(bench: Bench) -> None:
    with bench.client.pubsub() as bell:
        bell.subscribe(f"{bench.prefix}:bell:")
        assert bell.get_message(timeout=10)["type"] == "subscribe"
        assert bench.control("k1") == [Code.DONE, b""]
        assert bell.get_message(timeout=10)["data"] == b"e"


def test_an_ended_execution_is_told_nothing(bench: Bench) -> None:
    attempt = bench.claim()[1]
    bench.append(attempt, 2, "END", state="ended", outcome="failed")
    assert bench.control() == [Code.ENDED, b"failed"]
    assert bench.kinds() == {"meta": "hash"}


@pytest.mark.parametrize("loud", [0, 1])
def test_the_reaper_writes_the_end_of_what_a_dead_worker_held(bench: Bench, loud: int) -> None:
    attempt = bench.claim()[1]
    bench.append(attempt, 2, "A", loud=loud)
    reaped = bench.reap("w1", attempt, "lost")
    assert int(reaped[1]) > int(attempt)
    assert bench.said() == ["BEGUN", "A", "REAPED"]
    assert bench.meta()["outcome"] == "lost"
    assert bench.append(attempt, 3, "LATE") == [Code.STALE, reaped[1], b"c1"]
    assert bench.reap("w1", attempt, "lost") == [Code.ENDED, b"lost"]
    assert bench.said() == ["BEGUN", "A", "REAPED"]


def test_the_reaper_leaves_alone_what_another_worker_took(bench: Bench) -> None:
    first = bench.claim()[1]
    second = bench.claim("c2", "w2")[1]
    before = bench.meta()
    assert bench.reap("w1", first, "lost") == [Code.STALE, second]
    assert bench.meta() == before


def test_what_comes_again_waits_after_the_reaper(bench: Bench) -> None:
    attempt = bench.claim()[1]
    bench.reap("w1", attempt, "")
    assert bench.meta()["state"] == "waiting"
    assert bench.claim("c2", "w2")[0] == Code.DONE


def test_recent_keeps_the_newest_and_lists_them_first(bench: Bench) -> None:
    keys = RecentKeys(bench.prefix)
    for number in range(8):
        note = (f"id{number}", 1, f"r{number}")
        bench.call("executions/recent_record", 5, AGE_MS, "c", *note, keys=keys)
    listed = bench.call("executions/recent_list", "", 3, keys=keys)
    assert listed[1::3] == [b"id7", b"id6", b"id5"]
    assert listed[3::3] == [b"r7", b"r6", b"r5"]
    rest = bench.call("executions/recent_list", listed[-2], 3, keys=keys)
    assert rest[1::3] == [b"id4", b"id3"]
    assert bench.client.hlen(keys.entries) == bench.client.zcard(keys.order) == 5
    assert_expires(bench, keys.entries, keys.order)


def test_recent_finds_those_that_are_known(bench: Bench) -> None:
    keys = RecentKeys(bench.prefix)
    assert bench.call("executions/recent_find", keys=keys) == [Code.DONE]
    assert bench.call("executions/recent_find", "id", keys=keys) == [Code.DONE]
    bench.call(
        "executions/recent_record", 5, AGE_MS, "c", "id", 7, "a:b", "other", 7, "c", keys=keys
    )
    noted = {one: at for _, one, at, _ in [bench.call("executions/recent_list", "", 1, keys=keys)]}
    found = bench.call("executions/recent_find", "other", "unknown", "id", keys=keys)
    assert found[1::3] == [b"other", b"id"]
    assert found[3::3] == [b"c", b"a:b"]
    assert found[2] == noted[b"other"]


def test_recent_ignores_an_older_attempt(bench: Bench) -> None:
    keys = RecentKeys(bench.prefix)
    bench.call("executions/recent_record", 5, AGE_MS, "c", "id", 7, "new", keys=keys)
    bench.call("executions/recent_record", 5, AGE_MS, "c", "id", 6, "old", keys=keys)
    assert bench.call("executions/recent_list", "", 3, keys=keys)[3] == b"new"


def test_a_member_of_a_group_is_counted_once(bench: Bench) -> None:
    keys = GroupKeys("g", bench.prefix)
    for _ in range(2):
        members = (0, "succeeded", "", 49_999, "failed", "WHY")
        bench.call("executions/group_record", AGE_MS, 10, "c", *members, keys=keys)
    reply = bench.call("executions/group_read", "", 10, 0, keys=keys)
    assert reply[1:3] == [b"", 2]
    assert dict(zip(reply[3:7:2], reply[4:7:2], strict=True)) == {
        b"succeeded": b"1",
        b"failed": b"1",
    }
    assert reply[8:] == [b"WHY"]
    assert bench.call("executions/group_read", reply[7], 10, 0, keys=keys)[7:] == []
    counted = bench.call("executions/group_read", "", 10, 1, keys=keys)[1]
    assert [place for place in range(8 * len(counted)) if has(counted, place)] == [0, 49_999]
    assert_expires(bench, keys.counts, keys.failures, keys.seen)


def assert_expires(bench: Bench, *keys: str) -> None:
    for key in keys:
        assert AGE_MS / 2 < bench.client.pttl(key) <= AGE_MS, key


def has(bits: bytes, place: int) -> bool:
    return bool(bits[place // 8] & 0x80 >> place % 8)


def test_a_group_of_which_nothing_is_known_is_empty(bench: Bench) -> None:
    reply = bench.call("executions/group_read", "", 10, 1, keys=GroupKeys("g", bench.prefix))
    assert reply == [Code.DONE, b"", 0]
