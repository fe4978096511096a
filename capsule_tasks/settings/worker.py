"""The settings of a Celery app for its workers and producers."""

from typing import Annotated, Any, Literal

from msgspec import Meta

from capsule_tasks.settings.child import Backpressure
from capsule_tasks.settings.declared import (
    PositiveCount,
    PositiveSeconds,
    Seconds,
    Settings,
    TimeToLive,
)


class AppSettings(Settings, frozen=True, kw_only=True):
    """Settings in a Celery app's configuration, where each name begins with `capsule_`."""

    start: Literal["fork", "exec", "cold"] = "fork"
    """`fork` copies the worker; `exec` imports the app in a fresh interpreter that is then copied;
    `cold` imports the app in a fresh interpreter for each child."""
    async_children: PositiveCount = 1
    """Children for `async def` tasks. They start with the first such task."""
    async_limit: PositiveCount = 1000
    """Tasks that each of these children runs at once."""
    async_threads: PositiveCount = 64
    """Threads of each of these children for functions that block (`asyncio.to_thread`)."""
    loss_limit: PositiveCount = 5
    """Child processes that one task message may cost, before it is not delivered again."""
    ready_s: PositiveSeconds = 60.0
    """How long a child may take to become ready, imports included."""
    child_stop_s: PositiveSeconds = 5.0
    """How long an idle child, and in a cold shutdown a task, may take to stop before the kill."""
    call_stop_s: Seconds = 10.0
    """How long calls of named sessions may go on in a warm shutdown once no task runs, while Redis
    answers, before they are stopped."""
    worker_stop_s: PositiveSeconds = 30.0
    """How much longer a worker that is stopping may take once no task runs, or while Redis does not
    answer, before it exits by force."""
    streams: bool = True
    """Whether tasks have streams."""
    redis_url: str | None = None
    """Where the streams are; else the environment's `CAPSULE_REDIS_URL`, the broker, or the result
    backend, the first of these that is a Redis."""
    prefix: str | None = "capsule"
    """The beginning of every key; None is the default."""
    output: Backpressure = "drop_oldest"
    """`drop_oldest` never waits for a reader; `block` never drops output."""
    retention: dict[str, Any] | None = None
    """How much of an execution is retained, and how long (fields of `ExecutionSettings`). A task
    may have an attribute `capsule_retention`, too."""
    publish: dict[str, Any] | None = None
    """Fields of `PublishSettings`."""
    lease_s: Annotated[float, Meta(ge=0.05)] = 15.0
    """How long a worker that does not renew its lease counts as alive."""
    code_profiles: dict[str, Any] | None = None
    """The kinds of session in which the worker runs code that producers send, by name: each a dict
    of fields of `CodeProfileSettings`. None is one profile, `sandbox`, with the defaults."""
    max_live_sessions: PositiveCount | None = None
    """Named sessions that a worker holds, of all profiles together; None for as many as the
    profiles may have."""
    tenants: dict[str, Any] | None = None
    """Limits of the named sessions of tenants, by tenant: each a dict of fields of
    `TenantSettings`. The tenant `*` stands for all that are not listed."""
    runs: dict[str, Any] | None = None
    """How long durable runs are kept, and how large what they store may be: fields of
    `RunSettings`."""
    revoke_ttl_s: TimeToLive = 86400.0
    """How long Redis knows that a task was revoked."""
    checkpoints: str = "redis"
    """Where checkpoints of named sessions are: `redis`, or a URL that fsspec knows."""
