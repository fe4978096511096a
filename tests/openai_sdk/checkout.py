"""The SDK's tests of the pinned release, from the package index, and a run of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from fcntl import LOCK_EX, flock
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RELEASE = "0.24.0"
SHA256 = "4b4b285f4fed81fdf1b4ac426a9101658d9cd29b4fb1aaeee18f639b77e704e3"
CACHE = ROOT / ".openai-agents"
"""What was downloaded stays here, outside of git."""
RUN_LIMIT_S = 1500


@dataclass(frozen=True)
class Outcomes:
    """How the SDK's tests ended, by their ids without `tests/`."""

    bad: dict[str, str]
    passed: frozenset[str]


def checkout() -> Path:
    """The directory of the SDK's tests; skips the calling test where they cannot be had."""
    if (installed := version("openai-agents")) != RELEASE:
        pytest.skip(f"the list is of openai-agents {RELEASE}, and {installed} is installed")
    CACHE.mkdir(exist_ok=True)
    unpacked = CACHE / f"openai_agents-{RELEASE}"
    with (CACHE / "lock").open("w") as lock:
        flock(lock, LOCK_EX)  # several tests may want it at once
        if not unpacked.is_dir():
            _unpack(_downloaded())
    return unpacked


def _unpack(archive: Path) -> None:
    with tarfile.open(archive) as tar, TemporaryDirectory(dir=CACHE) as beside:
        wanted = [
            member
            for member in tar.getmembers()
            if member.name.split("/")[1] in ("tests", "pyproject.toml")
        ]
        tar.extractall(beside, wanted, filter="data")
        (Path(beside) / f"openai_agents-{RELEASE}").rename(CACHE / f"openai_agents-{RELEASE}")


def _downloaded() -> Path:
    wanted = CACHE / "requirements.txt"
    wanted.write_text(f"openai-agents=={RELEASE} --hash=sha256:{SHA256}\n")
    # Without its dependencies: the tests run in this environment, whose versions are pinned.
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--no-binary", "openai-agents", "--require-hashes", "-r", str(wanted)]
    done = subprocess.run(command, check=False, cwd=CACHE, capture_output=True, text=True)
    if "DO NOT MATCH THE HASHES" in done.stderr:
        raise AssertionError(done.stderr)
    if done.returncode:
        said = done.stderr.strip().splitlines()[-1:]
        pytest.skip(f"the SDK's tests could not be downloaded: {''.join(said)}")
    return CACHE / f"openai_agents-{RELEASE}.tar.gz"


def run_tests(
    directory: Path, report: Path, chosen: list[str], *plugins: str, processes: int = 2
) -> Outcomes:
    """Run tests of the SDK, files or ids, with plugins of this folder."""
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider"]
    command += ["-n", str(processes), "-p", "capsule_plain"]
    for plugin in plugins:
        command += ["-p", plugin]
    # Without what a worker of xdist, as which the caller may run, passes on.
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    env |= {"PYTHONPATH": str(HERE), "CAPSULE_SDK_REPORT": str(report)}
    done = subprocess.run(
        [*command, *(f"tests/{each}" for each in chosen)],
        check=False, cwd=directory, env=env, capture_output=True, text=True,
        timeout=RUN_LIMIT_S,
    )  # fmt: skip
    if done.returncode not in (0, 1) or not report.exists():
        raise AssertionError(done.stdout[-5000:] + done.stderr[-5000:])
    found = json.loads(report.read_text())
    bad = {_short(name): error for name, error in found["bad"].items()}
    return Outcomes(bad, frozenset(map(_short, found["passed"])))


def _short(name: str) -> str:
    return name.removeprefix("tests/")
