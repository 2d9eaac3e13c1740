"""The calls of a setting, in each of its modes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from gatewise import functional
from gatewise.cells import cell_named
from gatewise.contract.capture import captured_graph, for_cuda_graph
from gatewise.contract.saved import InputGradients, Needs, Result
from gatewise.testing.trials.setting import Setting
from gatewise.testing.trials.tensors import Tensors, seed_masks

Found = tuple[Result, InputGradients | None, tuple[Tensor, ...]]
"""The outputs, the gradients (None for those that are not needed), and the dropout masks."""

_WARM_UPS = 2


class Call(Protocol):
    """The interface of one mode of calling a layer."""

    def forward(self) -> Any:
        """Run the forward pass; return what `backward` needs."""
        ...

    def backward(self, pending: Any) -> Found:
        """Run the backward pass, if there is one, and return the results."""
        ...


def call_of(setting: Setting, tensors: Tensors) -> Call:
    """Return the call for a setting."""
    if setting.mode == "explicit":
        return _Explicit(setting, tensors)
    if setting.mode == "graph":
        return _Captured(setting, tensors)
    return _Layer(setting, tensors)


@contextlib.contextmanager
def rounding_of(setting: Setting) -> Iterator[None]:
    """Enable or disable TF32 for PyTorch's float32 products inside the block, according to a setting."""
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = setting.allow_tf32
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before


def _autocast(setting: Setting) -> contextlib.AbstractContextManager:
    if not setting.autocast:
        return contextlib.nullcontext()
    return torch.autocast(setting.device, getattr(torch, setting.autocast))


class _Layer:
    """A call of the layer as a module, unchanged or wrapped."""

    def __init__(self, setting: Setting, tensors: Tensors) -> None:
        self._setting, self._tensors = setting, tensors
        self._stream = torch.cuda.Stream() if setting.mode == "stream" else None
        self._called: Callable = tensors.layer
        self._ddp = setting.mode == "ddp" and any(weight.requires_grad for weight in tensors.layer.parameters())
        if setting.mode == "compile":
            torch._dynamo.reset()
            self._called = torch.compile(tensors.layer, backend="aot_eager", dynamic=False)
        elif self._ddp:
            self._called = torch.nn.parallel.DistributedDataParallel(tensors.layer)

    def forward(self) -> tuple[Tensor, Tensor, Tensor]:
        given: dict[str, Any] = {"lengths": self._tensors.lengths} if self._tensors.lengths is not None else {}
        if (resets := self._tensors.resets) is not None:
            given["resets"] = resets.t() if self._setting.batch_first else resets
        if not self._capturing():
            seed_masks()
        with self._on_stream(), self._without_gradients(), _autocast(self._setting):
            # The view is made inside the block, because it is differentiated on the stream on which it is made.
            y, (h_n, c_n) = self._states_of(self._called(self._input(), self._state(), **given))
        return _in_time_order(self._setting, y), h_n, c_n

    def backward(self, pending: tuple[Tensor, Tensor, Tensor]) -> Found:
        y, h_n, c_n = outputs = pending
        result = Result(y.detach(), h_n.detach(), c_n.detach())
        if not self._setting.training:
            return result, None, self._tensors.masks
        wanted = [
            (output, gradient)
            for output, gradient in zip(outputs, self._tensors.above, strict=True)
            if gradient is not None and output.requires_grad
        ]
        leaves = _leaves(self._tensors)
        learned = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
        found: dict[int, Tensor | None] = {}
        if wanted and learned:
            with self._on_stream():
                if self._ddp:
                    # The wrapper's hooks run only for gradients that are accumulated into `.grad`.
                    for leaf in learned:
                        leaf.grad = None
                    torch.autograd.backward(*[list(each) for each in zip(*wanted, strict=True)])  # type: ignore[arg-type]
                    gradients = [leaf.grad for leaf in learned]
                else:
                    tops, given = zip(*wanted, strict=True)
                    gradients = torch.autograd.grad(tops, learned, given, allow_unused=True)
            found = {id(leaf): gradient for leaf, gradient in zip(learned, gradients, strict=True)}
        x, h0, c0, *weights = [None if leaf is None else found.get(id(leaf)) for leaf in leaves]
        return result, InputGradients(x, h0, c0, tuple(weights)), self._tensors.masks

    def _capturing(self) -> bool:
        return self._setting.device == "cuda" and torch.cuda.is_current_stream_capturing()

    def _state(self) -> Any:
        state, count = self._tensors.state, len(cell_named(self._setting.cell).states)
        if state is None or count == 1:
            return state
        h0, others = state
        return (h0, *others.chunk(count, -1)) if count else h0

    def _states_of(self, found: tuple) -> tuple:
        if not self._setting.has_c:
            y, h_n = found
            return y, (h_n, h_n.new_zeros(*h_n.shape[:2], 0))
        y, (h_n, *others) = found
        return y, (h_n, torch.cat(others, -1) if len(others) > 1 else others[0])

    def _input(self) -> Tensor | PackedSequence:
        given = self._tensors.input
        return given.transpose(0, 1) if isinstance(given, Tensor) and self._setting.batch_first else given

    def _without_gradients(self) -> contextlib.AbstractContextManager:
        contexts = {"inference": torch.inference_mode, "no_grad": torch.no_grad}
        return contexts.get(self._setting.mode, contextlib.nullcontext)()

    @contextlib.contextmanager
    def _on_stream(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield
        torch.cuda.current_stream().wait_stream(self._stream)


class _Captured:
    """The forward and backward pass, captured as a CUDA graph once and replayed."""

    def __init__(self, setting: Setting, tensors: Tensors) -> None:
        self._inner = _Layer(setting, tensors)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._found: Found | None = None

    def forward(self) -> None:
        if self._graph is not None:
            return
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with for_cuda_graph(), torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                self._inner.backward(self._inner.forward())
            torch.cuda.current_stream().synchronize()
            graph = captured_graph(self._capture, stream=side)
        torch.cuda.current_stream().wait_stream(side)
        self._graph = graph

    def _capture(self) -> None:
        self._found = self._inner.backward(self._inner.forward())

    def backward(self, pending: None) -> Found:
        assert self._graph is not None
        assert self._found is not None
        result, gradients, masks = self._found
        for tensor in (*result[:3], *_flat(gradients)):
            if tensor is not None:
                tensor.fill_(float("nan"))
        seed_masks()
        self._graph.replay()
        copies = Result(result.y.clone(), result.h_n.clone(), result.c_n.clone())
        if gradients is None:
            return copies, None, masks
        x, h0, c0, *weights = [None if tensor is None else tensor.clone() for tensor in _flat(gradients)]
        return copies, InputGradients(x, h0, c0, tuple(weights)), masks


class _Explicit:
    """The explicit passes of `gatewise.functional`, outside of autograd."""

    def __init__(self, setting: Setting, tensors: Tensors) -> None:
        self._setting, self._tensors = setting, tensors

    def forward(self) -> tuple:
        setting, (layer, given, x, state, lengths, _, resets, _) = self._setting, self._tensors
        packed = isinstance(given, PackedSequence)
        order = given.sorted_indices if packed else None
        if state is not None and order is not None:
            state = state[0].index_select(1, order), state[1].index_select(1, order)
        seed_masks()
        with torch.no_grad():
            return functional.forward(
                x,
                state,
                layer.all_weights,
                lengths=lengths,
                batch_sizes=given.batch_sizes if packed else None,
                bidirectional=setting.bidirectional,
                dropout=setting.dropout,
                kernel=setting.kernel,
                memory=setting.memory,
                resets=resets,
            )

    def backward(self, pending: tuple) -> Found:
        (y, (h_n, c_n)), saved = pending
        given, above = self._tensors.input, self._tensors.above
        unsorted = given.unsorted_indices if isinstance(given, PackedSequence) else None
        order = given.sorted_indices if isinstance(given, PackedSequence) else None

        def moved(tensor: Tensor | None, index: Tensor | None) -> Tensor | None:
            return tensor if tensor is None or index is None else tensor.index_select(1, index)

        result = Result(y, moved(h_n, unsorted), moved(c_n, unsorted))  # type: ignore[arg-type]
        masks = saved.inputs.masks
        needs = Needs(self._setting.x_learned, True, True)
        states = (moved(above.h_n, order), moved(above.c_n, order))
        found = functional.backward(saved, above.y, states, needs=needs)
        h0, c0 = found.state if found.state is not None else (None, None)
        weights = tuple(weight for weights in found.weights for weight in weights)
        return result, InputGradients(found.x, moved(h0, unsorted), moved(c0, unsorted), weights), masks


def _in_time_order(setting: Setting, y: Tensor | PackedSequence) -> Tensor:
    if isinstance(y, PackedSequence):
        return y.data
    return y.transpose(0, 1) if setting.batch_first else y


def _leaves(tensors: Tensors) -> list[Tensor | None]:
    state = (None, None) if tensors.state is None else tensors.state
    return [tensors.x, *state, *(weight for weights in tensors.layer.all_weights for weight in weights)]


def _flat(gradients: InputGradients | None) -> list[Tensor | None]:
    return [] if gradients is None else [gradients.x, gradients.h0, gradients.c0, *gradients.weights]
