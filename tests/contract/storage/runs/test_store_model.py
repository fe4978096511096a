"""Any interleaving of producers, owners, people and keepers of runs, with a real server.

Each step is one call of one process. Calls and replies are lost, processes die between any two
calls, leases lapse under owners that go on, and lost calls arrive late.
"""

from __future__ import annotations

from functools import partial
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
from capsule_tasks.settings import LeaseSettings, RetrySettings, RunSettings
from capsule_tasks.storage import PlannedCall, RunStore, SyncConnections, SyncLease, SyncRunStore
from capsule_tasks.storage.keys import RunKeys, run_owners
from capsule_tasks.storage.runs import scripts
from capsule_tasks.storage.runs.types import ENDED, Claim
from capsule_tasks.storage.scripts import Call, Code
from tests.contract.storage.runs.subjects import PRINT, ask
from tests.contract.storage.sessions.actors import Actor, Choice, SteppedStore, stopped
from tests.servers import fresh_prefix

RUNS = ["one", "two"]
SESSION = "user-42"
MAX_ACTORS = 6
MAX_LIVE = 2
ABOUT: dict[str, Any] = {"schema": "1", "agent": "a"}
FATES = st.sampled_from(
    ["answered"] * 8 + ["reply lost", "lost", "late"]  # a late call is done after it was given up
)


class Owner:
    """A process that drives runs, one after the other; it does what every driver has to."""

    def __init__(self, machine: RunsMachine, incarnation: str, lease: Any) -> None:
        self.machine, self.incarnation, self.lease = machine, incarnation, lease
        self.has_lease, self.is_dead = True, False

    async def drive(self, run_id: str) -> None:
        runs = self.machine.stepped
        try:
            claim = await runs.claim(run_id, self.incarnation)
            assert claim.token not in self.machine.tokens
            self.machine.tokens.add(claim.token)
            going: Claim | None = claim
            while going is not None:
                going = await self._turn(runs, run_id, going)
        except CapsuleError:
            return

    async def _turn(self, runs: RunStore, run_id: str, claim: Claim) -> Claim | None:
        """One turn; the claim for the next, if the owner goes on."""
        if claim.cancelled_by:
            await runs.commit(claim, b"", turn=claim.turn, status="cancelled")
            return None
        turn = claim.turn
        key, call_id, held = f"m{turn}", f"call{turn}", dict[str, bytes]()
        if key in claim.journal:
            assert claim.journal == {key: b"reply"}, "a reply of another turn"
        elif await stopped(Choice(2)):
            held[key] = b"reply"
        else:
            await runs.journal(claim, key, b"reply")
        planned = [PlannedCall(call_id, PRINT)]
        (start,) = (await runs.start_calls(claim, planned, replies=held)).calls
        self.machine.started.add((run_id, turn))
        if start.state == "go":
            self.machine.effects.append((run_id, call_id))
            await runs.finish_calls(claim, {call_id: b"made"})
        choice = await stopped(Choice(8))
        item = {"turn": turn + 1}
        if choice == 0:
            await runs.release(claim)
            return None
        if choice == 1:
            asks = [ask(f"ask{turn}")]
            parking: Any = {"status": "interrupted", "approval_requests": asks}
            await runs.commit(claim, b"parked", turn=turn + 1, items=[item], **parking)
            return None
        if choice == 2:
            result = f"{run_id} {turn + 1}".encode()
            end: Any = {"status": "completed", "result": result}
            await runs.commit(claim, b"", turn=turn + 1, items=[item], **end)
            return None
        done = await runs.commit(claim, b"turn", turn=turn + 1, items=[item])
        return done.claim


class RunsMachine(RuleBasedStateMachine):
    """No effect and no item happens twice; no run is left that nobody would find."""

    connections: SyncConnections
    client: Any

    def __init__(self) -> None:
        super().__init__()
        self.prefix = fresh_prefix()
        retry = RetrySettings(attempts=3, first_delay_s=0, max_delay_s=0)
        stepped: Any = SteppedStore()
        self.stepped = RunStore(stepped, settings=RunSettings(prefix=self.prefix, retry=retry))
        self.runs = SyncRunStore(self.connections, settings=RunSettings(prefix=self.prefix))
        self.owners: list[Owner] = []
        self.actors: list[tuple[Actor, Owner | None]] = []
        self.late: list[Call] = []
        self.tokens: set[int] = set()
        """Of all claims that owners were told of."""
        self.effects: list[tuple[str, str]] = []
        self.started: set[tuple[str, int]] = set()
        """Turns whose calls were started, as an owner was told."""
        self.ended: dict[str, tuple[str, bytes]] = {}
        """How each run ended, when that was seen first."""
        self.deleted: set[str] = set()
        self.turns: dict[str, int] = dict.fromkeys(RUNS, 0)
        for _ in range(MAX_LIVE):
            self.start_owner()
        for run_id in RUNS:
            self._start(self._created(run_id))
        self._finish_others()

    # --- what happens --------------------------------------------------------------------------

    def _created(self, run_id: str) -> Any:
        create = partial(self.stepped.create, run_id, SESSION, b"new", message=b"m", **ABOUT)
        return self._quiet(create)

    @rule(run_id=st.sampled_from(RUNS))
    def create(self, run_id: str) -> None:
        """Also again, as by a message that comes twice."""
        self._start(self._created(run_id))

    @rule()
    def start_owner(self) -> None:
        if sum(owner.has_lease and not owner.is_dead for owner in self.owners) < MAX_LIVE:
            name, settings = f"w{len(self.owners)}", LeaseSettings(lease_s=600)
            lease: Any = SyncLease(name, self.connections, settings=settings, prefix=self.prefix)
            lease.acquire()
            self.owners.append(Owner(self, name, lease))

    @rule(run_id=st.sampled_from(RUNS))
    def deliver(self, run_id: str) -> None:
        """A message comes to every owner that has nothing to do."""
        for owner in self.owners:
            is_free = all(owner is not of for _, of in self.actors)
            if is_free and owner.has_lease and not owner.is_dead:
                self._start(owner.drive(run_id), owner)

    @rule(run_id=st.sampled_from(RUNS), dice=st.integers(0, 7))
    def cancel(self, run_id: str, dice: int) -> None:
        if dice == 7:
            self._start(self._quiet(lambda: self.stepped.cancel(run_id, by="ann")))

    @rule(run_id=st.sampled_from(RUNS), turn=st.integers(0, 3), approved=st.booleans())
    def decide(self, run_id: str, turn: int, approved: bool) -> None:
        approvals = self.stepped.approvals
        take = approvals.approve if approved else approvals.reject
        self._start(self._quiet(lambda: take(run_id, f"ask{turn}")))

    @rule()
    def keep(self) -> None:
        """Queue runs of lapsed owners, and note what is unsent, as each worker does."""
        self._look_now()
        for sweep in (self.stepped.requeue_lapsed, self.stepped.queued_unsent, self.stepped.list):
            self._start(self._quiet(sweep))

    @rule(run_id=st.sampled_from(RUNS))
    def send(self, run_id: str) -> None:
        self._start(self._quiet(lambda: self._sent(run_id)))

    async def _sent(self, run_id: str) -> None:
        record = await self.stepped.read(run_id, with_snapshot=False)
        await self.stepped.note_sent(run_id, record.unsent_us)

    @rule(run_id=st.sampled_from(RUNS), dice=st.integers(0, 9))
    def delete(self, run_id: str, dice: int) -> None:
        if dice == 9:
            self.deleted.add(run_id)
            self._start(self._quiet(lambda: self.stepped.delete(run_id)))

    async def _quiet(self, make: Any) -> None:
        try:
            await make()
        except CapsuleError:
            return

    @rule(steps=st.lists(st.tuples(st.integers(0, 7), FATES, st.integers(0, 7)), min_size=4))
    def step(self, steps: list[tuple[int, str, int]]) -> None:
        for number, fate, choice in steps:
            if self.actors:
                self._step(*self.actors[number % len(self.actors)], fate, choice)

    @precondition(lambda self: self.actors)
    @rule(number=st.integers(0, 7), count=st.integers(4, 40), choice=st.integers(0, 7))
    def step_on(self, number: int, count: int, choice: int) -> None:
        """Several calls of one actor that all go well."""
        self._step_on(*self.actors[number % len(self.actors)], count, choice)

    @precondition(lambda self: any(owner is not None for _, owner in self.actors))
    @rule(counts=st.lists(st.integers(1, 30), min_size=2, max_size=4), choice=st.integers(0, 7))
    def work(self, counts: list[int], choice: int) -> None:
        """Owners go on by turns, after all others have come to their ends."""
        self._finish_others()
        for index, count in enumerate(counts):
            working = [each for each in self.actors if each[1] is not None]
            if working:
                self._step_on(*working[index % len(working)], count, choice)

    @rule(run_id=st.sampled_from(RUNS), count=st.integers(1, 25), last=st.sampled_from(
        ["go on", "die", "lapse", "both"]), choice=st.integers(0, 7))  # fmt: skip
    def one_works(self, run_id: str, count: int, last: str, choice: int) -> None:
        """One owner takes a run, goes some way, and may be lost."""
        self._finish_others()
        self.start_owner()
        self.deliver(run_id)
        working = [each for each in self.actors if each[1] is not None]
        for actor, owner in working[-1:]:
            self._step_on(actor, owner, count, choice)
            if owner is not None and last in ("lapse", "both"):
                owner.lease.release()
                owner.has_lease = False
            if owner is not None and last in ("die", "both"):
                actor.kill()
                owner.is_dead = True
        self._sweep()

    @precondition(lambda self: self.late)
    @rule(number=st.integers(0, 99))
    def arrive_late(self, number: int) -> None:
        self._do(self.late.pop(number % len(self.late)))

    @precondition(lambda self: self.actors)
    @rule(number=st.integers(0, 99))
    def die(self, number: int) -> None:
        actor, owner = self.actors[number % len(self.actors)]
        actor.kill()
        if owner is not None:
            owner.is_dead = True
        self._sweep()

    @rule(number=st.integers(0, 99))
    def lapse(self, number: int) -> None:
        """The lease of an owner lapses, whether it lives or not."""
        leased = [owner for owner in self.owners if owner.has_lease]
        if leased:
            owner = leased[number % len(leased)]
            owner.lease.release()
            owner.has_lease = False

    # --- how it happens ------------------------------------------------------------------------

    def _start(self, work: Any, owner: Owner | None = None) -> None:
        if len(self.actors) >= MAX_ACTORS:
            work.close()
            return
        self.actors.append((Actor("", work), owner))
        self._sweep()

    def _finish_others(self) -> None:
        """Let all but the owners come to their ends."""
        for actor, owner in list(self.actors):
            if owner is None:
                self._step_on(actor, owner, 200, 0)

    def _step_on(self, actor: Actor, owner: Owner | None, count: int, choice: int) -> None:
        for _ in range(count):
            if not actor.is_over:
                self._step(actor, owner, "answered", choice)

    def _step(self, actor: Actor, owner: Owner | None, fate: str, choice: int) -> None:
        if actor.is_over:
            return
        if isinstance(actor.at, Choice):
            actor.go_on(choice % actor.at.options)
        else:
            call = actor.at
            assert call is not None
            reply = None
            if fate in ("answered", "reply lost"):
                reply = self._do(call)
            if fate == "late":
                self.late.append(call)
            if fate == "answered":
                actor.go_on(reply)
            else:
                actor.go_on(None, StorageUnavailable("lost", may_have_written=True))
        self._sweep()

    def _sweep(self) -> None:
        self.actors = [each for each in self.actors if not each[0].is_over]

    def _do(self, call: Call) -> Any:
        return self.connections.run_blocking(call)

    def _look_now(self) -> None:
        """Let the time pass after which owners are looked at."""
        index = run_owners(self.prefix)
        for owner in self.owners:
            if not owner.has_lease and self.client.zscore(index, owner.incarnation) is not None:
                call = scripts.run_owners.call(
                    index, owner=owner.incarnation, in_ms=-1, ttl_ms=60_000, max_due=0,
                    incarnations=[],
                )  # fmt: skip
                self._do(call)

    def _record(self, run_id: str) -> Any:
        return self._do(scripts.run_read.call(self._keys(run_id), with_snapshot=0))

    def _keys(self, run_id: str) -> RunKeys:
        return RunKeys(SESSION, run_id, self.prefix)

    # --- what always holds ---------------------------------------------------------------------

    @invariant()
    def no_effect_happened_twice(self) -> None:
        assert len(set(self.effects)) == len(self.effects)

    @invariant()
    def what_is_stored_is_coherent(self) -> None:
        """Read once for all checks: there are thousands of steps, and each call is a round trip."""
        records = {run_id: self._record(run_id) for run_id in RUNS}
        known = {run_id: reply for run_id, reply in records.items() if reply[0] == Code.DONE}
        statuses = ("queued", "running", "interrupted", *ENDED)
        with self.client.pipeline(transaction=False) as pipeline:
            pipeline.llen(self._keys("one").items)
            pipeline.zrange(run_owners(self.prefix), 0, -1)
            for index in (f"session:{SESSION}", "unsent", *(f"status:{each}" for each in statuses)):
                pipeline.zrange(f"{self.prefix}:{{runs}}:{index}", 0, -1)
            length, owners, session, unsent, *listed = pipeline.execute()
        with_status = dict(zip(statuses, listed, strict=True))
        self._the_history_has_each_turn_once(known, length)
        self._an_end_stays(known)
        self._whoever_needs_a_run_finds_it(known, session, unsent, with_status)
        self._a_running_run_has_an_owner_that_is_looked_after(known, owners)

    def _the_history_has_each_turn_once(self, known: dict[str, Any], length: int) -> None:
        self.turns |= {run_id: int(reply[3]) for run_id, reply in known.items()}
        if not self.deleted:
            assert length == sum(self.turns.values())

    def _an_end_stays(self, known: dict[str, Any]) -> None:
        for run_id, reply in known.items():
            if reply[1].decode() in ENDED:
                end = reply[1].decode(), reply[14]
                assert self.ended.setdefault(run_id, end) == end
                assert end[0] != "completed" or end[1] == f"{run_id} {int(reply[3])}".encode()
        has_ended = {run_id for run_id, reply in known.items() if reply[1].decode() in ENDED}
        assert self.ended.keys() - has_ended <= self.deleted

    def _whoever_needs_a_run_finds_it(
        self, known: dict[str, Any], session: Any, unsent: Any, with_status: dict[str, Any]
    ) -> None:
        """A run is listed with its status; one that needs a message is among those."""
        for run_id, reply in known.items():
            status = reply[1].decode()
            member = f'["{run_id}","{status}"]'.encode()
            assert member in with_status[status]
            assert member in session
            if reply[16]:
                assert member in unsent

    def _a_running_run_has_an_owner_that_is_looked_after(
        self, known: dict[str, Any], owners: Any
    ) -> None:
        for run_id, reply in known.items():
            if reply[1] == b"running":
                owner = reply[4]
                assert owner in owners, "it would never be looked at"
                held = self.client.smembers(f"{self.prefix}:{{W:{owner.decode()}}}:runs")
                assert any(hold.startswith(f'["{run_id}",'.encode()) for hold in held)

    @invariant()
    def a_deleted_run_has_left_nothing(self) -> None:
        for run_id in self.deleted:
            keys = self._keys(run_id)
            if self.client.hget(keys.run, "status") == b"deleted":
                assert self.client.hkeys(keys.run) == [b"status"]
                assert not self.client.exists(keys.ledger, keys.journal)

    def teardown(self) -> None:
        """When all have died and lapsed, every run that has not ended can be driven to its end."""
        for actor, _ in self.actors:
            actor.kill()
        for owner in self.owners:
            owner.lease.release()
            owner.has_lease = False
        self._look_now()
        sweep = self.runs.requeue_lapsed()
        requeued = {each.run_id for each in sweep.requeued}
        last: Any = SyncLease("last", self.connections, prefix=self.prefix)
        last.acquire()
        for run_id in RUNS:
            reply = self._record(run_id)
            if reply[0] != Code.DONE:
                continue
            record = self.runs.read(run_id)
            assert record.status != "running"
            if record.status not in ENDED and (run_id, record.turn) in self.started:
                journal = self.client.hkeys(self._keys(run_id).journal)
                assert journal == [f"m{record.turn}".encode()], "its call was started without it"
            if run_id in requeued:
                assert record.status in ("queued", "cancelled")
                assert record.unsent_us
            if record.status == "interrupted":
                for waiting in record.pending:
                    self.runs.approvals.approve(run_id, waiting.call_id)
            if record.status not in ENDED:
                claim = self.runs.claim(run_id, "last")
                done = self.runs.commit(claim, b"", turn=claim.turn, status="failed", error=b"e")
                assert done.status == "failed"
            assert self.runs.wait(run_id, timeout_s=0).status in ENDED
        self.runs.delete_all(SESSION)
        assert self.runs.list().runs == []


def test_runs_survive_any_interleaving(valkey_url: str) -> None:
    with redis.Redis.from_url(valkey_url) as client:
        RunsMachine.client = client
        RunsMachine.connections = SyncConnections(valkey_url)
        try:
            run_state_machine_as_test(
                RunsMachine,
                settings=hypothesis_settings(
                    max_examples=60,
                    derandomize=True,
                    stateful_step_count=40,
                    deadline=None,
                    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
                ),
            )
        finally:
            RunsMachine.connections.close_blocking()
