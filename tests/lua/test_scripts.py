"""Every script: its header, its declaration and its first lines say the same; none is too long."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import redis

from capsule_tasks import storage
from capsule_tasks.errors import InternalError
from capsule_tasks.storage.keys import (
    ApprovalKeys,
    ExecutionKeys,
    GroupKeys,
    HeldKeys,
    RecentKeys,
    RevokeKeys,
    RunKeys,
    SessionKeys,
    StepKeys,
    WorkerKeys,
    losses_key,
    run_place,
    unacked_marks,
    worker_index,
)
from capsule_tasks.storage.scripts import Code, Script, parsed_header, text_of

FOLDER = Path(storage.__file__).parent / "lua"
MODULES = [
    importlib.import_module(f"{storage.__name__}.{module.name}")
    for module in pkgutil.iter_modules(storage.__path__)
    if module.name != "__main__"
]
DECLARED = {
    value.name: value
    for module in MODULES
    for value in vars(module).values()
    if isinstance(value, Script)
}
FILES = sorted(path.stem for path in FOLDER.glob("*.lua"))
each_script = pytest.mark.parametrize("name", FILES)


def code_of(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if not line.startswith("--")).strip()


def test_every_file_is_declared_once_and_every_declaration_has_its_file() -> None:
    assert sorted(DECLARED) == FILES
    assert len(FILES) > 5


@each_script
def test_the_header_names_what_callers_pass(name: str) -> None:
    header = parsed_header(text_of(name))
    script = DECLARED[name]
    assert tuple(key.name for key in header.keys) == script.keys
    assert header.args == script.args
    assert header.purpose
    assert "DONE" in header.returns
    assert header.refuses


def spelled(script_name: str, key_name: str) -> str:
    """A key of a script as the package spells it."""
    approvals = ApprovalKeys()
    orders = approvals.of_call("<agent>", "<tool>")
    if script_name.startswith("approvals_"):
        names = ("all", "due", "entries", "agent", "tool", "both")
        return approvals.all if key_name == "order" else orders[names.index(key_name)]
    alone = {
        "workers": worker_index(),
        "revokes": RevokeKeys().revokes,
        "losses": losses_key("<execution>", "<attempt>"),
        "place": run_place("<run>"),
    }
    if key_name in alone:
        return alone[key_name]
    if script_name.startswith("unacked_"):
        return "unacked_index" if key_name == "index" else unacked_marks("unacked_index")
    owners = {
        "execution_": ExecutionKeys("<execution>"),
        "worker_": HeldKeys("<incarnation>"),
        "recent_": RecentKeys(),
        "group_": GroupKeys("<group>"),
        "lease_": WorkerKeys("<incarnation>"),
        "step_": StepKeys("<execution>"),
    }
    for prefix, owner in owners.items():
        if script_name.startswith(prefix):
            return str(getattr(owner, key_name))
    if key_name == "stage":
        return SessionKeys("<session>").stage("<operation>")
    if key_name in ("taken", "taken...", "corrupt"):
        return SessionKeys("<session>").popped_by("<operation>")
    is_run = script_name.startswith("run_")
    return str(
        getattr(RunKeys("<session>", "<run>") if is_run else SessionKeys("<session>"), key_name)
    )


@each_script
def test_the_header_spells_keys_as_they_are(name: str) -> None:
    for key in parsed_header(text_of(name)).keys:
        assert spelled(name, key.name).replace("%3C", "<").replace("%3E", ">") == key.shape


@each_script
def test_keys_and_arguments_are_bound_on_the_first_lines(name: str) -> None:
    header = parsed_header(text_of(name))
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
    shared = "".join(code_of((FOLDER / "lib" / f"{part}.lua").read_text()) for part in uses)
    unused = dict(
        re.findall(r"^local function (\w+)(\(.*?)^end$", shared, re.MULTILINE | re.DOTALL)
    )
    while called := [name for name in unused if re.search(rf"\b{name}\(", code)]:
        code += "".join(unused.pop(name) for name in called)
    return code


@each_script
def test_every_code_it_answers_is_in_the_header(name: str) -> None:
    header = parsed_header(text_of(name))
    code = with_what_it_calls(code_of(text_of(name)), header.uses)
    answered = set(re.findall(rf"\b({'|'.join(Code.__members__)})\b", code))
    assert answered == set(re.findall(r"\{(\w+)", header.returns + header.refuses))


@each_script
def test_it_is_short_and_uses_what_exists(name: str) -> None:
    assert len(text_of(name).splitlines()) <= 120
    for part in parsed_header(text_of(name)).uses:
        assert (FOLDER / "lib" / f"{part}.lua").exists()


@pytest.mark.parametrize("server", ["valkey_url", "redis62_url"])
@each_script
def test_the_server_compiles_it(name: str, server: str, request: pytest.FixtureRequest) -> None:
    with redis.Redis.from_url(request.getfixturevalue(server)) as client:
        assert client.script_load(DECLARED[name].source) == DECLARED[name].sha


def test_a_header_that_lacks_a_part_is_refused() -> None:
    with pytest.raises(InternalError, match="ARGV, REFUSES, RETURNS, USES"):
        parsed_header("-- Purpose\n--\n-- KEYS\n--   a  list  b\nreturn 1")
