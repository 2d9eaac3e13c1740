"""What the processor of this machine can do."""

from __future__ import annotations

import pytest
import torch

_REASON = "torch.nn.LSTM raises an error under bfloat16 autocast on this processor"
_RUNS = torch.ops.mkldnn._is_mkldnn_bf16_supported()

needs_bfloat16_autocast = pytest.mark.skipif(not _RUNS, reason=_REASON)
"""Marks tests of `torch.nn.LSTM` under bfloat16 autocast on a CPU, which PyTorch computes on some processors only."""

AUTOCAST = pytest.param("bf16-autocast", marks=needs_bfloat16_autocast)
"""The name of the precision of the benchmarks, as a parameter of tests."""


def skip_where_it_fails(autocast: bool) -> None:
    """Skip a test of `torch.nn.LSTM` with or without bfloat16 autocast where the processor cannot run it."""
    if autocast and not _RUNS:
        pytest.skip(_REASON)
