"""The tests of three clients, as they are published, before and after gatewise's classes are put into `torch.nn`."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import re
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

from clients.environment import Failed, answer_of, call, last_line
from clients.paths import ROOT

RECORD = ROOT / "benchmarks" / "results" / "client_tests.jsonl"

TESTS = {
    "opacus": ["opacus/tests/dp_layers/dp_rnn_test.py", "opacus/tests/validators/lstm_test.py"],
    "pytorch-forecasting": ["tests/test_models/test_nn/test_rnn.py"],
    "sb3-contrib": ["tests/test_lstm.py"],
}
"""The files of the source distribution."""

_LEFT_OUT = {"sb3-contrib": "test_ppo_lstm_performance"}  # trains for many minutes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OwnTests:
    """The results of a client's tests.

    Attributes:
        client: The name of the client in the package index.
        version: Its version.
        files: The files of its source distribution.
        before: The summary of pytest without gatewise, such as "20 passed".
        after: The summary with gatewise's classes in `torch.nn`.
        commit: The commit of gatewise.
        date: The date, in UTC.
    """

    client: str
    version: str
    files: Sequence[str]
    before: str
    after: str
    commit: str
    date: str


def own_tests(python: Path, client: str, version: str, commit: str, timeout: float) -> OwnTests:
    """Run the tests of a client, and add the results to their record.

    Args:
        python: The interpreter of the environment of the client.
        client: The name of the client in the package index.
        version: Its version.
        commit: The commit of gatewise.
        timeout: The time after which they are ended, in seconds.

    Raises:
        Failed: The source distribution cannot be had, or the tests take too long, end without a result, or none passes.
    """
    with tempfile.TemporaryDirectory() as folder:
        words = ["download", "--quiet", "--no-deps", "--no-binary", ":all:", "--dest", folder, f"{client}=={version}"]
        call(sys.executable, "-m", "pip", *words)
        (archive,) = Path(folder).glob("*.tar.gz")
        with tarfile.open(archive) as file:
            file.extractall(folder, filter="data")
        source = next(path for path in Path(folder).iterdir() if path.is_dir())
        before, after = (
            _tested(python, client, source, plugin, timeout) for plugin in ((), ("-p", "clients.replaced"))
        )
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    found = OwnTests(
        client=client, version=version, files=TESTS[client], before=before, after=after, commit=commit, date=date
    )
    with RECORD.open("a", encoding="utf-8") as file:
        file.write(json.dumps(dataclasses.asdict(found)) + "\n")
    return found


def newest() -> list[OwnTests]:
    """Return the newest results of every client, in the order of their names."""
    lines = RECORD.read_text("utf-8").splitlines() if RECORD.exists() else []
    found = {record["client"]: OwnTests(**record) for record in map(json.loads, lines)}
    return [found[client] for client in sorted(found)]


def table(results: Sequence[OwnTests]) -> str:
    """Return the results as Markdown.

    Args:
        results: One for each client.
    """
    rows = [
        f"| {each.client} {each.version} | {', '.join(f'`{file}`' for file in each.files)} | {each.before} "
        f"| {each.after} | {each.date[:10]}, {each.commit} |"
        for each in results
    ]
    return "\n".join(["| client | its tests | before | after | date, commit |", "|---|---|---|---|---|", *rows])


def _tested(python: Path, client: str, source: Path, plugin: Sequence[str], timeout: float) -> str:
    # The installed library is tested, and not the source beside the tests.
    words = ["-q", "-p", "no:cacheprovider", "--import-mode=importlib", "-c", os.devnull, "--rootdir", str(source)]
    words += ["--confcutdir", str((source / TESTS[client][0]).parent), "-k", f"not {_LEFT_OUT.get(client, 'nothing')}"]
    command = [str(python), "-P", "-m", "pytest", *plugin, *words, *TESTS[client]]
    answer = answer_of(command, source, "tests", timeout)
    summary = (answer.stdout.strip().splitlines() or [""])[-1].partition(" in ")[0].strip("= ")
    # 1: some failed, as they may do without gatewise
    if answer.returncode not in (0, 1) or not re.search(r"\b\d+ passed", summary):
        raise Failed(f"tests: {last_line(answer.stdout) or 'no output'}")
    return summary
