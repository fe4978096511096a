"""Stored forms of a run: every version is read, the current one is written, others are refused."""

from __future__ import annotations

import copy
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capsule_tasks.errors import InvalidRunState, UnreadableSchema
from capsule_tasks.runs import (
    CURRENT_SCHEMA_VERSION,
    SCHEMA_VERSION_SUMMARIES,
    SUPPORTED_SCHEMA_VERSIONS,
    AgentId,
    GuardrailResult,
    RunState,
    Usage,
    schema,
)
from tests.unit.runs.run_states import FIXTURES, fixture_of, states

every_version = pytest.mark.parametrize("version", SUPPORTED_SCHEMA_VERSIONS)
SECRET = "sk-live-0123456789"
TRIAGE = AgentId("triage")
RESULT = {"kind": "input", "name": "g", "agent": {"name": "a"}}


def test_every_version_has_a_summary_a_fixture_and_a_migration_to_the_next() -> None:
    assert {path.stem for path in FIXTURES.glob("*.json")} == set(SUPPORTED_SCHEMA_VERSIONS)
    assert set(schema.MIGRATIONS) == set(SUPPORTED_SCHEMA_VERSIONS[:-1])
    assert SUPPORTED_SCHEMA_VERSIONS[-1] == CURRENT_SCHEMA_VERSION
    for summary in SCHEMA_VERSION_SUMMARIES.values():
        assert summary.strip()
        assert "\n" not in summary


def test_the_fixture_of_the_current_version_has_every_field_of_the_state() -> None:
    fields = fixture_of(CURRENT_SCHEMA_VERSION).keys() - {schema.VERSION_FIELD}
    assert fields == set(RunState.__struct_fields__)


@pytest.fixture
def older(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A snapshot of a made-up older version, in which agents were plain names."""

    def with_identities(fields: dict[str, Any]) -> dict[str, Any]:
        if strange := fields.keys() - {"run_id", "start_agent", "agent"}:
            raise ValueError(strange)
        named = {name: {"name": fields[name] + ""} for name in ("start_agent", "agent")}
        return {**fields, **named}

    versions = ("0.9", *SUPPORTED_SCHEMA_VERSIONS)
    monkeypatch.setattr(schema, "SUPPORTED_SCHEMA_VERSIONS", versions)
    monkeypatch.setitem(schema.MIGRATIONS, "0.9", with_identities)
    return {
        schema.VERSION_FIELD: "0.9",
        "run_id": "r",
        "start_agent": "triage",
        "agent": "billing",
    }


def test_a_snapshot_of_an_older_version_is_migrated_and_left_as_it_is(
    older: dict[str, Any],
) -> None:
    before = copy.deepcopy(older)
    state = RunState.from_json(older)
    assert older == before
    assert (state.start_agent, state.agent) == (AgentId("triage"), AgentId("billing"))
    assert state.to_json()[schema.VERSION_FIELD] == CURRENT_SCHEMA_VERSION


@pytest.mark.parametrize("change", [{"agent": {"name": SECRET}}, {"turn": SECRET}])
def test_a_snapshot_that_does_not_fit_its_older_version_is_refused_without_its_values(
    older: dict[str, Any], change: dict[str, Any]
) -> None:
    with pytest.raises(InvalidRunState, match=r"version 0\.9") as caught:
        RunState.from_json({**older, **change})
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("field", ["run_id", "start_agent", "agent"])
def test_an_error_names_the_missing_field(field: str) -> None:
    data = fixture_of(CURRENT_SCHEMA_VERSION)
    del data[field]
    with pytest.raises(InvalidRunState, match="missing") as caught:
        RunState.from_json(data)
    assert caught.value.where == f"$.{field}"


@every_version
def test_every_version_is_read_and_written_as_the_current_one(version: str) -> None:
    data = fixture_of(version)
    before = copy.deepcopy(data)
    state = RunState.from_json(data)
    assert data == before, "reading changed the snapshot"
    written = state.to_json()
    assert written[schema.VERSION_FIELD] == CURRENT_SCHEMA_VERSION
    assert RunState.from_json(written) == state
    assert RunState.from_string(state.to_string()) == state


@every_version
def test_every_schema_version_is_read_with_the_same_meaning(version: str) -> None:
    state = RunState.from_json(fixture_of(version))
    assert (state.agent.name, state.start_agent.name) == ("billing", "triage")
    assert state.tools_used_by(state.agent) == ("charge", "lookup")
    assert {use.agent.name: use.input_tokens for use in state.usage} == {
        "billing": 100,
        "triage": 10,
    }
    call, unasked = state.calls
    assert (call.call_id, call.tool.text) == ("call_2", "namespaced:crm/lookup")
    assert not unasked.needs_approval
    assert state.decision_for(call) is None, "a decision for billing/lookup covered crm/lookup"
    assert state.approvals.exact[0].rejection == "too much"
    assert state.approvals.exact[0].agent == state.agent
    assert state.context.value == {"user": "u-7", "limits": [1, 2.5, None, True]}


NEW_IN_1_1 = ("responses", "guardrails", "filtered_input", "code")


@pytest.mark.parametrize("field", [*NEW_IN_1_1, "usage"])
@pytest.mark.parametrize("is_nested", [False, True])
def test_a_snapshot_of_1_0_with_what_it_did_not_have_is_refused(
    field: str, is_nested: bool
) -> None:
    """An older reader would have dropped it, and so did not write it."""
    data, newer = fixture_of("1.0"), fixture_of("1.1")
    (data["nested"]["call_3"] if is_nested else data)[field] = newer[field]
    with pytest.raises(InvalidRunState, match=r"version 1\.0"):
        RunState.from_json(data)
    RunState.from_json({**fixture_of("1.0"), schema.VERSION_FIELD: "1.1"})


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize("field", ["first_item", "last_item", "filtered_input"])
def test_an_older_snapshot_with_a_digest_of_an_item_is_refused(
    version: str, is_nested: bool, field: str
) -> None:
    data, newer = fixture_of(version), fixture_of("1.2")
    (data["nested"]["call_3"] if is_nested else data)[field] = newer[field]
    with pytest.raises(InvalidRunState, match=rf"version {version}"):
        RunState.from_json(data)
    RunState.from_json({**data, schema.VERSION_FIELD: "1.2"})


def test_a_state_of_1_0_has_nothing_of_what_came_later() -> None:
    before = RunState.from_json(fixture_of("1.0"))
    now = RunState.from_json(fixture_of("1.1"))
    assert {field: getattr(before, field) for field in NEW_IN_1_1} == {
        "responses": (),
        "guardrails": (),
        "filtered_input": None,
        "code": None,
    }
    usage = tuple(msgspec.convert(each, Usage) for each in fixture_of("1.0")["usage"])
    only_new = dict.fromkeys(NEW_IN_1_1[:2], ()) | dict.fromkeys(NEW_IN_1_1[2:])
    assert msgspec.structs.replace(now, usage=usage, **only_new) == before
    assert now.usage[0].cached_tokens == 40


def test_a_state_of_1_1_has_no_digests_of_items() -> None:
    before, now = (RunState.from_json(fixture_of(version)) for version in ("1.1", "1.2"))
    assert before.filtered_input is not None
    assert now.filtered_input is not None
    filtered = msgspec.structs.replace(now.filtered_input, last_item=None)
    assert filtered == before.filtered_input
    assert (before.first_item, before.last_item) == (None, None)
    without = {"first_item": None, "last_item": None, "filtered_input": filtered}
    assert msgspec.structs.replace(now, **without) == before


def test_the_newest_fixture_is_written_back_as_it_is() -> None:
    data = fixture_of(CURRENT_SCHEMA_VERSION)
    assert without_defaults(RunState.from_json(data).to_json()) == without_defaults(data)


def without_defaults(value: Any) -> Any:
    """Nothing and an empty list are what a snapshot leaves out."""
    if isinstance(value, list):
        return [without_defaults(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {key: without_defaults(each) for key, each in value.items() if each not in ([], 0)}


@settings(max_examples=50)
@given(states())
def test_any_state_comes_back_as_it_was(state: RunState) -> None:
    data = state.to_json()
    assert json.loads(json.dumps(data)) == data
    assert RunState.from_json(data) == state
    assert RunState.from_string(state.to_string()) == state


FIELDS_NEW_IN = {"1.1": set(NEW_IN_1_1), "1.2": {"first_item", "last_item"}}


def as_written_in(version: str, snapshot: dict[str, Any]) -> dict[str, Any]:
    """A snapshot as that version would have written it: without what came later."""
    later = [new for name, new in FIELDS_NEW_IN.items() if name > version]
    fields = {
        name: copy.deepcopy(value)
        for name, value in snapshot.items()
        if not any(name in new for new in later)
    }
    for call_id, inner in fields.get("nested", {}).items():
        fields["nested"][call_id] = as_written_in(version, inner)
        del fields["nested"][call_id][schema.VERSION_FIELD]
    if version < "1.2":
        (fields.get("filtered_input") or {}).pop("last_item", None)
    if version < "1.1":
        known = {"agent", "requests", "input_tokens", "output_tokens"}
        for use in fields.get("usage", []):
            for field in use.keys() - known:
                del use[field]
    return {**fields, schema.VERSION_FIELD: version}


@settings(max_examples=25)
@given(states(), st.sampled_from(SUPPORTED_SCHEMA_VERSIONS))
def test_any_snapshot_of_any_version_is_read_as_what_it_says(state: RunState, version: str) -> None:
    old = as_written_in(version, state.to_json())
    before = copy.deepcopy(old)
    read = RunState.from_json(old)
    assert old == before
    assert RunState.from_string(json.dumps(old)) == read
    written = read.to_json()
    assert as_written_in(version, written) == old
    later = set().union(*(new for name, new in FIELDS_NEW_IN.items() if name > version))
    assert not written.keys() & later
    assert RunState.from_json(written) == read


@settings(max_examples=25)
@given(states(), st.sampled_from(SUPPORTED_SCHEMA_VERSIONS[:-1]))
def test_no_older_label_is_read_over_what_that_version_did_not_have(
    state: RunState, version: str
) -> None:
    data = state.to_json()
    relabeled = {**data, schema.VERSION_FIELD: version}
    if as_written_in(version, data) == relabeled:
        assert RunState.from_json(relabeled) == state
        return
    with pytest.raises(InvalidRunState, match=f"version {version}"):
        RunState.from_json(relabeled)


def state_with(value: Any) -> RunState:
    return RunState(run_id="r", start_agent=TRIAGE, agent=TRIAGE, input=[{"value": value}])


def test_a_state_of_plain_values_is_written_and_read_in_one_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = RunState.from_json(fixture_of(CURRENT_SCHEMA_VERSION))
    monkeypatch.setattr(RunState, "to_json", None)
    monkeypatch.setattr(RunState, "from_json", None)
    assert RunState.from_string(state.to_string()) == state


@pytest.mark.parametrize("value", [2**80, "\ud800", 1e300, -0.0, "\u2028", [[[[]]]]])
def test_text_and_json_say_the_same_of_values_that_are_hard_to_write(value: Any) -> None:
    state = state_with(value)
    text = state.to_string()
    assert json.loads(text) == state.to_json()
    assert RunState.from_string(text) == RunState.from_string(text.encode()) == state
    assert RunState.from_string(json.dumps(json.loads(text), indent=1, sort_keys=True)) == state


@pytest.mark.parametrize("value", [(1,), {1: 2}, float("nan"), float("inf"), b"x", {1}])
def test_values_that_would_not_come_back_are_refused_as_text_too(value: Any) -> None:
    for write in (RunState.to_string, RunState.to_json):
        with pytest.raises(InvalidRunState, match="not JSON"):
            write(state_with(value))


def test_a_state_that_is_nested_too_deeply_is_refused_as_text_too() -> None:
    value: Any = []
    for _ in range(120):
        value = [value]
    with pytest.raises(InvalidRunState, match="more than 100 deep"):
        state_with(value).to_string()


@pytest.mark.parametrize("version", ["1.3", "2.0", "0.9", "", "1"])
def test_other_versions_are_refused_with_the_list_of_readable_ones(version: str) -> None:
    with pytest.raises(UnreadableSchema) as caught:
        RunState.from_json({**fixture_of(CURRENT_SCHEMA_VERSION), schema.VERSION_FIELD: version})
    assert caught.value.version == version
    assert caught.value.readable == SUPPORTED_SCHEMA_VERSIONS
    assert ", ".join(SUPPORTED_SCHEMA_VERSIONS) in str(caught.value)


@pytest.mark.parametrize("label", [None, 1.2, ["1.2"]])
def test_a_label_that_is_no_text_is_refused(label: object) -> None:
    with pytest.raises(InvalidRunState, match=r"\$schemaVersion"):
        RunState.from_json({**fixture_of(CURRENT_SCHEMA_VERSION), schema.VERSION_FIELD: label})


@pytest.mark.parametrize("data", [None, [], "{}", 7])
def test_a_state_that_is_no_object_is_refused(data: object) -> None:
    with pytest.raises(InvalidRunState, match="not an object"):
        RunState.from_json(data)


@pytest.mark.parametrize("text", ["", "{", "[1,", '{"a": NaN}', b"\xff", "[" * 100_000, 5, None])
def test_a_state_that_is_no_json_is_refused(text: Any) -> None:
    with pytest.raises(InvalidRunState):
        RunState.from_string(text)


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"run_id": 7}, "run_id"),
        ({"turn": SECRET}, "turn"),
        ({"turn": -1}, "$"),
        ({"surprise": SECRET}, "surprise"),
        ({"agent": SECRET}, "agent"),
        ({"context": {"kind": SECRET}}, "context"),
        ({"trace": {"trace_id": "t", "api_key": SECRET}}, "trace"),
        ({"input": [SECRET]}, "input"),
        ({"nested": {SECRET: {}}}, "nested"),
        ({"calls": [{"call_id": 4711}]}, "calls"),
        ({"guardrails": [{"kind": SECRET}]}, "guardrails"),
        ({"guardrails": [{**RESULT, "call_id": SECRET}]}, "guardrails[0]"),
        ({"responses": [{"agent": {"name": "a"}, "items": [SECRET]}]}, "responses"),
        ({"filtered_input": {"items": SECRET}}, "filtered_input"),
        ({"code": {"session_id": 5}}, "code"),
        ({"approvals": {"exact": [], "standing": [{"approved": SECRET}]}}, "approvals"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_a_broken_snapshot_is_refused_where_it_is_broken_without_its_values(
    change: dict[str, Any], where: str
) -> None:
    with pytest.raises(InvalidRunState) as caught:
        RunState.from_json({**fixture_of(CURRENT_SCHEMA_VERSION), **change})
    assert where in caught.value.where
    seen: BaseException | None = caught.value
    while seen is not None:
        assert SECRET not in f"{seen!r} {seen}"
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)


@every_version
@given(data=st.data())
def test_a_snapshot_with_anything_in_any_place_is_read_or_refused(
    version: str, data: st.DataObject
) -> None:
    snapshot = fixture_of(version)
    name = data.draw(st.sampled_from(sorted(snapshot)))
    junk = st.recursive(
        st.none() | st.integers() | st.text(max_size=3),
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner),
        max_leaves=4,
    )
    snapshot[name] = data.draw(junk)
    try:
        state = RunState.from_json(snapshot)
    except (InvalidRunState, UnreadableSchema):
        return
    assert RunState.from_json(state.to_json()) == state


@pytest.mark.parametrize("value", [(1, 2), {1: 2}, float("nan"), {"a": object()}, b"x"])
def test_a_state_that_is_no_json_is_not_written(value: Any) -> None:
    state = RunState.from_json(fixture_of(CURRENT_SCHEMA_VERSION))
    held = RunState(
        run_id="r", start_agent=state.agent, agent=state.agent, held_items=[{"content": value}]
    )
    with pytest.raises(InvalidRunState, match="not JSON"):
        held.to_json()


@pytest.mark.parametrize(
    "wrong",
    [
        {"run_id": 5},
        {"turn": -1},
        {"turn": "1"},
        {"agent": "triage"},
        {"calls": [5]},
        {"nested": {"c": 5}},
        {"context": 5},
        {"approvals": None},
        {"trace": 5},
        {"input": {1}},
        {"responses": (5,)},
        {"code": "user-42"},
        {"guardrails": (GuardrailResult(kind="input", name="g", agent=TRIAGE, info=object()),)},
        {"guardrails": (GuardrailResult(kind="input", name="g", agent=TRIAGE, behavior="raise"),)},
        {"guardrails": (GuardrailResult(kind="tool_input", name="g", agent=TRIAGE),)},
    ],
)
def test_a_state_that_could_not_be_read_back_is_not_written(wrong: dict[str, Any]) -> None:
    triage = AgentId("triage")
    parts: dict[str, Any] = {"run_id": "r", "start_agent": triage, "agent": triage, **wrong}
    with pytest.raises(InvalidRunState):
        RunState(**parts).to_string()


def test_a_run_inside_of_no_call_is_not_written() -> None:
    state = RunState.from_json(fixture_of(CURRENT_SCHEMA_VERSION))
    with pytest.raises(InvalidRunState, match="no waiting call"):
        msgspec.structs.replace(state, nested={"gone": state}).to_string()
