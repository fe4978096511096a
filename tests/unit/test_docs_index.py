"""The index of the documentation leads to every page, and every link leads somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
INDEX = DOCS / "README.md"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]


def links_of(page: Path) -> list[tuple[Path, str]]:
    """Files and headings within this repository, as the links of a page name them."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    targets = re.findall(r"\]\(([^)\s]+)\)", prose)
    return [
        ((page.parent / target.partition("#")[0]).resolve() if target[0] != "#" else page, heading)
        for target in targets
        if "://" not in target
        for heading in [target.partition("#")[2]]
    ]


def headings_of(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    found = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in found}


def test_the_index_leads_to_every_page() -> None:
    reached = {target for target, _ in links_of(INDEX)}
    pages = {page for page in DOCS.glob("*.md") if page != INDEX}
    assert pages <= reached


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    for target, heading in links_of(page):
        assert target.exists(), target
        if heading and target.suffix == ".md":
            assert heading in headings_of(target), f"{target}#{heading}"
