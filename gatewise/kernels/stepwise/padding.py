"""Calls whose hidden size or input size is rounded up, so that the rows of all matrices are multiples of 16 bytes.

Sequences are not padded here. The fast matrix kernels of GPUs read rows at multiples of 16 bytes. Where measured times
say that it is faster, and never in compiled calls, all tensors are therefore padded, and results are cropped. The units
that are added start at zero and have the sums of the last unit, whose rows of the weights and biases they repeat, so
that they are finite where it is, also for infinite inputs. Their columns in the weights of other units are zeros, and
so are the gradients of their outputs: they contribute nothing to other sums, and nothing to gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from torch import Tensor

from gatewise.contract import ranking
from gatewise.contract.device import Device
from gatewise.contract.problem import Problem
from gatewise.contract.saved import InputGradients, Inputs, OutputGradients, Result
from gatewise.kernels.criteria import is_fused
from gatewise.kernels.stepwise.plan import Products, products_of

_ALIGNMENT = 16  # bytes


def padded(problem: Problem, device: Device) -> Problem | None:
    """Return the problem with rounded sizes; None if it is computed as it is.

    Copies take as long for one step as for many, so that calls of a few steps are not padded. Measured numbers say
    which calls are (`gatewise.contract.ranking`). A compiled call is not padded: its numbers of steps and sequences may
    be unknown when it is traced, and what it keeps must not depend on them.

    Args:
        problem: The problem.
        device: The properties of its device.
    """
    return None if problem.traced else _padded(problem, device)


@functools.lru_cache(maxsize=4096)
def _padded(problem: Problem, device: Device) -> Problem | None:
    values = _ALIGNMENT // problem.element_bytes
    hidden, features = (-(-size // values) * values for size in (problem.hidden_size, problem.input_size))
    if (hidden, features) == (problem.hidden_size, problem.input_size):
        return None
    if problem.proj_size or not is_fused(problem.cell) or products_of(problem) is Products.EXACT:
        return None
    least = ranking.weights(device, "stepwise padding")
    steps, tokens = problem.time * min(problem.batch, least["most_rows"]), problem.time * problem.batch
    loops = hidden != problem.hidden_size and problem.hidden_size >= least["units"] and steps >= least["rows"]
    inputs = features != problem.input_size and problem.input_size >= least["inputs"] and tokens >= least["tokens"]
    return problem.replace(hidden_size=hidden, input_size=features) if loops or inputs else None


class Padding:
    """The conversion between the tensors of a problem and those of the padded problem.

    Args:
        problem: The problem.
        wide: The padded problem.
    """

    def __init__(self, problem: Problem, wide: Problem) -> None:
        self._problem = problem
        self._units = problem.hidden_size, wide.hidden_size
        self._features = problem.input_size, wide.input_size

    def inputs(self, inputs: Inputs) -> Inputs:
        """Return the inputs with padding."""
        sizes = self._sizes_of_weights()
        pairs = zip(inputs.weights, sizes, strict=True)
        weights = tuple([_wider(weight, each, repeats=0) for weight, each in pairs])
        return inputs._replace(
            x=_wider(inputs.x, (self._features,)),
            h0=_wider(inputs.h0, (self._units,)),
            c0=_wider(inputs.c0, (self._units,)),
            weights=weights,
            masks=tuple([_wider(mask, (self._units,)) for mask in inputs.masks]),
        )

    def result(self, found: Result) -> Result:
        """Return the result of the padded problem without padding; what it keeps begins with its outputs."""
        y, h_n, c_n = (_narrower(each, (self._units,)) for each in (found.y, found.h_n, found.c_n))
        return Result(y, h_n, c_n, (found.y, *found.kept) if self._problem.needs_grad else ())

    def kept(self, result: Result, inputs: Inputs) -> Result:
        """Return the result of the padded problem from that without padding.

        Args:
            result: The result that `result` returned.
            inputs: The padded inputs. Their states take the places of the final ones, which no backward pass reads.
        """
        y, *kept = result.kept
        return Result(y, inputs.h0, inputs.c0, tuple(kept))

    def above(self, gradients: OutputGradients) -> OutputGradients:
        """Return the gradients of the outputs with padding."""
        return OutputGradients(*[None if each is None else _wider(each, (self._units,)) for each in gradients])

    def gradients(self, found: InputGradients) -> InputGradients:
        """Return the gradients of the inputs without padding."""
        weights = zip(found.weights, self._sizes_of_weights(), strict=True)
        return InputGradients(
            None if found.x is None else _narrower(found.x, (self._features,)),
            None if found.h0 is None else _narrower(found.h0, (self._units,)),
            None if found.c0 is None else _narrower(found.c0, (self._units,)),
            tuple([None if each is None else _narrower(each, sizes) for each, sizes in weights]),
        )

    def _sizes_of_weights(self) -> list[tuple[tuple[int, int], ...]]:
        found: list[tuple[tuple[int, int], ...]] = []
        for layer in range(self._problem.num_layers):
            inputs = self._features if layer == 0 else self._units
            own = [(self._units, inputs), (self._units, self._units), *[(self._units,)] * (2 * self._problem.bias)]
            found += own * self._problem.num_directions
        return found


def _wider(tensor: Tensor, sizes: Sequence[tuple[int, int]], repeats: int | None = None) -> Tensor:
    """Return a tensor whose last dimensions are blocks of some size, each padded to another size.

    Args:
        tensor: The tensor.
        sizes: The size of a block before and after, for each of the last dimensions.
        repeats: The place in `sizes` of the dimension whose padding repeats the last values of each block; None for
            padding with zeros in all of them.
    """
    narrow, wide = [before for before, _ in sizes], [after for _, after in sizes]
    if narrow == wide:
        return tensor
    found = tensor.new_zeros(_shape(tensor, narrow, wide))
    _blocks(found, wide, narrow).copy_(_blocks(tensor, narrow, narrow))
    if repeats is not None and narrow[repeats] < wide[repeats]:
        last, added = list(narrow), list(narrow)
        last[repeats], added[repeats] = 1, wide[repeats] - narrow[repeats]
        source = _blocks(tensor, narrow, last, {repeats: narrow[repeats] - 1})
        _blocks(found, wide, added, {repeats: narrow[repeats]}).copy_(source)
    return found


def _narrower(tensor: Tensor, sizes: Sequence[tuple[int, int]]) -> Tensor:
    """Return a tensor without the padding of `_wider`."""
    narrow, wide = [before for before, _ in sizes], [after for _, after in sizes]
    if narrow == wide:
        return tensor
    found = tensor.new_empty(_shape(tensor, wide, narrow))
    _blocks(found, narrow, narrow).copy_(_blocks(tensor, wide, narrow))
    return found


def _shape(tensor: Tensor, sizes: Sequence[int], others: Sequence[int]) -> list[int]:
    """Return the shape of a tensor whose last dimensions have as many blocks, of other sizes."""
    shape, first = list(tensor.shape), tensor.dim() - len(sizes)
    shape[first:] = [length // size * other for length, size, other in zip(shape[first:], sizes, others, strict=True)]
    return shape


def _blocks(
    tensor: Tensor, sizes: Sequence[int], taken: Sequence[int], starts: Mapping[int, int] | None = None
) -> Tensor:
    """Return a view in which each of the last dimensions is two: its blocks, and some of the values of a block.

    It is made by one operator, because the CPU's time for a call counts where calls are not in a CUDA graph.

    Args:
        tensor: The tensor.
        sizes: The size of a block in each of the last dimensions.
        taken: The number of values that are taken of a block.
        starts: The first of them, by the place in `sizes`, where it is not 0.
    """
    first = tensor.dim() - len(sizes)
    shape, strides = list(tensor.shape[:first]), list(tensor.stride()[:first])
    offset = tensor.storage_offset()
    lasts = zip(tensor.shape[first:], tensor.stride()[first:], sizes, taken, strict=True)
    for place, (length, stride, size, own) in enumerate(lasts):
        shape += [length // size, own]
        strides += [size * stride, stride]
        offset += stride * (starts or {}).get(place, 0)
    return tensor.as_strided(shape, strides, offset)
