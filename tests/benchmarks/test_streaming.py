"""The benchmark of single steps runs, compares its ways with float64, and records what it measures."""

import importlib.util
import itertools
import json
import sys
from pathlib import Path

import pytest
import torch

from tests.pairwise import each_value

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "streaming.py"


@pytest.fixture
def program(tmp_path, monkeypatch):
    specification = importlib.util.spec_from_file_location("streaming", PROGRAM)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    monkeypatch.setattr(module, "RESULTS", tmp_path / "streaming.jsonl")
    monkeypatch.setattr(sys, "argv", ["streaming.py", "--batch", "2", "--size", "3", "5", "--calls", "30"])
    return module


@pytest.mark.parametrize(
    ("cell", "dtype"),
    each_value([*itertools.product(["LSTM", "GRU", "RNN"], ["float32", "float64", "bfloat16"])]),
    ids=str,
)
def test_the_program_records_every_way(program, cell, dtype, capsys):
    sys.argv += ["--cell", cell, "--dtype", dtype]
    assert program.main() == 0
    (line,) = program.RESULTS.read_text("utf-8").splitlines()
    record = json.loads(line)
    ways = ["nn", "cell", "layer", "stream"]
    assert [(row["H"], row["way"]) for row in record["rows"]] == [(size, way) for size in (3, 5) for way in ways]
    assert all(0 < row["least"] <= row["median"] <= row["q99"] for row in record["rows"])
    assert all(row["calls"] == 50 for row in record["rows"])
    assert record["run"]["torch"] == torch.__version__
    assert capsys.readouterr().out.count("stream") == 2


def test_wrong_outputs_are_not_timed(program, monkeypatch):
    ways_of = program.ways_of

    def wrong(*case):
        ways, x = ways_of(*case)
        stream = ways["stream"]
        return ways | {"stream": lambda: 1.001 * stream()}, x

    monkeypatch.setattr(program, "ways_of", wrong)
    with pytest.raises(RuntimeError, match="'stream'"):
        program.main()
    assert not program.RESULTS.exists()
