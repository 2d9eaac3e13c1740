"""The folders and files of the comparisons."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = Path(__file__).parent
RECORD = ROOT / "benchmarks" / "results" / "clients.jsonl"
PAGE = ROOT / "docs" / "clients.md"
