"""Every knob refuses what it cannot be, with its name and the value."""

from __future__ import annotations

import importlib
import math
import pkgutil
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from msgspec import inspect as mi

from capsule_tasks import settings
from capsule_tasks.errors import CallerError, InvalidSetting
from capsule_tasks.settings import (
    MIB,
    ChildSettings,
    DiagnosticSettings,
    LimitSettings,
    OutputSettings,
    PoolSettings,
    Profile,
    SandboxSettings,
    SessionConfig,
    Settings,
    TaskChildSettings,
    Text,
    TimeoutSettings,
    check_value,
)

for module in pkgutil.iter_modules(settings.__path__, f"{settings.__name__}."):
    importlib.import_module(module.name)
SECTIONS = Settings.__subclasses__()
KNOBS = [
    pytest.param(section, field, id=f"{section.__name__}.{field.name}")
    for section in SECTIONS
    for field in mi.type_info(section).fields
]


def kinds(field: mi.Field) -> tuple[mi.Type, ...]:
    return field.type.types if isinstance(field.type, mi.UnionType) else (field.type,)


def accepts(field: mi.Field, kind: type[mi.Type]) -> bool:
    return any(isinstance(member, kind) for member in kinds(field))


def knobs(*wanted: type[mi.Type]) -> list[Any]:
    return [p for p in KNOBS if any(accepts(p.values[1], kind) for kind in wanted)]


def refused(section: type[Settings], name: str, value: object) -> InvalidSetting:
    with pytest.raises(InvalidSetting) as caught:
        section(**{name: value})
    error = caught.value
    assert error.name == f"{section.__name__}.{name}"
    assert error.value is value
    assert f"{error.name} = {value!r}: must be " in str(error)
    assert isinstance(error, (CallerError, ValueError))
    return error


def test_every_kind_of_knob_is_covered_below() -> None:
    covered = (
        mi.IntType,
        mi.FloatType,
        mi.LiteralType,
        mi.StructType,
        mi.StrType,
        mi.BoolType,
        mi.VarTupleType,
        mi.DictType,
    )
    assert {p.id for p in knobs(*covered)} == {p.id for p in KNOBS}
    assert len(KNOBS) > 50


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.__name__)
def test_the_defaults_are_allowed(section: type[Settings]) -> None:
    assert section() == section()


@pytest.mark.parametrize(("section", "field"), knobs(mi.IntType, mi.FloatType))
@pytest.mark.parametrize(
    "value",
    [-1, -math.inf, math.inf, math.nan, 2**63, True, False, "1", "", [1], b"1"],
    ids=repr,
)
def test_a_number_out_of_range_or_of_another_type_is_refused(
    section: type[Settings], field: mi.Field, value: object
) -> None:
    refused(section, field.name, value)


@pytest.mark.parametrize(("section", "field"), knobs(mi.IntType))
def test_a_setting_that_counts_has_no_fractions(section: type[Settings], field: mi.Field) -> None:
    error = refused(section, field.name, 1e9 + 0.5)
    assert "whole number" in str(error)
    refused(section, field.name, 1e9)


@pytest.mark.parametrize(("section", "field"), knobs(mi.FloatType))
def test_a_time_is_a_number_of_seconds_whole_or_not(
    section: type[Settings], field: mi.Field
) -> None:
    assert field.name.endswith("_s")
    for value in (1, 1.5, 86_400):
        assert getattr(section(**{field.name: value}), field.name) == value
    assert "seconds" in str(refused(section, field.name, 1e10))


SMALLEST = {
    "AppSettings.async_children": 1,
    "AppSettings.async_limit": 1,
    "AppSettings.async_threads": 1,
    "AppSettings.loss_limit": 1,
    "AppSettings.max_live_sessions": 1,
    "AppSettings.ready_s": 0.001,
    "AppSettings.call_stop_s": 0,
    "AppSettings.child_stop_s": 0.001,
    "AppSettings.worker_stop_s": 0.001,
    "AppSettings.lease_s": 0.05,
    "AppSettings.revoke_ttl_s": 1,
    "TenantSettings.max_sessions": 0,
    "TenantSettings.max_cpu_s": 0,
    "CodeProfileSettings.warm": 0,
    "CodeProfileSettings.max_live": 0,
    "CodeProfileSettings.idle_timeout_s": 0.001,
    "CodeProfileSettings.max_age_s": 0.001,
    "CodeProfileSettings.checkpoint_every": 0,
    "CodeProfileSettings.checkpoint_idle_s": 0,
    "CodeProfileSettings.max_checkpoint_bytes": 1,
    "RunSettings.ttl_s": 1,
    "RunSettings.ended_ttl_s": 1,
    "RunSettings.max_snapshot_bytes": 1,
    "RunSettings.max_output_bytes": 1,
    "RunSettings.max_journal_bytes": 1,
    "NamedSessionSettings.ttl_s": 1,
    "NamedSessionSettings.known_ttl_s": 1,
    "NamedSessionSettings.max_waiting": 1,
    "NamedSessionSettings.hold_ttl_s": 1,
    "NamedSessionSettings.request_ttl_s": 1,
    "NamedSessionSettings.index_max": 1,
    "NamedSessionSettings.usage_window_s": 1,
    "LeaseSettings.lease_s": 0.05,
    "LeaseSettings.lapsed_ttl_s": 1,
    "StepSettings.ttl_s": 1,
    "StepSettings.max_output_bytes": 1,
    "ExecutionSettings.unfinished_ttl_s": 1,
    "ExecutionSettings.retention_s": 1,
    "ExecutionSettings.control_ttl_s": 1,
    "ExecutionSettings.recent_ttl_s": 1,
    "ExecutionSettings.group_ttl_s": 1,
    "ExecutionSettings.hold_ttl_s": 1,
    "ExecutionSettings.silent_retention_s": 0.1,
    "ExecutionSettings.recent_max": 1,
    "ExecutionSettings.group_failures": 1,
    "ExecutionSettings.retention_bytes": 1,
    "ExecutionSettings.live_bytes": 65536,
    "PublishSettings.window_bytes": 1024,
    "PublishSettings.event_bytes_max": 1024,
    "PublishSettings.rate_bytes_per_second": 1024,
    "PublishSettings.total_bytes": 1048576,
    "PublishSettings.batch_max": 1,
    "PublishSettings.claim_wait_s": 0,
    "PublishSettings.end_wait_s": 0,
    "PublishSettings.cancel_grace_s": 0,
    "PublishSettings.replicas": 0,
    "PublishSettings.replica_wait_s": 0.001,
    "ExecutorSettings.max_waiting": 0,
    "ExecutorSettings.async_limit": 1,
    "ExecutorSettings.switch_interval_s": 1e-6,
    "ExecutorSettings.unresponsive_loop_s": 0.001,
    "OutputSettings.window_bytes": 1,
    "OutputSettings.chunk_bytes": 1,
    "OutputSettings.flush_interval_s": 0.0001,
    "InputSettings.timeout_s": 0.001,
    "LimitSettings.memory_bytes": 64 * MIB,
    "LimitSettings.cpu_time_s": 0.001,
    "LimitSettings.output_bytes": 1,
    "LimitSettings.file_bytes": 1,
    "LimitSettings.open_files": 32,
    "DiagnosticSettings.heartbeat_interval_s": 0.01,
    "DiagnosticSettings.summary_names": 0,
    "TaskChildSettings.async_limit": 1,
    "TaskChildSettings.async_threads": 1,
    "TaskChildSettings.log_level": 0,
    "SandboxSettings.max_processes": 0,
    "SandboxSettings.max_threads": 16,
    "SandboxSettings.max_disk_bytes": 0,
    "TimeoutSettings.ready_s": 0.001,
    "TimeoutSettings.warmup_s": 0.001,
    "TimeoutSettings.shutdown_s": 0.001,
    "TimeoutSettings.grace_s": 0,
    "TimeoutSettings.drain_s": 0,
    "TimeoutSettings.stack_s": 0,
    "TimeoutSettings.idle_s": 0.001,
    "TimeoutSettings.unresponsive_s": 0.001,
    "RoutingSettings.control_weight": 1,
    "RoutingSettings.bulk_weight": 1,
    "RoutingSettings.read_bytes": 4096,
    "RoutingSettings.session_queue": 1,
    "RoutingSettings.session_queue_bytes": 1,
    "RoutingSettings.interceptor_budget_s": 0.0001,
    "RoutingSettings.interceptor_overruns": 1,
    "RoutingSettings.quarantine_queue": 1,
    "RoutingSettings.run_bytes": 1,
    "PoolSettings.max_sessions": 1,
    "PoolSettings.idle_timeout_s": 0.001,
    "PoolSettings.max_uses": 1,
    "PoolSettings.max_age_s": 0.001,
    "PoolSettings.max_growth_bytes": 1,
    "PoolSettings.max_rss_bytes": 1,
    "PoolSettings.breaker_failures": 1,
    "PoolSettings.breaker_reset_s": 0.001,
    "Profile.template_timeout_s": 0.001,
    "RetrySettings.attempts": 1,
    "RetrySettings.first_delay_s": 0,
    "RetrySettings.max_delay_s": 0,
    "ConnectionSettings.connect_timeout_s": 0.001,
    "ConnectionSettings.reply_timeout_s": 0.001,
    "ConnectionSettings.max_connections": 1,
    "ConnectionSettings.replicas": 0,
    "ConnectionSettings.replica_wait_s": 0.001,
    "HistorySettings.ttl_s": 0.001,
    "HistorySettings.max_item_bytes": 1,
    "HistorySettings.max_items": 1,
    "HistorySettings.max_bytes": 1,
    "HistorySettings.max_quarantined": 1,
}
SPECIAL = {"ChildSettings.max_frame_bytes", "PoolSettings.min_idle"}
"""Bounded by another knob as well; they have tests of their own."""


def test_the_bounds_below_are_those_of_every_number() -> None:
    assert {p.id for p in knobs(mi.IntType, mi.FloatType)} == SMALLEST.keys() | SPECIAL


@pytest.mark.parametrize(
    ("section", "field"), [p for p in knobs(mi.IntType, mi.FloatType) if p.id in SMALLEST]
)
def test_a_number_takes_its_least_value_and_nothing_below(
    section: type[Settings], field: mi.Field
) -> None:
    least = SMALLEST[f"{section.__name__}.{field.name}"]
    given: dict[str, Any] = {"min_idle": 0} if section is PoolSettings else {}
    assert getattr(section(**given | {field.name: least}), field.name) == least
    below = least - 1 if accepts(field, mi.IntType) else least * 0.99 - 1e-9
    refused(section, field.name, below)


@pytest.mark.parametrize(("section", "field"), KNOBS)
def test_none_is_accepted_only_where_the_type_allows_it(
    section: type[Settings], field: mi.Field
) -> None:
    if accepts(field, mi.NoneType):
        assert getattr(section(**{field.name: None}), field.name) is None
    else:
        refused(section, field.name, None)


@pytest.mark.parametrize(("section", "field"), knobs(mi.LiteralType))
def test_a_choice_takes_what_it_names_and_nothing_else(
    section: type[Settings], field: mi.Field
) -> None:
    (literal,) = (kind for kind in kinds(field) if isinstance(kind, mi.LiteralType))
    for value in literal.values:
        assert getattr(section(**{field.name: value}), field.name) == value
    for value in ("", literal.values[0].swapcase(), "no such thing", 1, None):
        error = refused(section, field.name, value)
        assert all(repr(allowed) in str(error) for allowed in literal.values)


@pytest.mark.parametrize(
    ("section", "field"),
    knobs(mi.StrType, mi.BoolType, mi.VarTupleType, mi.DictType, mi.StructType),
)
@pytest.mark.parametrize("value", [5, b"x", ..., ["x"], Path("x"), {1: 2}], ids=repr)
def test_text_switches_groups_and_sections_refuse_other_types(
    section: type[Settings], field: mi.Field, value: object
) -> None:
    refused(section, field.name, value)


@pytest.mark.parametrize(("section", "field"), knobs(mi.VarTupleType))
def test_a_group_is_a_tuple_and_no_text_in_its_place(
    section: type[Settings], field: mi.Field
) -> None:
    for value in ("*secret*", ("ok", 5, None), (b"x",), (True,)):
        refused(section, field.name, value)


@pytest.mark.parametrize(("section", "field"), knobs(mi.BoolType))
def test_a_switch_is_no_number(section: type[Settings], field: mi.Field) -> None:
    refused(section, field.name, 1)
    refused(section, field.name, 0)


def test_the_environment_is_text_for_text() -> None:
    for env in ({"A": 1}, {1: "a"}, {"A": None}):
        refused(SessionConfig, "env", env)
    assert SessionConfig(env={"A": "b"}).env == {"A": "b"}


def test_a_version_must_be_offered() -> None:
    assert "at least 1 of them" in str(refused(SessionConfig, "protocol_versions", ()))


def test_a_frame_is_no_larger_than_its_length_field_allows() -> None:
    for value in (64 * 1024 - 1, 2**32):
        refused(ChildSettings, "max_frame_bytes", value)
    assert ChildSettings(max_frame_bytes=2**32 - 1).max_frame_bytes == 2**32 - 1


def test_a_chunk_of_output_always_fits_into_a_frame() -> None:
    """Four bytes a character, and the rest of the message."""
    output = OutputSettings(chunk_bytes=100_000)
    assert ChildSettings(output=output, max_frame_bytes=500_000).output is output
    with pytest.raises(
        InvalidSetting,
        match=r"chunk_bytes = 100000: .* ChildSettings.max_chunk_bytes \(99999",
    ):
        ChildSettings(output=output, max_frame_bytes=499_999)


def test_no_more_sessions_idle_than_there_may_be() -> None:
    assert PoolSettings(min_idle=4, max_sessions=4).min_idle == 4
    assert "at most PoolSettings.max_sessions (3)" in str(refused_pool(min_idle=4, max_sessions=3))
    refused(PoolSettings, "min_idle", -1)


@pytest.mark.parametrize(("interval_s", "unresponsive_s"), [(10.0, 10.0), (20, 10.0), (2.0, 0.5)])
def test_silence_between_two_heartbeats_is_no_fault(
    interval_s: float, unresponsive_s: float
) -> None:
    """A pool would replace its idle sessions for ever."""
    child = ChildSettings(diagnostics=DiagnosticSettings(heartbeat_interval_s=interval_s))
    timeouts = TimeoutSettings(unresponsive_s=unresponsive_s)
    with pytest.raises(InvalidSetting) as caught:
        SessionConfig(child=child, timeouts=timeouts)
    assert caught.value.name == "TimeoutSettings.unresponsive_s"
    assert f"TimeoutSettings.unresponsive_s = {unresponsive_s}" in str(caught.value)
    assert f"DiagnosticSettings.heartbeat_interval_s ({interval_s})" in str(caught.value)
    kept = TimeoutSettings(unresponsive_s=interval_s + 0.001)
    assert SessionConfig(child=child, timeouts=kept).timeouts is kept


def refused_pool(**values: int) -> InvalidSetting:
    with pytest.raises(InvalidSetting) as caught:
        PoolSettings(**values)
    assert caught.value.name == "PoolSettings.min_idle"
    return caught.value


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.__name__)
def test_a_section_cannot_be_changed_afterwards(section: type[Settings]) -> None:
    made = section()
    for field in msgspec.structs.fields(section):
        with pytest.raises(AttributeError):
            setattr(made, field.name, getattr(made, field.name))


def test_a_knob_that_does_not_exist_is_refused() -> None:
    with pytest.raises(TypeError, match="colour"):
        OutputSettings(colour="red")  # type: ignore[call-arg]


def test_settings_for_the_child_are_checked_again_where_they_arrive() -> None:
    wire = msgspec.msgpack.encode({"output": {"window_bytes": 0}})
    with pytest.raises(msgspec.ValidationError, match=r">= 1 - at `\$.output.window_bytes`"):
        msgspec.msgpack.decode(wire, type=ChildSettings)


def test_the_settings_of_a_child_round_trip() -> None:
    config = ChildSettings(output=OutputSettings(backpressure="drop_oldest", chunk_bytes=1000))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=ChildSettings) == config
    assert "drop_oldest" in get_args(settings.Backpressure)


def test_a_sandbox_has_a_default_for_every_limit_that_is_not_given() -> None:
    sandbox = SandboxSettings(max_disk_bytes=5 * MIB)
    child = ChildSettings(sandbox=sandbox, limits=LimitSettings(open_files=64))
    assert None not in msgspec.structs.astuple(child.limits)
    assert (child.limits.open_files, child.limits.file_bytes) == (64, 5 * MIB)
    assert Profile.sandbox(sandbox).session.child.limits.file_bytes == 5 * MIB
    assert msgspec.json.decode(msgspec.json.encode(child), type=ChildSettings) == child


def test_trusted_code_has_no_limits_by_default() -> None:
    assert ChildSettings(tasks=TaskChildSettings()).limits == ChildSettings().limits
    assert set(msgspec.structs.astuple(ChildSettings().limits)) == {None}


@pytest.mark.parametrize("value", ["", "\ud800", b"text", 5, None])
def test_text_that_is_empty_or_no_utf_8_is_refused_by_its_name_and_value(value: object) -> None:
    check_value("tool", "pay", Text)
    with pytest.raises(InvalidSetting, match="tool") as caught:
        check_value("tool", value, Text)
    assert caught.value.value == value
    check_value("tool", None, Text | None)


def test_a_setting_of_several_texts_names_its_expected_type() -> None:
    with pytest.raises(InvalidSetting, match="a tuple of str"):
        check_value("roles", ["ann"], tuple[Text, ...])
