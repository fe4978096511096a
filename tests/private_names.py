"""The undocumented names of other packages that we use: each name, its shape, and its use.

Private names, and names that we override, replace or rely on although their package may change them
in any minor release. pyproject.toml pins these packages to a minor for that reason.
`tests/unit/test_private_names.py` finds names that have moved, and uses that are not listed here.

A shape is a signature without annotations, `(… a, b)` for one with these parameters among others,
`= value` for what an attribute is set to, and else a type. `…` at its end stands for any end.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Names:
    owner: str
    """`module` or `module:Class`; or `module:function`, if that sets the names as attributes."""
    use: str
    shapes: dict[str, str]


def names(owner: str, use: str, **shapes: str) -> Names:
    return Names(owner, use, shapes)


CELERY = (
    names(
        "celery._state",
        "the current task; a pool process says that its tasks must not wait for results",
        _task_stack="_LocalStack",
        _set_task_join_will_block="(blocks)",
        set_default_app="(app)",
    ),
    names(
        "celery.utils.threads:_LocalStack",
        "the ids of tasks that call each other; coroutines have stacks by context, not thread",
        stack="property",
        top="property",
        __ident_func__="property",
    ),
    names(
        "celery.app.trace",
        "a child traces tasks as a pool process of Celery does",
        setup_worker_optimizations="(app, hostname=None)",
        build_tracer="(… name, task, loader, hostname, app)",
        trace_ok_t="class",
        logger="Logger",
    ),
    names(
        "celery.app.base:Celery",
        "tasks and their class are extended before the app is finalized; one backend for a child",
        _tasks="= tasks",
        _get_backend="(self)",
        _backend="property",
        task_cls="str",
        Task="cached_property",
        steps="= defaultdict(set)",
        configured="= False",
    ),
    names(
        "celery.app.autoretry:add_autoretry_behaviour",
        "the function behind autoretry",
        _orig_run="= task.run",
    ),
    names(
        "celery.app.task:Task",
        "overridden by our task class; the request class and the tracer of a task are replaced",
        AsyncResult="(self, task_id, **kwargs)",
        apply="(… args, kwargs, **options)",
        abstract="bool",
        Request="str",
        __trace__="NoneType",
        request_stack="= LocalStack()",
    ),
    names(
        "celery.app.registry:TaskRegistry",
        "overridden, for later tasks",
        __setitem__="wrapper_descriptor",
    ),
    names(
        "celery.app.log:Logging",
        "a child sets up logging as its worker did",
        already_setup="class_property",
        supports_color="(self, colorize=None, logfile=None)",
        setup="(… loglevel, logfile, hostname)",
    ),
    names("celery.app.utils", "a fresh child finds the app by its name", find_app="(… app)"),
    names(
        "celery.app.utils:Settings",
        "whether a setting was made, and where",
        value_set_for="(self, key)",
        add_defaults="(self, d)",
        maps="NoneType",
    ),
    names(
        "celery.app.control:Inspect", "our remote commands", _request="(self, command, **kwargs)"
    ),
    names(
        "celery.backends.base:Backend",
        "the stored end of a task is read with Celery's own retries; one backend for many threads",
        _ensure_retryable="(… func, fallback_exc, fallback_msg, max_retries)",
        on_chord_part_return="(self, request, state, result, **kwargs)",
        max_retries="= conf.get('result_backend_max_retries', float('inf'))",
        thread_safe="= conf.get('result_backend_thread_safe', False)",
        supports_native_join="bool",
    ),
    names(
        "celery.backends.base:KeyValueStoreBackend",
        "the stored end of a task past the cache; many results and groups in one call",
        _get_task_meta_for="(self, task_id)",
        get_many="(… task_ids, interval, max_iterations)",
        get_key_for_group="(self, group_id, key='')",
        mget="(self, keys)",
    ),
    names(
        "celery.backends.redis:RedisBackend",
        "one blocking pool of connections for a child",
        _ConnectionPool="= connection_pool",
        connparams="= {'host': …",
        redis="module",
    ),
    names(
        "celery.worker.request:Request",
        "overridden or read by the pool's requests, which report an end when it is known",
        acknowledge="(self)",
        terminate="(self, pool, signal=None)",
        cancel="(self, pool, signal=None, emit_retry=True)",
        on_accepted="(self, pid, time_accepted)",
        on_success="(self, failed__retval__runtime, **kwargs)",
        on_failure="(self, exc_info, send_failed_event=True, return_ok=False)",
        on_timeout="(self, soft, timeout)",
        reject="(self, requeue=False)",
        send_event="(self, type, **fields)",
        execute_using_pool="(self, pool, **kwargs)",
        _worker_lost_info="(self, exc)",
        _announce_revoked="(self, reason, terminated, signum, expired)",
        _announce_cancelled="(self, emit_retry=True)",
        _already_revoked="bool",
        _terminate_on_ack="= (pool, signal)",
        _apply_result="= maybe(ref, result)",
        _context="cached_property",
        time_start="= time() - …",
        worker_pid="= pid",
        acknowledged="bool",
        time_limits="tuple",
        message="property",
    ),
    names(
        "celery.worker.state",
        "which messages a worker has, what was revoked, and whether the worker is stopping",
        reserved_requests="WeakSet",
        active_requests="WeakSet",
        revoked="LimitedSet",
        revoked_stamps="dict",
        merge_revoked="(task_ids)",
        REVOKE_EXPIRES="float",
        should_terminate="NoneType",
        maybe_shutdown="()",
        task_ready="(… request, successful)",
        reset_state="()",
    ),
    names(
        "celery.worker.control",
        "wrapped: revokes that a worker receives are stored for the others",
        revoke="(state, task_id, terminate=False, signal=None, **kwargs)",
        terminate="(state, signal, task_id, **kwargs)",
        revoke_by_stamped_headers="(state, headers, terminate=False, signal=None, **kwargs)",
    ),
    names("celery.worker.control:Panel", "where those commands are replaced", data="dict"),
    names("celery.concurrency", "other names of our pool", ALIASES="dict"),
    names(
        "celery.concurrency.base:BasePool",
        "the contract of a pool, which our pool implements",
        __init__="(… limit, putlocks, app, **options)",
        body_can_be_buffer="bool",
        flush="(self)",
        on_apply="(self, *args, **kwargs)",
        terminate_job="(self, pid, signal=None)",
        maintain_pool="(self, *args, **kwargs)",
        putlocks="= putlocks",
        options="= options",
        _get_info="(self)",
    ),
    names(
        "celery.concurrency.prefork:TaskPool",
        "overridden: Celery sizes only pools that derive from prefork's by the CPU quota",
        uses_semaphore="bool",
        on_start="(self)",
        did_start_ok="(self)",
        register_with_event_loop="(self, loop)",
        on_close="(self)",
        on_stop="(self)",
        on_terminate="(self)",
        restart="(self)",
        num_processes="property",
        _get_info="(self)",
    ),
    names(
        "celery.concurrency.prefork",
        "late acknowledgements while the pool stops",
        _run_ready_callbacks="(hub)",
    ),
    names(
        "celery.worker.autoscale:Autoscaler", "overridden: coroutines take no slot", qty="property"
    ),
    names(
        "celery.worker.autoscale:WorkerComponent.create",
        "where the autoscaler is found",
        autoscaler="= self.instantiate(…",
    ),
    names(
        "celery.worker.consumer.consumer:Consumer",
        "replaced on the consumer: slots, the preparation of its connections, a cold shutdown",
        on_task_request="= on_task_request",
        ensure_connected="(self, conn)",
        cancel_active_requests="(self)",
        controller="= controller",
        steps="= []",
    ),
    names(
        "celery.worker.consumer.tasks:Tasks.start",
        "the prefetch counter is replaced; the channel of the consumer",
        qos="= QoS(set_prefetch_count, …",
        task_consumer="= c.app.amqp.TaskConsumer(…",
    ),
    names(
        "celery.bootsteps:Blueprint",
        "replaced: a consumer starts after a pause; the end of the worker is waited for",
        start="(self, parent)",
        started="int",
        shutdown_complete="= Event()",
    ),
    names(
        "celery.bootsteps:Step",
        "overridden by the pool's step of the consumer",
        include_if="(self, parent)",
        create="(self, parent)",
        requires="tuple",
    ),
    names("celery.bootsteps:StartStopStep", "the same", start="(self, parent)"),
    names("celery.local:Proxy", "the app behind `current_app`", _get_current_object="(self)"),
    names(
        "celery.result:AsyncResult",
        "overridden by executions",
        __init__="(self, id, backend=None, task_name=None, app=None, parent=None)",
        revoke="(self, connection=None, terminate=False, signal=None, wait=False, timeout=None)",
    ),
    names(
        "celery.utils.serialization",
        "a task's exception is rebuilt in the worker",
        create_exception_cls="(name, module, parent=None)",
    ),
    names(
        "celery.utils.serialization:UnpickleableExceptionWrapper",
        "the same, without its constructor",
        __init__="(self, exc_module, exc_cls_name, exc_args, text=None)",
    ),
    names("celery.exceptions:Retry", "the same", __init__="(… message, exc, when, is_eager, sig)"),
    names("celery.exceptions:Reject", "the same", __init__="(self, reason=None, requeue=False)"),
    names(
        "celery.loaders.base:BaseLoader",
        "a child is a pool process in the eyes of the app; what it imports",
        init_worker="(self)",
        init_worker_process="(self)",
        import_default_modules="(self)",
        task_modules="= set()",
    ),
    names(
        "celery.platforms",
        "signals and the title of a pool process",
        signals="Signals",
        set_mp_process_title="(progname, info=None, hostname=None)",
    ),
)

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

BILLIARD = (
    names(
        "billiard.process",
        "a child has no share in the processes of the worker that it was forked from",
        _children="set",
        current_process="()",
    ),
    names(
        "billiard.process:BaseProcess",
        "the name of a child in log lines",
        _name="= name or type(self).__name__ + '-' + ':'.join((str(i) for i in self._identity))",
    ),
    names(
        "billiard.util",
        "what a pool process does after a fork, and when it ends",
        _run_after_forkers="()",
        _run_finalizers="(minpriority=None)",
    ),
    names(
        "billiard.einfo:ExceptionInfo",
        "made without its constructor, from what a child reports",
        type="NoneType",
        exception="= ExceptionWithTraceback(…",
        tb="= Traceback(tb)",
        traceback="= ''.join(…",
        internal="bool",
    ),
    names(
        "billiard.einfo:ExceptionWithTraceback",
        "Celery expects exceptions so",
        __init__="(self, exc, tb)",
    ),
    names("billiard.einfo:RemoteTraceback", "the same", __init__="(self, tb)"),
)

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

STANDARD_LIBRARY = (
    names("asyncio", "a loop that another loop's thread runs", _set_running_loop="builtin"),
    names(
        "asyncio.base_events:BaseEventLoop",
        "whether such a loop has work left",
        _ready="= collections.deque()",
        _scheduled="= []",
    ),
    names(
        "asyncio.selector_events:BaseSelectorEventLoop",
        "closed in forked copies",
        _selector="= selector",
    ),
    names(
        "atexit",
        "the functions of the worker are not run in a child; those of a child before it exits",
        _clear="builtin",
        _run_exitfuncs="builtin",
    ),
    names("argparse", "the type of a parser's sub-commands", _SubParsersAction="class"),
    names("logging", "every handler, to give it a stream of the child", _handlerList="list"),
    names(
        "multiprocessing.process",
        "a child has no share in the processes of the worker that it was forked from",
        _children="set",
    ),
    names(
        "multiprocessing.process:BaseProcess",
        "the name of a child in log lines",
        _name="= name or type(self).__name__ + '-' + ':'.join((str(i) for i in self._identity))",
    ),
    names("signal", "its functions without the enums around them", _signal="module"),
    names(
        "subprocess:Popen", "a cancel does not wait for a subprocess", _sigint_wait_secs="= 0.25"
    ),
)

NAMES = (*CELERY, *KOMBU, *BILLIARD, *REDIS, *STANDARD_LIBRARY)
