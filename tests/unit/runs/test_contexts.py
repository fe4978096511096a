"""A run's context: mappings come back, other types need help, secrets stay out."""

from __future__ import annotations

import sys
from collections import OrderedDict
from dataclasses import asdict, dataclass
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capsule_tasks.errors import ContextNotRestorable, ContextNotStorable
from capsule_tasks.runs import (
    AgentId,
    GuardrailResult,
    PendingCall,
    RunState,
    SavedContext,
    ToolKey,
    TraceState,
    restored_context,
    saved_context,
)
from capsule_tasks.runs.parking import parked
from capsule_tasks.runs.redaction import has_credentials, is_secret_name
from tests.unit.runs.run_states import texts, values

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


def test_a_missing_context_is_none() -> None:
    saved, _ = through_a_snapshot(saved_context(None))
    assert restored_context(saved) is None
    assert restored_context(saved, override="given later") == "given later"


@pytest.mark.parametrize("context", [Customer("ann"), {"x": (1,)}, {"x": {1}}, {1: 2}, [1], "x"])
def test_contexts_of_other_types_are_kept_as_a_type_name_and_a_warning(context: Any) -> None:
    saved, text = through_a_snapshot(saved_context(context))
    assert SECRET not in text
    assert saved.type == f"{type(context).__module__}.{type(context).__qualname__}"
    assert saved.value is None
    assert saved.warning
    with pytest.raises(ContextNotRestorable, match="give override= when the run is resumed"):
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
    with pytest.raises(ContextNotRestorable, match="give deserializer="):
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


WITH_CREDENTIALS = [
    f"redis://:{SECRET}@h/0",
    f"rediss://:p/{SECRET}#?@h:6379/0",
    f"mysql+pymysql://u:pa#{SECRET}@[::1]/db",
    f"amqp://u:12345{SECRET}@h",
    f"first http://host:80/ then postgres://app:{SECRET}@h1,h2/db, said ann@x",
    f"sentinel://:{SECRET}@h1;sentinel://:{SECRET}@h2",
    f"line\nredis://:{SECRET}@h",
    f"redis://h/0?db=1&password={SECRET}",
    f"https://h/#state=1&access_token={SECRET}",
    # An @ in a password: all up to the last one is hidden.
    f"redis://u:p@{SECRET}@h",
    f"redis://:@{SECRET}@h",
    f"redis://u:p@a://{SECRET}@h",
    # A user alone is a token, unless the scheme or `git@` says otherwise.
    f"https://{SECRET}@github.com/x",
    f"git+https://{SECRET}@github.com/x@main",
    f"https://to@{SECRET}@h",
    f"ssh://git@h,redis://:{SECRET}@h",
    # Blanks in a password.
    f"redis://:pass {SECRET}@h/0",
    f"first redis://u:{SECRET} p@ss@h",
    # Signed URLs, and keys in the query.
    f"https://h/?q=1&key={SECRET}",
    f"https://h/?subscription-key={SECRET}",
    f"https://h/c/blob?sv=2024&sig={SECRET}",
    f"https://b.s3.amazonaws.com/o?X-Amz-Signature={SECRET}",
    f"https://b.s3.amazonaws.com/o?X-Amz-Credential={SECRET}",
    f"https://storage.googleapis.com/o?X-Goog-Signature={SECRET}",
    f"https://d.cloudfront.net/o?Expires=1&Signature={SECRET}",
]
WITHOUT = [
    "https://host:8080/a@b",
    "https://host:443?to=ann@x",
    "https://[::1]:8080/a@b",
    "http://host:80#a@b",
    "ssh://git@host/x",
    '{"u":"http://a","x":"b@c"}',
    "ann@x: see http://host:80",
    "https://h/?max_tokens=500&page=2",
    "https://h/?keyword=a&sort_key=b&design=c&monkey=d#keys",
    "https://git@github.com/x",
    "ssh://ann@h/x and git+ssh://ann@h/x, sftp://ann@h",
    "postgresql+asyncpg://app@h/db",
    "abfss://container@account.dfs.core.windows.net/x",
    "docker://alpine@sha256:00",
    "http://host,ann@x",
    "http://host: ann@x",
    "http://host:80, or ann@x",
    "http://host:80 12:30 ann@x",
    "redis+cluster://a:1,b:2 or ann@x",
    "http://host\nto: ann@x",
]


@pytest.mark.parametrize("text", WITH_CREDENTIALS)
def test_credentials_in_urls_stay_out_wherever_they_are(text: str) -> None:
    """A string inside of a list was never looked at, a key of a mapping neither."""
    context: dict[str, Any] = {
        "urls": ["a", text, "c"],
        "deep": [{"x": [[text]], "y": {"z": text}}],
        "keys": {text: 1, "kept": 2},
        text: "at the top",
    }
    saved, stored = through_a_snapshot(saved_context(context))
    assert SECRET not in stored
    assert restored_context(saved) == {
        "urls": ["a", None, "c"],
        "deep": [{"x": [[None]], "y": {}}],
        "keys": {"kept": 2},
    }
    assert saved.left_out[:3] == ("$.urls[1]", "$.deep[0].x[0][0]", "$.deep[0].y.z")
    assert len(saved.left_out) == 5
    with pytest.raises(ContextNotStorable) as caught:
        saved_context(context, strict=True)
    assert SECRET not in str(caught.value)
    kept, _ = through_a_snapshot(saved_context(context, keep_secrets=True, strict=True))
    assert restored_context(kept) == context


@pytest.mark.parametrize("text", WITHOUT)
def test_other_urls_and_addresses_are_kept(text: str) -> None:
    context = {"text": text, "texts": [text], text: 1}
    assert restored_context(saved_context(context, strict=True)) == context


def test_a_context_that_cannot_be_stored_is_reported_without_its_credentials() -> None:
    saved, text = through_a_snapshot(saved_context({f"redis://:{SECRET}@h": object()}))
    assert (saved.kind, SECRET in text) == ("omitted", False)
    assert "redis://:***@h" in (saved.warning or "")


def test_looking_for_credentials_takes_linear_time() -> None:
    """Each of these took the square of its length with a pattern that looks for an @ in vain."""
    for piece in ("://a:b", "://:", "://a:", "?a", "?a=", "a", "://a", "://a:b ", "://a:b c"):
        assert not has_credentials(f"@://{piece * 200_000} @")
    for piece in ("@", "a@", "://git@", "://a:1@", "://a:b@", "a:b@ "):
        has_credentials(f"ssh://{piece * 200_000}/")


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
    assert not any(is_secret_name(name) for name in TraceState.__struct_fields__)


def test_metadata_of_a_trace_is_filtered_unless_its_caller_asks_for_it() -> None:
    metadata = {
        "tenant": "a",
        "api-key": SECRET,
        "broker": f"redis://:{SECRET}@h",
        f"redis://:{SECRET}@h": "x",
    }
    trace = TraceState(trace_id="t", metadata=metadata)
    assert trace.metadata == {"tenant": "a"}
    assert trace.left_out == ("$.api-key", "$.broker", "$.redis://:***@h")
    state = RunState(run_id="r", start_agent=AgentId("a"), agent=AgentId("a"), trace=trace)
    assert SECRET not in state.to_string()
    assert RunState.from_string(state.to_string()) == state
    kept = msgspec.structs.replace(
        state, trace=TraceState(trace_id="t", metadata=metadata, unfiltered=True)
    )
    back = RunState.from_string(kept.to_string())
    assert back == kept
    assert back.trace is not None
    assert back.trace.metadata == metadata


def test_metadata_in_a_snapshot_that_was_not_filtered_goes_no_further() -> None:
    data = RunState(
        run_id="r",
        start_agent=AgentId("a"),
        agent=AgentId("a"),
        trace=TraceState(trace_id="t", metadata={"api_key": SECRET}, unfiltered=True),
    ).to_json()
    del data["trace"]["unfiltered"]
    assert SECRET not in RunState.from_json(data).to_string()


# --- every field of a snapshot -------------------------------------------------------------------

FILTERED = {
    *("context.value.*", "context.value.key", "trace.metadata.*", "trace.metadata.key"),
    "guardrails[].info",
}
"""Places for the caller's own data; values that look like secrets are left out."""
MADE_HERE = {
    *("context.type", "context.left_out[]", "context.warning", "trace.left_out[]"),
    *("guardrails[].info_type", "guardrails[].left_out[]"),
    *("approvals.exact[].fingerprint", "approvals.standing[].fingerprint"),
    *("first_item", "last_item", "filtered_input.last_item"),
}
"""Places where this package writes names, paths and digests itself, never values."""
AS_GIVEN = {
    *("run_id", "trace.trace_id", "trace.workflow", "trace.group_id"),
    *("conversation.conversation_id", "conversation.previous_response_id", "nested.key"),
    *("start_agent.name", "start_agent.tag", "agent.name", "agent.tag"),
    *("calls[].call_id", "calls[].agent.name", "calls[].agent.tag"),
    *("calls[].tool.name", "calls[].tool.namespace"),
    *(
        f"approvals.{kind}[].{name}"
        for kind in ("exact", "standing")
        for name in ("call_id", "agent.name", "agent.tag", "tool.name", "tool.namespace")
    ),
    *("tool_use[].agent.name", "tool_use[].agent.tag", "tool_use[].tools[]"),
    *("usage[].agent.name", "usage[].agent.tag"),
    *(
        f"guardrails[].{name}"
        for name in ("name", "agent.name", "agent.tag", "call_id", "tool.name", "tool.namespace")
    ),
    *(f"responses[].{name}" for name in ("agent.name", "agent.tag", "response_id", "request_id")),
    *("code.session_id", "code.profile", "code.generation"),
    # The conversation, what people decide about, and what they say: to filter them is to change
    # the output of the model, what is executed, and the input of the model.
    *("input", "input[].*", "input[].key", "held_items[].*", "held_items[].key"),
    *("responses[].items[].*", "responses[].items[].key", "guardrails[].message"),
    *("filtered_input.items[].*", "filtered_input.items[].key", "calls[].arguments"),
    *(f"approvals.{kind}[].{name}" for kind in ("exact", "standing") for name in ("message", "by")),
}
"""Names and ids that are looked up, and the run itself."""


def string_places(kind: Any, at: str = "", inside: tuple[type, ...] = ()) -> set[str]:
    """Every place of a type at which a snapshot can hold a string of somebody's."""
    match kind:
        case msgspec.inspect.StrType() | msgspec.inspect.AnyType():
            return {at}
        case msgspec.inspect.UnionType():
            return set().union(*(string_places(each, at, inside) for each in kind.types))
        case msgspec.inspect.ListType() | msgspec.inspect.VarTupleType():
            return string_places(kind.item_type, f"{at}[]", inside)
        case msgspec.inspect.DictType():
            values = string_places(kind.value_type, f"{at}.*", inside)
            return string_places(kind.key_type, f"{at}.key", inside) | values
        case msgspec.inspect.StructType():
            if kind.cls in inside:
                return set()
            deeper = (*inside, kind.cls)
            dot = f"{at}." if at else ""
            return set().union(
                *(string_places(each.type, f"{dot}{each.name}", deeper) for each in kind.fields)
            )
    return set()


def test_every_string_of_a_snapshot_is_filtered_or_there_for_a_reason() -> None:
    """A new field has to be put into one of the three, and the docs say what is not filtered."""
    found = string_places(msgspec.inspect.type_info(RunState))
    assert found == FILTERED | MADE_HERE | AS_GIVEN


def test_a_secret_in_every_filtered_field_is_in_no_snapshot_of_nested_runs_either() -> None:
    url = f"redis://:{SECRET}@h/0"
    hidden = {"password": SECRET, "list": [url, [url, {"token": SECRET}]], "d": {url: url}, url: 1}

    def run(run_id: str, **more: Any) -> RunState:
        return RunState(
            run_id=run_id,
            start_agent=AgentId("a"),
            agent=AgentId("a"),
            context=saved_context({"deep": hidden, **hidden}),
            trace=TraceState(trace_id="t", metadata={"password": SECRET, "u": url, url: "x"}),
            guardrails=(
                GuardrailResult(kind="input", name="g", agent=AgentId("a"), info=hidden),
                GuardrailResult(kind="output", name="g", agent=AgentId("a"), info=url),
            ),
            **more,
        )

    call = PendingCall(call_id="c", tool=ToolKey("t"), agent=AgentId("a"), arguments="{}")
    state = run("outer", calls=(call,), nested={"c": run("inner")})
    text = state.to_string()
    assert SECRET not in text
    assert text.count("redis://:***@h/0") > 0, "the places that were left out are named"
    assert SECRET not in parked(state).snapshot.decode()
    assert RunState.from_string(text) == state
