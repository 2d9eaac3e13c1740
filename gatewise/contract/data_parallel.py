"""Calls whose gradients are exchanged between GPUs while the backward pass goes on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

from gatewise.contract.errors import ArgumentError, sentence

multiprocessors_left: ContextVar[int | None] = ContextVar("gatewise_for_data_parallel", default=None)
"""The argument of the innermost `for_data_parallel` block of the running context; None outside of all blocks."""

MULTIPROCESSORS = 24
"""The default number of multiprocessors that backward passes leave to collectives."""


@contextlib.contextmanager
def for_data_parallel(multiprocessors: int = MULTIPROCESSORS) -> Iterator[None]:
    """Let gradients be exchanged between GPUs during the backward passes of the calls in the block.

    Two things differ in the block, and the results are the same up to rounding:

    - Each layer of a stack is an autograd node of its own. The gradients of the upper layers are therefore ready, for
      example for `torch.nn.parallel.DistributedDataParallel`, while those of the lower layers are computed. Otherwise
      all gradients of a stack are ready at its end. Dropout between layers is that of `torch.nn.functional.dropout`.
    - The backward passes of `persistent` leave multiprocessors of the GPU free, on which the collectives of NCCL can
      run beside them; the blocks of a pass wait for each other, and often take all multiprocessors otherwise. Where
      the weights do not fit on the remaining multiprocessors, a pass takes all of them. No deadlock is possible: a
      collective waits for other GPUs, and a pass for none of them. Blocks of a pass that wait for each other begin at
      the same time, when there is room for all of them.

    Put the block around the forward pass of the model; its backward pass follows the calls. If `torch.utils.checkpoint`
    repeats a part of the forward pass in the backward pass, the block belongs inside of that part. The training
    commands of gatewise use the block for several processes.

    Calls that `torch.compile` compiles are computed as outside of the block. `gatewise.explain` describes a stack as
    one call, of which the backward passes leave multiprocessors free.

    Args:
        multiprocessors: The number of multiprocessors to leave free, 0 or more. NCCL is limited to as many by the
            environment variable ``NCCL_MAX_CTAS``.

    Raises:
        ArgumentError: The number is negative or no integer.

    Examples:
        >>> import torch, gatewise
        >>> lstm = gatewise.LSTM(4, 8, num_layers=2)
        >>> with gatewise.for_data_parallel():
        ...     y, (h_n, c_n) = lstm(torch.randn(5, 2, 4))
    """
    if isinstance(multiprocessors, bool) or not isinstance(multiprocessors, int) or multiprocessors < 0:
        raise ArgumentError(sentence("multiprocessors", "an integer of 0 or more", repr(multiprocessors)))
    token = multiprocessors_left.set(multiprocessors)
    try:
        yield
    finally:
        multiprocessors_left.reset(token)


def reserved() -> int:
    """Return the number of multiprocessors that backward passes leave free."""
    return multiprocessors_left.get() or 0
