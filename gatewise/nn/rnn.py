"""The Elman RNN layer, and one time step of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from gatewise.contract.errors import ArgumentError, sentence
from gatewise.contract.problem import NORMAL
from gatewise.nn import pytorch_layer, single_state, torchscript
from gatewise.nn.arguments import check_dtype, checked_sizes
from gatewise.nn.stream import stream
from gatewise.nn.symbolic import recorded

_MODES = {"tanh": "RNN_TANH", "relu": "RNN_RELU"}


class RNN(nn.RNN):
    r"""A stack of Elman RNN layers, a drop-in for `torch.nn.RNN`.

    The fastest kernel is chosen for every call; `gatewise.explain(module, input)` shows which one and why. For each
    layer and time step

    $$h' = \tanh(W_{ih} x + b_{ih} + W_{hh} h + b_{hh})$$

    or the same with $\mathrm{ReLU}$ in place of $\tanh$. Parameters have the names, shapes, order and initial values of
    `torch.nn.RNN`: `weight_ih_l{k}` [H, I or D*H], `weight_hh_l{k}` [H, H], `bias_ih_l{k}` [H], `bias_hh_l{k}` [H], and
    the same with `_reverse`.

    Args:
        input_size: I, the number of input features.
        hidden_size: H, the number of hidden units.
        num_layers: L, the number of layers, each reading the output of the one below.
        nonlinearity: "tanh" or "relu".
        bias: Whether the two bias vectors exist.
        batch_first: Whether input and output are [B, T, features] instead of [T, B, features]; the states never are.
        dropout: The probability of dropping each output of every layer but the last, in training mode.
        bidirectional: Whether there is a second direction, which reads the sequence from its end; D is then 2.
        device: The device of the parameters.
        dtype: The dtype of the parameters.
        kernel: "auto", or the name of the only kernel that may run, one of `gatewise.kernel_names()`.
        memory: "normal" keeps for the backward pass whatever makes it fastest. "lean" keeps only tensors that cannot be
            recomputed from the input and the outputs (gradient checkpointing): a training step takes less memory, and
            more time.
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
        >>> layer = RNN(10, 20, num_layers=2, nonlinearity="relu")
        >>> y, h_n = layer(torch.randn(5, 3, 10), lengths=[5, 2, 4])
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
        nonlinearity: str = "tanh",
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        kernel: str = "auto",
        memory: str = NORMAL,
        weight_dropout: float = 0.0,
        reverse: bool = False,
    ) -> None:
        _check_nonlinearity(nonlinearity)
        pytorch_layer.initialise(
            self,
            _MODES[nonlinearity],
            input_size,
            hidden_size,
            num_layers,
            bias,
            batch_first,
            dropout,
            bidirectional,
            0,
            device,
            dtype,
            kernel,
            memory,
            weight_dropout,
            reverse,
        )
        self.nonlinearity = nonlinearity

    # Which of the two kinds of output a call has follows from its input, as type checkers find it for PyTorch's layer.
    @overload  # type: ignore[override]
    def forward(
        self,
        input: Tensor,
        hx: Tensor | None = None,
        lengths: Tensor | Sequence[int] | None = None,
        resets: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]: ...

    @overload
    def forward(
        self, input: PackedSequence, hx: Tensor | None = None, lengths: None = None, resets: None = None
    ) -> tuple[PackedSequence, Tensor]: ...

    def forward(
        self,
        input: Tensor | PackedSequence,
        hx: Tensor | None = None,
        lengths: Tensor | Sequence[int] | None = None,
        resets: Tensor | None = None,
    ) -> tuple[Tensor | PackedSequence, Tensor]:
        """Run the layers over a batch of sequences.

        Args:
            input: The input [T, B, I], or [B, T, I] with `batch_first`, or one sequence [T, I], or a `PackedSequence`.
            hx: The initial hidden state [L*D, B, H], without B for one sequence; zeros if None.
            lengths: The number of valid steps of each sequence: B integers in [0, T], in any order, on any device. The
                padding after the end of a sequence is not read, `output` is zero there, and the final states are those
                at the end. Lengths on the GPU are never copied to the CPU.
            resets: The steps at which episodes begin, [T, B], or [B, T] with `batch_first`, or [T] for one sequence;
                bool, or integers, which are set unless they are 0, on the input's device. Where it is set, all states
                before the step are zero, and no gradient flows back from the step through them. The reverse direction
                carries no state across the border either. At the first step, it sets the initial states of the forward
                direction to zero.

        Returns:
            The output of the last layer, [T, B, D*H] in the arrangement of `input`, and the final hidden state of every
            layer and direction [L*D, B, H].

        Raises:
            ShapeError: A rank, size or length does not fit.
            DtypeError: A dtype differs from that of the parameters, and autocast is off.
            DeviceError: Tensors are on incompatible devices.
            ArgumentError: `input` or `hx` is not a tensor, `lengths` is given with a `PackedSequence` or with one
                sequence, or `resets` with a `PackedSequence`.
            KernelRefused: The kernel named by `kernel` does not exist or cannot run this call.
        """
        return single_state.run(self, input, hx, lengths, resets)

    stream = stream
    extra_repr = pytorch_layer.extra_repr
    flatten_parameters = pytorch_layer.flatten_parameters
    _apply = pytorch_layer.apply
    __setstate__ = pytorch_layer.set_state
    __prepare_scriptable__ = torchscript.scriptable
    _slow_forward = torchscript.traced


class RNNCell(nn.RNNCell):
    r"""One time step of one Elman RNN layer, a drop-in for `torch.nn.RNNCell`.

    $$h' = \tanh(W_{ih} x + b_{ih} + W_{hh} h + b_{hh})$$

    or the same with $\mathrm{ReLU}$ in place of $\tanh$. The step is computed by PyTorch's own operators
    (`torch.rnn_tanh_cell`, `torch.rnn_relu_cell`). Programs that loop over time are faster with `gatewise.RNN`, and
    those that get their input step by step and compute no gradients with its method `stream`.

    Args:
        input_size: I, the number of input features.
        hidden_size: H, the number of hidden units.
        bias: Whether the two bias vectors exist.
        nonlinearity: "tanh" or "relu".
        device: The device of the parameters.
        dtype: The dtype of the parameters.

    Raises:
        ArgumentError: An argument has a wrong type or is out of range.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        nonlinearity: str = "tanh",
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_dtype(dtype)
        sizes = checked_sizes(input_size, hidden_size, least_input=0)
        _check_nonlinearity(nonlinearity)
        super().__init__(sizes.input_size, sizes.hidden_size, bool(bias), nonlinearity, device, dtype)

    def forward(self, input: Tensor, hx: Tensor | None = None) -> Tensor:
        """Compute one time step.

        Args:
            input: The input [B, I], or [I] without a batch.
            hx: The hidden state [B, H] or [H]; zeros if None.

        Returns:
            The next hidden state, in the shape of `hx`.

        Raises:
            ShapeError: A rank or size does not fit.
            DtypeError: The dtype of the input differs from that of the parameters, and autocast is off.
            ArgumentError: `input` or `hx` is not a tensor.
        """
        if not isinstance(input, Tensor):
            return recorded(self, input, hx=hx)
        _check_nonlinearity(self.nonlinearity)  # an attribute, which programs may set
        operator = torch.rnn_tanh_cell if self.nonlinearity == "tanh" else torch.rnn_relu_cell
        return single_state.step(self, operator, input, hx)

    __prepare_scriptable__ = torchscript.scriptable
    _slow_forward = torchscript.traced


def _check_nonlinearity(nonlinearity: object) -> None:
    if nonlinearity not in tuple(_MODES):
        raise ArgumentError(sentence("nonlinearity", "'tanh' or 'relu'", repr(nonlinearity)))
