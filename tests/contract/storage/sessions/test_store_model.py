"""Any interleaving of producers, owners and reapers, with Hypothesis and a real server.

Each step is one call of one process. Calls and replies are lost, processes die between any two
calls, leases lapse under workers that go on, and lost calls arrive late.
"""

from __future__ import annotations

from typing import Any

import redis
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from capsule_tasks.errors import CapsuleError, StorageUnavailable
from capsule_tasks.settings import LeaseSettings, NamedSessionSettings, RetrySettings
from capsule_tasks.storage import SyncConnections, SyncLease
from capsule_tasks.storage.keys import HostKeys, NamedSessionKeys, WantedKeys
from capsule_tasks.storage.scripts import Call, Code
from capsule_tasks.storage.sessions.store import NamedSessionStore
from tests.contract.storage.sessions.actors import (
    IDS,
    PROFILE,
    Actor,
    Choice,
    Host,
    SteppedStore,
    produce,
    reap,
)
from tests.servers import fresh_prefix

SESSIONS = ["one", "two"]
MAX_ACTORS = 8
MAX_LIVE = 2
BUSY, QUIET = 1, 2
"""Choices of a host that goes on with its session, and of one that leaves it when it is idle."""
FATES = st.sampled_from(
    ["answered"] * 8 + ["reply lost", "lost", "late"]  # a late call is done after it was given up
)


class SessionsMachine(RuleBasedStateMachine):
    """Calls begin in order and once for each owner; none is left without an owner or a listing."""

    connections: SyncConnections
    client: Any

    def __init__(self) -> None:
        super().__init__()
        self.prefix = fresh_prefix()
        retry = RetrySettings(attempts=3, first_delay_s=0, max_delay_s=0)
        settings = NamedSessionSettings(prefix=self.prefix, retry=retry)
        self.store = NamedSessionStore(SteppedStore(), settings=settings)
        self.hosts: list[Host] = []
        self.actors: list[tuple[Actor, Host | None]] = []
        self.late: list[tuple[Call, Host | None]] = []
        self.acknowledged: set[tuple[str, str]] = set()
        self.token: dict[str, int] = {}
        """The token that was given last, of each session."""
        self.began: dict[str, list[tuple[int, int, str]]] = {each: [] for each in SESSIONS}
        """(token, seq, call) of each session in the order in which Redis did it."""
        self.done: dict[str, set[int]] = {each: set() for each in SESSIONS}
        self.keys = {each: NamedSessionKeys(each, self.prefix) for each in SESSIONS}
        for _ in range(MAX_LIVE):
            self.start_worker()

    # --- what happens --------------------------------------------------------------------------

    @rule(session_id=st.sampled_from(["one", "one", "two"]), call_id=st.sampled_from(IDS))
    def submit(self, session_id: str, call_id: str) -> None:
        work = produce(self.store, session_id, f"{session_id} {call_id}", self.acknowledged)
        self._start(Actor(f"producer of {call_id}", work))

    @rule()
    def start_worker(self) -> None:
        if sum(host.has_lease and not host.is_dead for host in self.hosts) < MAX_LIVE:
            self.hosts.append(self._new_host(f"w{len(self.hosts)}"))

    def _new_host(self, incarnation: str) -> Host:
        settings = LeaseSettings(lease_s=600)
        lease: Any = SyncLease(incarnation, self.connections, settings=settings, prefix=self.prefix)
        lease.acquire()
        return Host(self.store, incarnation, lease.core.token)

    @rule()
    def take(self) -> None:
        """Every worker that has no session looks for one."""
        for host in self.hosts:
            is_free = all(host is not of for _, of in self.actors)
            if is_free and host.has_lease and not host.is_dead:
                self._start(Actor(host.incarnation, host.run()), host)

    @rule(number=st.integers(0, 99))
    def reap(self, number: int) -> None:
        lapsed = [host for host in self.hosts if not host.has_lease]
        if lapsed:
            incarnation = lapsed[number % len(lapsed)].incarnation
            self._start(Actor(f"reaper of {incarnation}", reap(self.store, incarnation)))

    @rule(steps=st.lists(st.tuples(st.integers(0, 7), FATES, st.integers(0, 7)), min_size=4))
    def step(self, steps: list[tuple[int, str, int]]) -> None:
        for number, fate, choice in steps:
            if self.actors:
                self._step(*self.actors[number % len(self.actors)], fate, choice)

    @precondition(lambda self: self.actors)
    @rule(number=st.integers(0, 7), count=st.integers(2, 12), choice=st.sampled_from([BUSY, QUIET]))
    def step_on(self, number: int, count: int, choice: int) -> None:
        """Several calls of one actor that all go well."""
        actor, host = self.actors[number % len(self.actors)]
        for _ in range(count):
            if not actor.is_over:
                self._step(actor, host, "answered", choice)

    @precondition(lambda self: self.late)
    @rule(number=st.integers(0, 99))
    def arrive_late(self, number: int) -> None:
        self._do(self.late.pop(number % len(self.late))[0])

    @precondition(lambda self: self.actors)
    @rule(number=st.integers(0, 99))
    def die(self, number: int) -> None:
        actor, host = self.actors[number % len(self.actors)]
        actor.kill()
        if host is not None:
            host.is_dead = True
        self._sweep()

    @rule(number=st.integers(0, 99))
    def lapse(self, number: int) -> None:
        """The lease of a worker lapses, whether it lives or not."""
        leased = [host for host in self.hosts if host.has_lease]
        if leased:
            self._lapse(leased[number % len(leased)])

    @rule(number=st.integers(0, 7))
    def lapse_and_be_reaped(self, number: int) -> None:
        """The lease of a worker lapses, and all it held is reaped before it does anything more."""
        leased = [host for host in self.hosts if host.has_lease]
        if leased:
            host = leased[number % len(leased)]
            self._lapse(host)
            self._finish(Actor("reaper", reap(self.store, host.incarnation)), None)

    def _lapse(self, host: Host) -> None:
        # What a worker has sent arrives within the time of its lease.
        for call in [call for call, of in self.late if of is host]:
            self._do(call)
        self.late = [each for each in self.late if each[1] is not host]
        lease: Any = SyncLease(host.incarnation, self.connections, prefix=self.prefix)
        lease.core.token = host.lease_token
        lease.release()
        host.has_lease = False

    def _start(self, actor: Actor, host: Host | None = None) -> None:
        if len(self.actors) < MAX_ACTORS:
            self.actors.append((actor, host))
        else:
            actor.kill()

    def _step(self, actor: Actor, host: Host | None, fate: str, choice: int) -> None:
        at = actor.at
        try:
            if isinstance(at, Choice):
                actor.go_on(choice % at.options)
            elif at is not None:
                if fate == "late":
                    self.late.append((at, host))
                reply = self._do(at) if fate in ("answered", "reply lost") else None
                gone = StorageUnavailable("the connection is lost", may_have_written=True)
                actor.go_on(reply, None if fate == "answered" else gone)
        except CapsuleError:  # the actor has given up
            actor.is_over = True
        self._sweep()

    def _sweep(self) -> None:
        self.actors = [each for each in self.actors if not each[0].is_over]

    def _do(self, call: Call) -> Any:
        reply = self.connections.run_blocking(call)
        if reply[0] != Code.DONE or not call.script.name.startswith("sessions/"):
            return reply
        kind = call.script.name.removeprefix("sessions/")
        if kind in ("take", "begin", "done"):
            (session_id,) = [each for each in SESSIONS if self.keys[each].session == call.keys[0]]
            getattr(self, f"_on_{kind}")(session_id, call, reply)
        return reply

    # --- what has to hold ----------------------------------------------------------------------

    def _on_take(self, session_id: str, _: Call, reply: Any) -> None:
        assert int(reply[1]) >= self.token.get(session_id, 0)
        self.token[session_id] = int(reply[1])

    def _on_begin(self, session_id: str, call: Call, reply: Any) -> None:
        token = int(call.args[0])
        assert token == self.token[session_id], "an owner that lost the session began a call"
        if len(reply) > 1:
            self.began[session_id].append((token, int(reply[1]), reply[2].decode()))

    def _on_done(self, session_id: str, call: Call, _: Any) -> None:
        token, seq = int(call.args[0]), int(call.args[1])
        assert token == self.token[session_id], "an owner that lost the session ended a call"
        self.done[session_id].add(seq)

    @invariant()
    def calls_begin_in_order_and_only_once(self) -> None:
        for began in self.began.values():
            order = [(seq, token) for token, seq, _ in began]
            assert order == sorted(order)
            assert len({call for _, _, call in began}) == len({seq for _, seq, _ in began})

    @invariant()
    def no_call_is_ended_twice(self) -> None:
        for session_id, done in self.done.items():
            executions = self.client.hget(self.keys[session_id].session, "executions")
            assert int(executions or 0) == len(done)

    @invariant()
    def nothing_unfinished_is_out_of_sight(self) -> None:
        client = self.client
        for session_id, keys in self.keys.items():
            held = [
                host.incarnation
                for host in self.hosts
                if client.sismember(HostKeys(host.incarnation, self.prefix).sessions, session_id)
            ]
            owner = (client.hget(keys.session, "owner") or b"").decode()
            # A worker that dies with a session that it took after its lease had lapsed, and was
            # reaped, has not removed the listing.
            assert not owner or owner in held or self._is_wanted(session_id)
            if client.xlen(keys.calls):
                assert held or self._is_wanted(session_id)

    def teardown(self) -> None:
        """Every worker dies, what they held is reaped, and a new worker runs what is left."""
        for actor, _ in self.actors:
            actor.kill()
        self.actors = []
        for host in self.hosts:
            if host.has_lease:
                self._lapse(host)
        for host in self.hosts:
            self._finish(Actor("reaper", reap(self.store, host.incarnation)), None)
        for call, _ in self.late:
            self._do(call)
        client = self.client
        for session_id, keys in self.keys.items():
            assert not client.hget(keys.session, "owner") or self._is_wanted(session_id)
            assert not client.xlen(keys.calls) or self._is_wanted(session_id)
        last = self._new_host("last")
        for _ in range(20):
            self._finish(Actor("last", last.run()), last)
        finished = {
            (session_id, call)
            for session_id, began in self.began.items()
            for _, seq, call in began
            if seq in self.done[session_id]
        }
        assert self.acknowledged <= finished
        assert client.zcard(WantedKeys(PROFILE, self.prefix).wanted) == 0

    def _finish(self, actor: Actor, host: Host | None) -> None:
        for _ in range(1000):
            if actor.is_over:
                return
            self._step(actor, host, "answered", QUIET)
        raise AssertionError(f"{actor.name} comes to no end")

    def _is_wanted(self, session_id: str) -> bool:
        listed = self.client.zscore(WantedKeys(PROFILE, self.prefix).wanted, session_id)
        return listed is not None


def test_any_order_of_calls_and_faults(valkey_url: str) -> None:
    connections = SyncConnections(valkey_url)
    with redis.Redis.from_url(valkey_url) as client:
        SessionsMachine.connections, SessionsMachine.client = connections, client
        run_state_machine_as_test(
            SessionsMachine,
            settings=hypothesis_settings(
                max_examples=40,
                stateful_step_count=40,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
    connections.close_blocking()
