"""Where Redis is: one server, a primary that Sentinels know, or a cluster, spelled as a URL.

    redis://[user:password@]host:port/db       rediss:// with TLS, unix:///path for a socket
    redis+sentinel://host:port,host:port/name/db    the primary of that name
    redis+cluster://host:port,host:port             rediss+… with TLS

Options follow `?` as redis-py knows them (`ssl_ca_certs`, `client_name`, …). For Sentinels,
`sentinel_username` and `sentinel_password` are theirs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import parse_qsl, urlencode, urlsplit

from redis import RedisError
from redis.connection import Connection, parse_url

from capsule_tasks.errors import InvalidSetting
from capsule_tasks.settings import ConnectionSettings

_NO_PORT = re.compile(r":(?!\d+(?:[,/\]:]|$)|:|\d*\])[^,/]*")

Kind = Literal["server", "sentinel", "cluster"]
Address = tuple[str, int]

_KINDS: dict[str, tuple[Kind, str]] = {
    "redis": ("server", "redis"),
    "rediss": ("server", "rediss"),
    "unix": ("server", "unix"),
    "redis+sentinel": ("sentinel", "redis"),
    "rediss+sentinel": ("sentinel", "rediss"),
    "redis+cluster": ("cluster", "redis"),
    "rediss+cluster": ("cluster", "rediss"),
}
_DEFAULT_PORT: dict[Kind, int] = {"server": 6379, "sentinel": 26379, "cluster": 6379}


_LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class Location:
    """Which Redis a store talks to, as far as its URL or its client tells."""

    kind: str
    addresses: frozenset[str]
    """Empty where they are not known."""
    name: str = ""
    """The database, and the service that Sentinels know."""

    def may_be(self, other: Location) -> bool:
        """Whether both can be the same Redis; a common address is enough, and so is an unknown."""
        if not self.addresses or not other.addresses:
            return True
        is_alike = (self.kind, self.name) == (other.kind, other.name)
        return is_alike and not self.addresses.isdisjoint(other.addresses)

    def __str__(self) -> str:
        return f"{self.kind} {','.join(sorted(self.addresses))}/{self.name}".rstrip("/")


def location_of_client(client: Any) -> Location:
    """The location of a client of redis-py, awaited or blocking."""
    if (nodes := getattr(client, "nodes_manager", None)) is not None:
        places = [(node.host, node.port) for node in nodes.startup_nodes.values()]
        return Location("cluster", _spelled(places))
    pool = client.connection_pool
    options = pool.connection_kwargs
    if (manager := getattr(pool, "sentinel_manager", None)) is not None:
        known = [sentinel.connection_pool.connection_kwargs for sentinel in manager.sentinels]
        places = [(each.get("host"), each.get("port")) for each in known]
        return Location("sentinel", _spelled(places), f"{pool.service_name}/{_database(options)}")
    return _server_location(options)


def _server_location(options: dict[str, Any]) -> Location:
    if path := options.get("path"):
        return Location("server", frozenset({path}), _database(options))
    place = (options.get("host", "localhost"), options.get("port", 6379))
    return Location("server", _spelled([place]), _database(options))


def _database(options: dict[str, Any]) -> str:
    return str(options.get("db") or 0)


def _spelled(places: Iterable[tuple[Any, Any]]) -> frozenset[str]:
    names = ((str(host).lower(), port) for host, port in places)
    return frozenset(f"{'localhost' if host in _LOOPBACK else host}:{port}" for host, port in names)


@dataclass(frozen=True)
class Target:
    """A parsed URL; its text never holds the password."""

    kind: Kind
    addresses: tuple[Address, ...]
    service: str
    is_tls: bool
    options: dict[str, Any] = field(repr=False)
    sentinel_options: dict[str, Any] = field(repr=False)
    settings: ConnectionSettings

    @property
    def location(self) -> Location:
        if self.kind == "server":
            return _server_location(self.options)
        name = f"{self.service}/{_database(self.options)}" if self.kind == "sentinel" else ""
        return Location(self.kind, _spelled(self.addresses), name)


class _Refused(ValueError):
    """Says what the URL must be."""


def parsed(url: str, settings: ConnectionSettings) -> Target:
    """The target of a URL; refuses what is none, without repeating a password."""
    try:
        target = _parsed(url, settings)
    except _Refused as refused:
        must = str(refused)
    except ValueError:  # Python's own message is not repeated: it may show a password as the port
        must = (
            "a URL of Redis: hosts, ports up to 65535, options with values of their kind, and "
            "/ ? # @ in a password written as %2F %3F %23 %40"
        )
    else:
        if target.kind == "cluster" and settings.replicas:
            raise InvalidSetting("replicas", settings.replicas, "0 where the Redis is a cluster")
        return target
    raise InvalidSetting("url", _without_password(url), must)


def _parsed(url: str, settings: ConnectionSettings) -> Target:
    parts = urlsplit(url)
    if parts.scheme not in _KINDS:
        raise _Refused(f"one of {', '.join(_KINDS)}://…")
    kind, scheme = _KINDS[parts.scheme]
    sentinel_options, query = _split_query(parts.query)
    userinfo, at, hosts = parts.netloc.rpartition("@")
    addresses: tuple[Address, ...] = ()
    service, path = "", parts.path
    if kind != "server":
        addresses = tuple(_address(host, kind) for host in hosts.split(","))
        hosts = f"{_bracketed(addresses[0][0])}:{addresses[0][1]}"
    if kind == "sentinel":
        service, _, database = path.strip("/").partition("/")
        path = f"/{database}"
        if not service:
            raise _Refused("…/name/db for Sentinels")
    # Not by urlunsplit, which leaves out the slashes where there is no host, as with a socket.
    plain = f"{scheme}://{userinfo}{at}{hosts}{path}" + (f"?{query}" if query else "")
    options = _options(plain)
    is_tls = scheme == "rediss"
    if kind != "server":
        for name in ("host", "port", "connection_class"):
            options.pop(name, None)
    if kind == "cluster":  # a cluster has one database, and redis-py refuses the option
        options.pop("db", None)
    options |= {
        "socket_connect_timeout": settings.connect_timeout_s,
        "socket_timeout": settings.timeout_s,
    }
    return Target(kind, addresses, service, is_tls, options, sentinel_options, settings)


def _options(plain: str) -> dict[str, Any]:
    options = dict(parse_url(plain))
    # Stored values are bytes, in as many connections as the settings allow and in one protocol,
    # whatever the URL says.
    for name in ("decode_responses", "max_connections", "protocol"):
        options.pop(name, None)
    # As Celery spells it in the URL of a broker or a result backend.
    if str(options.get("ssl_cert_reqs", "")).startswith("CERT_"):
        options["ssl_cert_reqs"] = options["ssl_cert_reqs"].removeprefix("CERT_").lower()
    _check_known(options)
    return options


def _check_known(options: dict[str, Any]) -> None:
    """Refuse here what redis-py would refuse as it connects: a connection is made, not opened."""
    names = {name: value for name, value in options.items() if name != "connection_class"}
    try:
        options.get("connection_class", Connection)(**names)
    except (TypeError, ValueError, RedisError) as error:
        why = str(error).partition("() ")[2] or str(error)
        raise _Refused(f"a URL whose options redis-py knows: {why}") from None


def _split_query(query: str) -> tuple[dict[str, Any], str]:
    pairs = parse_qsl(query, keep_blank_values=True)
    theirs = {"sentinel_username": "username", "sentinel_password": "password"}
    mine = {theirs[name]: value for name, value in pairs if name in theirs}
    return mine, urlencode([pair for pair in pairs if pair[0] not in theirs])


def _address(host: str, kind: Kind) -> Address:
    split = urlsplit(f"//{host}")
    port = split.port or _DEFAULT_PORT[kind]
    if not split.hostname:
        raise _Refused("host:port,host:port")
    return split.hostname, port


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _without_password(url: str) -> str:
    """The URL to show. Python may have read it wrongly: all that may be a password is left out."""
    before, slashes, after = url.partition("://")
    scheme, rest = (f"{before}://", after) if slashes else ("", before)
    mark = next((sign for sign in rest if sign in "?#"), "")
    place, query = rest.split(mark, 1) if mark else (rest, "")
    _, at, hosts = place.rpartition("@")
    if not at and "@" in query:
        return f"{scheme}***"
    shown = ("***@" if at else "") + _NO_PORT.sub(":***", hosts)
    return f"{scheme}{shown}{mark}***" if mark else f"{scheme}{shown}"
