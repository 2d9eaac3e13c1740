"""The files of a release: the citation, the supported versions, and the program that tests what was built."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import gatewise

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def program(name):
    specification = importlib.util.spec_from_file_location(name, ROOT / ".ci" / f"{name}.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def installation():
    return program("install")


@pytest.fixture(scope="module")
def release(installation):
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(sys.modules, "install", installation)
        return program("release")


def test_the_citation_is_of_this_version():
    yaml = pytest.importorskip("yaml")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert citation["version"] == gatewise.__version__
    assert citation["license"] == PROJECT["license"]
    assert citation["authors"] == PROJECT["authors"]
    assert {"cff-version", "message", "title", "type"} <= citation.keys()


def test_the_page_about_versions_names_what_the_project_supports():
    page = (ROOT / "docs" / "versions.md").read_text("utf-8")
    pythons = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", line)]
    assert f"| Python | {pythons[0]} to {pythons[-1]} |" in page
    (torch,) = [line for line in PROJECT["dependencies"] if line.startswith("torch")]
    assert f"| PyTorch | {torch.removeprefix('torch>=')} or newer |" in page


def test_every_version_is_tested_by_default_with_and_without_extras():
    makefile = (ROOT / "Makefile").read_text("utf-8")
    pythons = " ".join(line.rpartition(" ")[2] for line in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", line))
    assert f"PYTHONS ?= {pythons}\n" in makefile
    assert re.search(r"TORCHES \?= 2\.6 ", makefile)


def test_what_the_release_installs_is_declared(release):
    assert {re.split("[>=]", line)[0] for line in release.tools()} == set(release.TOOLS)
    for extras in filter(None, release.EXTRAS):
        assert set(extras.split(",")) == PROJECT["optional-dependencies"].keys() - {"dev"}
    assert all((ROOT / test).exists() for test in release.LIGHT)


@pytest.mark.parametrize(
    ("asked", "run"),
    [
        (["tests/test_import.py", "tests/nn/"], ["tests/test_import.py", "tests/nn"]),
        (["tests/nn/test_compile.py", "tests/cli"], ["tests/nn/test_compile.py"]),
        (["tests/nn", "tests/nn/test_compile.py"], ["tests/nn", "tests/nn/test_compile.py"]),
        ([], []),
    ],
)
def test_without_extras_some_of_the_tests_are_run(release, asked, run):
    assert release.light(asked) == run
    assert release.light(["tests"]) == list(release.LIGHT)


def test_a_version_that_cannot_be_had_is_skipped_with_a_sentence(release, monkeypatch, capsys, tmp_path):
    wheel, sdist = tmp_path / "a.whl", tmp_path / "a.tar.gz"
    checked = []
    monkeypatch.setattr(release, "build", lambda pip: (wheel, sdist))
    monkeypatch.setattr(release, "unpacked", lambda sdist, folder: folder)
    monkeypatch.setattr(release.shutil, "which", lambda name: None if name == "python3.99" else name)
    monkeypatch.setattr(release, "_runs", lambda interpreter: True)
    monkeypatch.setattr(release, "available", lambda interpreter, torch, pip: torch == "2.6")
    monkeypatch.setattr(release, "check", lambda interpreter, torch, extras, package, *rest: checked.append(package))
    words = ["release", "--pythons", "3.99 3.11", "--torches", "2.6 9.9"]
    monkeypatch.setattr(release.sys, "argv", words)
    with pytest.raises(SystemExit) as leaving:
        release.main()
    assert leaving.value.code == 0
    said = capsys.readouterr().out
    assert "skipped: Python 3.99, PyTorch 2.6, no extras: python3.99 is not installed." in said
    assert "skipped: Python 3.11, PyTorch 9.9, no extras: pip finds no PyTorch 9.9 for it." in said
    assert said.count("passed: ") == 2
    assert said.count("not tried: ") == 6
    assert "not tried: Python 3.11, PyTorch 9.9, no extras\n" in said
    assert "2 combinations passed, 0 failed, 6 skipped. In " in said.splitlines()[-1]
    assert checked == [sdist, wheel]
    monkeypatch.setattr(release.sys, "argv", ["release", "--pythons", "/opt/own/python", "--torches", "2.6"])
    with pytest.raises(SystemExit) as leaving:
        release.main()
    assert leaving.value.code == 0
    assert "passed: Python /opt/own/python, PyTorch 2.6, no extras\n" in capsys.readouterr().out
    monkeypatch.setattr(release.sys, "argv", ["release", "--pythons", "3.99"])
    with pytest.raises(SystemExit) as leaving:
        release.main()
    assert leaving.value.code == 1


NONE = "ERROR: Could not find a version that satisfies the requirement torch==9.9.* (from versions: {})\n"
NONE += "ERROR: No matching distribution found for torch==9.9.*\n"


@pytest.mark.parametrize(
    ("said", "known"),
    [
        (NONE.format("2.10.0, 2.11.0"), True),
        (NONE.format("none"), True),
        (
            "WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError'\n"
            + NONE.format("none"),
            False,
        ),
        ("no such option: --index", False),
    ],
)
def test_only_a_version_that_no_index_has_is_skipped(release, monkeypatch, said, known):
    monkeypatch.setattr(release, "environment", lambda interpreter, folder: interpreter)
    answer = subprocess.CompletedProcess([], 1, said)
    monkeypatch.setattr(release.subprocess, "run", lambda *words, **options: answer)
    if known:
        assert not release.available("python3", "9.9", [])
    else:
        with pytest.raises(release.Failed, match="pip install --dry-run"):
            release.available("python3", "9.9", [])


def test_a_build_that_fails_keeps_what_was_built_before(release, monkeypatch, tmp_path):
    monkeypatch.setattr(release, "DIST", tmp_path / "dist")
    monkeypatch.setattr(release, "environment", lambda interpreter, folder: interpreter)
    written = ["gatewise.whl", "gatewise.tar.gz"]

    def run(*words, cwd=None):
        if "--outdir" in words:
            folder = words[words.index("--outdir") + 1]
            folder.mkdir()
            for name in written:
                (folder / name).write_text(name)
            if len(written) < 2:
                raise release.Failed("the build")

    monkeypatch.setattr(release, "run", run)
    built = release.build([])
    assert built == (tmp_path / "dist" / "gatewise.whl", tmp_path / "dist" / "gatewise.tar.gz")
    del written[1]
    with pytest.raises(release.Failed):
        release.build([])
    assert all(file.exists() for file in built)


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_options_of_pip_reach_the_release(release, monkeypatch):
    given = ["PYTHON=python3", "TESTS=tests/nn tests/cells", "PIP_OPTIONS=--no-cache-dir --index-url here"]
    words = ["make", "--dry-run", "release", *given]
    command = subprocess.run(words, cwd=ROOT, text=True, capture_output=True, check=True).stdout
    monkeypatch.setattr(release.sys, "argv", release.shlex.split(command.replace("\\\n", " "))[1:])
    options = release._options()
    assert options.pip == ["--no-cache-dir", "--index-url", "here"]
    assert options.tests == ["tests/nn", "tests/cells"]


LISTED = """:env:.find-links='/one /two'
global.extra-index-url='file:///a file:///b'
global.find-links='/old'
freeze.timeout='10'
install.cert='/etc/own.crt'
"""


@pytest.fixture
def started(installation, monkeypatch):
    """Answer with given exit statuses instead of starting programs; the commands are listed."""
    commands, statuses = [], []

    def run(command, **options):
        if command[-2:] == ["config", "list"]:
            return subprocess.CompletedProcess(command, 0, LISTED)
        if command == ["python", "-m", "pip", "--version"]:
            return subprocess.CompletedProcess(command, 0)
        commands.append((command, options.get("env") or {}))
        return subprocess.CompletedProcess(command, statuses.pop(0))

    monkeypatch.setattr(installation.subprocess, "run", run)
    return commands, statuses


def test_uv_installs_from_the_indexes_of_pip(installation, started):
    commands, statuses = started
    statuses += [0, 0]
    assert installation.install("python", ["--pre", "torch"], ["--pre"]) == 0
    (first, _), (second, environment) = commands
    assert first == ["python", "-m", "pip", "install", *installation.QUIET, "--pre", "uv"]
    assert second[:5] == ["python", "-m", "uv", "pip", "install"]
    indexes = ["--index", "file:///a", "--index", "file:///b"]
    assert second[-10:] == [*indexes, "--find-links", "/one", "--find-links", "/two", "--pre", "torch"]
    assert environment["SSL_CERT_FILE"] == "/etc/own.crt"


@pytest.mark.parametrize("running", [True, False])
def test_an_environment_without_pip_gets_what_another_pip_installs(installation, monkeypatch, running):
    asked = []

    def run(command, **options):
        asked.append(command)
        found = running and command[0] == sys.executable
        return subprocess.CompletedProcess(command, 0 if found or "ensurepip" in command else 1)

    monkeypatch.setattr(installation.subprocess, "run", run)
    command = installation.pip_for("python")
    assert command == ([sys.executable, "-m", "pip", "--python", "python"] if running else ["python", "-m", "pip"])
    assert (asked[-1] == ["python", "-m", "ensurepip"]) == (not running)


@pytest.mark.parametrize("statuses_of_uv", [[1], [0, 1]], ids=["cannot be had", "fails"])
def test_pip_installs_where_uv_does_not(installation, started, statuses_of_uv):
    commands, statuses = started
    statuses += [*statuses_of_uv, 3]
    assert installation.install("python", ["torch"]) == 3
    assert commands[-1][0] == ["python", "-m", "pip", "install", *installation.QUIET, "--no-compile", "torch"]
    assert not statuses


def test_no_index_of_pip_is_none_of_uv(installation):
    assert installation.translated({"no-index": "true"}) == ["--no-index"]
    assert installation.translated({"no-index": "0", "index-url": "file:///a"}) == ["--default-index", "file:///a"]
