"""The undocumented names of kombu that we use."""

from __future__ import annotations

from tests.unit.private_names.entries import names

KOMBU = (
    names(
        "kombu.transport.virtual.base:QoS",
        "the unacknowledged messages of a worker, and when it may take more",
        append="(self, message, delivery_tag)",
        ack="(self, delivery_tag)",
        can_consume="(self)",
        _delivered="= OrderedDict()",
        _dirty="= set()",
    ),
    names(
        "kombu.transport.virtual.base:Message", "stored until it is acknowledged", _raw="= payload"
    ),
    names(
        "kombu.transport.redis:QoS",
        "overridden: deliveries and acknowledgements are recorded in batches",
        append="(self, message, delivery_tag)",
        ack="(self, delivery_tag)",
        reject="(self, delivery_tag, requeue=False)",
        restore_by_tag="(self, tag, client=None, leftmost=False)",
        _remove_from_indices="(self, delivery_tag, pipe=None)",
        unacked_index_key="cached_property",
    ),
    names(
        "kombu.transport.redis:Channel",
        "unacknowledged messages are recorded, renewed and requeued under kombu's own keys",
        conn_or_acquire="(self, client=None)",
        pool="property",
        global_keyprefix="str",
        visibility_timeout="int",
        unacked_key="str",
        unacked_index_key="str",
    ),
    names("kombu.transport.redis:Transport", "whether a broker is a Redis", driver_type="str"),
    names(
        "kombu.common:QoS",
        "overridden: the prefetch counter has room for coroutines in addition to the limit",
        __init__="(self, callback, initial_value, max_prefetch=None)",
        increment_eventually="(self, n=1)",
        decrement_eventually="(self, n=1)",
        _mutex="= threading.RLock()",
        callback="= callback",
        value="= initial_value or 0",
        prev="= pcount",
        max_prefetch="= max_prefetch",
    ),
    names(
        "kombu.connection:Connection",
        "replaced: a connection closes its channel at the first call; another visibility timeout",
        maybe_close_channel="(self, channel)",
        transport_options="= transport_options",
        clone="(self, **kwargs)",
    ),
    names(
        "kombu.pidbox:Node",
        "overridden: replies that come later",
        reply="(self, data, exchange, routing_key, ticket, **kwargs)",
    ),
    names("kombu.pidbox:Mailbox", "where that node is given", node_cls="class"),
    names(
        "kombu.asynchronous.hub:Hub",
        "the children of the pool are served on the worker's event loop",
        on_tick="= set()",
        fire_timers="(… min_delay, max_delay)",
        call_soon="(self, callback, *args)",
        call_later="(self, delay, callback, *args)",
        add_reader="(self, fds, callback, *args)",
        remove_reader="(self, fd)",
    ),
    names(
        "kombu.serialization",
        "a child decodes messages itself",
        prepare_accept_content="(… content_types)",
    ),
    names("kombu.utils.json", "kombu's own format of stored messages", dumps="(… s)"),
)
