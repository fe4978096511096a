"""The SDK's own tests, with our session and as durable runs: all pass but those that are listed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.openai_sdk import page
from tests.openai_sdk.checkout import checkout, run_tests


@pytest.mark.full
@pytest.mark.parametrize(
    ("headings", "plugin"),
    [
        (["With our session"], "capsule_session"),
        (["With our session", "As durable runs"], "capsule_runs"),
    ],
    ids=["session", "runs"],
)
def test_the_sdks_tests_pass_but_for_those_that_are_listed(
    tmp_path: Path, headings: list[str], plugin: str
) -> None:
    sdk = checkout()
    listed = [name for heading in headings for name in page.listed(heading)]
    timing = page.listed("Timing")
    known = [*listed, *timing]
    files = [file for file in page.files() if file not in known]
    found = run_tests(sdk, tmp_path / "all", files, plugin)
    assert len(found.passed) > 1500, "most of the SDK's tests were not run"

    unknown = [test for test in found.bad if not any(page.matches(each, test) for each in known)]
    if unknown:  # some have limits of a second or two, which a busy machine exceeds
        again = run_tests(sdk, tmp_path / "again", unknown, plugin, processes=0)
        unknown = list(again.bad)
    if unknown:  # with another release of `openai`, some fail without us
        alone = run_tests(sdk, tmp_path / "alone", unknown, processes=0)
        unknown = [test for test in unknown if test not in alone.bad]
    assert not unknown, {test: found.bad[test] for test in unknown}

    run = {*found.bad, *found.passed}
    stale = [
        each
        for each in listed
        if any(page.matches(each, test) for test in run)
        and not any(page.matches(each, test) for test in found.bad)
    ]
    assert not stale, "these are listed in docs/sdk_tests.md, and pass"
