"""The LSTM layer."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import overload

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from gatewise.contract.errors import ShapeError, sentence
from gatewise.contract.problem import NORMAL
from gatewise.functional.differentiable import recurrent
from gatewise.nn import pytorch_layer, torchscript
from gatewise.nn.arguments import check_pair
from gatewise.nn.call_errors import CALL_ERRORS, restate
from gatewise.nn.pytorch_layer import check_assigned_options, weights_of
from gatewise.nn.sequences import run_one, run_packed, time_first
from gatewise.nn.stream import stream
from gatewise.nn.symbolic import recorded
from gatewise.nn.weight_dropout import with_dropped_weights


class LSTM(nn.LSTM):
    r"""A stack of LSTM layers, a drop-in for `torch.nn.LSTM`.

    The fastest kernel is chosen for every call; `gatewise.explain(module, input)` shows which one and why. For each
    layer and time step

    $$\begin{aligned}
    i &= \sigma(W_{ii} x + b_{ii} + W_{hi} h + b_{hi}) & f &= \sigma(W_{if} x + b_{if} + W_{hf} h + b_{hf}) \\
    g &= \tanh(W_{ig} x + b_{ig} + W_{hg} h + b_{hg}) & o &= \sigma(W_{io} x + b_{io} + W_{ho} h + b_{ho}) \\
    c' &= f \odot c + i \odot g & h' &= o \odot \tanh(c')
    \end{aligned}$$

    and with a projection $h' = W_{hr} (o \odot \tanh(c'))$. Parameters have the names, shapes and order of
    `torch.nn.LSTM`: `weight_ih_l{k}` [4H, I or D*R], `weight_hh_l{k}` [4H, R], `bias_ih_l{k}` [4H], `bias_hh_l{k}`
    [4H], `weight_hr_l{k}` [P, H], and the same with `_reverse`; the order of the gates is `i f g o`. A `state_dict` of
    either class loads into the other, and the same seed initialises both to the same numbers.

    Args:
        input_size: I, the number of input features.
        hidden_size: H, the number of hidden units.
        num_layers: L, the number of layers, each reading the output of the one below.
        bias: Whether the two bias vectors exist.
        batch_first: Whether input and output are [B, T, features] instead of [T, B, features]; the states never are.
        dropout: The probability of dropping each output of every layer but the last, in training mode.
        bidirectional: Whether there is a second direction, which reads the sequence from its end; D is then 2.
        proj_size: P, the number of features of the projected hidden state; 0 for no projection. R is P with a
            projection, otherwise H.
        device: The device of the parameters.
        dtype: The dtype of the parameters.
        kernel: "auto", or the name of the only kernel that may run, one of `gatewise.kernel_names()`.
        memory: "normal" keeps for the backward pass whatever makes it fastest. "lean" keeps the cell states and
            otherwise only tensors that cannot be recomputed from them, the input and the outputs (gradient
            checkpointing): a training step takes less memory, and more time.
        weight_dropout: The probability of dropping each element of the recurrent matrices `weight_hh` in training mode
            (weight drop of the AWD-LSTM, Merity et al. 2018): one mask for each matrix and call; the other elements are
            multiplied by 1 / (1 - weight_dropout). Every kernel runs it.
        reverse: Whether the layers read each sequence from its last step to its first, within its length, as a layer
            between two flips: the output is in the order of the input, an initial state is that before the last step,
            and a final state that after the first one. Parameters are those of a layer with one direction. Input and
            output are copied in the other order around the kernel.

    Raises:
        ArgumentError: An argument has a wrong type or is out of range.
        KernelRefused: No kernel is named `kernel`.

    Examples:
        >>> layer = LSTM(10, 20, num_layers=2)
        >>> y, (h_n, c_n) = layer(torch.randn(5, 3, 10), lengths=[5, 2, 4])
        >>> y.shape, h_n.shape
        (torch.Size([5, 3, 20]), torch.Size([2, 3, 20]))
    """

    # The options of layers that `gatewise.accelerate` has made of PyTorch's.
    kernel = "auto"
    memory = NORMAL
    weight_dropout = 0.0
    reverse = False

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        proj_size: int = 0,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        kernel: str = "auto",
        memory: str = NORMAL,
        weight_dropout: float = 0.0,
        reverse: bool = False,
    ) -> None:
        pytorch_layer.initialise(
            self,
            "LSTM",
            input_size,
            hidden_size,
            num_layers,
            bias,
            batch_first,
            dropout,
            bidirectional,
            proj_size,
            device,
            dtype,
            kernel,
            memory,
            weight_dropout,
            reverse,
        )

    # Which of the two kinds of output a call has follows from its input, as type checkers find it for PyTorch's layer.
    @overload  # type: ignore[override]
    def forward(
        self,
        input: Tensor,
        hx: tuple[Tensor, Tensor] | None = None,
        lengths: Tensor | Sequence[int] | None = None,
        resets: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]: ...

    @overload
    def forward(
        self, input: PackedSequence, hx: tuple[Tensor, Tensor] | None = None, lengths: None = None, resets: None = None
    ) -> tuple[PackedSequence, tuple[Tensor, Tensor]]: ...

    def forward(
        self,
        input: Tensor | PackedSequence,
        hx: tuple[Tensor, Tensor] | None = None,
        lengths: Tensor | Sequence[int] | None = None,
        resets: Tensor | None = None,
    ) -> tuple[Tensor | PackedSequence, tuple[Tensor, Tensor]]:
        """Run the layers over a batch of sequences.

        Args:
            input: The input [T, B, I], or [B, T, I] with `batch_first`, or one sequence [T, I], or a `PackedSequence`.
            hx: The initial hidden state [L*D, B, R] and cell state [L*D, B, H], without B for one sequence; zeros if
                None.
            lengths: The number of valid steps of each sequence: B integers in [0, T], in any order, on any device. The
                padding after the end of a sequence is not read, `output` is zero there, and the final states are those
                at the end. Lengths on the GPU are never copied to the CPU.
            resets: The steps at which episodes begin, [T, B], or [B, T] with `batch_first`, or [T] for one sequence;
                bool, or integers, which are set unless they are 0, on the input's device. Where it is set, all states
                before the step are zero, and no gradient flows back from the step through them. The reverse direction
                carries no state across the border either. At the first step, it sets the initial states of the forward
                direction to zero.

        Returns:
            The output of the last layer, [T, B, D*R] in the arrangement of `input`, and the final states of every layer
            and direction, `(h_n [L*D, B, R], c_n [L*D, B, H])`.

        Raises:
            ShapeError: A rank, size or length does not fit.
            DtypeError: A dtype differs from that of the parameters, and autocast is off.
            DeviceError: Tensors are on incompatible devices.
            ArgumentError: `input` is not a tensor, `hx` is not a pair of tensors, `lengths` is given with a
                `PackedSequence` or with one sequence, or `resets` with a `PackedSequence`.
            KernelRefused: The kernel named by `kernel` does not exist or cannot run this call.
        """
        padded = isinstance(input, Tensor)
        if not padded and not isinstance(input, PackedSequence):
            return recorded(self, input, hx=hx, lengths=lengths, resets=resets)
        try:
            if hx is not None:
                check_pair(hx)
            if not padded:
                run = functools.partial(_run, self)
                packed, (h_n, c_n) = run_packed(run, input, hx, lengths, "[L*D, B, R] and [L*D, B, H]", resets)
                return packed, (h_n, c_n)
            rank = input.dim()
            if rank == 2:
                run = functools.partial(_run, self)
                y, (h_n, c_n) = run_one(run, input, hx, lengths, "[L*D, R] and [L*D, H]", resets)
                return y, (h_n, c_n)
            if rank != 3:
                arrangement = "[B, T, I]" if self.batch_first else "[T, B, I]"
                expectation = f"{arrangement}, or [T, I] for one sequence"
                raise ShapeError(sentence("input", expectation, f"rank {rank} with shape {list(input.shape)}"))
            if not self.batch_first:
                return _run(self, input, hx, lengths=lengths, resets=resets)
            if resets is not None:
                resets = time_first(resets, input.shape[:2])
            y, state = _run(self, input.transpose(0, 1), hx, lengths=lengths, resets=resets)
            return y.transpose(0, 1), state
        except CALL_ERRORS as error:
            restate(error, input, hx, self.batch_first)
            raise

    stream = stream
    extra_repr = pytorch_layer.extra_repr
    flatten_parameters = pytorch_layer.flatten_parameters
    _apply = pytorch_layer.apply
    __setstate__ = pytorch_layer.set_state
    __prepare_scriptable__ = torchscript.scriptable
    _slow_forward = torchscript.traced


def _run(
    layer: LSTM,
    x: Tensor,
    state: tuple[Tensor, ...] | None,
    batch_sizes: Tensor | None = None,
    *,
    lengths: Tensor | Sequence[int] | None = None,
    resets: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    rate = layer.weight_dropout
    if type(rate) is not float or rate or layer.reverse:
        check_assigned_options(layer)
    weights = weights_of(layer)
    if rate and layer.training:
        weights = with_dropped_weights(weights, len(layer._all_weights[0]), rate)
    y, h_n, c_n = recurrent(
        x,
        state,  # type: ignore[arg-type] - a pair
        weights,
        lengths=lengths,
        batch_sizes=batch_sizes,
        bidirectional=layer.bidirectional,
        dropout=layer.dropout if layer.training else 0.0,
        kernel=layer.kernel,
        memory=layer.memory,
        resets=resets,
        reverse=layer.reverse,
    )
    return y, (h_n, c_n)
