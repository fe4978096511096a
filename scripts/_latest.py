"""The newest releases, for scripts/test --latest: what to install, and how it differs.

`requirements` prints what the tests need, without the upper bounds of pyproject.toml.
`differences` prints what is installed in another version than constraints.txt has.
"""

from __future__ import annotations

import argparse
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
_NOT_CONSTRAINED = {"capsule-tasks", "pip"}


def requirements(project: dict[str, Any]) -> Iterator[str]:
    """Dependencies of a `[project]` table and its extra `dev`, without upper bounds."""
    extras: dict[str, list[str]] = project["optional-dependencies"]
    waiting = [*project["dependencies"], *extras["dev"]]
    for text in waiting:
        own = re.fullmatch(rf"{project['name']}\[(.+)\]", text)
        if own is None:
            yield without_upper_bound(text)
        else:
            waiting += [needed for extra in own[1].split(",") for needed in extras[extra.strip()]]


def without_upper_bound(requirement: str) -> str:
    """A whole version (`==1.2.3`) stays: there is a reason for that one."""
    specifier, semicolon, marker = requirement.partition(";")
    specifier = re.sub(r",\s*<[^,]+", "", specifier)
    specifier = re.sub(r"==([\d.]+)\.\*", r">=\1", specifier)
    return f"{specifier}{semicolon}{marker}"


def differences(constraints: str, installed: dict[str, str]) -> Iterator[str]:
    """One line for each package that has no version of the constraints."""
    known: defaultdict[str, list[str]] = defaultdict(list)
    for name, version in re.findall(r"^([^\s#]+)==(\S+)", constraints, re.MULTILINE):
        known[name].append(version)
    for name, version in sorted(installed.items()):
        if version not in known[name]:
            expected = " or ".join(known[name]) or "not listed"
            yield f"{name} {version} (constraints.txt: {expected})"


def installed_versions() -> dict[str, str]:
    versions = {
        re.sub(r"[-_.]+", "-", package.name).lower(): package.version
        for package in metadata.distributions()
    }
    return {name: v for name, v in versions.items() if name not in _NOT_CONSTRAINED}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("verb", choices=("requirements", "differences"))
    if parser.parse_args().verb == "requirements":
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        print(*requirements(project), sep="\n")
    else:
        found = differences((ROOT / "constraints.txt").read_text(), installed_versions())
        print("\n── other versions than in constraints.txt ──", *found, sep="\n")


if __name__ == "__main__":
    main()
