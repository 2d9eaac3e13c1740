"""What the parts of a translation model's training step are stated from."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from gatewise.contract.device import Device, tf32_products_allowed
from gatewise.models import Seq2Seq
from gatewise.planning.choose import Shape


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """A model on batches of one shape, in a precision, on a device.

    Attributes:
        model: The model, which may be on the device "meta".
        shape: Of the batch.
        dtype: Of products and of what they give: float32, or bfloat16 under autocast.
        device: Where it would run.
        captured: Whether steps are replayed as CUDA graphs, so that no time goes into launching.
    """

    model: Seq2Seq
    shape: Shape
    dtype: torch.dtype
    device: Device
    captured: bool = False

    @property
    def autocast(self) -> bool:
        """Whether weights are copied to another dtype in the forward pass."""
        return self.dtype != torch.float32

    @property
    def rounds_float32(self) -> bool:
        """Whether float32 products may be rounded to TF32; asked while the training's arithmetic is set."""
        return self.device.kind == "cuda" and self.dtype == torch.float32 and tf32_products_allowed()

    @property
    def pace(self) -> Device:
        """The device as times of attention and output are predicted with it."""
        return self.device.replace(operator_seconds=0.0, issue_seconds=0.0) if self.captured else self.device

    def cast_bytes(self, *parameters: Tensor) -> int:
        """Return the bytes of autocast's copies of these parameters, which live as long as what was kept."""
        return sum(parameter.numel() for parameter in parameters) * self.dtype.itemsize if self.autocast else 0

    def mask_bytes(self, count: int, rate: float, itemsize: int = 4) -> int:
        """Return the bytes that a dropout of this many numbers keeps beside its output."""
        # PyTorch's GPU operator keeps a byte a number, the one for CPUs the factors.
        return 0 if not rate else count * (1 if self.device.kind == "cuda" else itemsize)


def parameter_bytes(*modules: nn.Module) -> int:
    """Return the bytes of the modules' parameters."""
    return sum(each.numel() * each.itemsize for module in modules for each in module.parameters())
