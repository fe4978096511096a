"""scripts/test: its environment, unsteady tests, the newest releases, a run in a clean clone."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import _clean_run
from scripts._latest import differences, requirements
from scripts._test_suite import HEAVY_PATHS, Outcome, Part, result, run_live

ROOT = Path(__file__).parents[2]

# --- the environment -----------------------------------------------------------------------------


def test_an_environment_with_a_copy_of_the_checkout_is_not_up_to_date(tmp_path: Path) -> None:
    """`pip install .` in the environment replaces the editable install by a copy."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    (tmp_path / "stamp").write_text("wanted")
    packages = tmp_path / "lib" / "python3.11" / "site-packages"
    packages.mkdir(parents=True)
    check = f". scripts/_env.sh; VENV={tmp_path} stamp=$VENV/stamp wanted=wanted; _is_installed"
    command = ["bash", "-c", check]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == 1
    (packages / "_editable_impl_capsule_tasks.pth").touch()
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == 0


# --- chaos and soak tests ------------------------------------------------------------------------


def test_all_chaos_and_soak_tests_are_collected() -> None:
    tests = {
        path.relative_to(ROOT)
        for path in ROOT.glob("tests/**/*.py")
        if re.search(r"mark\.(chaos|soak)\b", path.read_text())
    }
    assert [path for path in tests if not any(map(path.is_relative_to, HEAVY_PATHS))] == []
    assert len(tests) > 10


# --- tests that failed once ----------------------------------------------------------------------


def outcome_of(first: str, again: str) -> Outcome:
    """The outcome of a part whose two runs are Python code."""
    part = Part("tests", [sys.executable, "-c", first], again=(sys.executable, "-c", again))
    return run_live(part, os.environ)


TWO_FAIL = """if True:
    print("FAILED tests/test_a.py::test_one[a-b]")
    print("FAILED tests/test_a.py::test_two - AssertionError: no")
    print("ERROR tests/test_a.py::test_two - not cleaned up")
    print("ERROR    capsule_tasks:pool.py:1 a captured log line")
    print("==== 2 failed, 3 passed, 1 skipped, 1 error in 1.23s ====")
    raise SystemExit(1)
"""


def test_tests_that_pass_the_second_time_are_named_before_the_closing_line() -> None:
    outcome = outcome_of(TWO_FAIL, "print('2 passed in 0.1s')")
    assert not outcome.is_failure
    assert list(result([], [outcome]))[1:] == [
        "UNSTEADY, to be mended: tests/test_a.py::test_one[a-b]",
        "UNSTEADY, to be mended: tests/test_a.py::test_two",
        "3 passed, 0 failed, 1 skipped, 2 unsteady",
    ]


def test_tests_that_fail_twice_do_not_hide_unsteady_ones() -> None:
    again = "print('FAILED tests/test_a.py::test_two - no\\n1 failed, 1 passed in 0.1s'); exit(1)"
    outcome = outcome_of(TWO_FAIL, again)
    assert outcome.is_failure
    assert list(result([], [outcome]))[1:] == [
        "UNSTEADY, to be mended: tests/test_a.py::test_one[a-b]",
        "3 passed, 2 failed, 1 skipped, 1 unsteady",
    ]


def test_a_second_run_that_breaks_off_finds_no_unsteady_tests() -> None:
    outcome = outcome_of(TWO_FAIL, "raise SystemExit(3)")
    assert outcome.is_failure
    assert list(result([], [outcome]))[1:] == ["3 passed, 3 failed, 1 skipped, 0 unsteady"]


RUN_A_PART = """
import os, signal, sys
from scripts._test_suite import Part, run_live
signal.signal(signal.SIGINT, signal.default_int_handler)
run_live(Part("tests", [sys.executable, "-c", *sys.argv[1:]]), os.environ)
"""
STOPS_SLOWLY = """
import pathlib, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
print("waiting", flush=True)
signal.sigwait({signal.SIGINT})
while not pathlib.Path(sys.argv[1]).exists():
    print("stopping", flush=True)
"""


def test_ctrl_c_waits_for_the_tests_to_stop(tmp_path: Path) -> None:
    may_stop = tmp_path / "may stop"
    with subprocess.Popen(
        [sys.executable, "-c", RUN_A_PART, STOPS_SLOWLY, str(may_stop)],
        cwd=ROOT, process_group=0, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        assert "waiting\n" in lines
        os.killpg(process.pid, signal.SIGINT)
        # One piece of output may be lost in the interrupt, but not all that follow.
        assert "stopping\n" in lines
        may_stop.touch()
        process.stdout.read()
    assert process.returncode != 0


# --- the newest releases -------------------------------------------------------------------------


def test_the_newest_releases_are_installed_without_upper_bounds() -> None:
    project = {
        "name": "ours",
        "dependencies": ["celery[redis]>=5.7,<5.8", "redis>=8, < 9", "plain"],
        "optional-dependencies": {
            "dev": ["ours[one,two]", "exact==1.2.3; python_version < '3.13'"],
            "one": ["series==0.24.*"],
            "two": ["ranged>=1,!=1.5,<2"],
            "other": ["unwanted"],
        },
    }
    assert list(requirements(project)) == [
        "celery[redis]>=5.7",
        "redis>=8",
        "plain",
        "exact==1.2.3; python_version < '3.13'",
        "series>=0.24",
        "ranged>=1,!=1.5",
    ]


def test_versions_that_differ_from_the_constraints_are_printed() -> None:
    constraints = "# said so\nsame==1\nnewer==1\ntwo==1 ; old\ntwo==2 ; new\ngone==3\n"
    installed = {"two": "2", "newer": "2", "same": "1", "unknown": "4"}
    assert list(differences(constraints, installed)) == [
        "newer 2 (constraints.txt: 1)",
        "unknown 4 (constraints.txt: not listed)",
    ]


# --- a clean clone -------------------------------------------------------------------------------


class Checkout:
    """A small repository with the script, and with a suite of its own."""

    def __init__(self, root: Path, temporary: Path) -> None:
        self.root = root
        self.temporary = temporary

    def git(self, *arguments: str) -> str:
        identity = ("-c", "user.name=test", "-c", "user.email=test@example.org")
        command = ["git", *identity, *arguments]
        return subprocess.check_output(command, cwd=self.root, text=True).strip()

    def start(self, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-P", "scripts/_clean_run.py"], cwd=self.root, text=True,
            env=os.environ | {"TMPDIR": str(self.temporary)} | environment,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def run(self, **environment: str) -> tuple[int, str]:
        with self.start(**environment) as process:
            output, _ = process.communicate()
        assert not list(self.temporary.iterdir())
        return process.returncode, output

    @property
    def passed(self) -> Path:
        return self.root / self.git("rev-parse", "--git-path", "tests-passed")


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    """Its suite prints what is in `file`, and fails if that is missing."""
    made = Checkout(tmp_path / "checkout", tmp_path / "temporary")
    scripts = made.root / "scripts"
    scripts.mkdir(parents=True)
    made.temporary.mkdir()
    shutil.copy(_clean_run.__file__, scripts)
    (scripts / "test").write_text("#!/bin/sh\nexec cat file\n")
    (scripts / "test").chmod(0o755)
    (made.root / ".gitignore").write_text("/ignored\n")
    (made.root / "file").write_text("what was committed\n")
    made.git("init", "--quiet")
    made.git("add", "--all")
    made.git("commit", "--quiet", "--message", "first")
    return made


def test_a_commit_that_passes_is_recorded(checkout: Checkout) -> None:
    (checkout.root / "ignored").touch()
    code, output = checkout.run()
    assert code == 0
    assert "what was committed" in output
    assert checkout.passed.read_text() == checkout.git("rev-parse", "HEAD") + "\n"


def test_a_commit_that_fails_is_not_recorded(checkout: Checkout) -> None:
    checkout.run()
    before = checkout.passed.read_text()
    checkout.git("rm", "--quiet", "file")
    checkout.git("commit", "--quiet", "--message", "second")
    code, output = checkout.run()
    assert code != 0
    assert "No such file" in output
    assert checkout.passed.read_text() == before


def test_uncommitted_changes_are_refused(checkout: Checkout) -> None:
    (checkout.root / "new").touch()
    code, output = checkout.run()
    assert code == 1
    assert "?? new" in output
    assert "what was committed" not in output
    assert not checkout.passed.exists()


def test_a_worktree_that_is_on_no_branch_has_a_file_of_its_own(checkout: Checkout) -> None:
    other = Checkout(checkout.root.parent / "other", checkout.temporary)
    checkout.git("worktree", "add", "--quiet", "--detach", str(other.root))
    (other.root / "file").write_text("on no branch\n")
    other.git("commit", "--quiet", "--all", "--message", "second")
    code, output = other.run()
    assert code == 0
    assert "on no branch" in output
    assert other.passed.read_text() == other.git("rev-parse", "HEAD") + "\n"
    assert not checkout.passed.exists()


def test_the_repository_of_a_git_hook_is_not_taken_for_the_checkout(checkout: Checkout) -> None:
    code, output = checkout.run(GIT_DIR="/nowhere", GIT_INDEX_FILE="/nowhere/index")
    assert code == 0, output
    assert checkout.passed.exists()


def test_other_users_may_read_the_clone_whatever_the_umask(checkout: Checkout) -> None:
    (checkout.root / "scripts/test").write_text("#!/bin/sh\nstat -c %a . .. file\n")
    checkout.git("commit", "--quiet", "--all", "--message", "second")
    before = os.umask(0o077)
    try:
        _, output = checkout.run()
    finally:
        os.umask(before)
    assert output.startswith("755\n755\n644\n")


WAITING = """#!{python}
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
print("waiting", flush=True)
signal.sigwait([signal.SIGINT])
print("interrupted")
"""


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_the_suite_and_removes_the_clone(
    checkout: Checkout, signum: signal.Signals
) -> None:
    (checkout.root / "scripts/test").write_text(WAITING.format(python=sys.executable))
    checkout.git("commit", "--quiet", "--all", "--message", "second")
    with checkout.start() as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        assert list(checkout.temporary.iterdir())
        process.send_signal(signum)
        assert process.stdout.read() == "interrupted\n"
    assert process.returncode == _clean_run.EXIT_INTERRUPTED
    assert not list(checkout.temporary.iterdir())
    assert not checkout.passed.exists()
