"""The largest batch whose training step fits into a memory budget."""

from __future__ import annotations

from collections.abc import Callable

MULTIPLE = 32  # batch sizes are multiples of this, at which kernels are fast


def largest_batch(
    peak_bytes: Callable[[int], int], budget: int, first: int = 64, most: int = 8192, guess: int | None = None
) -> int | None:
    """Return the largest batch, a multiple of `MULTIPLE`, whose measured peak memory is within a budget.

    The memory of a step is almost a linear function of the batch, so two measurements show where to search; the
    returned batch was measured.

    Args:
        peak_bytes: A function that measures the peak memory for a batch size.
        budget: The budget in bytes.
        first: The smallest batch that is tried.
        most: The largest batch that is tried.
        guess: The start of the search; None to extrapolate it from measurements.

    Returns:
        The batch size; None if not even the smallest fits.
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
