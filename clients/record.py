"""The record of the runs: one line of JSON for each, which is never edited."""

from __future__ import annotations

import dataclasses
import json

from clients.comparison import Comparison
from clients.paths import RECORD


def append(comparison: Comparison) -> None:
    """Add a line to the record."""
    with RECORD.open("a", encoding="utf-8") as file:
        file.write(json.dumps(dataclasses.asdict(comparison)) + "\n")


def newest() -> list[Comparison]:
    """Return the newest comparison of every client, in the order of their names."""
    lines = RECORD.read_text("utf-8").splitlines() if RECORD.exists() else []
    found = {record["client"]: Comparison(**record) for record in map(json.loads, lines)}
    return [found[client] for client in sorted(found)]
