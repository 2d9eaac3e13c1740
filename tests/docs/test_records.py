"""The numbers in README and documentation are those of the newest record."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("rich")

from gatewise.benchmarks import record
from gatewise.benchmarks.publication import publication

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / record.RESULTS
PAGES = [ROOT / "README.md", ROOT / "docs" / "benchmarks.md", ROOT / "docs" / "attention.md"]
PICTURE = re.compile(r"^!\[[^\]]*\]\(([^)]+)\)$", re.MULTILINE)
BLOCK = re.compile(r"<!-- benchmark: (\w+) -->\n(.*?)\n<!-- /benchmark: \1 -->", re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_shows_the_newest_record(page: Path) -> None:
    blocks = BLOCK.findall(page.read_text("utf-8"))
    assert blocks, "the marks of the generated block are missing"
    for name, shown in blocks:
        path = record.path_of(RESULTS, name)
        expected = publication(name, RESULTS).summary if path.exists() else "No record yet."
        for picture in PICTURE.findall(shown):
            assert (page.parent / picture).is_file()
        assert PICTURE.sub("", shown).strip() == expected.strip(), (
            f"run: gatewise bench report {name} --into {page.relative_to(ROOT)}"
        )
