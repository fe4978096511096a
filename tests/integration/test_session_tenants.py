"""Tenants have a number of live sessions, and an amount of processor time."""

from __future__ import annotations

import asyncio

import pytest

from capsule_tasks.executions.hosting import tenants as usage
from capsule_tasks.executions.hosting.plan import Stage
from capsule_tasks.executions.hosting.tenants import METER_EVERY_S
from capsule_tasks.protocol.events import Outcome, RespondCommand
from capsule_tasks.settings import TenantSettings
from tests.integration.hosting import PROFILE, Caller, HostWorker, Results
from tests.streaming import HANG_S, eventually


async def test_calls_of_a_session_too_many_fail_and_others_of_the_tenant_go_on(
    valkey_url: str, prefix: str, results: Results, caller: Caller
) -> None:
    tenants = {"acme": TenantSettings(max_sessions=1)}
    async with HostWorker(valkey_url, prefix, results, tenants=tenants) as worker:
        assert (await caller.run("a", "1", tenant="acme")).result_text == "1"
        refused = await caller.submit("b", "print('runs')", tenant="acme")
        ended = await caller.ended(refused)
        assert (ended.outcome, ended.type) == (Outcome.FAILED, "TenantFull")
        assert "'acme' has 1 live sessions" in ended.message
        await eventually(lambda: refused in results)
        assert results[refused].type == "TenantFull"
        assert (await caller.run("a", "2", tenant="acme")).result_text == "2"
        await caller.settled("b")
        assert (await caller.sessions.info("b")).executions == 0
        assert (await caller.run("c", "3", tenant="other")).result_text == "3"
        await eventually(lambda: set(worker.hosted) == {"a", "c"})
        assert (await caller.sessions.tenants.usage("acme")).live == 1


async def test_the_tenant_of_a_session_that_is_taken_before_its_first_call_counts(
    valkey_url: str, prefix: str, results: Results, caller: Caller
) -> None:
    """Producers list a new session first: a worker may take it before the call is appended."""
    tenants = {"acme": TenantSettings(max_sessions=1)}
    async with HostWorker(valkey_url, prefix, results, tenants=tenants) as worker:
        for session_id in "ab":
            await caller.sessions.want(PROFILE, session_id)
        await eventually(
            lambda: [seat.stage for seat in worker.plan.seats.values()] == [Stage.IDLE] * 2
        )
        assert (await caller.run("a", "1", tenant="acme")).result_text == "1"
        await caller.settled("a")
        async with asyncio.timeout(HANG_S):
            while not (listed := await caller.sessions.list_sessions(tenant="acme")):
                await asyncio.sleep(0.005)  # the index is written in the background
        assert [(info.session_id, bool(info.owner)) for info in listed] == [("a", True)]
        assert (await caller.run("b", "2", tenant="acme")).type == "TenantFull"
        await eventually(lambda: set(worker.hosted) == {"a"})
        async with asyncio.timeout(HANG_S):
            while (await caller.sessions.tenants.usage("acme")).calls != 1:
                await asyncio.sleep(0.005)
        assert (await caller.sessions.tenants.usage("acme")).live == 1


async def test_a_session_that_leaves_gives_its_place_to_another(
    valkey_url: str, prefix: str, results: Results, caller: Caller
) -> None:
    tenants = {"*": TenantSettings(max_sessions=1)}
    async with HostWorker(
        valkey_url, prefix, results, tenants=tenants, idle_timeout_s=0.01
    ) as worker:
        await caller.run("a", "1", tenant="acme")
        await eventually(lambda: not worker.hosted)
        assert (await caller.run("b", "2", tenant="acme")).result_text == "2"


async def test_a_tenant_that_used_its_processor_time_runs_no_call_more(
    valkey_url: str,
    prefix: str,
    results: Results,
    caller: Caller,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(usage, "COUNT_EVERY_S", HANG_S)
    tenants = {"acme": TenantSettings(max_cpu_s=0.05)}
    burn = "import time\nend = time.process_time() + 0.2\nwhile time.process_time() < end: pass"
    async with HostWorker(valkey_url, prefix, results, tenants=tenants):
        assert (await caller.run("a", burn, tenant="acme")).outcome is Outcome.SUCCEEDED
        async with asyncio.timeout(HANG_S):
            while (await caller.sessions.tenants.usage("acme")).cpu_ms < 150:
                await asyncio.sleep(0.005)
        ended = await caller.run("b", "1", tenant="acme")
        assert (ended.outcome, ended.type) == (Outcome.FAILED, "TenantOverLimit")
        assert "may use 0.05 s" in ended.message
        await caller.settled("b")
        assert (await caller.sessions.info("b")).executions == 0
        assert (await caller.run("c", "3")).result_text == "3"
        assert (await caller.sessions.info("a")).cpu_ms >= 150


@pytest.mark.parametrize("end", ["os._exit(0)", "os.kill(os.getpid(), 9)"])
async def test_processor_time_counts_also_if_the_code_ends_its_process(
    end: str, valkey_url: str, prefix: str, results: Results, caller: Caller
) -> None:
    burn_s = 8 * METER_EVERY_S
    source = (
        f"import os, time\nend = time.process_time() + {burn_s}\n"
        f"while time.process_time() < end: pass\n{end}"
    )
    async with HostWorker(valkey_url, prefix, results):
        assert (await caller.run("a", source, tenant="acme")).outcome is Outcome.FAILED
        await caller.settled("a")
        assert (await caller.sessions.info("a")).cpu_ms >= 1000 * METER_EVERY_S
        async with asyncio.timeout(HANG_S):
            while (await caller.sessions.tenants.usage("acme")).cpu_ms < 1000 * METER_EVERY_S:
                await asyncio.sleep(0.005)


BURNERS = {
    "thread": "import threading\ndef burn():\n    while True: pass\n"
    "threading.Thread(target=burn, daemon=True).start()",
    "process": "import os\nif os.fork() == 0:\n    if os.fork() == 0:\n        os.setsid()\n"
    "        while True: pass\n    os._exit(0)\n_ = os.wait()",
}


@pytest.mark.parametrize("burner", BURNERS)
async def test_what_burns_on_after_its_call_counts_and_is_stopped_at_the_limit(
    burner: str,
    valkey_url: str,
    prefix: str,
    results: Results,
    caller: Caller,
    caplog: pytest.LogCaptureFixture,
) -> None:
    tenants = {"acme": TenantSettings(max_cpu_s=0.5)}
    async with HostWorker(valkey_url, prefix, results, tenants=tenants) as worker:
        started = await caller.run("a", BURNERS[burner], tenant="acme")
        assert started.outcome is Outcome.SUCCEEDED
        session = worker.hosted["a"].child
        assert session is not None
        await eventually(lambda: not session.is_alive)
        assert "session 'a' is stopped, its child killed: tenant 'acme' has used" in caplog.text
        assert (await caller.sessions.tenants.usage("acme")).cpu_ms >= 500
        refused = await caller.run("a", "1", tenant="acme")
        assert (refused.outcome, refused.type) == (Outcome.FAILED, "TenantOverLimit")


async def test_a_call_that_takes_its_tenant_over_the_limit_is_stopped(
    valkey_url: str, prefix: str, results: Results, caller: Caller
) -> None:
    tenants = {"acme": TenantSettings(max_cpu_s=0.2)}
    async with HostWorker(valkey_url, prefix, results, tenants=tenants):
        call = await caller.submit("a", "while True: pass", tenant="acme")
        ended = await caller.ended(call)
        assert (ended.outcome, ended.type) == (Outcome.FAILED, "TenantOverLimit")
        assert "may use 0.2 s" in ended.message
        await eventually(lambda: call in results)
        assert results[call].type == "TenantOverLimit"


async def test_the_time_of_processes_counts_for_the_call_that_starts_them(
    valkey_url: str, prefix: str, results: Results, caller: Caller
) -> None:
    source = (
        "import os, time\n"
        "if (pid := os.fork()) == 0:\n"
        f"    end = time.process_time() + {8 * METER_EVERY_S}\n"
        "    while time.process_time() < end: pass\n"
        "    os.kill(os.getpid(), 9)\n"
        "_ = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)"
    )
    async with HostWorker(valkey_url, prefix, results):
        assert (await caller.run("a", source)).outcome is Outcome.SUCCEEDED
        await caller.settled("a")
        assert (await caller.sessions.info("a")).cpu_ms >= 1000 * METER_EVERY_S


async def test_places_last_as_long_as_their_sessions(
    valkey_url: str, prefix: str, results: Results, caller: Caller
) -> None:
    tenants = {"acme": TenantSettings(max_sessions=1)}
    async with HostWorker(valkey_url, prefix, results, tenants=tenants, lease_s=0.2):
        call = await caller.submit("a", "input('?')", tenant="acme")
        await caller.asks(call)
        await asyncio.sleep(1.0)  # longer than a place lasts that nobody renews
        assert (await caller.run("b", "1", tenant="acme")).type == "TenantFull"
        await caller.executions.send_command(call, RespondCommand(text=""))
        await caller.ended(call)
