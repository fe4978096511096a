"""Every script: its header, its declaration and its first lines say the same; none is too long."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import typing
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis

from capsule_tasks import storage
from capsule_tasks.errors import InternalError
from capsule_tasks.storage.keys import (
    CallKeys,
    ExecutionKeys,
    GroupKeys,
    HostKeys,
    NamedSessionKeys,
    OwnerKeys,
    RecentKeys,
    RevokeKeys,
    RunEntryKeys,
    RunKeys,
    SessionIndexKeys,
    SessionKeys,
    StepKeys,
    TenantKeys,
    WantedKeys,
    WorkerKeys,
    losses_key,
    renewal_marks,
    run_location,
    run_owners,
    worker_index,
)
from capsule_tasks.storage.scripts import Code, Script, script, sections_of, text_of
from tests.script_headers import header_of

FOLDER = Path(storage.__file__).parent / "lua"
MODULES = [
    importlib.import_module(module.name)
    for module in pkgutil.walk_packages(storage.__path__, f"{storage.__name__}.")
    if not module.name.endswith("__main__")
]
DECLARED: dict[str, Script[...]] = {
    value.name: value
    for module in MODULES
    for value in vars(module).values()
    if isinstance(value, Script)
}
FILES = sorted(
    str(path.relative_to(FOLDER).with_suffix(""))
    for path in FOLDER.rglob("*.lua")
    if path.parent.name != "lib"
)
each_script = pytest.mark.parametrize("name", FILES)


def code_of(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if not line.startswith("--")).strip()


def test_every_file_is_declared_once_and_every_declaration_has_its_file() -> None:
    assert sorted(DECLARED) == FILES
    assert len(FILES) > 5


@each_script
def test_the_header_has_every_part(name: str) -> None:
    header = header_of(name)
    assert header.purpose
    assert "DONE" in header.returns
    assert header.refuses


def parameter_of(argument: str) -> str:
    return f"{argument.removesuffix('...')}s" if argument.endswith("...") else argument


@each_script
def test_arguments_of_a_call_are_in_the_order_of_the_header(name: str) -> None:
    header = header_of(name)
    declared = DECLARED[name]
    parameters = inspect.signature(declared.call).parameters.values()
    hints = typing.get_type_hints(inspect.unwrap(declared.call))
    words = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]
    places = [each.name for each in parameters if each.kind is not each.KEYWORD_ONLY]
    implied = ({"age_ms", "channel"} & {*header.args}) - {*words}
    assert words == [parameter_of(each) for each in header.args if each not in implied]
    left = [key.name for key in header.keys if key.name.removesuffix("...") not in places]
    if left:
        made = inspect.signature(hints["keys"]).parameters.values()
        keys_of_an_id = hints["keys"](*("id" for each in made if each.default is each.empty))
        assert all(hasattr(keys_of_an_id, key) for key in [*left, *implied - {"age_ms"}])
    its = {key: f"its {key}" for key in [*left, "channel"]}
    given: dict[str, Any] = {"keys": SimpleNamespace(**its)}
    for key in header.keys:
        own = key.name.removesuffix("...")
        given[own] = [f"a {own}", f"another {own}"] if key.name.endswith("...") else f"a {own}"
    passed = {each: [each, each] if f"{each[:-1]}..." in header.args else each for each in words}
    call = declared.call(*(given[place] for place in places), **passed)
    names = [key.name.removesuffix("...") for key in header.keys]
    keys = [f"its {own}" if own in left else given[own] for own in names]
    passed |= {"age_ms": 0} | ({} if "channel" in words else {"channel": "its channel"})
    args = [passed[parameter_of(each)] for each in header.args]
    assert list(call.keys) == flat(keys)
    assert call.args == flat(args)


def flat(values: list[Any]) -> list[Any]:
    return [each for value in values for each in (value if isinstance(value, list) else [value])]


def test_a_call_with_a_wrong_name_is_refused() -> None:
    call: Any = DECLARED["workers/lease_renew"].call
    keys = WorkerKeys("w")
    with pytest.raises(TypeError, match="'lapsed_ttl_ms'"):
        call(keys, token="t", lease_ms=1)
    with pytest.raises(TypeError, match="'lapsed_ms'"):
        call(keys, token="t", lease_ms=1, lapsed_ms=1)


def of_another_order(
    keys: WorkerKeys, *, lease_ms: int, token: str, lapsed_ttl_ms: int
) -> None: ...
def that_lacks_one(keys: WorkerKeys, *, token: str, lease_ms: int) -> None: ...
def without_its_key(*, token: str, lease_ms: int, lapsed_ttl_ms: int) -> None: ...
def of_another_key(other: str, *, token: str, lease_ms: int, lapsed_ttl_ms: int) -> None: ...
def without_names(keys: WorkerKeys, token: str, lease_ms: int, lapsed_ttl_ms: int) -> None: ...


@pytest.mark.parametrize(
    "declaration",
    [of_another_order, that_lacks_one, without_its_key, of_another_key, without_names],
)
def test_a_declaration_that_does_not_fit_the_header_is_refused(declaration: Any) -> None:
    with pytest.raises(
        InternalError, match=r"'workers/lease_renew' takes KEYS \['worker'\] and ARGV"
    ):
        script("workers/lease_renew")(declaration)


def spelled(script_name: str, key_name: str) -> str:
    """A key of a script as the package spells it."""
    indexes = {
        "approvals": CallKeys("<agent>", "<tool>"),
        "index": RunEntryKeys("<agent>", "<status>", "<session>"),
    }
    index = script_name.removeprefix("runs/").partition("_")[0]
    if index in indexes:
        return str(getattr(indexes[index], "all" if key_name == "order" else key_name))
    alone = {
        "workers": worker_index(),
        "revokes": RevokeKeys().revokes,
        "owners": run_owners(),
        "losses": losses_key("<execution>", "<attempt>"),
        "location": run_location("<run>"),
    }
    if key_name in alone:
        return alone[key_name]
    if key_name == "reply":
        return NamedSessionKeys("<session>").reply("<request>")
    if key_name in ("staged", "previous"):
        return NamedSessionKeys("<session>").checkpoint("<generation>")
    if script_name == "workers/unacked_claim":
        return "unacked_index" if key_name == "index" else renewal_marks("unacked_index")
    owners = {
        "executions/recent_": RecentKeys(),
        "executions/group_": GroupKeys("<group>"),
        "executions/step_": StepKeys("<execution>"),
        "executions/": ExecutionKeys("<execution>"),
        "workers/": WorkerKeys("<incarnation>"),
        "sessions/want": WantedKeys("<profile>"),
        "sessions/unwant": WantedKeys("<profile>"),
        "sessions/take_wanted": WantedKeys("<profile>"),
        "sessions/h": HostKeys("<incarnation>"),
        "runs/h": OwnerKeys("<incarnation>"),
        "sessions/index_": SessionIndexKeys(),
        "sessions/tenant_": TenantKeys("<tenant>"),
        "sessions/": NamedSessionKeys("<session>"),
    }
    for prefix, owner in owners.items():
        if script_name.startswith(prefix):
            return str(getattr(owner, key_name))
    if key_name == "staging":
        return SessionKeys("<session>").staging("<operation>")
    if key_name in ("taken", "taken...", "corrupt"):
        return SessionKeys("<session>").popped_by("<operation>")
    is_run = script_name.startswith("runs/")
    return str(
        getattr(RunKeys("<session>", "<run>") if is_run else SessionKeys("<session>"), key_name)
    )


@each_script
def test_the_header_spells_keys_as_they_are(name: str) -> None:
    for key in header_of(name).keys:
        assert spelled(name, key.name).replace("%3C", "<").replace("%3E", ">") == key.shape


@each_script
def test_keys_and_arguments_are_bound_on_the_first_lines(name: str) -> None:
    header = header_of(name)
    first_lines = code_of(text_of(name)).partition("\n\n")[0]
    bound = re.findall(r"local ([\w, ]+?) =", first_lines)
    names = [one.strip() for group in bound for one in group.split(",")]
    assert [n.removesuffix("_key") for n in names if n.endswith("_key")] == [
        key.name for key in header.keys if not key.name.endswith("...")
    ]
    fixed = [argument for argument in header.args if not argument.endswith("...")]
    others = [n for n in names if not n.endswith("_key") and not n.startswith("FIRST")]
    assert others == fixed
    if len(fixed) < len(header.args):
        assert f"FIRST = {len(fixed) + 1}" in first_lines


def with_what_it_calls(code: str, uses: Sequence[str]) -> str:
    """The code with the shared functions that it calls, and those that they call."""
    shared = "\n".join(code_of((FOLDER / "lib" / f"{part}.lua").read_text()) for part in uses)
    unused = dict(
        re.findall(r"^local function (\w+)(\(.*?)^end$", shared, re.MULTILINE | re.DOTALL)
    )
    while called := [name for name in unused if re.search(rf"\b{name}\(", code)]:
        code += "".join(unused.pop(name) for name in called)
    return code


@each_script
def test_every_code_it_answers_is_in_the_header(name: str) -> None:
    header = header_of(name)
    code = with_what_it_calls(code_of(text_of(name)), header.uses)
    answered = set(re.findall(rf"\b({'|'.join(Code.__members__)})\b", code))
    assert answered == set(re.findall(r"\{(\w+)", header.returns + header.refuses))


@each_script
def test_a_script_is_short_and_uses_commands_that_exist(name: str) -> None:
    assert len(text_of(name).splitlines()) <= 120
    for part in header_of(name).uses:
        assert (FOLDER / "lib" / f"{part}.lua").exists()


@pytest.mark.parametrize("server", ["valkey_url", "redis62_url"])
@each_script
def test_the_server_compiles_it(name: str, server: str, request: pytest.FixtureRequest) -> None:
    with redis.Redis.from_url(request.getfixturevalue(server)) as client:
        assert client.script_load(DECLARED[name].source) == DECLARED[name].sha


def test_a_header_that_lacks_a_part_is_refused() -> None:
    with pytest.raises(InternalError, match="ARGV, REFUSES, RETURNS, USES"):
        sections_of("-- Purpose\n--\n-- KEYS\n--   a  list  b\nreturn 1")
