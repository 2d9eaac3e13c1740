"""The Keras layer."""

from __future__ import annotations

import contextlib
import copyreg
import pkgutil
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from gatewise.contract.errors import ArgumentError, KernelRefused, SlowerKernelWarning, sentence
from gatewise.functional import lstm
from gatewise.functional.arguments import check_name
from gatewise.interop.keras.backend import keras_on_torch
from gatewise.interop.keras.masking import Masking
from gatewise.interop.layouts import LAYOUTS
from gatewise.interop.packing import unpack

keras = keras_on_torch()

_LAYOUT = LAYOUTS["keras"]


class _InKerasFiles(type(keras.layers.LSTM)):
    """The class of the layer's class: files name the module that it has, from which plain Keras takes its own layer."""

    def __repr__(self) -> str:
        return f"<class '{__name__}.{self.__name__}'>" if self is LSTM else super().__repr__()


def _pickled(cls: type) -> tuple[Callable, tuple[str]] | str:
    return (pkgutil.resolve_name, (f"{__name__}:LSTM",)) if cls is LSTM else cls.__qualname__


copyreg.pickle(_InKerasFiles, _pickled)  # by the place where the class is, which is not the module that it names


@keras.saving.register_keras_serializable(package="gatewise")
class LSTM(keras.layers.LSTM, metaclass=_InKerasFiles):
    """`keras.layers.LSTM` on the kernels of gatewise, with the same arguments, weights, results and files.

    The fastest kernel is chosen for every call. The kernels support masks of any form, `stateful`, `go_backwards`,
    `return_state`, `dropout`, `use_bias=False` and mixed precision; `unroll` has no effect. For options that no kernel
    supports (another `activation` or `recurrent_activation`, `recurrent_dropout`), Keras' own loop over time steps runs
    instead, and the constructor emits a `SlowerKernelWarning`.

    A model that is saved with this layer is loaded with it where `gatewise.interop.keras` was imported, and with
    `keras.layers.LSTM` elsewhere.

    The layer needs Keras with the torch backend. Importing `gatewise.interop.keras` before `keras` selects that backend
    unless KERAS_BACKEND is set.

    Args:
        units: The number of hidden units, H.
        *arguments: The arguments of `keras.layers.LSTM`.
        use_cudnn: "auto" for the fastest kernel; True for the kernel `cudnn`, which raises where it cannot run; False
            for the fastest of the other kernels.
        kernel: "auto", or the name of the only kernel that may run, one of `gatewise.kernel_names()`.
        **options: The keyword arguments of `keras.layers.LSTM`.

    Raises:
        ArgumentError: `kernel` and `use_cudnn` contradict each other.
        KernelRefused: There is no kernel of the given name; or a kernel is named, and the layer has options that no
            kernel supports.

    Numerics: The same as of `keras.layers.LSTM`. float32 on a GPU may use TF32, which PyTorch allows for LSTMs by
        default
    (`torch.backends.cudnn.allow_tf32`).
    """

    __module__ = keras.layers.LSTM.__module__

    def __init__(
        self,
        units: int,
        *arguments: Any,
        use_cudnn: Literal["auto"] | bool = "auto",
        kernel: str = "auto",
        **options: Any,
    ) -> None:
        if isinstance(options.get("implementation"), str):
            kernel = options.pop("implementation")  # from `get_config`
        super().__init__(units, *arguments, use_cudnn=use_cudnn, **options)
        check_name(kernel, "kernel")
        if (use_cudnn is True and kernel not in ("auto", "cudnn")) or (use_cudnn is False and kernel == "cudnn"):
            advice = "Give one of the two."
            raise ArgumentError(sentence("kernel", f"'auto' with use_cudnn={use_cudnn}", repr(kernel), advice))
        self.kernel = "cudnn" if use_cudnn is True else kernel
        obstacles = self._obstacles()
        if not obstacles:
            return
        listed = ", ".join(obstacles)
        if self.kernel != "auto":
            named = "use_cudnn=True" if use_cudnn is True else f"kernel={kernel!r}"
            message = sentence("the options", f"supported by a kernel, with {named}", listed, "Leave one of them out.")
            raise KernelRefused(message)
        warnings.warn(
            f"no kernel of gatewise supports {listed}: Keras' own loop over time steps runs instead, which is slower",
            SlowerKernelWarning,
            stacklevel=2,
        )

    def inner_loop(
        self, sequences: Tensor, initial_state: list[Tensor], mask: Tensor | None, training: bool = False
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Compute the last output, all outputs and the final states, as Keras requires of a recurrent layer.

        Args:
            sequences: The inputs [B, T, I].
            initial_state: The states h and c, [B, H] each.
            mask: The steps that are not masked out [B, T]; None for all.
            training: Whether dropout is applied.
        """
        if self._obstacles():
            return super().inner_loop(sequences, initial_state, mask=mask, training=training)
        if isinstance(mask, list | tuple):
            mask = mask[0]
        weights = self._weights()
        x = keras.ops.convert_to_tensor(sequences).to(weights[0].dtype)
        if training and self.dropout:
            x = x * self.cell.get_dropout_mask(x[:, 0, :]).unsqueeze(1)
        if self.go_backwards:
            x, mask = x.flip(1), None if mask is None else mask.flip(1)
        masking = None if mask is None or x.shape[1] == 0 else Masking.of(keras.ops.convert_to_tensor(mask))
        h0, c0 = (keras.ops.convert_to_tensor(state).to(x.dtype).unsqueeze(0) for state in initial_state)
        if self.stateful:
            h0, c0 = h0.clone(), c0.clone()  # Keras overwrites its states, which the backward pass still needs
        if masking is None:
            y, (h_n, c_n) = self._run(x, h0, c0, weights, None)
            return (y[:, -1] if x.shape[1] else h_n[0]), y, [h_n[0], c_n[0]]
        # Without lengths a kernel continues past the last unmasked step. Its outputs up to there are right, its final
        # cell state is not; if that is not needed, this is faster than reading lengths, and every kernel supports it.
        lengths = masking.lengths if self.return_state or self.stateful else None
        if lengths is not None and self.kernel in ("cudnn", "aten"):
            lengths = lengths.cpu()  # these kernels read lengths on the CPU; naming them accepts the synchronisation
        y, (h_n, c_n) = self._run(masking.gathered(x), h0, c0, weights, lengths)
        y = masking.spread(y, self.zero_output_for_mask)
        return y[:, -1], y, [h_n[0], c_n[0]]

    def _run(
        self, x: Tensor, h0: Tensor, c0: Tensor, weights: list[Tensor], lengths: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        with _without_cudnn() if self.use_cudnn is False else contextlib.nullcontext():
            y, state = lstm(x.transpose(0, 1), (h0, c0), weights, lengths=lengths, kernel=self.kernel)
        return y.transpose(0, 1), state

    def _weights(self) -> list[Tensor]:
        variables = {"kernel": self.cell.kernel, "recurrent_kernel": self.cell.recurrent_kernel, "bias": self.cell.bias}
        tensors = {name: keras.ops.convert_to_tensor(value) for name, value in variables.items() if value is not None}
        weights = unpack(tensors, _LAYOUT)
        if weights.b_ih is not None:
            weights = weights._replace(b_hh=torch.zeros_like(weights.b_ih))
        return [tensor.contiguous() for tensor in weights.tensors()]

    def _obstacles(self) -> list[str]:
        """Return the options that no kernel supports, as text."""
        wanted = {
            "activation": (self.activation, keras.activations.tanh),
            "recurrent_activation": (self.recurrent_activation, keras.activations.sigmoid),
        }
        obstacles = [
            f"{option}={getattr(function, '__name__', function)!r}"
            for option, (function, served) in wanted.items()
            if function is not served
        ]
        if self.recurrent_dropout:
            obstacles.append(f"recurrent_dropout={self.recurrent_dropout}")
        return obstacles

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments, for saving and cloning; `keras.layers.LSTM` accepts them too.

        A named kernel is the value of `implementation`, which Keras reads as its default.
        """
        own = {} if self.use_cudnn == "auto" else {"use_cudnn": self.use_cudnn}
        if self.kernel != "auto" and self.use_cudnn is not True:
            own["implementation"] = self.kernel
        return super().get_config() | own


@contextlib.contextmanager
def _without_cudnn() -> Iterator[None]:
    before = torch.backends.cudnn.enabled
    torch.backends.cudnn.enabled = False
    try:
        yield
    finally:
        torch.backends.cudnn.enabled = before
