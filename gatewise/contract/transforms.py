"""Whether calls are made inside of transforms of `torch.func`."""

from __future__ import annotations

import torch


def is_transformed() -> bool:
    """Return whether the code runs inside of a transform of `torch.func`; `torch.compile` can trace the call."""
    return torch._C._are_functorch_transforms_active()


# What `torch.compiler.assume_constant_result` does, without importing the compiler with the package: the transforms are
# those that are active while the graph is built, which its guards compare.
is_transformed._dynamo_marked_constant = True  # type: ignore[attr-defined]
