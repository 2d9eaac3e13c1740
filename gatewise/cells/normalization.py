"""Normalization over the hidden units of a layer, for the steps of cells."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import handle_torch_function, has_torch_function

from gatewise.cells.statement import StatementError


def standardized(*values: Any, eps: float = 1e-5, centered: bool = True) -> Any:
    """Return values with mean 0 and variance 1 over the hidden units: layer normalization without gain and shift.

        mean = average of v over all units (and over all values, if there are several)
        variance = average of (v - mean)^2
        result = (v - mean) / sqrt(variance + eps)

    This is the only function by which the step of a cell can combine hidden units. The step multiplies the results with
    gains and adds shifts, which the cell declares in `parameters`.

    Args:
        values: The values, such as the sums of gates or a state. Several values are normalized together, with the mean
            and the variance of all of them, as where a layer normalization covers the 4 H sums of an LSTM.
        eps: The number that is added to the variance.
        centered: Whether the mean is subtracted. If not, the mean is taken as 0 (RMS normalization).

    Returns:
        A single result for a single value, otherwise a tuple with one result for each value.

    Raises:
        StatementError: No value is given, or `eps` is not a positive number.

    Source: Ba et al., "Layer normalization" (2016); Zhang & Sennrich, "Root mean square layer normalization" (2019).
    """
    if not values:
        raise StatementError("`values` of `standardized` must be one or more sums or states of the step, got none.")
    if isinstance(eps, bool) or not isinstance(eps, (int, float)) or not 0 < eps < float("inf"):
        raise StatementError(f"`eps` of `standardized` must be a positive number, got {eps!r}.")
    if has_torch_function(values):
        return handle_torch_function(standardized, values, *values, eps=eps, centered=centered)
    joined = values[0] if len(values) == 1 else torch.cat(values, -1)
    if joined.dtype == torch.float64:
        # PyTorch's operator loses digits where the variance is far below eps, which would show in comparisons. So do
        # sums of gradients: those of the value and of its mean are of order 1 / sqrt(eps) and nearly cancel. The view
        # has them added to each other before they are added to other gradients of the value, which may be far smaller.
        joined = joined.view_as(joined)
        joined = joined - joined.mean(-1, keepdim=True) if centered else joined
        found = joined * torch.rsqrt(joined.square().mean(-1, keepdim=True) + eps)
    else:
        function = torch.nn.functional.layer_norm if centered else torch.nn.functional.rms_norm
        found = function(joined, joined.shape[-1:], eps=eps)
    return found if len(values) == 1 else found.chunk(len(values), -1)
