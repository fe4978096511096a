"""Whether two stores can be on the same Redis, as far as URLs and clients tell."""

from __future__ import annotations

import pytest
import redis
import redis.asyncio
from redis.asyncio.cluster import ClusterNode
from redis.sentinel import Sentinel

from capsule_tasks.settings import ConnectionSettings
from capsule_tasks.storage.connections.targets import Location, location_of_client, parsed


def of_url(url: str) -> Location:
    return parsed(url, ConnectionSettings()).location


SAME = [
    ("redis://localhost", "redis://127.0.0.1:6379/0"),
    ("redis://user:one@Host:1/2", "rediss://host:1/2?client_name=x"),
    ("unix:///run/redis.sock", "unix:///run/redis.sock?db=0"),
    ("redis+sentinel://a:1,b:2/name/0", "redis+sentinel://b:2,c:3/name/0"),
    ("redis+cluster://a:1,b:2", "rediss+cluster://b:2"),
]
OTHERS = [
    ("redis://a", "redis://b"),
    ("redis://a:1", "redis://a:2"),
    ("redis://a/0", "redis://a/1"),
    ("unix:///run/one.sock", "unix:///run/two.sock"),
    ("redis+sentinel://a:1/name/0", "redis+sentinel://a:1/other/0"),
    ("redis+cluster://a:1", "redis+cluster://b:1"),
    ("redis+cluster://a:1", "redis://a:1"),
]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_urls_of_one_redis(one: str, other: str) -> None:
    assert of_url(one).may_be(of_url(other))


@pytest.mark.parametrize(("one", "other"), OTHERS)
def test_urls_of_two(one: str, other: str) -> None:
    assert not of_url(one).may_be(of_url(other))


def test_clients_are_where_their_urls_say() -> None:
    for client in (redis.Redis, redis.asyncio.Redis):
        for url in ("redis://:secret@a:1/2", "unix:///run/redis.sock?db=3", "redis://localhost"):
            assert location_of_client(client.from_url(url)) == of_url(url)
    master = Sentinel([("a", 1), ("b", 2)]).master_for("name", db=3)
    assert location_of_client(master) == of_url("redis+sentinel://a:1,b:2/name/3")
    cluster = redis.asyncio.RedisCluster(startup_nodes=[ClusterNode("a", 1)])
    assert location_of_client(cluster) == of_url("redis+cluster://a:1")


def test_a_client_that_tells_nothing_may_be_anywhere() -> None:
    assert Location("server", frozenset()).may_be(of_url("redis://a"))


def test_the_text_of_a_location_holds_no_password() -> None:
    assert str(of_url("redis://user:secret@a:1/2")) == "server a:1/2"
    assert str(of_url("redis+sentinel://x:secret@a:1,b:2/name/0")) == "sentinel a:1,b:2/name/0"
