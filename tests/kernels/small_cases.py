"""Small calls of the CUDA kernels for `make sanitize`: odd sizes, lengths, directions, autocast, resets, layer norm."""

import functools
import sys

import torch

import gatewise

CASES = (
    {"kernel": "persistent", "hidden": 61, "batch": 9, "bidirectional": True, "dtype": torch.bfloat16},
    {"kernel": "persistent", "hidden": 32, "batch": 3, "bidirectional": False, "dtype": torch.float32},
    {"kernel": "persistent", "hidden": 36, "batch": 3, "bidirectional": False, "dtype": torch.float32, "exact": True},
    {"kernel": "persistent", "hidden": 256, "batch": 16, "bidirectional": False, "dtype": torch.bfloat16},
    # The units of a block divide 540, but not what it is rounded up to.
    {"kernel": "persistent", "hidden": 540, "batch": 3, "bidirectional": False, "dtype": torch.bfloat16, "cast": True},
    {"kernel": "persistent", "hidden": 540, "batch": 3, "bidirectional": False, "dtype": torch.float16, "cast": True},
    {"kernel": "persistent", "hidden": 61, "batch": 9, "bidirectional": True, "dtype": torch.float16, "resets": True},
    {"kernel": "stepwise", "hidden": 61, "batch": 9, "bidirectional": True, "dtype": torch.bfloat16},
    {"kernel": "stepwise", "hidden": 37, "batch": 3, "bidirectional": False, "dtype": torch.float16, "cast": True},
    {"kernel": "persistent", "hidden": 61, "batch": 9, "bidirectional": True, "dtype": torch.bfloat16, "norm": True},
    {"kernel": "persistent", "hidden": 256, "batch": 16, "bidirectional": False, "dtype": torch.float32, "norm": True},
    {"kernel": "stepwise", "hidden": 61, "batch": 9, "bidirectional": False, "dtype": torch.bfloat16, "norm": True},
)


def train(kernel, hidden, batch, bidirectional, dtype, *, cast=False, exact=False, resets=False, norm=False):
    torch.backends.cudnn.allow_tf32 = not exact
    given = torch.float32 if cast else dtype
    kind = functools.partial(gatewise.Recurrent, gatewise.cells.LayerNormLSTM()) if norm else gatewise.LSTM
    layer = kind(24, hidden, bidirectional=bidirectional, device="cuda", dtype=given, kernel=kernel)
    x = torch.randn(5, batch, 24, device="cuda", dtype=given, requires_grad=True)
    lengths = torch.randint(0, 6, (batch,), device="cuda") if bidirectional else None
    marked = torch.rand(5, batch, device="cuda") < 0.3 if resets else None
    with torch.autocast("cuda", dtype if cast else torch.bfloat16, enabled=cast):
        y, _ = layer(x, lengths=lengths, resets=marked)
    y.sum().backward()
    torch.cuda.synchronize()


if __name__ == "__main__":
    chosen = [int(number) for number in sys.argv[1:]] or range(len(CASES))
    for case in [CASES[number] for number in chosen]:
        train(**case)
        print(*case.values(), flush=True)
