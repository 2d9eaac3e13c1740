"""The LSTM layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from gatewise.contract.errors import ShapeError, sentence
from gatewise.contract.problem import NORMAL
from gatewise.functional.differentiable import recurrent
from gatewise.nn import init
from gatewise.nn.arguments import (
    check_layer_options,
    check_pair,
    check_rate,
    check_sizes,
    refuse_input,
    refuse_script,
    warn_of_idle_dropout,
)
from gatewise.nn.flat_weights import flatten
from gatewise.nn.sequences import run_one, run_packed, time_first
from gatewise.nn.weight_dropout import with_dropped_weights

# Attributes that are missing in modules pickled by older versions, and the values that they had implicitly.
_DEFAULTS: dict[str, object] = {"proj_size": 0, "kernel": "auto", "memory": NORMAL, "weight_dropout": 0.0}


class LSTM(nn.Module):
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

    Raises:
        ArgumentError: An argument has a wrong type or is out of range.
        KernelRefused: No kernel is named `kernel`.

    Example:
        >>> layer = LSTM(10, 20, num_layers=2)
        >>> y, (h_n, c_n) = layer(torch.randn(5, 3, 10), lengths=[5, 2, 4])
        >>> y.shape, h_n.shape
        (torch.Size([5, 3, 20]), torch.Size([2, 3, 20]))
    """

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
    ) -> None:
        super().__init__()
        check_sizes(input_size, hidden_size, num_layers, proj_size)
        check_layer_options(bias, batch_first, bidirectional, dropout, kernel, memory)
        warn_of_idle_dropout(dropout, num_layers)
        self.input_size = input_size
        self.hidden_size = hidden_size
        self.num_layers = num_layers
        self.bias = bias
        self.batch_first = batch_first
        self.dropout = float(dropout)
        self.bidirectional = bool(bidirectional)
        self.proj_size = proj_size
        self.kernel = kernel
        self.memory = memory
        self.weight_dropout = check_rate("weight_dropout", weight_dropout)
        self._weight_names = self._names_by_direction()
        self._flat_names = tuple(name for names in self._weight_names for name in names)
        for index, names in enumerate(self._weight_names):
            shapes = self._shapes_of_layer(index // (1 + self.bidirectional))
            for name, shape in zip(names, shapes, strict=True):
                self.register_parameter(name, nn.Parameter(torch.empty(shape, device=device, dtype=dtype)))
        self.reset_parameters()
        self.flatten_parameters()  # after the initialisation, because it copies the values

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
                bool, or integers that are 0 or 1, on the input's device. Where it is set, all states before the step
                are zero, and no gradient flows back from the step through them. The reverse direction carries no state
                across the border either. At the first step, it sets the initial states of the forward direction to
                zero.

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
        if hx is not None:
            check_pair(hx)
        if isinstance(input, PackedSequence):
            packed, (h_n, c_n) = run_packed(self._run, input, hx, lengths, "[L*D, B, R] and [L*D, B, H]", resets)
            return packed, (h_n, c_n)
        if not isinstance(input, Tensor):
            refuse_input(input)
        rank = input.dim()
        if rank == 2:
            y, (h_n, c_n) = run_one(self._run, input, hx, lengths, "[L*D, R] and [L*D, H]", resets)
            return y, (h_n, c_n)
        if rank != 3:
            arrangement = "[B, T, I]" if self.batch_first else "[T, B, I]"
            expectation = f"{arrangement}, or [T, I] for one sequence"
            raise ShapeError(sentence("input", expectation, f"rank {rank} with shape {list(input.shape)}"))
        if resets is not None and self.batch_first:
            resets = time_first(resets, input.shape[:2])
        if self.batch_first:
            y, state = self._run(input.transpose(0, 1), hx, lengths=lengths, resets=resets)
            return y.transpose(0, 1), state
        return self._run(input, hx, lengths=lengths, resets=resets)

    def _run(
        self,
        x: Tensor,
        state: tuple[Tensor, ...] | None,
        batch_sizes: Tensor | None = None,
        *,
        lengths: Tensor | Sequence[int] | None = None,
        resets: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        # Weights are looked up in every call, because parametrizations compute them and functional_call replaces them.
        found = self._parameters
        try:
            weights = tuple(map(found.__getitem__, self._flat_names))
        except KeyError:
            weights = tuple([getattr(self, name) for name in self._flat_names])
        if self.weight_dropout and self.training:
            weights = with_dropped_weights(
                weights,  # pyright: ignore[reportArgumentType] - none of these parameters is None
                len(self._weight_names[0]),
                self.weight_dropout,
            )
        y, h_n, c_n = recurrent(
            x,
            state,  # type: ignore[arg-type] - a pair
            weights,  # pyright: ignore[reportArgumentType] - none of these parameters is None
            lengths=lengths,
            batch_sizes=batch_sizes,
            bidirectional=self.bidirectional,
            dropout=self.dropout if self.training else 0.0,
            kernel=self.kernel,
            memory=self.memory,
            resets=resets,
        )
        return y, (h_n, c_n)

    @property
    def all_weights(self) -> list[list[Tensor]]:
        """The weights, one list for each direction of each layer, as `gatewise.functional.lstm` takes them."""
        return [[getattr(self, name) for name in names] for names in self._weight_names]

    def reset_parameters(self) -> None:
        """Initialise all parameters from U(-1/sqrt(H), 1/sqrt(H))."""
        init.uniform_(self.parameters(), self.hidden_size)

    def flatten_parameters(self) -> None:
        """Move the parameters into one buffer in cuDNN's order, so that cuDNN need not copy them in every call.

        This is done automatically when the layer is created, moved, converted, copied or unpickled. Call it after
        replacing parameters, as `load_state_dict(assign=True)` does. The Parameter objects and their values do not
        change. Nothing happens on other devices than CUDA, without cuDNN, or if weights are parametrised, tied to each
        other, of a tensor subclass or of several dtypes.
        """
        flatten(self, "LSTM", self._flat_names, len(self._weight_names[0]))

    def extra_repr(self) -> str:
        """Return the sizes and every option that differs from its default."""
        options = {
            "proj_size": 0,
            "num_layers": 1,
            "bias": True,
            "batch_first": False,
            "dropout": 0,
            "bidirectional": False,
            "kernel": "auto",
            "memory": NORMAL,
            "weight_dropout": 0,
        }
        given = [(name, getattr(self, name)) for name, default in options.items() if getattr(self, name) != default]
        return ", ".join([f"{self.input_size}, {self.hidden_size}", *(f"{name}={value}" for name, value in given)])

    def __prepare_scriptable__(self) -> NoReturn:
        refuse_script("LSTM")

    def _slow_forward(self, *given: object, **options: object) -> Any:
        # TorchScript's tracer calls this method instead of `forward`, and so does ONNX's exporter without dynamo.
        if torch.onnx.is_in_onnx_export():
            return super()._slow_forward(*given, **options)
        return refuse_script("LSTM", "trace")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LSTM:
        super()._apply(fn, recurse)
        self.flatten_parameters()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**_DEFAULTS, **state})
        self._weight_names = self._names_by_direction()
        self._flat_names = tuple(name for names in self._weight_names for name in names)
        self.flatten_parameters()

    def _names_by_direction(self) -> tuple[tuple[str, ...], ...]:
        kinds = ["weight_ih", "weight_hh"]
        if self.bias:
            kinds += ["bias_ih", "bias_hh"]
        if self.proj_size:
            kinds.append("weight_hr")
        suffixes = ("", "_reverse") if self.bidirectional else ("",)
        return tuple(
            tuple(f"{kind}_l{layer}{suffix}" for kind in kinds)
            for layer in range(self.num_layers)
            for suffix in suffixes
        )

    def _shapes_of_layer(self, layer: int) -> list[tuple[int, ...]]:
        gates, state_size = 4 * self.hidden_size, self.proj_size or self.hidden_size
        features = self.input_size if layer == 0 else state_size * (1 + self.bidirectional)
        shapes: list[tuple[int, ...]] = [(gates, features), (gates, state_size)]
        if self.bias:
            shapes += [(gates,), (gates,)]
        if self.proj_size:
            shapes.append((self.proj_size, self.hidden_size))
        return shapes
