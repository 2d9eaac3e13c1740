"""The floors of the house hold, and each contract that guards them can fail."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# For each contract of pyproject.toml: a file, and an import in it that the contract must catch.
FORBIDDEN_IMPORTS = {
    "floors": ("gatewise/contract/problem.py", "import gatewise.selection"),
    "kernels": ("gatewise/kernels/aten/kernel.py", "import gatewise.kernels.cudnn"),
    "cells": ("gatewise/functional/explicit.py", "import gatewise.cells.adjoint"),
    "calls": ("gatewise/functional/explicit.py", "import gatewise.kernels.cudnn"),
    "layers": ("gatewise/nn/lstm.py", "import gatewise.selection"),
    "attention": ("gatewise/attention/explicit.py", "import gatewise.selection"),
    "training": ("gatewise/training/__init__.py", "import gatewise.contract.problem"),
    "light": ("gatewise/nn/lstm.py", "import rich"),
}


def lint(folder: Path, contract: str | None = None) -> subprocess.CompletedProcess[str]:
    """Check the contracts of the project that lies in `folder`."""
    program = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    options = ["--no-logo", "--no-cache", *(["--contract", contract] if contract else [])]
    return subprocess.run(
        [sys.executable, "-c", program, *options], cwd=folder, capture_output=True, text=True, check=False, timeout=60
    )


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    pytest.importorskip("importlinter")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(ROOT / "gatewise", tmp_path / "gatewise", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def test_the_floors_hold() -> None:
    pytest.importorskip("importlinter")
    outcome = lint(ROOT)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr


def test_every_contract_has_a_forbidden_import() -> None:
    configuration = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    contracts = {contract["id"] for contract in configuration["tool"]["importlinter"]["contracts"]}
    assert contracts == FORBIDDEN_IMPORTS.keys()


@pytest.mark.parametrize("contract", FORBIDDEN_IMPORTS)
def test_a_forbidden_import_is_caught(copy: Path, contract: str) -> None:
    name, statement = FORBIDDEN_IMPORTS[contract]
    file = copy / name
    file.write_text(f"{file.read_text('utf-8')}\n{statement}\n", "utf-8")
    outcome = lint(copy, contract)
    assert outcome.returncode != 0
    assert "BROKEN" in outcome.stdout
    assert statement.removeprefix("import ") in outcome.stdout


def test_a_new_package_must_be_given_its_floor(copy: Path) -> None:
    (copy / "gatewise" / "attic").mkdir()
    (copy / "gatewise" / "attic" / "__init__.py").touch()
    outcome = lint(copy, "floors")
    assert outcome.returncode != 0
    assert "gatewise.attic" in outcome.stdout
