"""The part of the softmax over the target vocabulary and its loss, computed in chunks of tokens."""

from __future__ import annotations

import torch

from gatewise.contract.device import Device
from gatewise.models.chunked_softmax import even_rows, rows_of_a_chunk
from gatewise.planning.translation.setting import Setting
from gatewise.planning.way import Part, Way

ALL = 1 << 30
ROWS = (ALL, 8192, 4096, 2048, 1024, 512, 256, 128)
"""The chunk sizes, in tokens, that are considered, besides the default of `weighted_token_loss`."""

# The number of times a chunk's logits are read or written: the product writes them, the softmax reads and writes them,
# two products and the bias's gradient read them. With PyTorch operators the softmax reads and writes them twice more,
# for 16-bit logits in float32.
_PASSES, _PLAIN_PASSES, _PLAIN_PASSES_16 = 6, 9, 15
_LAUNCHES, _PLAIN_LAUNCHES = 7, 14  # per chunk

# The cost in bytes per element of the weight and per chunk after the first: the sum of its gradient is read and
# written, and products of fewer rows are slower. It was fitted on an H200 to both passes in bfloat16 over 6,400 rows of
# 512 numbers: for a vocabulary of 17,192 they took 974, 1,059, 1,244, 1,542 and 2,159 us in 1, 2, 4, 8 and 16 chunks,
# for one of 33,278 they took 1,839, 2,048, 2,323, 2,778 and 3,970 us: 80 and 140 us per chunk, 20 of them launches.
_SUM_BYTES = 36.0


def output(setting: Setting) -> Part:
    """Return the part of the output layer and the loss."""
    weight = setting.model.output.weight
    gradients = (weight.numel() + len(weight)) * weight.itemsize
    narrowed = setting.model.narrowed
    if narrowed is not None:
        gradients += narrowed.weight.numel() * narrowed.weight.itemsize
    rows = {*ROWS, rows_of_a_chunk(len(weight), setting.dtype.itemsize)}
    return Part("output", tuple(_way(most, setting) for most in sorted(rows, reverse=True)), gradients)


def rows_of(name: str) -> int:
    """Return the chunk size, in tokens, of the way with this name."""
    return int(name)


def _way(most: int, setting: Setting) -> Way:
    tokens = setting.shape.target * setting.shape.batch
    vocabulary, size = setting.model.output.weight.shape
    number = _number(setting)
    rows = even_rows(tokens, most, number)
    chunks = -(-tokens // rows)
    weights = vocabulary * size + vocabulary
    narrow = number.itemsize == 2
    # The logits; without the Triton kernel, the softmax of 16-bit logits works on a float32 copy, into another.
    scores = rows * vocabulary * (number.itemsize + 8 * (narrow and not _has_program(setting.device)))
    # The weight in the products' dtype, and a chunk's contribution to its gradient before it is added to the sum.
    copies = narrow * vocabulary * size * number.itemsize * (1 + (chunks > 1))
    attended = tokens * setting.model.hidden_size * setting.dtype.itemsize
    detail = f"{chunks} chunks of {rows:,} tokens" if chunks > 1 else f"all {tokens:,} tokens at once"
    return Way(
        str(most),
        detail,
        _seconds(tokens, chunks, number, setting),
        # The gradients of hidden rows, weight and bias are computed in the forward pass.
        kept=weights * (4 if chunks > 1 else number.itemsize) + tokens * size * number.itemsize,
        forward_scratch=scores + copies + attended,
        backward_scratch=tokens * size * setting.dtype.itemsize,
    )


def _number(setting: Setting) -> torch.dtype:
    """Return the dtype of the products."""
    return torch.float16 if setting.rounds_float32 else setting.dtype


def _seconds(tokens: int, chunks: int, number: torch.dtype, setting: Setting) -> float:
    vocabulary, size = setting.model.output.weight.shape
    device = setting.device
    arithmetic = 6.0 * tokens * vocabulary * size / device.matmul_rate(number)
    if _has_program(device):
        passes, launches = _PASSES, _LAUNCHES
    else:
        passes, launches = _PLAIN_PASSES_16 if number.itemsize == 2 else _PLAIN_PASSES, _PLAIN_LAUNCHES
    traffic = passes * tokens * vocabulary * number.itemsize
    sums = _SUM_BYTES * vocabulary * size * (chunks - 1)
    return arithmetic + (traffic + sums) / device.memory_bandwidth + launches * chunks * device.launch_seconds


def _has_program(device: Device) -> bool:
    return device.kind == "cuda" and device.triton
