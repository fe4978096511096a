"""A session is a REPL: what one execution defines the next one finds, and can be looked at."""

from __future__ import annotations

import pytest

from capsule_tasks.errors import SessionStateError
from capsule_tasks.protocol.messages import Terminal
from capsule_tasks.sessions import Session
from capsule_tasks.settings import DiagnosticSettings
from tests.sessions import Watched, child_config, collect, end_of, eventually, text

# --- REPL semantics ------------------------------------------------------------------------------


async def test_variables_functions_classes_and_imports_persist(session: Session) -> None:
    await session.run("import math as m\nx = 2\ndef f(y): return x + y\nclass C:\n    attr = 'a'")
    await session.run("x = 40")
    assert (await session.run("(f(2), C().attr, m.floor(2.5))")).value == (42, "a", 2)


async def test_the_trailing_expression_is_evaluated_once(session: Session) -> None:
    done = await session.run(
        "calls = []\ndef f():\n    print('called')\n    calls.append(1)\n    return len(calls)\nf()"
    )
    assert (done.value, done.stdout) == (1, "called\n")
    assert (await session.run("len(calls)")).value == 1
    awaited = await session.run("async def g(): return f()\nawait g()")
    assert (awaited.value, awaited.stdout) == (2, "called\n")


@pytest.mark.parametrize(
    ("source", "value"),
    [
        ("", None),
        ("# only a comment", None),
        ("x = 5", None),
        ("5;", 5),
        ("1\n2", 2),
        ("5\nx = 6", None),
        ("None", None),
        ("if True:\n    5", None),
        ("(y := 7)", 7),
        ("'''doc'''", "doc"),
        ("def f(): return 1", None),
        ("x = [\n1,\n2]\nx", [1, 2]),
    ],
    ids=range(12),
)
async def test_the_value_is_that_of_the_trailing_expression(
    session: Session, source: str, value: object
) -> None:
    assert (await session.run(source)).value == value


async def test_underscore_is_the_last_value(session: Session) -> None:
    await session.run("20 + 1")
    assert (await session.run("_ * 2")).value == 42
    await session.run("x = 'no value'")
    await session.run("print('None is no value either')")
    assert (await session.run("_")).value == 42
    await session.run("import asyncio\nawait asyncio.sleep(0, 'awaited')")
    assert (await session.run("_")).value == "awaited"


async def test_the_code_is_main(session: Session) -> None:
    done = await session.run(
        "import sys\n"
        "def f(): pass\n"
        "marker = object()\n"
        "(__name__, f.__module__, sys.modules['__main__'].marker is marker, globals() is vars(\n"
        "    sys.modules['__main__']), sys.argv)"
    )
    assert done.value == ("__main__", "__main__", True, True, [""])


async def test_the_namespace_starts_empty(session: Session) -> None:
    done = await session.run("sorted(n for n in globals() if not n.startswith('__'))")
    assert done.value == []


async def test_future_imports_hold_from_then_on(session: Session) -> None:
    await session.run("from __future__ import annotations")
    assert (await session.run("def f(x: undefined_name): pass\nf.__annotations__")).value == {
        "x": "undefined_name"
    }


async def test_decorators_and_dataclasses_work_across_executions(session: Session) -> None:
    await session.run("import functools\ndef twice(f):\n    return lambda *a: f(*a) * 2")
    await session.run("@functools.lru_cache\n@twice\ndef three(): return 3")
    await session.run(
        "import dataclasses\n@dataclasses.dataclass(order=True)\nclass P:\n    x: int = 1"
    )
    assert (await session.run("(three(), dataclasses.asdict(P(2)), P(1) < P(2))")).value == (
        6,
        {"x": 2},
        True,
    )


async def test_classes_made_here_can_be_pickled(session: Session) -> None:
    await session.run("class P:\n    def __init__(self, x): self.x = x")
    assert (await session.run("import pickle; pickle.loads(pickle.dumps(P(3))).x")).value == 3


async def test_the_source_of_earlier_definitions_can_be_inspected(session: Session) -> None:
    await session.run("def f():\n    return 'its own source'")
    done = await session.run("import inspect; inspect.getsource(f)")
    assert "return 'its own source'" in done.value


async def test_asyncio_run_works_in_blocking_code(session: Session) -> None:
    source = "import asyncio\nasync def f(): return 5\nasyncio.run(f())"
    assert (await session.run(source)).value == 5
    await session.run("await asyncio.sleep(0)")
    assert (await session.run(source)).value == 5
    assert (await session.run("await f()")).value == 5


async def test_a_cyclic_namespace_and_hooks_are_left_alone(session: Session) -> None:
    done = await session.run(
        "import atexit, gc, sys\n"
        "me = sys.modules['__main__']\n"
        "atexit.register(print, 'bye', flush=True)\n"
        "gc.collect() >= 0"
    )
    assert done.value is True


# --- processes made by the code ------------------------------------------------------------------


async def test_multiprocessing_by_fork_uses_the_namespace(session: Session) -> None:
    done = await session.run(
        "import multiprocessing as mp\n"
        "offset = 100\n"
        "def work(x): return x + offset\n"
        "with mp.get_context('fork').Pool(2) as pool: made = pool.map(work, range(4))\n"
        "made"
    )
    assert done.value == [100, 101, 102, 103]


async def test_a_forked_process_prints_without_speaking_for_the_session(session: Session) -> None:
    messages = await collect(
        session,
        "import os\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    print('from the copy', flush=True)\n"
        "    os._exit(7)\n"
        "os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])",
    )
    assert text(messages) == "from the copy\n"
    assert messages[-1].value == 7


@pytest.mark.parametrize(
    "fork",
    [
        "pid = os.fork()",
        "await asyncio.sleep(0); pid = os.fork()",
        "pid = os.fork(); await asyncio.sleep(0.01)",
        "t = threading.Thread(target=lambda: globals().update(pid=os.fork())); t.start(); t.join()",
    ],
    ids=["blocking", "in a coroutine", "before an await", "in a thread"],
)
async def test_a_fork_that_never_exits_does_not_end_the_execution_twice(
    session: Session, fork: str
) -> None:
    """The copy runs into the end of the code too; it must exit silently and at once."""
    seen: list[object] = []
    session.add_message_interceptor(seen.append)
    done = await session.run(f"import asyncio, os, threading\n{fork}\npid or os.getpid()")
    reaped = await session.run("(os.waitpid(pid, 0)[0] == pid, 'still the one')")
    assert reaped.value == (True, "still the one")
    assert done.value != session.info.pid
    assert len([m for m in seen if isinstance(m, Terminal)]) == 2
    assert (await session.run("await asyncio.sleep(0, 'loop lives')")).value == "loop lives"


# --- the summary ---------------------------------------------------------------------------------


async def test_a_summary_has_names_types_and_sizes_only(session: Session) -> None:
    await session.run("import json\nnumber = 5\ntext = 'x' * 1000\nclass Own: pass\nown = Own()")
    summary = await session.namespace_summary()
    entries = {entry.name: entry for entry in summary.entries}
    assert summary.total == 5
    assert {name: entry.type_name for name, entry in entries.items()} == {
        "json": "module",
        "number": "int",
        "text": "str",
        "Own": "type",
        "own": "Own",
    }
    assert 1000 <= entries["text"].size < 2000
    assert "xxx" not in repr(summary)


async def test_a_summary_is_bounded_however_large_the_namespace_is() -> None:
    config = child_config(diagnostics=DiagnosticSettings(summary_names=10))
    async with Session(config) as session:
        await session.run(
            "globals().update((f'n{i}', i) for i in range(100_000))\n"
            "globals()['x' * 10_000_000] = 1"
        )
        summary = await session.namespace_summary(timeout_s=30)
        assert summary.total == 100_001
        assert len(summary.entries) == 10
        await session.run(
            "for name in list(globals()):\n    if name[0] == 'n': del globals()[name]"
        )
        summary = await session.namespace_summary(timeout_s=30)
        assert max(len(entry.name) for entry in summary.entries) <= 500


async def test_secrets_are_withheld_by_pattern() -> None:
    config = child_config(diagnostics=DiagnosticSettings(redact=("*token*", "key_?")))
    async with Session(config) as session:
        await session.run("My_Token = 'x' * 5000\nkey_1 = key_10 = 1")
        entries = {e.name: e for e in (await session.namespace_summary()).entries}
    assert {name for name, entry in entries.items() if entry.redacted} == {"My_Token", "key_1"}
    assert (entries["My_Token"].type_name, entries["My_Token"].size) == ("", 0)
    assert entries["key_10"].type_name == "int"


async def test_secrets_are_withheld_by_default(session: Session) -> None:
    await session.run("db_password = api_key = client_secret = aws_credentials = 'x'; user = 'y'")
    entries = (await session.namespace_summary()).entries
    assert [entry.name for entry in entries if not entry.redacted] == ["user"]


async def test_a_summary_runs_no_user_code(session: Session) -> None:
    await session.run(
        "import os, sys\n"
        "class Meta(type):\n"
        "    def __getattribute__(cls, name): os._exit(9)\n"
        "    def __instancecheck__(cls, other): os._exit(9)\n"
        "class Trap(metaclass=Meta):\n"
        "    def __sizeof__(self): os._exit(9)\n"
        "    def __repr__(self): os._exit(9)\n"
        "    def __getattribute__(self, name): os._exit(9)\n"
        "    def __len__(self): os._exit(9)\n"
        "    def __del__(self): pass\n"
        "class Name(str):\n"
        "    def __hash__(self): return str.__hash__(self)\n"
        "    def lower(self): os._exit(9)\n"
        "trap = Trap()\n"
        "globals()[Name('odd')] = 1\n"
        "globals()['\\ud800'] = 1\n"
    )
    summary = await session.namespace_summary()
    entries = {entry.name: entry.type_name for entry in summary.entries}
    assert entries["trap"] == "Trap"
    assert entries["Trap"] == "Meta"
    assert "\\ud800" in entries
    assert (await session.run("1")).value == 1


async def test_a_summary_is_answered_while_code_adds_names(session: Session) -> None:
    watched = Watched(
        session,
        "print('adding', flush=True)\n"
        "i = 0\n"
        "while True:\n"
        "    globals()[f'n{i % 50_000}'] = i\n"
        "    i += 1\n"
        "    if i % 100_000 == 0:\n"
        "        for name in [n for n in globals() if n[0] == 'n' and n[1:]]: del globals()[name]",
    )
    await watched.until_output("adding")
    for _ in range(10):
        summary = await session.namespace_summary(timeout_s=30)
        assert len(summary.entries) <= 1000
    await session.cancel(watched.execution_id, grace_s=30)
    await watched.ended()


async def test_the_heartbeat_reports_the_resources_of_the_child() -> None:
    config = child_config(diagnostics=DiagnosticSettings(heartbeat_interval_s=0.02))
    async with Session(config) as session:
        await session.run("a = b = c = 1")
        watched = Watched(session, "import time; time.sleep(3600)")
        beat = await eventually(lambda: (b := session.info.last_heartbeat) and b.running and b)
        assert beat.running == (watched.execution_id,)
        assert beat.namespace_size == 4
        assert beat.rss_bytes > 5_000_000
        assert beat.cpu_s > 0
        assert beat.threads >= 3
        assert beat.output_backlog_bytes == beat.waiting == 0
        assert session.info.last_heartbeat_at is not None
        await session.cancel(watched.execution_id)
        await watched.ended()


async def test_a_summary_of_a_dead_session_is_refused(session: Session) -> None:
    await end_of(session, "import os; os._exit(0)")
    with pytest.raises(SessionStateError, match="restart"):
        await session.namespace_summary()
