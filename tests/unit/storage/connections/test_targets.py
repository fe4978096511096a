"""URLs of Redis, and whether two stores can be on the same Redis, as far as these tell."""

from __future__ import annotations

import pytest
import redis
import redis.asyncio
from redis.asyncio.cluster import ClusterNode
from redis.sentinel import Sentinel

from capsule_tasks import History
from capsule_tasks.errors import InvalidSetting
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


def test_clients_connect_where_their_urls_point() -> None:
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


def test_urls_are_understood() -> None:
    settings = ConnectionSettings()
    one = parsed("rediss://user:p%40ss@host:1/2?ssl_ca_certs=/ca.pem", settings)
    assert (one.kind, one.is_tls) == ("server", True)
    assert one.options["password"] == "p@ss"
    assert one.options["ssl_ca_certs"] == "/ca.pem"
    assert "p@ss" not in repr(one)
    many = parsed("redis+sentinel://u:p@a:1,b,[::1]:3/primary/4?sentinel_password=x", settings)
    assert many.addresses == (("a", 1), ("b", 26379), ("::1", 3))
    assert (many.service, many.options["db"]) == ("primary", 4)
    assert many.sentinel_options == {"password": "x"}
    cluster = parsed("rediss+cluster://u:p@a:1,b:2", settings)
    assert (cluster.kind, cluster.is_tls, cluster.addresses) == (
        "cluster", True, (("a", 1), ("b", 2)),
    )  # fmt: skip


@pytest.mark.parametrize(
    "url",
    ["", "localhost", "http://user:hidden@host", "redis+sentinel://:hidden@host",
     "redis+cluster://:hidden@host:port", "redis://:hidden@host/?db=x",
     "redis://:hid/hidden@host:1", "redis://:hidden#1@host", "redis://u:hidden?1@host",
     "redis://:hidden", "redis://:hidden@[::1", "redis+cluster://:hidden/@host:1,[::1",
     "redis+sentinel://u:hidden#/x@host/n", "redis://hidden@a@host:1x", "redis://u:hidden,@h:x",
     "redis://:a://hidden@h:x", "user:hidden@host", "redis+sentinel://h?sentinel_password=a@hidden"],
)  # fmt: skip
def test_an_invalid_url_is_refused_without_showing_its_password(url: str) -> None:
    with pytest.raises(InvalidSetting, match="url") as refusal:
        History("s", url)
    assert "hidden" not in str(refusal.value)
    assert "hid/" not in str(refusal.value)


@pytest.mark.parametrize("scheme", ["redis", "rediss", "redis+cluster", "redis+sentinel"])
def test_an_unknown_option_is_refused_at_once(scheme: str) -> None:
    """Such an option was once a TypeError of redis-py, at the first call."""
    path = "name/0" if scheme == "redis+sentinel" else "0"
    with pytest.raises(InvalidSetting, match="'socket_timeut'") as refusal:
        History("s", f"{scheme}://:hidden@host/{path}?socket_timeut=3")
    assert "hidden" not in str(refusal.value)
