"""The numbers in README and documentation are those of the newest record."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("rich")

from gatewise.benchmarks import record
from gatewise.benchmarks.publication import publication
from gatewise.cli.bench_quality import defaults_of_recipes

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / record.RESULTS
PAGES = [ROOT / "README.md", ROOT / "docs" / "benchmarks.md", ROOT / "docs" / "attention.md"]
PAGES += [ROOT / "docs" / "training.md"]
PICTURE = re.compile(r"^!\[[^\]]*\]\(([^)]+)\)$", re.MULTILINE)
BLOCK = re.compile(r"<!-- benchmark: (\w+) -->\n(.*?)\n<!-- /benchmark: \1 -->", re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_shows_the_newest_record(page: Path) -> None:
    blocks = BLOCK.findall(page.read_text("utf-8"))
    assert blocks, "the marks of the generated block are missing"
    for name, shown in blocks:
        path = record.path_of(RESULTS, name)
        expected = (
            publication(name, RESULTS, recipes=defaults_of_recipes()).summary if path.exists() else "No record yet."
        )
        for picture in PICTURE.findall(shown):
            assert (page.parent / picture).is_file()
        assert PICTURE.sub("", shown).strip() == expected.strip(), (
            f"run: gatewise bench report {name} --into {page.relative_to(ROOT)}"
        )


def test_the_readme_states_the_speed_of_cells_as_the_tables_do() -> None:
    tables = dict(BLOCK.findall((ROOT / "docs" / "benchmarks.md").read_text("utf-8")))
    readme = " ".join((ROOT / "README.md").read_text("utf-8").split())

    def row(table: str, name: str) -> list[str]:
        line = next(line for line in tables[table].splitlines() if line.startswith(f"| {name} |"))
        return [cell.strip().split("x")[0] for cell in line.strip("|").split("|")]

    gru, own, normalized = row("gru", "bf16"), row("cells", "own_lstm"), row("cells", "layer_norm_lstm")
    assert f"`gatewise.GRU` is {gru[1]} times as fast as that of `torch.nn.GRU`, and {gru[2]} times where" in readme
    assert own[2] == "1.00"
    assert f"is as fast as the built-in LSTM, and {float(own[6]):.0f} times as fast as a loop" in readme
    assert f"(docs/how-to/layer-norm.md) is {float(normalized[6]):.0f} times as fast as its loop" in readme


def test_the_readme_states_the_speed_of_models_and_the_time_to_quality_as_the_tables_do() -> None:
    pages = {page.name: dict(BLOCK.findall(page.read_text("utf-8"))) for page in PAGES}
    readme = " ".join((ROOT / "README.md").read_text("utf-8").split())

    def rows(page: str, block: str) -> list[list[str]]:
        lines = [line for line in pages[page][block].splitlines() if line.startswith("|")][2:]
        return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]

    factors: dict[str, dict[str, float]] = {}
    name = ""
    for model, way, step, *_ in rows("benchmarks.md", "models"):
        name = model.split(",")[0] or name
        if "(" in step:
            factors.setdefault(name, {})[way] = float(step.split("(")[1].split("x")[0])

    def of(*names: str, way: str = "one line") -> list[float]:
        return sorted(factors[name][way] for name in names)

    slowest, *_, fastest = sorted(ways["one line"] for ways in factors.values() if "one line" in ways)
    assert f"called from Python, {slowest} to {fastest} times as fast: hydrology" in readme
    slowest, *_, fastest = of("flood-512", "cudalstm-128", "cudalstm-256")
    assert f"hydrology {slowest} to {fastest} times," in readme
    assert "a basecaller {} and {} times".format(*of("bonito-sup", "bonito-hac")) in readme
    assert f"text-to-speech {factors['tts']['one line']} times" in readme
    slowest, *_, fastest = of("ppo-128", "ppo-256", "ppo-512", way="resets=")
    own_loop = "Recurrent policies that pass `resets=` in place of their loop over time"
    assert f"{own_loop} train {slowest} to {fastest} times as fast" in readme
    (awd,) = [row for row in rows("training.md", "quality") if "awd" in row[0]]
    assert f"test perplexity of [{awd[4].split()[0]}](docs/training.md" in readme
    assert f"WikiText-2 in {float(awd[5].split()[0]):.1f} minutes" in readme
