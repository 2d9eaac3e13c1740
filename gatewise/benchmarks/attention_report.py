"""The table of `gatewise bench attention`, for the terminal and for pages."""

from __future__ import annotations

from collections.abc import Sequence

from gatewise.benchmarks.attention import PLAIN, AttentionRecord
from gatewise.benchmarks.provenance import provenance
from gatewise.contract.decision import format_bytes, format_seconds


def markdown(records: Sequence[AttentionRecord]) -> str:
    """Return a table with a row for each case and way, with times and memory compared with plain PyTorch's.

    Args:
        records: The records of one run.
    """
    lines = [
        "| dtype | T | S | way | called | replayed | memory | replayed, against plain torch |",
        "|---|---|---|---|---|---|---|---|",
    ]
    plain = {_case(record): record for record in records if record.way == PLAIN}
    for record in records:
        lead = f"| {record.dtype} | {record.steps} | {record.source} | {record.way} |"
        if record.median is None:
            lines.append(f"{lead} {record.status} | | | |")
            continue
        times = f"{format_seconds(record.median)} | {_seconds(record.replayed)} | {_bytes(record.peak_bytes)}"
        lines.append(f"{lead} {times} | {_against(record, plain.get(_case(record)))} |")
    if records:
        sizes = f"B {records[0].batch}, H = V = {records[0].hidden}"
        origin = provenance([record.run for record in records], in_turn=False)
        lines += ["", f"Additive attention, forward and backward, {sizes}. {origin}"]
    return "\n".join(lines)


def _case(record: AttentionRecord) -> tuple[str, int, int]:
    return record.dtype, record.steps, record.source


def _seconds(value: float | None) -> str:
    return "" if value is None else format_seconds(value)


def _bytes(value: int | None) -> str:
    return "" if value is None else format_bytes(value)


def _against(record: AttentionRecord, plain: AttentionRecord | None) -> str:
    if plain is None or plain.median is None or record.median is None or record is plain:
        return ""
    faster = (plain.replayed or plain.median) / (record.replayed or record.median)
    if plain.peak_bytes and record.peak_bytes:
        return f"{faster:.1f}x as fast, {plain.peak_bytes / record.peak_bytes:.1f}x less memory"
    return f"{faster:.1f}x as fast"
