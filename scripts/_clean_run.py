"""scripts/test --clean: the whole suite in a fresh clone of HEAD.

A commit that passes is written into `tests-passed` in the git directory; each worktree has a file
of its own. The clone is made in a temporary directory and removed at the end, also by Ctrl-C.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

OF_HOOKS = {"GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_OBJECT_DIRECTORY"}
"""Variables that a git hook is given: they name a repository, whatever the directory is."""
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in OF_HOOKS}

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_INTERRUPTED = 130


def main() -> int:
    if changed := git("status", "--porcelain"):
        print(f"test: a clone would lack what is not committed:\n{changed}", file=sys.stderr)
        return EXIT_FAILED
    commit = git("rev-parse", "HEAD")
    os.umask(0o022)  # the tests of sandboxes read the clone as another user, too
    with tempfile.TemporaryDirectory(prefix="capsule-clean-", ignore_cleanup_errors=True) as parent:
        Path(parent).chmod(0o755)
        clone = Path(parent, ROOT.name)
        git("clone", "--quiet", "--no-checkout", str(ROOT), str(clone))
        git("-C", str(clone), "checkout", "--quiet", "--detach", commit)
        code = run_suite(clone)
    if code == EXIT_OK:
        passed = ROOT / git("rev-parse", "--git-path", "tests-passed")
        passed.write_text(f"{commit}\n")
        print(f"{commit} passed: written into {passed}")
    return code


def git(*arguments: str) -> str:
    command = ["git", *arguments]
    return subprocess.check_output(command, cwd=ROOT, env=ENVIRONMENT, text=True).strip()


def run_suite(clone: Path) -> int:
    """The exit code of the clone's own scripts/test.

    An interrupt reaches the suite from here and only once, be it from the terminal or by `kill`,
    since the suite is a process group of its own. It is waited for, as it stops what it has
    started; a second interrupt kills it.
    """
    with subprocess.Popen(
        ["./scripts/test"], cwd=clone, env=ENVIRONMENT, stdin=subprocess.DEVNULL, process_group=0
    ) as suite:
        try:
            return suite.wait()
        except KeyboardInterrupt:
            os.killpg(suite.pid, signal.SIGINT)
            try:
                suite.wait()
            except KeyboardInterrupt:
                os.killpg(suite.pid, signal.SIGKILL)
                suite.wait()
            raise


if __name__ == "__main__":
    # Also where SIGINT is ignored, as in a job that a script runs in the background.
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.default_int_handler)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
