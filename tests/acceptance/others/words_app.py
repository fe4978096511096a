"""An app with an agent that does what its input says, without any model.

The input is a list of words: `work`, `ask` (wait for an approval), `hang` (for ever, the first
time), `crash` (end the process).
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Sequence
from typing import Any

from celery import Celery, signals

from capsule_tasks import Capsule
from capsule_tasks.durable import INPUT_SCHEMA, TurnEnd, TurnWork, first_snapshot, input_of
from capsule_tasks.storage import ApprovalRequest, Claim

REDIS_URL = os.environ.get("REDIS_URL", "redis://localhost")

app = Celery("tests.acceptance.others.words_app", broker=REDIS_URL, backend=REDIS_URL)
app.conf.update(
    task_default_queue=os.environ.get("TEST_QUEUE", "celery"),
    broker_transport_options={"visibility_timeout": 5, "unacked_restore_interval": 0.2},
    broker_connection_retry_on_startup=True,
    worker_cancel_long_running_tasks_on_connection_loss=False,
    capsule_redis_url=os.environ.get("TEST_RUNS_URL"),
    capsule_lease_s=2.0,
    capsule_prefix=os.environ.get("TEST_PREFIX"),
    capsule_loss_limit=int(os.environ.get("TEST_LOSS_LIMIT", "5")),
)
app.conf.update(json.loads(os.environ.get("TEST_CONF", "{}")))
capsule = Capsule(app)


class WordsEngine:
    """Does one word in each turn, and says in each snapshot which version of it wrote it."""

    def __init__(self, version: int) -> None:
        """A version reads the snapshots of those before it."""
        versions = [f"words/{number}" for number in range(1, version + 1)]
        self.readable: Sequence[str] = (INPUT_SCHEMA, *versions)
        self._schema = versions[-1]

    def first(self, given: Any, context: Any = None) -> tuple[bytes, str, str]:
        return first_snapshot(given, context), INPUT_SCHEMA, "words"

    def waiting(self, claim: Claim) -> tuple[ApprovalRequest, ...]:
        words, did = _read(claim)
        return () if words[0] != "ask" else (_request(did),)

    def encoded(self, output: Any) -> bytes:
        return json.dumps(output).encode()

    async def turn(self, work: TurnWork) -> TurnEnd:
        words, did = _read(work.claim)
        word, rest = words[0], words[1:]
        if word == "ask":
            request = _request(did)
            decided = [one for one in work.claim.decisions.exact if one.call == request.call_id]
            if not decided:
                return self._end(words, did, status="interrupted", approval_requests=(request,))
            (decision,) = decided
            word = f"{'approved' if decision.approved else 'rejected'} by {decision.by}"
        elif word == "crash":
            os._exit(1)
        elif word == "hang" and app.backend.client.setnx(f"hung:{work.claim.run_id}", 1):
            app.backend.client.rpush(f"mark:{work.claim.run_id}", os.getpid())
            await asyncio.sleep(3600)
        did = [*did, word]
        items: list[Any] = [{"did": word}]
        if not rest:
            return self._end(rest, did, status="completed", output=did, items=items)
        return self._end(rest, did, items=items)

    def _end(self, words: list[str], did: list[str], **end: Any) -> TurnEnd:
        return TurnEnd(json.dumps([words, did]).encode(), self._schema, "words", **end)


def _read(claim: Claim) -> tuple[list[str], list[str]]:
    """The words that are left, and those that were done."""
    if claim.schema == INPUT_SCHEMA:
        return list(input_of(claim.snapshot).input), []
    words, did = json.loads(claim.snapshot)
    return words, did


def _request(did: list[str]) -> ApprovalRequest:
    limit = os.environ.get("TEST_APPROVAL_S")
    return ApprovalRequest(
        call_id=f"ask-{len(did)}",
        tool="bare:ask",
        agent="words",
        fingerprint="f",
        expires_in_s=float(limit) if limit else None,
        on_expiry=os.environ.get("TEST_ON_EXPIRY", "reject"),  # type: ignore[arg-type]
    )


capsule.runs.register("words", WordsEngine(int(os.environ.get("TEST_VERSION", "1"))))


if "TEST_DIES_BEFORE_RESULT" in os.environ:

    def die(*_: Any, **__: Any) -> None:
        os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    type(app.backend).mark_as_done = die


@signals.worker_ready.connect
def tell_ready(**_: Any) -> None:
    if descriptor := os.environ.pop("TEST_READY_FD", None):
        os.write(int(descriptor), b"ready\n")
