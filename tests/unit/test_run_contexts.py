"""A run's context: mappings come back, other types need help, secrets stay out."""

from __future__ import annotations

import sys
from collections import OrderedDict
from dataclasses import asdict, dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capsule_tasks.errors import ContextNotRestorable, ContextNotStorable
from capsule_tasks.runs import AgentId, RunState, SavedContext, restored_context, saved_context
from capsule_tasks.runs.contexts import is_secret_name
from tests.unit.run_states import texts, values

SECRET = "sk-live-0123456789"


@dataclass
class Customer:
    name: str
    token: str = SECRET


def through_a_snapshot(saved: SavedContext) -> tuple[SavedContext, str]:
    agent = AgentId("a")
    state = RunState(run_id="r", start_agent=agent, agent=agent, context=saved)
    text = state.to_string()
    return RunState.from_string(text).context, text


@given(st.dictionaries(texts.filter(lambda name: not is_secret_name(name)), values, max_size=4))
def test_a_mapping_comes_back_as_it_was(context: dict[str, Any]) -> None:
    saved, _ = through_a_snapshot(saved_context(context, keep_secrets=True))
    assert restored_context(saved) == context


def test_a_snapshot_and_its_context_share_nothing() -> None:
    context: dict[str, Any] = {"list": [1]}
    saved = saved_context(context)
    context["list"].append(2)
    restored = restored_context(saved)
    assert restored == {"list": [1]}
    restored["list"].append(3)
    assert restored_context(saved) == {"list": [1]}


def test_no_context_is_none() -> None:
    saved, _ = through_a_snapshot(saved_context(None))
    assert restored_context(saved) is None
    assert restored_context(saved, override="given later") == "given later"


@pytest.mark.parametrize("context", [Customer("ann"), {"x": (1,)}, {"x": {1}}, {1: 2}, [1], "x"])
def test_of_other_types_only_the_type_and_a_warning_are_kept(context: Any) -> None:
    saved, text = through_a_snapshot(saved_context(context))
    assert SECRET not in text
    assert saved.type == f"{type(context).__module__}.{type(context).__qualname__}"
    assert saved.value is None
    assert saved.warning
    with pytest.raises(ContextNotRestorable, match="give one when the run is resumed"):
        restored_context(saved)
    assert restored_context(saved, override=context) is context
    with pytest.raises(ContextNotStorable) as caught:
        saved_context(context, strict=True)
    assert SECRET not in str(caught.value)


def test_a_serializer_and_its_deserializer_bring_any_type_back() -> None:
    context = Customer("ann")
    saved, text = through_a_snapshot(saved_context(context, serializer=asdict, keep_secrets=True))
    assert SECRET in text, "the caller chose to keep it"
    assert restored_context(saved, deserializer=lambda parts: Customer(**parts)) == context
    with pytest.raises(ContextNotRestorable, match="needs its deserializer"):
        restored_context(saved)


def test_a_mapping_of_another_type_comes_back_as_a_dict() -> None:
    saved = saved_context(OrderedDict(a=1))
    assert restored_context(saved) == {"a": 1}
    assert type(restored_context(saved)) is dict


@pytest.mark.parametrize("made", [None, [1], {"x": object()}])
def test_a_serializer_that_gives_no_json_mapping_is_refused(made: Any) -> None:
    with pytest.raises(ContextNotStorable):
        saved_context(Customer("ann"), serializer=lambda _: made)


def test_secrets_by_name_stay_out_wherever_they_are() -> None:
    context = {
        "user": "ann",
        "API-Key": SECRET,
        "max_tokens_used": 7,
        "http": {"Headers": {"x": SECRET}, "retries": 3},
        "logins": [{"name": "bob", "password": SECRET}, {"access_token": SECRET}],
    }
    saved, text = through_a_snapshot(saved_context(context))
    assert SECRET not in text
    assert restored_context(saved) == {
        "user": "ann",
        "max_tokens_used": 7,
        "http": {"retries": 3},
        "logins": [{"name": "bob"}, {}],
    }
    assert saved.left_out == (
        "$.API-Key",
        "$.http.Headers",
        "$.logins[0].password",
        "$.logins[1].access_token",
    )
    assert all(place in (saved.warning or "") for place in saved.left_out)
    with pytest.raises(ContextNotStorable, match="look like secrets"):
        saved_context(context, strict=True)
    kept, text = through_a_snapshot(saved_context(context, keep_secrets=True, strict=True))
    assert restored_context(kept) == context


@pytest.mark.parametrize(
    "name",
    [
        *("passwd", "db_pwd", "access_key", "accessKeyId", "bearer", "auth", "id_jwt"),
        *("x-api.key", "signing.key", "tokens", "connection_string", "Session-Key"),
    ],
)
def test_other_names_of_secrets_are_known(name: str) -> None:
    saved, text = through_a_snapshot(saved_context({name: SECRET, "user": "ann"}))
    assert SECRET not in text
    assert restored_context(saved) == {"user": "ann"}


def test_a_password_in_a_url_stays_out_whatever_its_name_is() -> None:
    context = {"db": f"postgres://app:{SECRET}@host/db", "site": "https://host:8080/a@b"}
    saved, text = through_a_snapshot(saved_context(context))
    assert SECRET not in text
    assert restored_context(saved) == {"site": context["site"]}


def test_numbers_of_tokens_are_no_secrets() -> None:
    context = {"max_tokens": 500, "usage": {"total_tokens": 7, "token": 1.5}}
    saved = saved_context(context, strict=True)
    assert restored_context(saved) == context


def test_a_number_that_python_cannot_write_is_refused_by_its_place() -> None:
    with pytest.raises(ContextNotStorable, match=r"\$\.a.*too many digits"):
        saved_context({"a": 10**5000}, strict=True)
    kept, _ = through_a_snapshot(saved_context({"a": 10**4000}))
    assert restored_context(kept) == {"a": 10**4000}


def test_a_failing_deserializer_does_not_leak_what_it_was_given() -> None:
    saved = saved_context({"name": SECRET})

    def failing(parts: dict[str, Any]) -> Any:
        raise ValueError(f"cannot use {parts}")

    with pytest.raises(ContextNotRestorable) as caught:
        restored_context(saved, deserializer=failing)
    assert "ValueError" in str(caught.value)
    assert SECRET not in str(caught.value)
    assert caught.value.__context__ is None


def test_no_module_is_imported_because_a_snapshot_names_it() -> None:
    module = "antigravity"
    assert module not in sys.modules
    saved = SavedContext(kind="custom", type=f"{module}.Thing", value={"a": 1})
    restored, _ = through_a_snapshot(saved)
    with pytest.raises(ContextNotRestorable):
        restored_context(restored)
    restored_context(restored, deserializer=dict)
    assert module not in sys.modules


def test_a_trace_has_no_place_for_its_key() -> None:
    from capsule_tasks.runs import TraceState

    assert not any(is_secret_name(name) for name in TraceState.__struct_fields__)
