"""The page on the architecture, the page on tests, and the code say the same."""

from __future__ import annotations

import ast
import builtins
import inspect
import re
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any, get_args
from urllib.parse import unquote

import pytest

from capsule_tasks import storage
from capsule_tasks.executions import states
from capsule_tasks.protocol.events import EventMessage, UnknownEvent
from capsule_tasks.realtime import call_table
from capsule_tasks.realtime.session import life
from capsule_tasks.storage import keys
from capsule_tasks.storage.runs import types
from capsule_tasks.storage.scripts import text_of
from tests import architecture_page
from tests.architecture_page import PAGE, ROOT
from tests.script_headers import header_of

PACKAGE = ROOT / "capsule_tasks"

# --- layers and folders --------------------------------------------------------------------------


def existing(line: str) -> str:
    """A line of layers without the packages that do not exist yet."""
    for sign in (" : ", " | "):
        if sign in line:
            return sign.join(filter(None, map(existing, line.split(sign))))
    name = line.strip("()")
    is_there = (PACKAGE / name / "__init__.py").exists() or (PACKAGE / f"{name}.py").exists()
    return name if is_there else ""


def test_the_layers_are_those_that_are_checked() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (layers,) = [c["layers"] for c in contracts["contracts"] if c["type"] == "layers"]
    (block,) = architecture_page.blocks("layers")
    assert block.splitlines() == [line for line in map(existing, layers) if line]


def test_the_table_has_every_folder() -> None:
    (block,) = architecture_page.blocks("layers")
    rows = [row[0].strip("`") for row in architecture_page.rows_under("folder")]
    assert sorted(rows) == sorted(re.findall(r"\w+", block))


def test_the_table_has_every_sub_folder() -> None:
    listed = [
        name
        for row in architecture_page.rows_under("sub-folder")
        for name in re.findall(r"[\w/]+", row[0])
    ]
    inner = (path.parent.relative_to(PACKAGE) for path in PACKAGE.glob("*/*/__init__.py"))
    assert sorted(listed) == sorted(map(str, inner))


def test_no_folder_and_no_module_has_grown_too_large() -> None:
    modules = [path for path in PACKAGE.rglob("*.py") if not path.name.startswith("__")]
    side_by_side = Counter(path.parent for path in modules)
    assert [str(folder) for folder, count in side_by_side.items() if count > 14] == []
    lines = {path: len(path.read_text().splitlines()) for path in modules}
    assert [str(path) for path, count in lines.items() if count > 500] == []


# --- tests ---------------------------------------------------------------------------------------

TESTS = ROOT / "tests"
README = (TESTS / "README.md").read_text()
MIRRORS = {
    "unit": (PACKAGE, ".py"),
    "contract": (PACKAGE, ".py"),
    "lua": (PACKAGE / "storage/lua", ".lua"),
}
"""Folders of tests, each with the folder and the kind of files whose paths its tests have."""


def subjects(folder: Path, suffix: str) -> Iterator[str]:
    """Names a test module may have: of a module or script, of a sub-folder, or of the folder."""
    yield folder.name
    yield "scripts" if suffix == ".lua" else "settings"
    yield from (path.stem for path in folder.glob(f"*{suffix}"))
    yield from (path.parent.name for path in folder.glob("*/__init__.py"))


def test_no_module_of_tests_and_no_folder_of_helpers_has_grown_too_large() -> None:
    modules = [path for path in TESTS.rglob("*.py") if not path.name.startswith("__")]
    lines = {path: len(path.read_text().splitlines()) for path in modules}
    assert [str(path) for path, count in lines.items() if count > 500] == []
    side_by_side = Counter(
        path.parent for path in modules if not path.stem.startswith(("test_", "conftest"))
    )
    assert [str(folder) for folder, count in side_by_side.items() if count > 14] == []


@pytest.mark.parametrize("kind", MIRRORS)
def test_tests_have_the_path_of_what_they_test(kind: str) -> None:
    mirrored, suffix = MIRRORS[kind]
    astray = []
    for path in sorted((TESTS / kind).rglob("test_*.py")):
        place = path.parent.relative_to(TESTS / kind)
        if kind == "unit" and place == Path():  # what concerns the whole repository
            continue
        name = path.stem.removeprefix("test_")
        names = set(subjects(mirrored / place, suffix))
        is_named = any(f"{name}_".startswith(f"{each}_") for each in names)
        is_group = suffix == ".lua" and any(each.startswith(f"{name}_") for each in names)
        if not (is_named or is_group):
            astray.append(str(path.relative_to(TESTS)))
    assert astray == []


def readme_paths() -> Iterator[Path]:
    """Every file or folder of tests that the page names, with its folder or without."""
    folder = "."
    for name in re.findall(r"`([\w/.]*\w/?)(?<!_)`", README):
        if "/" in name and name.split("/")[0] in {path.name for path in TESTS.iterdir()}:
            folder = str(Path(name).parent)
            yield TESTS / name
        elif re.fullmatch(r"test_\w+\.py", name):
            yield TESTS / folder / name


def readme_tests() -> Iterator[tuple[str, str]]:
    """Every `module: test, test` of integration tests that a table names."""
    for row in re.findall(r"^\|.*\| (.*) \|$", README, re.MULTILINE):
        for group in re.sub(r"`[^`]*`", "", row).split(";"):
            module, found, names = group.strip(" ,").partition(": ")
            if found and re.fullmatch(r"\w+", module):
                yield from ((module, name) for name in re.findall(r"\w+", names))


def test_the_page_names_files_and_tests_that_exist() -> None:
    assert len(list(readme_paths())) > 80
    assert len(list(readme_tests())) > 80
    assert [str(path) for path in readme_paths() if not path.exists()] == []
    missing = [
        f"{module}::{name}"
        for module, name in readme_tests()
        if not (path := TESTS / f"integration/test_{module}.py").exists()
        or f"def test_{name}(" not in path.read_text()
    ]
    assert missing == []


@pytest.mark.parametrize("folder", ["integration", "acceptance", "chaos"])
def test_the_page_names_every_module_whose_path_does_not_name_its_subject(folder: str) -> None:
    named = {path.resolve() for path in readme_paths()}
    named |= {TESTS / f"integration/test_{module}.py" for module, _ in readme_tests()}
    assert (
        sorted(path.name for path in (TESTS / folder).glob("test_*.py") if path not in named) == []
    )


# --- links ---------------------------------------------------------------------------------------

LINKS = sorted(set(re.findall(r"\[([^\]]+)\]\(([^)#]+)(?:#[^)]*)?\)", PAGE.read_text())))


def names_of(body: Iterable[ast.stmt]) -> Iterator[str]:
    """Functions, classes with their members, and constants."""
    for node in body:
        match node:
            case ast.ClassDef():
                yield node.name
                yield from (f"{node.name}.{name}" for name in names_of(node.body))
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield node.name
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                yield name


def test_there_are_links() -> None:
    assert len(LINKS) > 20


@pytest.mark.parametrize(("text", "target"), LINKS)
def test_a_link_leads_to_a_file_that_has_what_it_names(text: str, target: str) -> None:
    path = (PAGE.parent / target).resolve()
    assert path.exists()
    if path.suffix == ".py" and text.startswith("`"):
        assert text.strip("`") in set(names_of(ast.parse(path.read_text()).body))
    elif path.suffix == ".lua":
        assert path.as_posix().endswith(text)


def test_a_link_within_the_page_leads_to_a_heading() -> None:
    headings = re.findall(r"^#+ (.+)$", PAGE.read_text(), re.MULTILINE)
    places = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
    assert set(re.findall(r"\]\(#([^)]+)\)", PAGE.read_text())) <= places


# --- names ---------------------------------------------------------------------------------------


@cache
def trees() -> dict[Path, ast.Module]:
    """Each module of the package, parsed: not when tests are collected, as it takes a second."""
    return {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


def test_every_name_in_the_page_exists_in_the_package() -> None:
    text = re.sub(r"^```.*?^```", "", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    spans = set(re.findall(r"`([^`\n]+)`", text))
    named = {name for span in spans for name in re.findall(r"\b(?:[A-Z]\w*[a-z]|on_\w)\w*", span)}
    assert len(named) > 100
    defined = {name for tree in trees().values() for name in names_of(tree.body)}
    known = {part for name in defined for part in name.split(".")} | set(dir(builtins))
    assert named - known == set()


def users_of(name: str) -> set[str]:
    """The modules that define a class of the protocol, or use it."""
    return {
        str(path.relative_to(ROOT))
        for path, tree in trees().items()
        for node in ast.walk(tree)
        if (isinstance(node, ast.ClassDef | ast.alias) and node.name == name)
        or (isinstance(node, ast.Attribute) and node.attr == name)
    } - {"capsule_tasks/cli/screen.py"}  # has the Progress of rich


@pytest.mark.parametrize("example", ["Progress", "Stacks"])
def test_a_new_kind_of_event_is_added_where_the_page_says(example: str) -> None:
    (where,) = [row[1] for row in architecture_page.rows_under("what") if f"`{example}`" in row[0]]
    linked = re.findall(r"\(\.\./(capsule_tasks/[^)]+)\)", where)
    assert sorted(linked) == sorted(users_of(example))


def test_the_guide_lists_every_kind_of_event() -> None:
    guide = (PAGE.parent / "executions.md").read_text()
    heads = " ".join(re.findall(r"^- `.*?:", guide, re.MULTILINE))
    kinds = {kind.__name__ for kind in (*get_args(EventMessage), UnknownEvent)}
    assert kinds <= set(re.findall(r"`(\w+)", heads))


# --- states --------------------------------------------------------------------------------------


def moves_of(axis: type[Enum]) -> dict[Any, Iterable[Any]]:
    return {state: state.to for state in axis}  # type: ignore[attr-defined]


DIAGRAMS: dict[str, Mapping[Any, Iterable[Any]]] = {
    "run of an execution": moves_of(states.Run),
    "claim of an execution": moves_of(states.Claim),
    "report of an execution": moves_of(states.Report),
    "acknowledgement of an execution": moves_of(states.Ack),
    "run": types.TRANSITIONS,
    "realtime session": life.TRANSITIONS,
    "call of a realtime session": call_table.TRANSITIONS,
}
"""Each diagram by its title, with the table that it draws."""
TITLED = re.compile(r"^---\ntitle: ([^\n]+)\n---\nstateDiagram-v2\n(.*)", re.DOTALL)
DRAWN = {
    title: re.findall(r"^ *(\S+) --> (\w+)", text, re.MULTILINE)
    for block in architecture_page.blocks("mermaid")
    for title, text in TITLED.findall(block)
}


def name_of(state: Any) -> str:
    return state.name.lower() if isinstance(state, Enum) else str(state)


def test_every_diagram_has_its_table() -> None:
    assert set(DRAWN) == set(DIAGRAMS)
    assert len(architecture_page.blocks("mermaid")) == len(DRAWN)


@pytest.mark.parametrize("title", DIAGRAMS)
def test_a_diagram_has_the_moves_of_its_table(title: str) -> None:
    moves = {(name_of(a), name_of(b)) for a, ends in DIAGRAMS[title].items() for b in ends}
    drawn = [(start, end) for start, end in DRAWN[title] if start != "[*]"]
    assert set(drawn) == moves
    assert len(drawn) == len(moves)


# --- the tables of Redis keys and channels -------------------------------------------------------

LUA = Path(storage.__file__).parent / "lua"
SCRIPTS = sorted(
    str(path.relative_to(LUA).with_suffix(""))
    for path in LUA.rglob("*.lua")
    if path.parent.name != "lib"
)
ROWS = {row.shape: row for row in architecture_page.key_rows()}
PLACEHOLDERS = {
    "execution_id": "<execution>",
    "session_id": "<session>",
    "run_id": "<run>",
    "group_id": "<group>",
    "incarnation": "<incarnation>",
    "profile": "<profile>",
    "tenant": "<tenant>",
    "request_id": "<request>",
    "attempt": "<attempt>",
    "generation": "<generation>",
    "operation_id": "<operation>",
    "agent": "<agent>",
    "tool": "<tool>",
    "status": "<status>",
    "index": "unacked_index",
}


def called_with_placeholders(make: Any) -> Any:
    parameters = [name for name in inspect.signature(make).parameters if name != "prefix"]
    return make(*(PLACEHOLDERS[name] for name in parameters))


def spelled() -> Iterator[tuple[str, Any]]:
    """Every key that keys.py can spell, under the name of its method."""
    for name, value in vars(keys).items():
        if name.startswith("_") or getattr(value, "__module__", "") != keys.__name__:
            continue
        if inspect.isclass(value):
            owner = called_with_placeholders(value)
            for part in (part for part in dir(owner) if not part.startswith("_")):
                of_owner = getattr(owner, part)
                yield part, called_with_placeholders(of_owner) if callable(of_owner) else of_owner
        elif name not in ("escaped", "checked_prefix"):
            yield name, called_with_placeholders(value)


def spellings(*, are_channels: bool) -> set[str]:
    shapes: set[str] = set()
    for name, value in spelled():
        if name.endswith(("channel", "doorbell_prefix")) is are_channels:
            shapes |= {value} if isinstance(value, str) else set(value)
    return {unquote(shape) for shape in shapes}


def test_the_table_has_every_key_that_is_spelled_and_no_other() -> None:
    assert set(ROWS) == spellings(are_channels=False) | {"unacked_index"}
    assert len(ROWS) == len(architecture_page.key_rows())


def test_the_table_has_every_channel() -> None:
    rows = {row[0].strip("`") for row in architecture_page.rows_under("channel")}
    assert rows == spellings(are_channels=True) | {"capsule:doorbell:<incarnation>"}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_has_keys_of_the_type_in_the_table(name: str) -> None:
    for key in header_of(name).keys:
        assert ROWS[key.shape].type == key.type


FUNCTION = re.compile(r"^local function (\w+)\((.*?)\)\n(.*?)^end$", re.MULTILINE | re.DOTALL)
LOOP = re.compile(r"for _, key in ipairs\(\{(.*?)\}\)")
CALL = re.compile(r"redis\.call\(('\w+'|command), ([\w\[\]]+)((?:, [\w\[\]]+)*)")
WRITES = {
    *("HSET", "HDEL", "HINCRBY", "XADD", "XTRIM", "XDEL"),
    *("RPUSH", "RPOP", "LTRIM", "SADD", "SREM"),
    *("ZADD", "ZREM", "ZREMRANGEBYSCORE", "ZREMRANGEBYRANK", "SET", "SETBIT"),
    *("UNLINK", "DEL", "RENAME"),
}


def code_of(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("--"))


def arguments(text: str) -> list[str]:
    """The text before the bracket that closes a call."""
    found, depth = [""], 0
    for letter in text:
        depth += (letter in "({[") - (letter in ")}]")
        if depth < 0:
            break
        if letter == "," and depth == 0:
            found.append("")
        else:
            found[-1] += letter
    return [argument.strip() for argument in found]


def changed_in(code: str, functions: dict[str, tuple[str, str]]) -> set[str]:
    """The variables that hold keys whose values this code changes, itself or by its functions."""
    changed: set[str] = set()
    for command, first, others in CALL.findall(code):
        if command == "command" or command.strip("'") in WRITES:
            changed.add(first)
            if command in ("'UNLINK'", "'RENAME'"):
                changed |= {name for name in others.split(", ") if name}
    if "key" in changed:
        changed |= {name.strip() for names in LOOP.findall(code) for name in names.split(",")}
    for name, (parameters, body) in functions.items():
        calls = list(re.finditer(rf"\b{name}\(", code))
        if not calls:
            continue
        inner = changed_in(body, {other: of for other, of in functions.items() if other != name})
        for call in calls:
            given = dict(zip(arguments(parameters), arguments(code[call.end() :]), strict=False))
            changed |= {given.get(variable, variable) for variable in inner}
    return changed


def written_shapes(name: str) -> set[str]:
    """The keys that a script changes; a new time to live is no change."""
    header = header_of(name)
    code = code_of(text_of(name))
    shared = "\n".join(code_of(text_of(f"lib/{part}")) for part in header.uses)
    functions = {of[0]: (of[1], of[2]) for of in FUNCTION.findall(f"{shared}\n{code}")}
    changed = changed_in(FUNCTION.sub("", code), functions)
    shapes = {key.shape for key in header.keys if f"{key.name}_key" in changed}
    if any(variable.startswith("KEYS[") for variable in changed):
        shapes.add(header.keys[-1].shape)
    return shapes


def test_the_table_lists_the_scripts_that_write_a_key() -> None:
    written: defaultdict[str, set[str]] = defaultdict(set)
    declared: defaultdict[str, set[str]] = defaultdict(set)
    for name in SCRIPTS:
        for key in header_of(name).keys:
            declared[key.shape].add(name)
        for shape in written_shapes(name):
            written[shape].add(name)
    for shape, row in ROWS.items():
        stated = {name for name in declared[shape] for each in row.writers if fnmatch(name, each)}
        assert stated == written[shape], shape
        assert all(any(fnmatch(name, each) for name in stated) for each in row.writers), shape
