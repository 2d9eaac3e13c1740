"""The handling of single sequences and packed batches, which is the same for all recurrent layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from gatewise.contract.errors import ArgumentError, ShapeError, sentence
from gatewise.functional.resets import check_resets, refuse_packed

States = tuple[Tensor, ...]
"""The initial or final states of a layer: the hidden state, and the cell state of an LSTM."""


class Run(Protocol):
    """The call of a layer."""

    def __call__(
        self, x: Tensor, states: States | None, batch_sizes: Tensor | None, /, *, resets: Tensor | None = None
    ) -> tuple[Tensor, States]:
        """Return output and final states, given x [T, B, I] or [N, I], initial states, batch sizes and resets."""
        ...


def time_first(resets: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the resets [B, T] of a layer with `batch_first` as [T, B].

    Args:
        resets: The user's argument `resets`.
        shape: B and T.

    Raises:
        GatewiseError: The resets do not fit; the errors are those of `check_resets`.
    """
    check_resets(resets, shape, "[B, T]")
    return resets.transpose(0, 1)


def run_one(
    run: Run,
    x: Tensor,
    states: States | None,
    lengths: Tensor | Sequence[int] | None,
    form: str,
    resets: Tensor | None,
) -> tuple[Tensor, States]:
    """Run a layer over one sequence.

    Args:
        run: The function that runs the layer.
        x: The sequence [T, I].
        states: The initial states without a batch dimension, or None.
        lengths: The user's argument `lengths`, which must be None.
        form: The expected shape of the states, for the error.
        resets: The user's argument `resets` [T], or None.

    Raises:
        ArgumentError: `lengths` is given.
        ShapeError: A state has the wrong rank, or the resets have another shape.
    """
    if lengths is not None:
        advice = "Cut the sequence instead: input[:length]."
        raise ArgumentError(sentence("lengths", "None for one sequence [T, I]", lengths, advice))
    if states is not None:
        _check_states(states, 2, f"{form} like the input without a batch")
        states = tuple(state.unsqueeze(1) for state in states)
    if resets is not None:
        check_resets(resets, x.shape[:1], "[T]")
        resets = resets.unsqueeze(1)
    y, finals = run(x.unsqueeze(1), states, None, resets=resets)
    return y.squeeze(1), tuple(state.squeeze(1) for state in finals)


def run_packed(
    run: Run,
    packed: PackedSequence,
    states: States | None,
    lengths: Tensor | Sequence[int] | None,
    form: str,
    resets: Tensor | None,
) -> tuple[PackedSequence, States]:
    """Run a layer over a packed batch; the states are in the order of the batch before sorting.

    Args:
        run: The function that runs the layer.
        packed: The packed batch.
        states: The initial states, or None.
        lengths: The user's argument `lengths`, which must be None.
        form: The expected shape of the states, for the error.
        resets: The user's argument `resets`, which must be None.

    Raises:
        ArgumentError: `lengths` or `resets` is given.
        ShapeError: A state has the wrong rank or batch size.
    """
    if resets is not None:
        refuse_packed(resets)
    if lengths is not None:
        advice = "The packed batch has its own lengths; give the padded tensor to use others."
        raise ArgumentError(sentence("lengths", "None for a PackedSequence", lengths, advice))
    data, batch_sizes, sorted_indices, unsorted_indices = packed
    if states is not None and sorted_indices is not None:
        _check_states(states, 3, form, batch=len(sorted_indices))
        states = tuple([state.index_select(1, sorted_indices) for state in states])
    y, finals = run(data, states, batch_sizes)
    if unsorted_indices is not None:
        finals = tuple([state.index_select(1, unsorted_indices) for state in finals])
    # The fields are those of a packed batch, so that the checks of the constructor are not needed.
    return PackedSequence._make((y, batch_sizes, sorted_indices, unsorted_indices)), finals


def _check_states(states: States, rank: int, form: str, batch: int | None = None) -> None:
    for index, state in enumerate(states):
        if state.dim() != rank or (batch is not None and state.shape[1] != batch):
            name = "hx" if len(states) == 1 else f"hx[{index}]"
            where = form if batch is None else f"{form} with B = {batch}"
            raise ShapeError(sentence(name, f"a state of {where}", list(state.shape)))
