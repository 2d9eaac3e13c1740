"""The import contracts of pyproject.toml hold, and each of them can fail."""

from __future__ import annotations

import functools
import itertools
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[1]

# For each contract of pyproject.toml: a file, and an import in it that the contract must catch.
FORBIDDEN_IMPORTS = {
    "levels": ("gatewise/contract/problem.py", "import gatewise.selection"),
    "kernels": ("gatewise/kernels/aten/kernel.py", "import gatewise.kernels.cudnn"),
    "cells": ("gatewise/functional/explicit.py", "import gatewise.derivation"),
    "statements": ("gatewise/models/translation.py", "import gatewise.cells"),
    "calls": ("gatewise/functional/explicit.py", "import gatewise.kernels.cudnn"),
    "layers": ("gatewise/nn/lstm.py", "import gatewise.selection"),
    "attention": ("gatewise/attention/explicit.py", "import gatewise.selection"),
    "feeding": ("gatewise/feeding/decoder.py", "import gatewise.kernels.criteria"),
    "interop": ("gatewise/interop/convert.py", "import gatewise.attention"),
    "planning": ("gatewise/planning/planner.py", "import gatewise.functional"),
    "files": ("gatewise/models/translation.py", "import gatewise.files"),
    "training": ("gatewise/training/__init__.py", "import gatewise.contract.problem"),
    "light": ("gatewise/nn/lstm.py", "import rich"),
}


# For each statement of docs/architecture.md about the contracts: the statement, and a wrong version of it.
WRONG_SENTENCES = {
    "a package more": ("| `files` | the one place", "| `attic` | old things | `contract` |\n| `files` | the one place"),
    "a package less": ("| `data`, `training` |", "| `training` |"),
    "a row out of place": ("| `contract` | the data", "| `cli` | commands | everything |\n| `contract` | the data"),
    "an import more": ("`attention`, `kernels.cuda`, `sel", "`attention`, `kernels`, `sel"),
    "an import less": (
        "| `contract`, `nn`, `functional`, `attention`, `feeding` |",
        "| `contract`, `nn`, `functional` |",
    ),
    "one more of those below": ("everything but `cli` and `derivation`", "everything but `cli`"),
}

Contract = dict[str, Any]


class Levels(NamedTuple):
    """The structure of the package, as stated by the document or by the contracts.

    Attributes:
        heights: The height of each package's level, counted from the bottom.
        imports: The modules that each package may import: packages, or parts of packages of which not all are allowed.
    """

    heights: dict[str, int]
    imports: dict[str, set[str]]

    def below(self, *packages: str) -> set[str]:
        """Return the packages below the highest of the given ones."""
        highest = max(self.heights[package] for package in packages)
        return {package for package, height in self.heights.items() if height < highest}


def names_in(text: str) -> list[str]:
    return re.findall(r"`([a-z_.]+)`", text)


def contracts() -> list[Contract]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]["contracts"]


def levels_of(layers: list[str]) -> dict[str, int]:
    """Return the level of each package, from a list of levels from top to bottom, in which bars separate packages."""
    return {name.strip(" ()"): height for height, names in enumerate(reversed(layers)) for name in names.split("|")}


def checked() -> Levels:
    """Return what the contracts allow."""
    known = contracts()
    heights = levels_of(next(each["layers"] for each in known if each["id"] == "levels"))
    levels = Levels(heights, {})
    for package in heights:
        levels.imports[package] = levels.below(package)
    for contract in known:
        if contract["type"] == "forbidden":
            for source, forbidden in itertools.product(contract["source_modules"], contract["forbidden_modules"]):
                own = levels.imports.get(source.removeprefix("gatewise."), set())
                own.discard(forbidden.removeprefix("gatewise."))
            for importer, imported in (each.split(" -> ") for each in contract.get("ignore_imports", ())):
                own = levels.imports[importer.removeprefix("gatewise.").removesuffix(".**")]
                own.add(imported.removeprefix("gatewise.").removesuffix(".**"))
        elif contract["type"] == "protected":
            importers = {importer.removeprefix("gatewise.") for importer in contract["allowed_importers"]}
            for name in contract["protected_modules"]:
                protected = name.removeprefix("gatewise.")
                for package in heights.keys() - importers:
                    levels.imports[package].discard(protected)
    return levels


def documented(text: str) -> Levels:
    """Return the imports that the table of docs/architecture.md allows; its rows must be in the order of the levels."""
    rows = re.findall(r"^\| (`.+?`) \| .+? \| (.+?) \|$", text, re.MULTILINE)
    order = [name for first, _ in rows for name in names_in(first)]
    known = checked().heights
    heights = itertools.accumulate((known.get(name, 0) for name in order), max)
    levels = Levels(dict(zip(order, heights, strict=True)), {})
    for first, last in rows:
        clause, _, _ = last.partition(";")
        for package in names_in(first):
            named = set(names_in(clause))
            if clause.startswith("everything but"):
                named = set(order) - named - {package}
            elif "what is below" in clause:
                named |= levels.below(*named)
            levels.imports[package] = named
    return levels


def lint(folder: Path, contract: str | None = None) -> tuple[int, str]:
    """Check the contracts of the project in a folder; return the status and the report.

    This takes a process of its own: it looks for the package in the folder, and changes what Python prints to.
    """
    program = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    options = ["--no-logo", "--no-cache", *(["--contract", contract] if contract else [])]
    command = [sys.executable, "-c", program, *options]
    outcome = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=60)
    return outcome.returncode, outcome.stdout + outcome.stderr


@pytest.fixture(scope="module")
def whole_copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("importlinter")
    folder = tmp_path_factory.mktemp("copy")
    shutil.copy(ROOT / "pyproject.toml", folder)
    shutil.copytree(ROOT / "gatewise", folder / "gatewise", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.fixture
def put(whole_copy: Path) -> Iterator[Callable[[str, str], Path]]:
    """Return a function that puts a file into a copy of the project and returns the copy, until the test ends."""
    undo: list[Callable[[], object]] = []

    def write(name: str, text: str) -> Path:
        path = whole_copy / name
        if path.exists():
            undo.append(functools.partial(path.write_text, path.read_text("utf-8"), "utf-8"))
        else:  # a package
            undo.append(functools.partial(shutil.rmtree, path.parent))
            path.parent.mkdir()
        path.write_text(text, "utf-8")
        return whole_copy

    yield write
    for each in reversed(undo):
        each()


def test_the_levels_hold() -> None:
    pytest.importorskip("importlinter")
    status, report = lint(ROOT)
    assert status == 0, report


def test_the_levels_hold_in_the_copy(whole_copy: Path) -> None:
    status, report = lint(whole_copy)
    assert status == 0, report


def test_every_contract_has_a_forbidden_import() -> None:
    assert {contract["id"] for contract in contracts()} == FORBIDDEN_IMPORTS.keys()


def test_a_forbidden_import_is_caught(put: Callable[[str, str], Path], whole_copy: Path) -> None:
    """All are put into one copy, in which each contract's part of the report must have its own."""
    for name, statement in FORBIDDEN_IMPORTS.values():
        put(name, f"{(whole_copy / name).read_text('utf-8')}\n{statement}\n")
    status, report = lint(whole_copy)
    assert status != 0
    assert f"Contracts: 0 kept, {len(FORBIDDEN_IMPORTS)} broken." in report
    said = " ".join(report.partition("Broken contracts")[2].split())
    for contract in reversed(contracts()):
        said, _, part = said.partition(contract["name"])
        name, statement = FORBIDDEN_IMPORTS[contract["id"]]
        module = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        assert f"{module} -> {statement.removeprefix('import ')} (l." in part, contract["name"]


def test_a_new_package_must_be_given_its_level(put: Callable[[str, str], Path]) -> None:
    status, report = lint(put("gatewise/attic/__init__.py", ""), "levels")
    assert status != 0
    assert "gatewise.attic" in report


def test_the_document_says_what_the_contracts_do() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    said, done = documented(text), checked()
    assert said.heights == done.heights
    assert said.imports == done.imports


@pytest.mark.parametrize("wrong", WRONG_SENTENCES)
def test_a_wrong_sentence_in_the_document_is_noticed(wrong: str) -> None:
    text, (right, instead) = (ROOT / "docs" / "architecture.md").read_text("utf-8"), WRONG_SENTENCES[wrong]
    assert text.count(right) == 1
    assert documented(text.replace(right, instead)) != checked()


def test_the_picture_of_the_packages_has_the_same_levels() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    picture = text.partition("## Packages")[2].split("```")[1]
    lines = [re.split(r"  +", line)[0] for line in picture.strip().splitlines()]
    assert levels_of(lines) == checked().heights
