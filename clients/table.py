"""The table of the documentation."""

from __future__ import annotations

from collections.abc import Sequence

from clients.comparison import Comparison

_HEAD = """\
| client | PyTorch | the line | layers | greatest difference | on `eager` | without oneDNN | saved and loaded |
|---|---|---|---|---:|---:|---:|---|"""


def table(comparisons: Sequence[Comparison]) -> str:
    """Return the table as Markdown, with the versions below it.

    Args:
        comparisons: One for each client.
    """
    rows = [_row(each) for each in comparisons]
    agreeing = sum(each.agrees for each in comparisons)
    commits = ", ".join(dict.fromkeys(each.commit for each in comparisons))
    dates = [each.date[:10] for each in comparisons]
    dated = " to ".join(dict.fromkeys((min(dates), max(dates)))) if dates else ""
    pythons = ", ".join(dict.fromkeys(each.python for each in comparisons))
    versions = ", ".join(dict.fromkeys(each.gatewise for each in comparisons))
    head = f"{agreeing} of {len(comparisons)} clients agree."
    foot = f"gatewise {versions}, Python {pythons}, on the CPU; {dated}; commits {commits}."
    return "\n".join([head, "", _HEAD, *rows, "", foot])


def _row(each: Comparison) -> str:
    name = f"{each.client} {each.version}".strip()
    if not each.agrees:
        line = f"`{each.line}`" if each.line else ""
        return f"| {name} | {each.torch} | {line} | **{each.verdict.replace('|', ' ')}** | | | | |"
    cells = [
        name,
        each.torch,
        f"`{each.line}`",
        _layers(each),
        _number(each.difference),
        _number(each.eager),
        _number(each.plain),
        "; ".join(dict.fromkeys(_saved(each))) or "-",
    ]
    return f"| {' | '.join(cells)} |"


def _layers(each: Comparison) -> str:
    if not each.layers:
        return "none called"
    counts = ", ".join(f"{count} {kind.removeprefix('gatewise.')}" for kind, count in each.layers.items())
    return f"{counts} on {', '.join(each.kernels)}"


def _saved(each: Comparison) -> list[str]:
    return [
        f"{saved['how']}: {' and '.join(sorted({k.rpartition('.')[0] for k in saved['layers']}))}"
        for saved in each.saved
    ]


def _number(value: float | None) -> str:
    return "0" if value == 0 else f"{value:.0e}"
