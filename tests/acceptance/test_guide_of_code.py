"""The examples of code executions in the guide and in the README run against a real worker."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from capsule_tasks import Capsule
from tests.acceptance.test_code import code_worker
from tests.servers import fresh_prefix

ROOT = Path(__file__).parents[2]
EXAMPLE = re.compile(
    r"<!-- not run: [^\n]*test_guide_of_code.py[^\n]* -->\n```python\n(.*?)^```$",
    re.DOTALL | re.MULTILINE,
)


@pytest.mark.parametrize(
    ("page", "printed"),
    [
        (
            "docs/code.md",
            ["42", "45", "raised ZeroDivisionError division by zero", "46", "1", "1", "2", "46"],
        ),
        ("README.md", ["42", "1"]),
    ],
)
def test_the_examples_of_a_page_run(
    page: str,
    printed: list[str],
    redis_url: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    examples = EXAMPLE.findall((ROOT / page).read_text())
    assert examples
    conf = {"capsule_prefix": fresh_prefix()}
    with code_worker(redis_url, tmp_path, **conf) as worker:
        worker.app.conf.update(conf)
        namespace: dict[str, Any] = {"__name__": "guide", "Capsule": Capsule, "app": worker.app}
        for example in examples:
            # The app of this test is used instead: it has the queue and the server of the worker.
            source = re.sub(r"^app = .*$", "", example, flags=re.MULTILINE)
            exec(compile(source, page, "exec"), namespace)
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line in printed] == printed, lines
