"""The documentation builds, and the API reference shows what docstrings say."""

from __future__ import annotations

import importlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import gatewise

ROOT = Path(__file__).parents[2]
# The index for the search, the colours of code and the lines of signatures are the plugins' to test, and take two
# fifths of the time; looking for garbage takes a tenth.
BUILD = """
import gc, sys
from mkdocs.commands.build import build
from mkdocs.config import load_config
gc.disable()
config = load_config("mkdocs.yml", site_dir=sys.argv[1], strict=True)
config.plugins["material/search"].config.enabled = False
config.plugins["mkdocstrings"].config.handlers["python"]["options"]["separate_signature"] = False
config.mdx_configs["pymdownx.highlight"] = {"use_pygments": False}
build(config)
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Build the documentation, in which every warning is an error, such as a link that leads nowhere."""
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("needs mkdocs")
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-c", BUILD, str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
    )
    assert built.returncode == 0, built.stderr
    return folder


def test_every_page_is_built(site):
    pages = {page.relative_to(ROOT / "docs").with_suffix("") for page in (ROOT / "docs").rglob("*.md")}
    for page in pages:
        assert (site / ("index.html" if page.name == "index" else page / "index.html")).exists()


def test_examples_of_docstrings_are_code(site):
    reference = (site / "api" / "index.html").read_text("utf-8")
    assert "<blockquote>" not in reference, "a prompt (>>>) outside of a section `Examples:` is a quotation in Markdown"
    assert len(re.findall(r"<pre\b", reference)) > 20


def public_names():
    """Yield the packages of which users import names, and those names."""
    for package in ("gatewise", "gatewise.nn", "gatewise.attention", "gatewise.models"):
        yield from ((package, name) for name in importlib.import_module(package).__all__)
    cells = importlib.import_module("gatewise.cells")
    names = ["standardized", "candidate", "StatementError", *(type(cell).__name__ for cell in cells.SHIPPED)]
    yield from (("gatewise.cells", name) for name in names)


@pytest.mark.parametrize(("package", "name"), sorted(set(public_names())))
def test_the_reference_has_a_public_name(site, package, name):
    documented = getattr(importlib.import_module(package), name)
    if isinstance(documented, (str, ModuleType)):
        return  # the version, and packages whose names are listed by themselves
    places = {f"{package}.{name}", f"{documented.__module__}.{documented.__qualname__}"}
    places |= {f"gatewise.{name}"} if getattr(gatewise, name, None) is documented else set()
    reference = (site / "api" / "index.html").read_text("utf-8")
    assert any(f'id="{place}"' in reference for place in places)
