"""`benchmarks/starts.py`: how long training takes to start."""

import json
import subprocess
import sys

import pytest

from benchmarks import starts
from tests.programs import Program


@pytest.fixture
def forked(monkeypatch, tmp_path):
    """Fork what the script starts from a process that has imported everything."""

    def run(words, env, stdout, check):
        assert words[:3] == [sys.executable, "-m", "gatewise"]
        assert stdout is sys.stderr
        assert check
        program = Program(words[3:], tmp_path, env).ended()
        sys.stderr.write(program.out)
        if program.status:
            raise subprocess.CalledProcessError(program.status, words, stderr=program.err)

    monkeypatch.setattr(subprocess, "run", run)


def test_the_parts_of_a_process_add_up_to_its_time():
    result = {"evaluations": [{"epoch": 1.0, "minutes": 0.05}]}
    found = starts.measured(result, began=10.0, described=14.0, ended=19.0)
    assert found == {"first_epoch": 3.0, "process": 9.0, "before": 4.0, "after": 2.0}
    with pytest.raises(ValueError, match="unpack"):  # more than one epoch says nothing of the first
        starts.measured({"evaluations": 2 * result["evaluations"]}, 10.0, 14.0, 19.0)


# It starts processes to time them.
@pytest.mark.exhaustive
def test_a_line_of_the_record_has_all_runs_of_a_command(forked, corpus, tmp_path, capfd):
    record = tmp_path / "starts.jsonl"
    small = "--device", "cpu", "--text", str(corpus), "--tokens", "character", "--hidden-size", "8", "--epochs", "3"
    command = "train", "lm", *small, "--batch-size", "2", "--window", "5", "--set", "sample.length=1"
    assert starts.main(["--cached", "1", "--record", str(record), "tiny", "--", *command]) == 0
    (line,) = map(json.loads, record.read_text().splitlines())
    assert line["case"] == "tiny"
    assert line["run"]["command"] == f"gatewise {' '.join(command)}"
    assert len(line["runs"]) == 2
    for each in line["runs"]:
        assert 0 < each["first_epoch"] < each["process"]
        assert 0 < each["before"] < each["process"]
        assert each["before"] + each["first_epoch"] + each["after"] == pytest.approx(each["process"])
    lines = capfd.readouterr().out.splitlines()
    assert [line.split(" first")[0].split() for line in lines] == [
        ["tiny,", "caches", kind] for kind in ("empty", "full")
    ]
