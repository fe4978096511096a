"""The undocumented names of redis-py that we use."""

from __future__ import annotations

from tests.unit.private_names.entries import names

REDIS = (
    names(
        "redis.connection:AbstractConnection",
        "calls, subscriptions and pipelines over connections without a client",
        send_packed_command="(self, command, check_health=True)",
        send_command="(self, *args, **kwargs)",
        read_response="(… disable_decoding, timeout)",
        pack_command="(self, *args)",
        can_read="(self, timeout=0)",
        disconnect="(self, *args, **kwargs)",
    ),
    names(
        "redis.asyncio.connection:AbstractConnection",
        "the same on an event loop",
        send_packed_command="(self, command, check_health=True)",
        send_command="(self, *args, **kwargs)",
        read_response="(… disable_decoding, timeout)",
        pack_command="(self, *args)",
        is_connected="property",
        disconnect="(… nowait)",
    ),
    names(
        "redis.connection:ConnectionPool",
        "makes connections, of which it keeps none",
        make_connection="(self)",
        connection_kwargs="property",
        connection_class="= connection_class",
    ),
    names(
        "redis.asyncio.connection:ConnectionPool",
        "the same on an event loop",
        make_connection="(self)",
        connection_kwargs="property",
    ),
    names("redis.connection", "the options in a URL", parse_url="(url)"),
    names("redis.client", "replies of a cluster as bytes", NEVER_DECODE="str"),
    names(
        "redis.cluster:RedisCluster",
        "options that its constructor does not name reach the connections",
        __init__="(… startup_nodes, url, **kwargs)",
        nodes_manager="= NodesManager(…",
    ),
    names(
        "redis.asyncio.cluster:RedisCluster",
        "the same on an event loop",
        __init__="(… startup_nodes, max_connections, ssl)",
        connection_kwargs="= kwargs",
        nodes_manager="= NodesManager(…",
    ),
    names("redis.asyncio.cluster:ClusterNode", "the same", connection_kwargs="= connection_kwargs"),
    names(
        "redis.cluster:NodesManager",
        "which cluster a client belongs to",
        startup_nodes="= {n.name: n for n in startup_nodes}",
    ),
    names(
        "redis.asyncio.cluster:NodesManager",
        "the same",
        startup_nodes="= {node.name: node for node in startup_nodes}",
    ),
    names("redis.sentinel:Sentinel", "closed with the endpoint", sentinels="= [Redis(…"),
    names("redis.asyncio.sentinel:Sentinel", "closed with the endpoint", sentinels="= [Redis(…"),
    names(
        "redis.sentinel:SentinelConnectionPool",
        "which Sentinels and which service a client belongs to",
        sentinel_manager="= sentinel_manager",
        service_name="= service_name",
    ),
    names(
        "redis.asyncio.sentinel:SentinelConnectionPool",
        "the same",
        sentinel_manager="= sentinel_manager",
        service_name="= service_name",
    ),
)
