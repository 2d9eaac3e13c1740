"""The step function of a cell: the one derived from its trace if each unit computes by itself, or its own `step`."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from gatewise.cells import Cell
from gatewise.cells.statement import STEP_ERRORS, StatementError, line_of, returned_error, said_by
from gatewise.cells.step import next_states
from gatewise.derivation.pointwise import pointwise_of
from gatewise.derivation.trace import NotTraceable, is_pointwise, refusal_of


@functools.lru_cache(maxsize=256)
def step_of(cell: Cell) -> Callable[..., tuple[Tensor, ...]]:
    """Return the function of a cell's step, with the arguments and results of `Pointwise.step`.

    For a cell that cannot be traced, or whose step combines hidden units, it calls the cell itself, and only autograd
    can differentiate it.
    """
    return pointwise_of(cell).step if is_pointwise(cell) else _Stated(cell)


def step_to_record(cell: Cell) -> Callable[..., tuple[Tensor, ...]]:
    """Return the function of a cell's step as the cell states it, which `torch.jit.trace` records.

    The derived function reads some parts of a `chunk` and not others, and TorchScript fails to compute its gradients.
    """
    return _Stated(cell)


class _Stated:
    """The step of a cell as the cell states it.

    Args:
        cell: The cell.
    """

    def __init__(self, cell: Cell) -> None:
        self._cell = cell

    def __call__(self, sums: Tensor, h: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        """Return the states after a step.

        Raises:
            NotTraceable: The step raises an error, such as one that branches on the values of a tensor.
            StatementError: The step returns other states, or states of another dtype or shape, or changes in place what
                it reads.
        """
        cell, count = self._cell, len(self._cell.states)
        given = sums, h, *others
        versions: list[int] = []
        compiled = torch.compiler.is_dynamo_compiling()  # Dynamo traces neither inference mode nor version counters
        if not compiled and torch.is_inference_mode_enabled():  # where tensors have no versions
            sums, h, others = sums.clone(), h.clone(), tuple(value.clone() for value in others)
        elif not compiled:
            versions = [value._version for value in given]
        try:
            hidden, after = next_states(
                cell,
                dict(zip(cell.sums, sums.chunk(len(cell.sums), -1), strict=True)),
                {"h": h, **dict(zip(cell.states, others[:count], strict=True))},
                dict(zip(cell.parameters, others[count:], strict=True)),
            )
        except (StatementError, torch.OutOfMemoryError):
            raise
        except STEP_ERRORS as error:
            refusal, said = refusal_of(cell), said_by(error)
            if not refusal:
                raise
            again = "" if said in refusal else f" PyTorch cannot run it either: {said}{line_of(cell, error)}."
            raise NotTraceable(f"{refusal}{again}") from error
        if versions and versions != [value._version for value in given]:
            # The values may be those of the caller, and the output of the step before.
            expectation = "leave the gates, states and parameters that it reads as they are"
            advice = "Write `c = c * f` instead of `c *= f`."
            raise returned_error(cell, expectation, "one that is changed in place", advice)
        like = sums[..., : sums.shape[-1] // len(cell.sums)]
        for name, value in zip(("h", *cell.states), (hidden, *after), strict=True):
            if not isinstance(value, Tensor):
                raise returned_error(cell, "return tensors", f"{type(value).__name__} for the state {name!r}")
            if (value.dtype, value.shape) != (like.dtype, like.shape):
                expectation = f"return states of {like.dtype} and shape {list(like.shape)}"
                found = f"{value.dtype} and {list(value.shape)} for the state {name!r}"
                advice = "The dtype and shape are those of the gates." if value.dtype != like.dtype else ""
                raise returned_error(cell, expectation, found, advice)
        return hidden, *after
