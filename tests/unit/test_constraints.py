"""constraints.txt: it has every package that pyproject.toml names, and it is what is installed."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
LINES = (ROOT / "constraints.txt").read_text().splitlines()
PINS = [Requirement(line) for line in LINES if not line.startswith("#")]
IS_LATEST = Path(sys.prefix).name == ".venv-latest"
OURS = "capsule-tasks"


def declared() -> list[str]:
    """Requirements in pyproject.toml, with those of every extra and of the build."""
    document = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = document["project"]
    extras = project["optional-dependencies"].values()
    everything = [*project["dependencies"], *document["build-system"]["requires"]]
    everything += [text for extra in extras for text in extra]
    return [text for text in everything if Requirement(text).name != OURS]


def applies(marker: Marker | None, python: str) -> bool:
    environment = {"python_version": python, "python_full_version": f"{python}.9"}
    return marker is None or marker.evaluate(environment)


def pinned(name: str, python: str) -> str | None:
    """The one version of a package for a version of Python on this machine."""
    found = [
        str(pin.specifier).removeprefix("==")
        for pin in PINS
        if canonicalize_name(pin.name) == canonicalize_name(name) and applies(pin.marker, python)
    ]
    assert len(found) <= 1, f"{name} has {found} for Python {python}"
    return found[0] if found else None


def test_each_line_is_one_version_without_index_url_or_option() -> None:
    line = re.compile(r"[a-z0-9.-]+==[\w.]+( ; [^/]+)?")
    assert [text for text in LINES[1:] if not line.fullmatch(text)] == []


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_each_declared_package_has_a_version_that_is_allowed(python: str) -> None:
    missing = []
    for wanted in map(Requirement, declared()):
        if applies(wanted.marker, python):
            version = pinned(wanted.name, python)
            if version is None or not wanted.specifier.contains(version):
                missing.append(f"{wanted} (constraints.txt has {version})")
    assert missing == [], "run scripts/constraints"


def installed(name: str, extras: frozenset[str]) -> Iterator[tuple[str, frozenset[str]]]:
    """Requirements of an installed package, with the extras they ask for."""
    for text in metadata.requires(name) or ():
        wanted = Requirement(text)
        contexts = [{"extra": extra} for extra in (extras or {""})]
        if wanted.marker is None or any(map(wanted.marker.evaluate, contexts)):
            yield canonicalize_name(wanted.name), frozenset(wanted.extras)


@pytest.mark.skipif(IS_LATEST, reason="this environment is made without constraints")
def test_this_environment_has_the_versions_of_the_constraints() -> None:
    python = ".".join(map(str, sys.version_info[:2]))
    waiting = [(OURS, frozenset({"dev"}))]
    seen = set(waiting)
    wrong: dict[str, str] = {}
    while waiting:
        for package in installed(*waiting.pop()):
            if package not in seen:
                seen.add(package)
                waiting.append(package)
                name = package[0]
                version = metadata.version(name)
                if name != OURS and version != pinned(name, python):
                    wrong[name] = version
    assert len(seen) > 100
    assert wrong == {}, "run scripts/constraints, and scripts/test without arguments"
