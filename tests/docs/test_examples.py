"""All Python code in the documentation runs: README, guides, docstrings and example programs."""

from __future__ import annotations

import doctest
import importlib
import runpy
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch._inductor import config

import gatewise

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PROGRAMS = {
    "drop_in": "same parameter names: True",
    "lengths": "row 0 equals sequence 0 alone: True",
    "explicit_passes": "the forward pass ran on:",
    "explain": "* persistent",
    "character_model": "the quick brown fox jumps over the lazy dog",
}
PACKAGE = Path(gatewise.__file__).parent
# A program, which importing would run.
MODULES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.stem != "__main__"
}
IN_TRITON = (
    "gatewise.attention.fused.programs",
    "gatewise.models.rows_program",
    "gatewise.models.softmax_program",
    "gatewise.models.table_program",
)


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)


# Exporting takes as long as all other documents together, and tests/nn has the same exports of smaller models.
LONG = "docs/how-to/export.md"


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=name, marks=pytest.mark.exhaustive if name == LONG else ())
        for path, name in ((path, str(path.relative_to(ROOT))) for path in DOCUMENTS)
    ],
)
def test_the_python_of_a_document_runs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Return the blocks of a document in order, which share their names, without those after `<!--- skip: next -->`."""
    sybil = pytest.importorskip("sybil")
    markdown = pytest.importorskip("sybil.parsers.markdown")
    # A header that is compiled once for all programs, and fast code, would take longer than one program does without.
    for name, value in {"precompile_headers": False, "compile_wrapper_opt_level": "O0"}.items():
        if hasattr(config.aot_inductor, name):
            monkeypatch.setattr(config.aot_inductor, name, value)
    document = sybil.Sybil(parsers=[markdown.PythonCodeBlockParser(), markdown.SkipParser()]).parse(path)
    for example in document.examples():
        example.evaluate()


def test_every_module_can_be_imported() -> None:
    for name in MODULES:
        if find_spec("triton") or not name.startswith(IN_TRITON):
            assert importlib.import_module(name).__name__ == name


@pytest.mark.parametrize("name", [name for name, path in MODULES.items() if ">>> " in path.read_text("utf-8")])
def test_the_examples_of_docstrings_hold(name: str) -> None:
    if name.startswith(IN_TRITON):
        pytest.importorskip("triton", reason="written in Triton, which PyTorch's builds for the CPU do not bring")
    module = importlib.import_module(name)
    names = {"torch": torch, "gatewise": gatewise}
    failed, _ = doctest.testmod(module, extraglobs=names, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert failed == 0


def test_every_program_is_tested() -> None:
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == PROGRAMS.keys()


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_example_program_runs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    assert PROGRAMS[name] in capsys.readouterr().out
