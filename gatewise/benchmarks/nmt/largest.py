"""The largest batch whose training step fits a memory budget."""

from __future__ import annotations

from collections.abc import Callable

MULTIPLE = 32  # batches are multiples of this, as kernels like them


def largest_batch(
    peak_bytes: Callable[[int], int], budget: int, first: int = 64, most: int = 8192, guess: int | None = None
) -> int | None:
    """Return the largest batch of a multiple of `MULTIPLE` whose measured peak keeps to a budget.

    A step's memory is nearly a constant and a share for each sentence: two measurements say where to look, and the
    batch that is returned was measured.

    Args:
        peak_bytes: Measures the peak of a batch.
        budget: Bytes.
        first: The smallest batch that is tried.
        most: The largest.
        guess: Where to look; None to find out.

    Returns:
        The batch; None when not even the smallest fits.
    """
    known: dict[int, int] = {}
    if guess is None:
        known = {batch: peak_bytes(batch) for batch in (first, 2 * first)}
        at_first, at_second = known.values()
        slope = max((at_second - at_first) / first, 1.0)
        guess = first + _multiple((budget - at_first) / slope)
    guess = min(most, _multiple(guess))
    while guess >= first:
        peak = known[guess] if guess in known else peak_bytes(guess)
        if peak <= budget:
            return guess
        guess = min(guess - MULTIPLE, _multiple(guess * budget / peak))
    return None


def _multiple(batch: float) -> int:
    return int(batch) // MULTIPLE * MULTIPLE
