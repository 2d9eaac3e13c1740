"""The optimizers, in the fastest form that PyTorch has for the device."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from gatewise.training.options import TrainingOptions


def build_optimizer(parameters: Iterable[nn.Parameter], options: TrainingOptions) -> torch.optim.Optimizer:
    """Return the optimizer that the options name, fused: one kernel for all parameters.

    Weight decay applies to parameters with two or more dimensions, so not to biases.

    Args:
        parameters: What to train; floating point, all on one device.
        options: `optimizer`, `learning_rate`, `momentum` and `weight_decay` are read.

    Returns:
        The optimizer, with two parameter groups: matrices and the rest.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    groups = [
        {"params": [each for each in trained if each.ndim >= 2], "weight_decay": options.weight_decay},
        {"params": [each for each in trained if each.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if options.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=options.learning_rate, momentum=options.momentum, fused=True)
    betas = (options.momentum, 0.999)
    kind = torch.optim.Adam if options.optimizer == "adam" else torch.optim.AdamW
    return kind(groups, lr=options.learning_rate, betas=betas, fused=True)
