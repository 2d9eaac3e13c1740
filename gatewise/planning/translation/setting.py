"""The inputs from which memory and time of a translation model's parts are predicted."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from gatewise.contract.device import Device, tf32_products_allowed
from gatewise.models import Seq2Seq
from gatewise.planning.choose import Shape


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """A model with batches of one shape, a precision and a device.

    Attributes:
        model: The model, which may be on the device "meta".
        shape: The shape of the batch.
        dtype: The dtype of products and their results: float32, or bfloat16 under autocast.
        device: The device of the training.
        captured: Whether steps are replayed as CUDA graphs, so that launches take no time on the CPU.
    """

    model: Seq2Seq
    shape: Shape
    dtype: torch.dtype
    device: Device
    captured: bool = False

    @property
    def autocast(self) -> bool:
        """Whether weights are converted to another dtype in the forward pass."""
        return self.dtype != torch.float32

    @property
    def rounds_float32(self) -> bool:
        """Whether float32 products may be rounded to TF32 under the current settings."""
        return self.device.kind == "cuda" and self.dtype == torch.float32 and tf32_products_allowed()

    @property
    def pace(self) -> Device:
        """The device for time predictions of attention and output: without launch overhead if steps are captured."""
        return self.device.replace(operator_seconds=0.0, issue_seconds=0.0) if self.captured else self.device

    def cast_bytes(self, *parameters: Tensor) -> int:
        """Return the size in bytes of autocast's copies of some parameters, which live as long as kept tensors."""
        return sum(parameter.numel() for parameter in parameters) * self.dtype.itemsize if self.autocast else 0

    def mask_bytes(self, count: int, rate: float, itemsize: int = 4) -> int:
        """Return the size in bytes of the mask that a dropout of this many numbers keeps beside its output."""
        # PyTorch's GPU operator keeps one byte per number; the operator for CPUs keeps the factors.
        return 0 if not rate else count * (1 if self.device.kind == "cuda" else itemsize)


def parameter_bytes(*modules: nn.Module) -> int:
    """Return the size in bytes of the modules' parameters."""
    return sum(each.numel() * each.itemsize for module in modules for each in module.parameters())
