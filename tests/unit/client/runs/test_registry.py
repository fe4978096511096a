"""`capsule.runs`: agents by name, and what is refused before a run is stored."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
from celery import Celery

from capsule_tasks import Agent, Capsule
from capsule_tasks.client.configuration import run_lease_settings, run_settings
from capsule_tasks.client.runs.messages import RUN_TASK
from capsule_tasks.client.runs.registry import runs_of
from capsule_tasks.durable import INPUT_SCHEMA, TurnEnd, TurnWork
from capsule_tasks.durable.agent_engine import AgentEngine
from capsule_tasks.errors import (
    AgentNotRegistered,
    CodeNotRun,
    InvalidId,
    InvalidSetting,
    UnknownAgent,
)
from capsule_tasks.storage import ApprovalRequest, Claim


class ScriptEngine:
    """An engine of one's own."""

    readable: Sequence[str] = ("script/1",)

    def first(self, given: Any, context: Any = None) -> tuple[bytes, str, str]:
        return json.dumps([given, context]).encode(), "script/1", "script"

    async def turn(self, work: TurnWork) -> TurnEnd:
        raise NotImplementedError

    def waiting(self, claim: Claim) -> tuple[ApprovalRequest, ...]:
        del claim
        return ()

    def encoded(self, output: Any) -> bytes:
        return str(output).encode()


@pytest.fixture
def capsule() -> Capsule:
    return Capsule(Celery("shop", set_as_current=False, broker="memory://"))


def test_an_engine_is_taken_as_it_is(capsule: Capsule) -> None:
    engine = ScriptEngine()
    assert capsule.runs.register("script", engine, turn_timeout_s=30) is engine
    assert capsule.runs.engine_of("script") is engine
    assert dict(capsule.runs.agents) == {"script": engine}
    assert capsule.runs.agent("script").turn_timeout_s == 30
    with pytest.raises(TypeError, match="max_turns"):
        capsule.runs.register("other", engine, max_turns=3)


def test_an_agent_of_ours_is_registered_with_its_options(capsule: Capsule) -> None:
    engine = capsule.runs.register("a", Agent(name="shop", model="m"), on_uncertain="tell")
    assert isinstance(engine, AgentEngine)
    _, schema, agent = engine.first("go", {"user": "ann"})
    assert (schema, agent) == (INPUT_SCHEMA, "shop")
    with pytest.raises(InvalidSetting, match="a text or a list of items"):
        capsule.runs.s("a", "")
    with pytest.raises(InvalidSetting, match="max_turns = 0"):
        capsule.runs.register("b", Agent(name="shop", model="m"), max_turns=0)


def test_an_agent_of_ours_needs_no_sdk() -> None:
    code = (
        "import sys; sys.modules['agents'] = sys.modules['openai'] = None\n"
        "from celery import Celery\n"
        "from capsule_tasks import Agent, Capsule\n"
        "runs = Capsule(Celery('a', broker='memory://')).runs\n"
        "runs.register('shop', Agent(name='shop', model='gpt-5')).first('go')\n"
        "assert 'agents' not in [name for name, found in sys.modules.items() if found]\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_app_has_one_registry(capsule: Capsule) -> None:
    assert runs_of(capsule.app) is capsule.runs
    assert Capsule(capsule.app).runs is capsule.runs


@pytest.mark.parametrize(
    ("name", "agent", "options", "error"),
    [
        ("", ScriptEngine(), {}, "name"),
        ("a", 7, {}, "agent = 7: must be an Agent of capsule_tasks or of openai"),
        ("a", ScriptEngine(), {"turn_timeout_s": 0}, "turn_timeout_s = 0"),
        ("taken", ScriptEngine(), {}, "name = 'taken': must be a name under which no agent"),
    ],
)
def test_what_cannot_be_registered_is_refused(
    capsule: Capsule, name: str, agent: Any, options: dict[str, Any], error: str
) -> None:
    capsule.runs.register("taken", ScriptEngine())
    with pytest.raises((InvalidSetting, InvalidId), match=error):
        capsule.runs.register(name, agent, **options)


def test_an_agent_that_is_not_registered_is_named_with_those_that_are(capsule: Capsule) -> None:
    with pytest.raises(UnknownAgent, match=r"registered as 'x'; registered are no agents"):
        capsule.runs.engine_of("x")
    capsule.runs.register("support", ScriptEngine())
    capsule.runs.register("sales", ScriptEngine())
    for ask in (capsule.runs.engine_of, lambda name: capsule.runs.start(name, "hello")):
        with pytest.raises(AgentNotRegistered, match=r"as 'x'; registered are sales, support"):
            ask("x")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"agent": 7}, "agent must be of type str, not 7"),
        ({"given": ""}, "input = '': must be a text or a list of items"),
        ({"given": 7}, "input = 7: must be a text"),
        ({"given": [object()]}, "input = .*what JSON can write: no value of type object"),
        ({"context": object()}, "context = .*what JSON can write: no value of type object"),
        ({"session": 7}, "session must be of type str, not 7"),
        ({"run_id": 7}, "run_id must be of type str, not 7"),
        ({"task_id": "x"}, "'task_id'; did you mean run_id"),
        ({"sesion": "x"}, "no argument 'sesion'; did you mean session"),
    ],
)
def test_a_wrong_argument_is_named_before_anything_is_stored(
    capsule: Capsule, arguments: dict[str, Any], error: str
) -> None:
    given = {"agent": "support", "given": "hello", **arguments}
    with pytest.raises((TypeError, ValueError), match=error):
        capsule.runs.start(given.pop("agent"), given.pop("given"), **given)


def test_a_run_is_not_started_eagerly(capsule: Capsule) -> None:
    capsule.app.conf.task_always_eager = True
    with pytest.raises(CodeNotRun, match="driven by workers, and not eagerly"):
        capsule.runs.start("support", "hello")


def test_a_signature_has_its_input_or_leaves_it_to_the_chain(capsule: Capsule) -> None:
    capsule.runs.register("script", ScriptEngine())
    signature = capsule.runs.s("script", "hello", session="user-1", context={"plan": "pro"})
    assert signature.task == RUN_TASK
    assert (signature.args, signature.kwargs) == (
        ("hello",),
        {"agent": "script", "session": "user-1", "context": {"plan": "pro"}},
    )
    assert capsule.runs.s("script").args == ()
    assert capsule.runs.si("script", "hello").immutable
    assert capsule.runs.signature("script", ("x",), queue="agents").options == {"queue": "agents"}
    with pytest.raises(TypeError, match="one input"):
        capsule.runs.s("script", "a", "b")
    with pytest.raises(AgentNotRegistered):
        capsule.runs.s("x", "hello")


def test_settings_of_runs_are_those_of_the_app() -> None:
    app = Celery("shop", set_as_current=False)
    app.conf.capsule_prefix = "mine"
    app.conf.capsule_runs = {"ttl_s": 60}
    app.conf.capsule_lease_s = 3
    assert (run_settings(app).ttl_s, run_settings(app).prefix) == (60, "mine")
    assert run_lease_settings(app).lease_s == 3
    app.conf.capsule_runs = {"ttl": 60}
    with pytest.raises(InvalidSetting, match=r"capsule_runs\['ttl'\]"):
        run_settings(app)
