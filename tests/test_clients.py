"""The programs of the clients, and the table of the documentation."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import gatewise
from clients import own_tests
from clients.comparison import Comparison, compared, difference, failed
from clients.environment import Failed, last_line
from clients.paths import FOLDER, PAGE
from clients.record import newest
from clients.table import table
from clients.trial import Trial

CLIENTS = [
    *("captum", "darts", "demucs", "flair", "gluonts", "lightning", "neuralforecast", "neuralhydrology"),
    *("opacus", "pfrl", "pytorch-forecasting", "resemblyzer", "sb3-contrib", "skorch", "stanza"),
    *("tianshou", "torch-geometric", "torchrl"),
]
GOOD = {"client": "one", "difference": 0.0, "eager": 1e-7, "plain": 1e-7, "layers": {"gatewise.LSTM": 2}}


def test_every_client_has_a_program_pins_and_a_record():
    programs = sorted(path.stem for path in (FOLDER / "programs").glob("*.py") if path.stem != "__init__")
    assert programs == [client.replace("-", "_") for client in CLIENTS]
    assert sorted(path.stem for path in (FOLDER / "requirements").glob("*.txt")) == CLIENTS
    assert [each.client for each in newest()] == CLIENTS


@pytest.mark.parametrize("client", CLIENTS)
def test_a_program_can_be_read_and_states_its_line(client):
    source = (FOLDER / "programs" / f"{client.replace('-', '_')}.py").read_text("utf-8")
    assert ast.get_docstring(ast.parse(source))
    name, line = re.search(r'Trial\(\s*"([\w-]+)",\s*"([^"]+)"', source).groups()
    assert name == client
    statement = re.split(r"[( ]", line)[0]
    assert source.count(statement) > 1  # it is run, too


@pytest.mark.parametrize("client", CLIENTS)
def test_all_versions_are_pinned(client):
    lines = (FOLDER / "requirements" / f"{client}.txt").read_text("utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert {client, "torch", "numpy"} <= pins.keys()
    found = next(each for each in newest() if each.client == client)
    assert found.version == pins[client]
    assert found.torch.partition("+")[0] == pins["torch"]


def test_the_page_shows_the_newest_records_all_of_which_agree():
    assert table(newest()) in PAGE.read_text("utf-8")
    assert [each.client for each in newest() if not each.agrees] == []


def test_the_page_shows_the_newest_results_of_their_own_tests():
    results = own_tests.newest()
    assert [each.client for each in results] == sorted(own_tests.TESTS)
    assert own_tests.table(results) in PAGE.read_text("utf-8")
    assert all(each.before == each.after and "failed" not in each.after for each in results)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({}, ""),
        ({"layers": {"gatewise.LSTM": 1, "torch.nn.LSTM": 1}}, "not all layers were replaced"),
        ({"difference": 1e-4}, "the numbers differ by 0.0001"),
        ({"difference": float("nan")}, "the numbers differ by nan"),
        ({"eager": 1e-4}, "the numbers of eager differ by 0.0001"),
        ({"eager": 1e-4, "plain": 1e-5}, ""),
        ({"difference": float("inf"), "plain": float("inf")}, "the numbers without oneDNN differ by inf"),
        ({"layers": {}}, "no layer was called"),
        ({"layers": {}, "client": "opacus"}, ""),
        ({"saved": ({"how": "save", "same": False, "layers": {}},)}, "a loaded model answers otherwise"),
    ],
)
def test_what_does_not_agree_is_named(change, problem):
    found = Comparison(**(GOOD | change))
    assert found.problem == problem
    assert found.agrees == (not problem)
    assert ("**" in table([found])) == bool(problem)


def test_an_error_stands_in_the_table():
    found = failed("one", "gatewise: ValueError: a | b")
    assert not found.agrees
    assert "| one |  |  | **error: gatewise: ValueError: a   b** | | | | |" in table([found])


def test_the_greatest_difference_is_relative_to_the_largest_number_of_the_name():
    expected = {"losses": [1.0, -4.0], "scores": [0.0]}
    assert difference(expected, {"losses": [1.0, -4.0], "scores": [0.0]}) == 0
    assert difference(expected, {"losses": [2.0, -4.0], "scores": [0.0]}) == 0.25
    assert difference(expected, {"losses": [1.0, -4.0], "scores": [3.0]}) == 3
    assert difference(expected, {"losses": [1.0], "scores": [0.0]}) == float("inf")
    assert difference(expected, {"losses": [1.0, -4.0]}) == float("inf")
    assert str(difference(expected, {"losses": [1.0, float("nan")], "scores": [0.0]})) == "nan"


@pytest.mark.parametrize("numbers", [{}, {"losses": []}, {"losses": [1.0], "scores": []}])
def test_a_program_without_numbers_cannot_be_compared(numbers):
    assert difference(numbers, numbers) == float("inf")


@pytest.mark.parametrize(
    ("status", "output", "result"),
    [
        (0, "....\n4 passed, 1 deselected in 0.1s\n", "4 passed, 1 deselected"),
        (1, "FAILED a.py - ValueError\n=== 1 failed, 3 passed in 0.1s ===\n", "1 failed, 3 passed"),
        (1, "/bin/python: No module named pytest\n", Failed),
        (1, "ERROR a.py - TypeError\n2 errors in 0.1s\n", Failed),
        (2, "ERROR a.py\n3 passed, 1 error in 0.1s\n", Failed),
        (0, "2 xpassed in 0.1s\n", Failed),
        (5, "no tests ran in 0.01s\n", Failed),
        (-9, "", Failed),
    ],
)
def test_tests_without_a_result_do_not_pass(monkeypatch, tmp_path, status, output, result):
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], status, output))
    arguments = (Path("python"), "opacus", tmp_path, (), 1.0)
    if result is not Failed:
        assert own_tests._tested(*arguments) == result
        return
    with pytest.raises(Failed, match=f"^tests: {re.escape(last_line(output) or 'no output')}$"):
        own_tests._tested(*arguments)


def test_the_error_of_a_traceback_is_found_among_what_follows_it():
    text = "Traceback\n  File x\nValueError: wrong\n  more of it\n1.0 seconds\n"
    assert last_line(text) == "ValueError: wrong"
    assert last_line("one\ntwo\n") == "two"


@pytest.fixture
def mkldnn():
    """Set oneDNN back to what it was, which a trial without it disables."""
    before = torch.backends.mkldnn.set_flags(True)
    yield
    torch.backends.mkldnn.set_flags(*before)


def test_a_trial_reports_layers_kernels_numbers_and_what_was_loaded(tmp_path, monkeypatch, mkldnn):
    reports = {}
    for way in ("pytorch", "gatewise", "eager", "plain"):
        monkeypatch.setattr(sys, "argv", ["program", way, str(tmp_path / way)])
        with gatewise.use_kernel("eager" if way == "eager" else "auto"), Trial("torch", "the line") as trial:
            layer = nn.LSTM(3, 4)
            if trial.gatewise:
                gatewise.accelerate(layer, verbose=False)
            y = layer(torch.randn(5, 2, 3))[0]
            trial.compare("outputs", y)
            trial.compare("losses", y.sum())
            trial.saved("nothing", [1.0], [1.0 if trial.gatewise else 2.0], nn.ModuleList([nn.GRU(1, 1)]))
            with torch.no_grad():
                nn.LSTM(3, 4)(torch.zeros(5, 2, 3))  # not looked at
        reports[way] = json.loads((tmp_path / way).read_text())
    assert reports["pytorch"]["layers"] == {"torch.nn.LSTM": 1}
    assert reports["pytorch"]["saved"] == [{"how": "nothing", "same": False, "layers": {"torch.nn.GRU": 1}}]
    assert (reports["eager"]["kernels"], reports["eager"]["calls"]) == (["eager"], 1)
    found = compared("torch", reports)
    assert (found.layers, found.kernels, found.count) == ({"gatewise.LSTM": 1}, ("aten",), 41)
    assert (found.line, found.version.partition("+")[0]) == ("the line", torch.__version__.partition("+")[0])
    assert found.difference == 0
    assert found.agrees


def test_a_program_that_fails_reports_nothing(tmp_path, monkeypatch, mkldnn):
    monkeypatch.setattr(sys, "argv", ["program", "gatewise", str(tmp_path / "report")])
    with pytest.raises(RuntimeError, match="must be equal to input_size"), Trial("torch", "the line"):
        nn.LSTM(1, 1)(torch.zeros(1, 1, 2))
    assert list(tmp_path.iterdir()) == []
