"""The program output on pages was recorded, from commands that exist, and fits into 80 columns."""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
PAGES = [page for page in sorted((ROOT / "docs").rglob("*.md")) if "<!-- output: " in page.read_text("utf-8")]


@pytest.fixture(scope="module")
def record_output():
    specification = importlib.util.spec_from_file_location("record_output", ROOT / "docs" / "record_output.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_is_recorded_with_commit_and_date(page, record_output):
    text = page.read_text("utf-8")
    blocks = list(record_output.BLOCK.finditer(text))
    assert len(blocks) == text.count("<!-- output: ") == text.count("<!-- /output -->")
    for block in blocks:
        shown = block[0]
        assert f"\n$ {block['command']}\n" in shown
        assert re.search(r"\n\(Commit [0-9a-f]{7}, 20\d\d-\d\d-\d\d\.\)\n", shown)
        assert max(map(len, shown.splitlines()[1:-1])) <= 80
        assert "/root" not in shown


def shown_here():
    """Yield the commands of all blocks that a machine without a GPU prints, with the output on the page."""
    block = re.compile(r"<!-- output: cpu: (gatewise .*?) -->\n```text\n\$ \1\n(.*?)\n```\n", re.DOTALL)
    for page in PAGES:
        for command, shown in block.findall(page.read_text("utf-8")):
            yield pytest.param(command, shown, id=f"{page.stem}: {command}")


def without_numbers(text):
    """Return a text without the versions, sizes and times of a machine, and without line breaks."""
    text = re.sub(r"\d[\d.,]*\S*( (ns|us|ms|s|[KMG]iB|threads?)\b)?", "N", text)
    return " ".join(text.split())


@pytest.mark.parametrize(("command", "shown"), list(shown_here()))
def test_a_page_shows_what_the_command_prints(command, shown, monkeypatch, capsys):
    pytest.importorskip("typer")
    from gatewise.cli import environment, main

    if command == "gatewise doctor" and any(extra.lacking for extra in environment.extras()):
        pytest.skip("not all extras are installed")
    if torch.cuda.is_available() and "--gpu" not in command:
        pytest.skip("the page describes a machine without a GPU")
    monkeypatch.setattr(sys, "argv", shlex.split(command))
    with pytest.raises(SystemExit) as leaving:
        main()
    assert not leaving.value.code
    printed = capsys.readouterr().out.rstrip()
    if "--gpu" in command:
        assert printed == shown  # the same on every machine
    else:
        assert without_numbers(printed) == without_numbers(shown)


def test_a_block_of_the_machine_is_filled_and_others_stay(record_output, tmp_path, monkeypatch):
    monkeypatch.setenv("GATEWISE_COMMIT", "0123456789")
    marks = "before\n<!-- output: {}: gatewise --version -->\nold\n<!-- /output -->\nafter\n"
    page = tmp_path / "page.md"
    page.write_text(marks.format("here") + marks.format("there"))
    record_output.main(page, "here")
    here, there = page.read_text().split("after\n")[:2]
    from gatewise import __version__

    assert f"```text\n$ gatewise --version\n{__version__}\n```\n\n(Commit 0123456, 20" in here
    assert "old" not in here
    assert there == marks.format("there").removesuffix("after\n")
