"""Reports state the origin of their numbers: every commit and every command, the oldest first."""

from __future__ import annotations

import dataclasses

import pytest

from gatewise.benchmarks.provenance import commands, provenance
from gatewise.benchmarks.record import Record, Run


@pytest.fixture
def later(row: Record) -> Run:
    changes = {"commit": "fedcba", "dirty": True, "date": "2026-01-05T00:00:00+00:00", "torch": "2.12.0"}
    return dataclasses.replace(row.run, **changes, command=f"{row.run.command} --dtype bf16")


def test_one_run(row: Record) -> None:
    text = provenance([row.run, row.run])
    assert text.startswith(f"{row.run.device}; PyTorch {row.run.torch}, ")
    assert text.endswith("; 2026-01-02; commit 0123456789. Medians of samples taken in turn.")
    assert provenance([row.run], in_turn=False).endswith("; commit 0123456789. Medians of samples.")
    assert provenance([row.run], sampled=False).endswith("; commit 0123456789.")


def test_several_runs_are_said_in_the_order_in_which_they_were_made(row: Record, later: Run) -> None:
    for runs in ([row.run, later], [later, row.run]):
        assert "2026-01-02 to 2026-01-05; commits 0123456789, fedcba with changes." in provenance(runs)
        assert "PyTorch 2.12.0" in provenance(runs)
        assert commands(runs) == f"- `{row.run.command}`\n- `{later.command}`"


def test_a_command_is_said_once(row: Record) -> None:
    assert commands([row.run, row.run]) == f"- `{row.run.command}`"
