"""The parts of scripts/test: each with a section on the screen and a line in the result.

The static checks run at the same time, beside a first collection of the tests. Tests run after
them, several at a time. Chaos and soak tests, which would take the machine from the others, run
last, two at a time. Tests that fail run once more, alone: one that then passes is unsteady, a
defect to mend, and is named in the result. The closing line counts the tests of all parts.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

HEAVY = "(chaos or soak)"
HEAVY_PATHS = ("tests/chaos", "tests/acceptance/test_many_tasks.py")
"""Where they are: to collect all others too would take longer than most of them."""
PROCESSES = 4
"""More than the two cores that CI has: most tests wait for other processes."""
HEAVY_PROCESSES = 2
BIN = Path(sys.executable).parent
TESTS_FAILED = 1  # pytest's exit code
INTERRUPTED = 130


@dataclass(frozen=True)
class Scope:
    """How much is run, and for how long at most."""

    skipped: str
    chaos_scale: str
    part_limit_s: int
    test_limit_s: int


PUSH = Scope(" and not full", "0.1", part_limit_s=1200, test_limit_s=120)
FULL = Scope("", "1.0", part_limit_s=3600, test_limit_s=1800)


@dataclass(frozen=True)
class Part:
    name: str
    command: list[str]
    again: tuple[str, ...] = ()
    """Runs what failed once more."""
    is_quiet: bool = False
    """Its output is shown only if it fails."""


@dataclass(frozen=True)
class Outcome:
    part: Part
    code: int
    seconds: float
    output: str
    unsteady: tuple[str, ...] = ()
    """Tests that failed, and passed when they were run once more."""

    @property
    def is_failure(self) -> bool:
        return self.code != 0

    def __str__(self) -> str:
        result = f"FAILED (exit code {self.code})" if self.is_failure else "ok"
        return f"{self.part.name:<18}{self.seconds:6.1f} s  {result}"


def static_parts() -> list[Part]:
    packages = [name for name in ("capsule_tasks", "workers", "scripts") if Path(name).is_dir()]
    return [
        Part("ruff", [str(BIN / "ruff"), "check", "."]),
        Part("format", [str(BIN / "ruff"), "format", "--check", "."]),
        Part("types", [str(BIN / "mypy"), *packages]),
        Part("layers", [str(BIN / "lint-imports"), "--no-logo", "--no-cache"]),
        # In a clean checkout each process that runs tests would compile all of them: here one does
        # it, beside mypy, which has one thread.
        Part(
            "collection",
            [sys.executable, "-m", "pytest", "--collect-only", "-qqq"],
            is_quiet=True,
        ),
    ]


def test_parts(python: str, scope: Scope) -> Iterator[Part]:
    version = subprocess.check_output(
        [python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"], text=True
    ).strip()
    # --foreground: Ctrl-C at the terminal still reaches pytest.
    pytest = ["timeout", "--foreground", "--signal=INT", "--kill-after=30", str(scope.part_limit_s)]
    pytest += [python, "-m", "pytest", "-o", f"faulthandler_timeout={scope.test_limit_s}"]
    again = (*pytest, "--last-failed", "--last-failed-no-failures=none")
    for name, marked, processes, paths in (
        ("tests", f"not {HEAVY}", PROCESSES, ()),
        ("chaos", HEAVY, HEAVY_PROCESSES, HEAVY_PATHS),
    ):
        chosen = ("-m", f"{marked}{scope.skipped}", *paths)
        together = ("-n", str(processes), "--dist=worksteal")
        yield Part(f"{name} {version}", [*pytest, *together, *chosen], again=(*again, *chosen))


def run_live(part: Part, env: Mapping[str, str]) -> Outcome:
    """Runs the part with its output on the screen as it comes."""
    print(f"\n── {part.name} ──", flush=True)
    outcome = run(part, env, on_output=write_to_screen)
    if outcome.code != TESTS_FAILED or not part.again:
        return outcome
    failed = failed_tests(outcome)
    print(f"\n── {part.name}: {len(failed)} failed and run once more, alone ──", flush=True)
    again = run(Part(part.name, list(part.again)), env, on_output=write_to_screen)
    if again.code not in (0, TESTS_FAILED):
        return outcome
    still_failed = failed_tests(again)
    return replace(
        outcome,
        code=again.code,
        seconds=outcome.seconds + again.seconds,
        unsteady=tuple(name for name in failed if name not in still_failed),
    )


def failed_tests(outcome: Outcome) -> list[str]:
    """By pytest's summary. A test can fail, and then fail to be cleaned up."""
    pattern = r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$"
    return list(dict.fromkeys(re.findall(pattern, outcome.output, re.MULTILINE)))


def run_together(parts: list[Part], env: Mapping[str, str]) -> list[Outcome]:
    """Runs the parts at the same time; the screen gets one after the other."""
    outcomes = []
    with ThreadPoolExecutor(len(parts)) as pool:
        for outcome in pool.map(lambda part: run(part, env, on_output=lambda _: None), parts):
            output = "" if outcome.part.is_quiet and not outcome.is_failure else outcome.output
            print(f"\n── {outcome.part.name} ──\n{output.strip()}", flush=True)
            outcomes.append(outcome)
    return outcomes


def run(part: Part, env: Mapping[str, str], on_output: Callable[[bytes], None]) -> Outcome:
    started = time.monotonic()
    output = bytearray()
    with subprocess.Popen(
        part.command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env=env, bufsize=0,
    ) as process:  # fmt: skip
        try:
            read_all(process, output, on_output)
        except KeyboardInterrupt:  # the process was interrupted too, and stops what it has started
            read_all(process, output, on_output)
            raise
    seconds = time.monotonic() - started
    return Outcome(part, process.returncode, seconds, output.decode(errors="replace"))


def read_all(
    process: subprocess.Popen[bytes], output: bytearray, on_output: Callable[[bytes], None]
) -> None:
    assert process.stdout is not None
    while chunk := process.stdout.read(65536):
        on_output(chunk)
        output += chunk


def write_to_screen(chunk: bytes) -> None:
    sys.stdout.buffer.write(chunk)
    sys.stdout.buffer.flush()


def result(static: list[Outcome], tests: list[Outcome]) -> Iterator[str]:
    yield from map(str, static + tests)
    for outcome in tests:
        for name in outcome.unsteady:
            yield f"UNSTEADY, to be mended: {name}"
    yield closing_line(tests)


def closing_line(outcomes: list[Outcome]) -> str:
    """Every suite's counts in the one line from which CI reads how many tests were run."""
    counts = {"passed": 0, "failed": 0, "skipped": 0, "unsteady": 0}
    for outcome in outcomes:
        ends = [line for line in outcome.output.splitlines() if re.search(r" in [\d.]+s\b", line)]
        found = re.findall(r"(\d+) (passed|failed|error|skipped)", "".join(ends[-1:]))
        numbers = Counter({word: int(number) for number, word in found})
        counts["passed"] += numbers["passed"]
        counts["skipped"] += numbers["skipped"]
        counts["unsteady"] += len(outcome.unsteady)
        if outcome.is_failure:
            counts["failed"] += numbers["failed"] + numbers["error"] - len(outcome.unsteady)
    return ", ".join(f"{number} {word}" for word, number in counts.items())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("pythons", nargs="*", help="further interpreters to run the tests on")
    arguments = parser.parse_args()
    scope = FULL if arguments.full else PUSH
    env = os.environ | {"CAPSULE_TEST_SCALE": scope.chaos_scale}

    static = run_together(static_parts(), env)
    tests = [
        run_live(part, env)
        for python in [sys.executable, *arguments.pythons]
        for part in test_parts(python, scope)
    ]
    print("\n── result ──", *result(static, tests), sep="\n")
    return int(any(outcome.is_failure for outcome in static + tests))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
