"""The precisions of benchmarks."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping

import torch

from gatewise.contract.errors import ArgumentError, sentence


@dataclasses.dataclass(frozen=True, slots=True)
class Precision:
    """The formats in which numbers are stored and multiplied.

    Attributes:
        name: The name in tables and for `--dtype`.
        dtype: The dtype of the parameters.
        rounding: The rounding unit of the coarsest format in use, relative to a number.
        tf32: Whether float32 products may run as TF32.
        autocast: Whether the forward pass runs under bfloat16 autocast.
    """

    name: str
    dtype: torch.dtype
    rounding: float
    tf32: bool = False
    autocast: bool = False

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype in which an LSTM computes."""
        return torch.bfloat16 if self.autocast else self.dtype

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Set PyTorch's TF32 switches for this precision inside the context."""
        before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = self.tf32
        try:
            yield
        finally:
            torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before

    def autocasting(self, device: torch.device) -> contextlib.AbstractContextManager[object]:
        """Return the autocast context of the forward pass."""
        return torch.autocast(device.type, torch.bfloat16, enabled=self.autocast)


FLOAT64 = Precision("fp64", torch.float64, 2.0**-52)
PRECISIONS = {
    precision.name: precision
    for precision in (
        Precision("fp32", torch.float32, 2.0**-23),
        Precision("tf32", torch.float32, 2.0**-10, tf32=True),
        Precision("bf16", torch.bfloat16, 2.0**-7, tf32=True),
        Precision("bf16-autocast", torch.float32, 2.0**-7, tf32=True, autocast=True),
    )
}


# The precisions of single layers, without autocast, which converts outside of a layer.
LAYER_PRECISIONS = {
    precision.name: precision
    for precision in (
        PRECISIONS["bf16"],
        Precision("fp16", torch.float16, 2.0**-10, tf32=True),
        PRECISIONS["tf32"],
        PRECISIONS["fp32"],
    )
}


def chosen(names: list[str], device: torch.device, offered: Mapping[str, Precision] = PRECISIONS) -> list[Precision]:
    """Return the precisions with the given names; without names, all of them on a GPU, and fp32 on a CPU.

    Args:
        names: The values of `--dtype`; duplicates count once.
        device: The device of the computation.
        offered: The precisions of the benchmark.

    Raises:
        ArgumentError: A name is unknown, or is TF32 on a CPU.
    """
    if not names:
        names = list(offered) if device.type == "cuda" else ["fp32"]
    for name in names:
        if name not in offered:
            raise ArgumentError(sentence("--dtype", f"one of {', '.join(offered)}", repr(name)))
        if name == "tf32" and device.type != "cuda":
            raise ArgumentError(sentence("--dtype", "other than tf32 on a CPU, which has no TF32", "'tf32'"))
    return [offered[name] for name in dict.fromkeys(names)]
