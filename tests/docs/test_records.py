"""The figures of README and documentation are those of the newest record."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("rich")

from gatewise.benchmarks import record, report

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / record.RESULTS
PAGES = [ROOT / "README.md", ROOT / "docs" / "benchmarks.md"]
BLOCK = re.compile(r"<!-- benchmark: (\w+) -->\n(.*?)\n<!-- /benchmark: \1 -->", re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_shows_the_newest_record(page: Path) -> None:
    blocks = BLOCK.findall(page.read_text("utf-8"))
    assert blocks, "the marks of the generated block are missing"
    for name, shown in blocks:
        path = record.path_of(RESULTS, name)
        expected = report.markdown(record.newest(record.read(path))) if path.exists() else "No record yet."
        assert shown.strip() == expected.strip(), f"run: gatewise bench report {name} --into {page.relative_to(ROOT)}"
