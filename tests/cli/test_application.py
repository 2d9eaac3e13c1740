"""The program as a whole: its list of commands, its errors, its imports."""

from __future__ import annotations

import importlib
import itertools
import subprocess
import sys

import pytest

from gatewise.cli import COMMANDS
from gatewise.contract.errors import MissingExtra


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_every_command_is_there_and_fits_80_columns(gatewise, command):
    importlib.import_module(command.module)
    answer = gatewise(command.name, "--help")
    assert answer.status == 0
    assert "Usage: gatewise" in answer.out
    assert max(map(len, answer.out.splitlines())) <= 80


@pytest.mark.parametrize("name", ["classify", "lm", "nmt"])
def test_sentences_of_the_help_are_not_broken_twice(gatewise, name):
    answer = gatewise("train", name, "--help")
    lines = [line.strip() for line in answer.out.partition("Examples:")[0].splitlines()]
    for before, line in itertools.pairwise(lines):
        if before and line and not before.startswith("Usage"):
            assert len(f"{before} {line.split()[0]}") > 75, f"{before!r} ends early"


def test_the_list_has_every_command_with_its_summary(gatewise):
    answer = gatewise("--help")
    for command in COMMANDS:
        assert command.name in answer.out
        assert command.summary in answer.out
    assert max(map(len, answer.out.splitlines())) <= 80


def test_help_for_training_has_examples_and_groups(gatewise):
    out = gatewise("train", "lm", "--help").out
    for word in ("Examples:", "torchrun --nproc-per-node 2", "Text", "Model", "Training", "Run", "--set", "--resume"):
        assert word in out


def test_the_version_is_printed(gatewise):
    from gatewise import __version__

    assert gatewise("--version").out.strip() == __version__


def test_an_unknown_command_is_a_usage_error(gatewise):
    answer = gatewise("tarin")
    assert answer.status == 2
    assert "No such command 'tarin'" in answer.err


def test_help_imports_no_command():
    program = (
        "import sys; sys.argv = ['gatewise', '--help']\n"
        "from gatewise.cli import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "print([name for name in sys.modules if name.startswith('gatewise.') and name.split('.')[1] in "
        "('training', 'data', 'models', 'benchmarks') or name in ('matplotlib', 'tensorboard', 'safetensors')])"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert answer.stdout.strip().endswith("[]")


# Looking for garbage would take a fifth of the time: imports leave none.
WITHOUT_EXTRAS = """
import gc
gc.disable()
import importlib.metadata, sys
from gatewise.cli import COMMANDS, environment, main
extra = {package.package.lower() for extra in environment.extras() for package in extra.requirements}
for package in extra:
    try:
        found = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        continue
    names = (found.read_text("top_level.txt") or "").split() or {file.parts[0] for file in found.files}
    sys.modules.update(dict.fromkeys(name.removesuffix(".py") for name in names))
call = "--input 5,3,4 --hidden 8"
helps = [f"{command.name} --help" for command in COMMANDS]
trained = [f"train {task} --help" for task in ("lm", "nmt", "classify")]
others = ["doctor", f"explain {call}", "explain nmt --hidden-size 8", "recipes"]
for words in ("--help", "--version", *helps, *trained, *others):
    sys.argv = ["gatewise", *words.split()]
    try:
        main()
    except SystemExit as leaving:
        assert not leaving.code, words
assert {"tokenizers", "matplotlib", "sacrebleu"} <= {name for name in sys.modules if sys.modules[name] is None}
"""


def test_help_doctor_explain_and_recipes_need_no_extra():
    pytest.importorskip("matplotlib")
    subprocess.run([sys.executable, "-c", WITHOUT_EXTRAS], check=True, capture_output=True, text=True)


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_without_its_packages_there_is_one_sentence(gatewise, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "gatewise.cli.application", raising=False)
    answer = gatewise("--help")
    assert answer.status == 1
    expected = f"error: the command line needs `{package}`, which is not installed. Run: pip install {package}"
    assert answer.err.strip() == expected


@pytest.mark.parametrize(
    ("package", "words"),
    [
        ("tokenizers", ["--tokens", "bpe"]),
        ("safetensors", []),
        ("torch.utils.tensorboard", []),
        ("matplotlib.figure", []),
    ],
)
def test_training_without_a_package_of_the_extra_says_which(gatewise, small, monkeypatch, package, words):
    monkeypatch.setitem(sys.modules, package, None)
    answer = gatewise("train", "lm", *small, *words)
    assert answer.status == 1
    name = {"torch.utils.tensorboard": "tensorboard", "matplotlib.figure": "matplotlib"}.get(package, package)
    assert f"needs `{name}`, which is not installed. Run: pip install 'gatewise[train]'" in answer.err
    assert "\n      1 " not in answer.out  # no epoch was trained


def test_the_error_of_a_missing_extra_is_an_import_error():
    assert issubclass(MissingExtra, ImportError)
