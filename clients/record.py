"""The record of the runs: one line of JSON for each, which is never edited."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from clients.comparison import Comparison

ROOT = Path(__file__).parents[1]
FOLDER = Path(__file__).parent
RECORD = ROOT / "benchmarks" / "results" / "clients.jsonl"
PAGE = ROOT / "docs" / "clients.md"


def append(comparison: Comparison) -> None:
    """Add a line to the record."""
    with RECORD.open("a", encoding="utf-8") as file:
        file.write(json.dumps(dataclasses.asdict(comparison)) + "\n")


def newest() -> list[Comparison]:
    """Return the newest comparison of every client, in the order of their names."""
    from clients.comparison import Comparison

    lines = RECORD.read_text("utf-8").splitlines() if RECORD.exists() else []
    found = {record["client"]: Comparison(**record) for record in map(json.loads, lines)}
    return [found[client] for client in sorted(found)]
