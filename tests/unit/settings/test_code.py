"""The profiles of code: how an app names them, and the sessions that they make."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery

from capsule_tasks.client.configuration import code_profiles, tenant_settings
from capsule_tasks.errors import InvalidSetting
from capsule_tasks.settings import (
    ChildSettings,
    CodeProfileSettings,
    OutputSettings,
    SessionConfig,
    TenantSettings,
    scrubbed_environment,
)


def profiles(value: Any) -> dict[str, CodeProfileSettings]:
    app = Celery("shop", set_as_current=False)
    app.conf.capsule_code_profiles = value
    return code_profiles(app)


def test_without_a_setting_there_is_one_sandbox() -> None:
    assert profiles(None) == {"sandbox": CodeProfileSettings()}


def test_limits_and_sandbox_are_dicts_too() -> None:
    found = profiles(
        {
            "small": {
                "limits": {"cpu_time_s": 1},
                "sandbox": {"readable": ["/data"], "network": "open"},
                "imports": ["json"],
            }
        }
    )["small"]
    assert found.limits.cpu_time_s == 1
    assert (found.sandbox.readable, found.sandbox.network) == (("/data",), "open")
    assert found.imports == ("json",)


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ({"gpu": 1}, "capsule_code_profiles['gpu']"),
        ({"gpu": {"isolation": "some"}}, "capsule_code_profiles['gpu']['isolation']"),
        ({"gpu": {"memory": 1}}, "capsule_code_profiles['gpu']['memory']"),
        ({"gpu": {"limits": {"cpu": 1}}}, "capsule_code_profiles['gpu']['limits']['cpu']"),
        (
            {"gpu": {"limits": {"cpu_time_s": -1}}},
            "capsule_code_profiles['gpu']['limits']['cpu_time_s']",
        ),
        ({"gpu": {"limits": 1}}, "capsule_code_profiles['gpu']['limits']"),
        ({"": {}}, "capsule_code_profiles"),
        ({1: {}}, "capsule_code_profiles"),
        ([], "capsule_code_profiles"),
    ],
)
def test_a_wrong_value_is_refused_under_the_name_that_the_app_has_for_it(
    value: Any, name: str
) -> None:
    with pytest.raises(InvalidSetting) as refused:
        profiles(value)
    assert refused.value.name == name


def test_a_profile_confines_its_sessions_and_uses_each_once() -> None:
    base = SessionConfig(child=ChildSettings(output=OutputSettings(backpressure="drop_oldest")))
    made = CodeProfileSettings(warmup="import json").profile(base)
    assert made.session.env == scrubbed_environment()
    assert made.session.child.sandbox is not None
    assert made.session.child.limits.memory_bytes is not None, "a sandbox has limits by default"
    assert made.session.child.output.backpressure == "drop_oldest"
    assert (made.session.warmup, made.pool.fresh, made.pool.min_idle) == ("import json", True, 0)


def test_a_profile_without_isolation_is_not_confined() -> None:
    made = CodeProfileSettings(isolation="none").profile(SessionConfig())
    assert made.session.child.sandbox is None
    assert made.session.env is None


def test_tenants_have_limits_of_their_own() -> None:
    app = Celery("shop", set_as_current=False)
    assert tenant_settings(app) == {}
    app.conf.capsule_tenants = {"*": {"max_sessions": 5}, "acme": {"max_cpu_s": 60}}
    assert tenant_settings(app) == {
        "*": TenantSettings(max_sessions=5),
        "acme": TenantSettings(max_cpu_s=60),
    }


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ({"acme": 1}, "capsule_tenants['acme']"),
        ({"acme": {"max_sessions": -1}}, "capsule_tenants['acme']['max_sessions']"),
        ({"acme": {"sessions": 1}}, "capsule_tenants['acme']['sessions']"),
        ({1: {}}, "capsule_tenants"),
    ],
)
def test_wrong_limits_of_tenants_are_refused(value: Any, name: str) -> None:
    app = Celery("shop", set_as_current=False)
    app.conf.capsule_tenants = value
    with pytest.raises(InvalidSetting) as refused:
        tenant_settings(app)
    assert refused.value.name == name
