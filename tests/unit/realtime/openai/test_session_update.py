"""The settings of agents in the words of the server, and whose answer an answer is."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from openai.types.realtime import RealtimeSessionCreateRequest

from capsule_tasks.errors import InvalidSetting, RealtimeLost, RealtimeRefused
from capsule_tasks.realtime.model import AgentSettings
from capsule_tasks.realtime.openai.session_update import Updates, session_of
from capsule_tasks.realtime.settings import RealtimeSettings
from capsule_tasks.runs.models.model import ToolSpec

PCM = {"type": "audio/pcm", "rate": 24000}
LOOK = ToolSpec(name="look", description="Look.", parameters={"type": "object"})


def agent(*tools: ToolSpec, instructions: str = "Be kind.", **settings: Any) -> AgentSettings:
    return AgentSettings(instructions, tools, RealtimeSettings(**settings))


def session(agent: AgentSettings) -> dict[str, Any]:
    made = session_of(agent, "gpt-realtime")
    RealtimeSessionCreateRequest.model_validate(made)
    return made


def test_settings_that_are_not_given_are_left_out() -> None:
    assert session(agent()) == {
        "type": "realtime",
        "model": "gpt-realtime",
        "instructions": "Be kind.",
        "tools": [],
        "audio": {"input": {"transcription": {"model": "gpt-4o-mini-transcribe"}}, "output": {}},
    }


def test_all_settings() -> None:
    made = session(
        agent(
            LOOK,
            model="gpt-realtime-2",
            modalities=("audio",),
            voice={"id": "voice_1"},
            speed=1.2,
            input_format="g711_ulaw",
            output_format={"type": "audio/pcm"},
            transcription={"model": "whisper-1", "language": "de"},
            turn_detection={"type": "semantic_vad", "eagerness": "low"},
            noise_reduction={"type": "near_field"},
            tool_choice="look",
            parallel_tool_calls=False,
            max_output_tokens="inf",
            reasoning={"effort": "low"},
            prompt={"id": "pmpt_1", "version": "2"},
            tracing={"workflow_name": "calls"},
            extra={"truncation": "disabled", "audio": {"output": {"speed": 1.5}}},
        )
    )
    assert made == {
        "type": "realtime",
        "model": "gpt-realtime-2",
        "instructions": "Be kind.",
        "tools": [
            {
                "type": "function",
                "name": "look",
                "description": "Look.",
                "parameters": {"type": "object"},
            }
        ],
        "output_modalities": ("audio",),
        "tool_choice": {"type": "function", "name": "look"},
        "parallel_tool_calls": False,
        "max_output_tokens": "inf",
        "reasoning": {"effort": "low"},
        "prompt": {"id": "pmpt_1", "version": "2"},
        "tracing": {"workflow_name": "calls"},
        "truncation": "disabled",
        "audio": {
            "input": {
                "format": {"type": "audio/pcmu"},
                "transcription": {"model": "whisper-1", "language": "de"},
                "turn_detection": {"type": "semantic_vad", "eagerness": "low"},
                "noise_reduction": {"type": "near_field"},
            },
            "output": {"format": PCM, "voice": {"id": "voice_1"}, "speed": 1.5},
        },
    }


def test_off_is_null() -> None:
    names = ("transcription", "turn_detection", "noise_reduction")
    made = session(agent(**dict.fromkeys(names, "off"), tracing="off"))
    assert made["audio"]["input"] == dict.fromkeys(names)
    assert made["tracing"] is None


def test_tracing_is_told_once() -> None:
    updates = Updates("gpt-realtime")
    told = [updates.next_session(agent(tracing="auto")).get("tracing") for _ in range(2)]
    assert told == ["auto", None]


@pytest.mark.parametrize("choice", ["auto", "required", "none"])
def test_tool_choices_that_name_no_tool(choice: str) -> None:
    assert session(agent(tool_choice=choice))["tool_choice"] == choice


def test_formats_have_several_names() -> None:
    for names, expected in (
        (("pcm16", "pcm", "audio/pcm", {"type": "audio/pcm", "rate": 24000}), PCM),
        (("g711_ulaw", "pcmu", {"type": "audio/pcmu"}), {"type": "audio/pcmu"}),
        (("g711_alaw", "pcma", "audio/pcma"), {"type": "audio/pcma"}),
    ):
        for name in names:
            made = session(agent(input_format=name))
            assert made["audio"]["input"]["format"] == expected


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        (agent(input_format="mp3"), "RealtimeSettings.input_format = 'mp3'"),
        (agent(output_format="mp3"), "RealtimeSettings.output_format"),
        (agent(LOOK, tool_choice="listen"), "RealtimeSettings.tool_choice = 'listen'"),
        (
            agent(ToolSpec(name="a", description="", parameters={}, namespace="crm")),
            "in the namespace 'crm'",
        ),
        (
            agent(ToolSpec(name="web_search", description="", parameters={}, hosted={})),
            "web_search, hosted",
        ),
    ],
)
def test_settings_that_the_server_could_not_honour(settings: AgentSettings, match: str) -> None:
    with pytest.raises(InvalidSetting, match=match):
        session(settings)


def test_settings_of_the_agent_before_are_taken_back() -> None:
    updates = Updates("gpt-realtime")
    updates.defaults = {
        "tool_choice": "auto",
        "max_output_tokens": "inf",
        "audio": {
            "input": {"turn_detection": {"type": "server_vad"}, "noise_reduction": None},
            "output": {"voice": "marin", "speed": 1.0},
        },
    }
    updates.next_session(
        agent(LOOK, tool_choice="required", turn_detection="off", voice="ash", speed=1.5)
    )
    for _ in range(2):
        made = updates.next_session(agent())
        assert made["tool_choice"] == "auto"
        assert "max_output_tokens" not in made, "it was never set"
        assert made["audio"]["input"]["turn_detection"] == {"type": "server_vad"}
        assert made["audio"]["output"] == {"speed": 1.0}, "a voice cannot be taken back"


def test_extra_fields_may_take_the_audio_away() -> None:
    updates = Updates("gpt-realtime")
    told = [updates.next_session(agent(extra={"audio": None}))["audio"] for _ in range(2)]
    assert told == [None, None]


# --- answers -------------------------------------------------------------------------------------


class Asked:
    """Updates that were sent, with an answer for each."""

    def __init__(self) -> None:
        self.updates = Updates("gpt-realtime")
        self.answers: dict[str, asyncio.Future[None]] = {}

    def send(self, event_id: str, **fields: Any) -> None:
        answer = self.answers[event_id] = asyncio.get_running_loop().create_future()
        self.updates.sent(event_id, fields, answer)

    @property
    def answered(self) -> list[str]:
        return [
            each
            for each, answer in self.answers.items()
            if answer.done() and not answer.cancelled()
        ]


@pytest.fixture
async def asked() -> Asked:
    return Asked()


async def test_an_update_is_accepted(asked: Asked) -> None:
    asked.send("a", instructions="A", tools=[{"name": "look"}])
    asked.updates.accepted({"instructions": "A", "tools": [{"name": "look", "strict": True}]})
    assert asked.answers["a"].result() is None


async def test_an_update_is_refused(asked: Asked) -> None:
    asked.send("a", instructions="A")
    assert not asked.updates.refused("b", "no", None)
    assert asked.updates.refused("a", "no such voice", "invalid_value")
    with pytest.raises(RealtimeRefused, match="no such voice") as caught:
        asked.answers["a"].result()
    assert caught.value.code == "invalid_value"


async def test_a_late_answer_is_not_taken_for_that_of_the_next_update(asked: Asked) -> None:
    asked.send("a", instructions="A")
    asked.answers["a"].cancel()
    asked.send("b", instructions="B")
    asked.updates.accepted({"instructions": "A"})
    assert asked.answered == []
    asked.updates.accepted({"instructions": "B"})
    assert asked.answered == ["b"]


async def test_a_late_answer_that_says_nothing_goes_to_the_older_update(asked: Asked) -> None:
    asked.send("a", instructions="A")
    asked.answers["a"].cancel()
    asked.send("b", instructions="B")
    asked.updates.accepted({})
    assert asked.answered == []
    asked.updates.accepted({})
    assert asked.answered == ["b"]


async def test_an_update_without_an_answer_does_not_take_that_of_the_next_one(
    asked: Asked,
) -> None:
    asked.send("a", instructions="A")
    asked.answers["a"].cancel()
    asked.send("b", instructions="B")
    asked.updates.accepted({"instructions": "B"})
    assert asked.answered == ["b"]
    asked.updates.accepted({"instructions": "A"})


async def test_a_late_refusal_is_told_to_whoever_reads_errors(asked: Asked) -> None:
    asked.send("a", instructions="A")
    asked.answers["a"].cancel()
    assert not asked.updates.refused("a", "no", None)


async def test_updates_at_once_are_told_apart(asked: Asked) -> None:
    asked.send("a", instructions="Be kind.", tools=[{"name": "look"}])
    asked.send("b", instructions="Be kind.", tools=[{"name": "listen"}])
    asked.updates.accepted({"instructions": "Be kind.", "tools": [{"name": "look"}]})
    assert asked.answered == ["a"]
    asked.updates.accepted({"instructions": "Be kind.", "tools": [{"name": "listen"}]})
    assert asked.answered == ["a", "b"]


async def test_a_server_may_change_what_it_is_told(asked: Asked) -> None:
    asked.send("a", instructions=" A ")
    asked.updates.accepted({"instructions": "A"})
    assert asked.answered == ["a"]


async def test_an_update_that_nobody_made_is_ignored(asked: Asked) -> None:
    asked.updates.accepted({"instructions": "A"})


async def test_a_lost_connection_answers_all(asked: Asked) -> None:
    asked.send("a", instructions="A")
    asked.updates.lost(RealtimeLost("gone"))
    with pytest.raises(RealtimeLost):
        asked.answers["a"].result()
