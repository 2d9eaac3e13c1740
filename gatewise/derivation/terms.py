"""Expressions of sums of products, and rows that one operator reads or writes."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def plus(total: str, above: str, coefficient: str, out: str = "") -> str:
    """Return the expression of a total plus a product; both factors are variables, or the coefficient is a number."""
    into = f", out={out}" if out else ""
    if not total:
        return above if coefficient == "1" else f"{above} * {coefficient}"
    if coefficient.isidentifier():
        return f"torch.addcmul({total}, {above}, {coefficient}{into})"
    return f"torch.add({total}, {above}, alpha={coefficient}{into})"


def are_consecutive(rows: Sequence[int]) -> bool:
    """Return whether all rows exist, and each follows on the one before it; -1 stands for none."""
    return rows[0] >= 0 and list(rows) == list(range(rows[0], rows[0] + len(rows)))


def runs_of(rows: Sequence[int], written: Collection[int]) -> list[tuple[int, int]]:
    """Return the first and last row of each run of rows that one operator can write to."""
    if not rows:
        return []
    first, last = rows[0], rows[-1]
    # Rows between them get zeros, if nothing has been written to them, or have zeros added.
    if last - first + 1 <= 2 * len(rows) and len({row in written for row in range(first, last + 1)}) == 1:
        return [(first, last)]
    runs: list[tuple[int, int]] = []
    for row in rows:
        if runs and runs[-1][1] == row - 1 and (row in written) == (row - 1 in written):
            runs[-1] = runs[-1][0], row
        else:
            runs.append((row, row))
    return runs
