"""The scripts of checkpoints, by what lies in Redis afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import redis

from capsule_tasks.storage.keys import NamedSessionKeys
from capsule_tasks.storage.scripts import Call, Code
from capsule_tasks.storage.sessions import checkpoints as scripts
from tests.servers import fresh_prefix

TTL_MS = 60_000
OWNED = {b"owner": b"w1", b"token": b"7"}


class Bench:
    """One session's keys on a server, and scripts called as they are."""

    def __init__(self, client: redis.Redis) -> None:
        self.client = client
        self.keys = NamedSessionKeys("s", fresh_prefix())
        client.hset(self.keys.session, mapping=OWNED)
        client.pexpire(self.keys.session, TTL_MS)

    def call(self, call: Call) -> list[Any]:
        source = call.script.source
        reply: list[Any] = self.client.eval(source, len(call.keys), *call.keys, *call.args)
        return reply

    def find(self, token: int = 0) -> list[Any]:
        return self.call(scripts.checkpoint_find.call(self.keys, token=token))

    def stage(self, generation: str, index: int, chunk: bytes, ttl_ms: int = 1000) -> list[Any]:
        staged = self.keys.checkpoint(generation)
        call = scripts.checkpoint_stage.call(staged, index=index, ttl_ms=ttl_ms, chunk=chunk)
        return self.call(call)

    def switch(
        self, generation: str, previous: str, manifest: bytes, chunks: int = 1, token: int = 7
    ) -> list[Any]:
        return self.call(
            scripts.checkpoint_switch.call(
                self.keys,
                self.keys.checkpoint(generation),
                self.keys.checkpoint(previous),
                token=token,
                chunks=chunks,
                manifest=manifest,
                ttl_ms=TTL_MS,
            )
        )

    def read(self, generation: str, index: int) -> list[Any]:
        staged = self.keys.checkpoint(generation)
        return self.call(scripts.checkpoint_read.call(staged, index=index, ttl_ms=TTL_MS))

    def drop(self, generation: str, stored: bytes, token: int = 0) -> list[Any]:
        staged = self.keys.checkpoint(generation)
        call = scripts.checkpoint_drop.call(self.keys, staged, token=token, stored=stored)
        return self.call(call)

    def unstage(self, generation: str) -> list[Any]:
        staged = self.keys.checkpoint(generation)
        call = scripts.checkpoint_unstage.call(self.keys, staged, generation=generation)
        return self.call(call)

    @property
    def session(self) -> dict[bytes, bytes]:
        found: dict[bytes, bytes] = self.client.hgetall(self.keys.session)
        return found

    def lists(self) -> dict[str, list[bytes]]:
        """The lists of chunks; each has a time to live."""
        pattern = f"{self.keys.session.partition('{')[0]}*:checkpoint:*"
        found = {}
        for key in self.client.scan_iter(match=pattern):
            assert self.client.pttl(key) > 0
            found[key.decode().rpartition(":")[2]] = self.client.lrange(key, 0, -1)
        return found


@pytest.fixture(params=["valkey_url", "redis62_url"])
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    with redis.Redis.from_url(request.getfixturevalue(request.param)) as client:
        yield Bench(client)


def test_find_reads_the_manifest_for_the_owner_and_for_others(bench: Bench) -> None:
    assert bench.find() == bench.find(7) == [Code.DONE, b""]
    bench.client.hset(bench.keys.session, "checkpoint", b"5 m")
    assert bench.find() == bench.find(7) == [Code.DONE, b"5 m"]
    assert bench.find(8) == [Code.STALE, b"w1"]
    bench.client.hdel(bench.keys.session, "owner")
    assert bench.find(7) == [Code.STALE, b""]
    assert bench.find() == [Code.DONE, b"5 m"]


def test_stage_appends_chunks_in_order_and_repeats_change_nothing(bench: Bench) -> None:
    assert bench.stage("g", 1, b"b") == [Code.CONFLICT, 0]
    for _ in range(2):
        assert bench.stage("g", 0, b"a") == [Code.DONE]
    for _ in range(2):
        assert bench.stage("g", 1, b"b") == [Code.DONE]
    assert bench.stage("g", 0, b"a") == [Code.DONE]  # a writer that begins again
    assert bench.stage("g", 3, b"d") == [Code.CONFLICT, 2]
    assert bench.lists() == {"g": [b"a", b"b"]}
    assert bench.client.pttl(bench.keys.checkpoint("g")) <= 1000


def test_unstage_removes_chunks_that_no_manifest_names(bench: Bench) -> None:
    bench.stage("g1", 0, b"a")
    assert bench.unstage("g1") == [Code.DONE]
    assert bench.lists() == {}
    bench.stage("g2", 0, b"b")
    bench.switch("g2", "g2", b"manifest of g2")
    assert bench.unstage("g2") == [Code.CHANGED]
    assert bench.lists() == {"g2": [b"b"]}


def test_switch_names_the_new_generation_and_removes_the_one_before(bench: Bench) -> None:
    bench.stage("g1", 0, b"a")
    code, stored = bench.switch("g1", "g1", b"first one")
    at_us, manifest = stored.split(b" ", 1)
    assert (code, manifest) == (Code.DONE, b"first one")
    assert int(at_us) > 10**15
    assert bench.session == {**OWNED, b"checkpoint": stored}
    assert bench.client.pttl(bench.keys.checkpoint("g1")) > 1000
    bench.stage("g2", 0, b"b")
    second = bench.switch("g2", "g1", b"second")
    assert bench.lists() == {"g2": [b"b"]}
    assert bench.switch("g2", "g1", b"second") == second  # repeated after a lost reply
    assert bench.session[b"checkpoint"] == second[1]
    assert bench.lists() == {"g2": [b"b"]}


def test_switch_without_chunks_is_for_those_that_are_elsewhere(bench: Bench) -> None:
    bench.stage("g1", 0, b"a")
    bench.switch("g1", "g1", b"first")
    assert bench.switch("g2", "g1", b"elsewhere", chunks=0)[0] == Code.DONE
    assert bench.lists() == {}


def test_switch_refuses_missing_chunks_and_changes_nothing(bench: Bench) -> None:
    bench.stage("g1", 0, b"a")
    bench.switch("g1", "g1", b"first")
    bench.stage("g2", 0, b"b")
    session, lists = bench.session, bench.lists()
    assert bench.switch("g2", "g1", b"second", 2) == [Code.LOST, 1]
    assert (bench.session, bench.lists()) == (session, lists)


def test_switch_refuses_other_owners_and_erases_what_they_staged(bench: Bench) -> None:
    bench.stage("g1", 0, b"a")
    bench.switch("g1", "g1", b"first")
    bench.stage("g2", 0, b"b")
    session = bench.session
    assert bench.switch("g2", "g1", b"second", token=6) == [Code.STALE, b"w1"]
    assert (bench.session, bench.lists()) == (session, {"g1": [b"a"]})


def test_a_repeated_switch_whose_owner_lost_the_session_since_leaves_the_checkpoint(
    bench: Bench,
) -> None:
    bench.stage("g1", 0, b"a")
    first = bench.switch("g1", "g1", b"first")
    bench.client.hset(bench.keys.session, mapping={"owner": "w2", "token": 8})
    session = bench.session
    assert bench.switch("g1", "g1", b"first") == first
    assert (bench.session, bench.lists()) == (session, {"g1": [b"a"]})


def test_switch_refuses_a_session_without_an_owner(bench: Bench) -> None:
    bench.client.hdel(bench.keys.session, "owner")
    bench.stage("g1", 0, b"a")
    assert bench.switch("g1", "g1", b"first") == [Code.STALE, b""]
    bench.client.delete(bench.keys.session)
    assert bench.switch("g1", "g1", b"first") == [Code.STALE, b""]
    assert bench.session == {}


def test_read_gives_one_chunk_and_renews_the_time_to_live(bench: Bench) -> None:
    bench.stage("g", 0, b"a")
    bench.stage("g", 1, b"")
    assert bench.read("g", 1) == [Code.DONE, b""]
    assert bench.client.pttl(bench.keys.checkpoint("g")) > 1000
    assert bench.read("g", 0) == [Code.DONE, b"a"]
    assert bench.read("g", 2) == [Code.MISSING]
    assert bench.read("other", 0) == [Code.MISSING]


def test_drop_removes_a_checkpoint_that_is_still_the_one_that_was_read(bench: Bench) -> None:
    bench.stage("g1", 0, b"a")
    _, stored = bench.switch("g1", "g1", b"first")
    assert bench.drop("g1", b"5 another") == [Code.CHANGED]
    assert bench.session[b"checkpoint"] == stored
    for _ in range(2):
        assert bench.drop("g1", stored) == [Code.DONE]
    assert (bench.session, bench.lists()) == (OWNED, {})


def test_drop_refuses_an_owner_after_whom_somebody_took_the_session(bench: Bench) -> None:
    bench.stage("g1", 0, b"a")
    _, stored = bench.switch("g1", "g1", b"first")
    session, lists = bench.session, bench.lists()
    assert bench.drop("g1", stored, token=6) == [Code.STALE, b"w1"]
    assert (bench.session, bench.lists()) == (session, lists)
    bench.client.hdel(bench.keys.session, "owner")  # the latest owner may have released it
    assert bench.drop("g1", stored, token=7) == [Code.DONE]
    assert (bench.session, bench.lists()) == ({b"token": b"7"}, {})
