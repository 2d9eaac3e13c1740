"""Check with a profile that a real call of a model ran the kernels of the decisions."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from gatewise.contract.decision import Decision, wrapped
from gatewise.contract.errors import ArgumentError, UnexpectedKernel, sentence
from gatewise.contract.problem import NORMAL
from gatewise.contract.pytorch import cell_of
from gatewise.functional.plan import REFERENCE, decision_of, kernels_among
from gatewise.nn import profile
from gatewise.nn.arguments import refuse_input
from gatewise.nn.call_errors import CALL_ERRORS, restate
from gatewise.nn.gru import GRU
from gatewise.nn.lstm import LSTM
from gatewise.nn.nested_tensors import tensors_in
from gatewise.nn.recurrent import Recurrent
from gatewise.nn.rnn import RNN

_OURS, _THEIRS = (LSTM, GRU, RNN, Recurrent), (nn.LSTM, nn.GRU, nn.RNN)


@dataclasses.dataclass(frozen=True, slots=True)
class PassRun:
    """The kernels that ran in one pass of one layer.

    Attributes:
        kernels: The names of the kernels with traces in the profile, and these traces.
        names: All operators and GPU kernels of the pass, with their numbers of calls.
    """

    kernels: Mapping[str, tuple[str, ...]]
    names: Mapping[str, int]

    def __str__(self) -> str:
        """Return the kernels with their traces, or the most frequent names if there are no traces."""
        if self.kernels:
            return "; ".join(f"{kernel} ({', '.join(traces)})" for kernel, traces in self.kernels.items())
        seen = ", ".join(name for name, _ in Counter(self.names).most_common(5))
        return f"no known kernel; the most frequent names are {seen or 'none'}"


@dataclasses.dataclass(frozen=True, slots=True)
class LayerRun:
    """The calls of one layer that have the same decision.

    Attributes:
        name: The dotted name of the layer in the model; "" is the model itself.
        decision: The decision for these calls.
        calls: The number of calls.
        forward: The kernels that ran in the forward pass.
        backward: The kernels that ran in the backward pass; None if there was none.
    """

    name: str
    decision: Decision
    calls: int
    forward: PassRun
    backward: PassRun | None

    @property
    def agrees(self) -> bool:
        """Whether the chosen kernel ran, and no other kernel."""
        passes = [self.forward] if self.backward is None else [self.forward, self.backward]
        if self.decision.problem.time * self.decision.problem.batch == 0:
            return all(set(ran.kernels) <= {self.decision.chosen} for ran in passes)
        return all(set(ran.kernels) == {self.decision.chosen} for ran in passes)


@dataclasses.dataclass(frozen=True, slots=True)
class Verification:
    """The result of `verify`: which kernels ran in a call of a model, and the decisions.

    Attributes:
        layers: One entry for each layer and decision, in the order of the calls.
        idle: The names of recurrent layers that the call did not use.
    """

    layers: tuple[LayerRun, ...]
    idle: tuple[str, ...]

    @property
    def agrees(self) -> bool:
        """Whether every layer ran the kernel of its decision."""
        return all(layer.agrees for layer in self.layers)

    def __str__(self) -> str:
        """Return a report of at most 80 columns."""
        wrong = sum(not layer.agrees for layer in self.layers)
        count = len(self.layers)
        head = f"{wrong} of {count} ran otherwise than decided" if wrong else "every layer ran as decided"
        lines = [head]
        for layer in self.layers:
            lines += ["", *_layer_lines(layer)]
        if self.idle:
            lines += ["", *wrapped("not called: ", ", ".join(self.idle))]
        return "\n".join(lines)


def verify(model: nn.Module, *inputs: Any, **options: Any) -> Verification:
    """Run a model once under PyTorch's profiler, and check that every layer runs the kernel of its decision.

    For each call of a recurrent layer of gatewise or PyTorch in the model, the profile shows the operators and GPU
    kernels that ran in its forward pass and, if gradients are on, in its backward pass. They are compared with the
    traces that each kernel states. The decision is that of `gatewise.explain` for the tensors of the
    call; for PyTorch's layers it is PyTorch's own choice.

    The call is a real one: hooks run, and buffers such as running means are updated. Parameters, their `.grad` and the
    random state are unchanged. The backward pass starts from the sum of all outputs. A compiled model runs uncompiled,
    because a compiled graph has no layers.

    Args:
        model: Any module with recurrent layers, or such a layer.
        *inputs: The positional arguments of the call.
        **options: The keyword arguments of the call.

    Returns:
        The report, which can be printed.

    Raises:
        UnexpectedKernel: A layer ran a different kernel than the decision says, or an unknown one; the message names
            it, and the report follows.
        ArgumentError: `model` is not a module, has no such layer, or the call used none of them.

    Examples:
        >>> import torch, gatewise
        >>> report = gatewise.verify(gatewise.LSTM(4, 8), torch.randn(5, 2, 4))
        >>> report.layers[0].decision.chosen in report.layers[0].forward.kernels
        True
    """
    layers = _layers(model)
    calls: list[_Call] = []
    on_gpu = any(tensor.is_cuda for tensor in tensors_in((inputs, options, list(model.parameters()))))
    devices = range(torch.cuda.device_count()) if on_gpu else ()
    with contextlib.ExitStack() as stack:
        for name, layer in layers.items():
            stack.enter_context(_watched(name, layer, calls))
        with torch.random.fork_rng(devices), _uncompiled(), profile.profiler(on_gpu) as profiler:
            _forward_and_backward(model, inputs, options)
            if on_gpu:
                torch.cuda.synchronize()
    if not calls:
        message = sentence("model", "called so that its layers run", f"no call of {', '.join(layers)}")
        raise ArgumentError(message)
    passes = profile.read(profiler.events() or (), [call.span for call in calls])
    used = {call.name for call in calls}
    found = Verification(tuple(_by_decision(calls, passes)), tuple(name for name in layers if name not in used))
    if not found.agrees:
        raise UnexpectedKernel(f"{_error_text(found)}\n\n{found}")
    return found


@dataclasses.dataclass(frozen=True, slots=True)
class _Call:
    name: str
    decision: Decision
    span: profile.Range


def _layers(model: nn.Module) -> dict[str, nn.Module]:
    if not isinstance(model, nn.Module):
        raise ArgumentError(sentence("model", "a torch.nn.Module", type(model).__name__, "Give the model, or a layer."))
    found: dict[str, nn.Module] = {
        name: layer for name, layer in model.named_modules() if isinstance(layer, _OURS + _THEIRS)
    }
    if not found:
        advice = "Only registered layers are found; functional calls are not."
        raise ArgumentError(sentence("model", "a module with recurrent layers of gatewise or PyTorch", "none", advice))
    return found


@contextlib.contextmanager
def _watched(name: str, layer: nn.Module, calls: list[_Call]) -> Iterator[None]:
    """Make the decision for each call of a layer, and mark the call in the profile."""
    running: list[profile.Range] = []

    def before(module: nn.Module, arguments: tuple, keywords: dict[str, Any]) -> None:
        # Outside of the range, because the decision can time kernels (policy "measure").
        try:
            decision = _decision(module, *arguments, **keywords)
        except TypeError:
            if _takes(arguments, keywords):
                raise
            return  # the call of the layer raises the error that names its arguments
        span = profile.Range(len(calls))
        calls.append(_Call(name, decision, span))
        running.append(span.open())

    def after(module: nn.Module, arguments: tuple, output: Any) -> None:
        if running:
            running.pop().close()

    base: Any = next(kind for kind in type(layer).__mro__ if kind in _OURS + _THEIRS)
    forward = base.forward
    if type(layer).forward is forward:
        handles = (
            layer.register_forward_pre_hook(before, with_kwargs=True),
            layer.register_forward_hook(after, prepend=True, always_call=True),
        )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        return

    # A subclass may have other arguments, and change them: what counts is its call of `super().forward`.
    def watched(module: nn.Module, *arguments: Any, **keywords: Any) -> Any:
        if module is not layer:
            return forward(module, *arguments, **keywords)
        before(module, arguments, keywords)
        try:
            return forward(module, *arguments, **keywords)
        finally:
            after(module, arguments, None)

    base.forward = watched
    try:
        yield
    finally:
        base.forward = forward


def _decision(
    layer: Any,
    input: Tensor | PackedSequence,
    hx: tuple[Tensor, Tensor] | Tensor | None = None,
    lengths: Any = None,
    resets: Any = None,
    return_steps: bool = False,
) -> Decision:
    """Return the decision for a call of a layer, from the arguments of its `forward`."""
    if not isinstance(input, (Tensor, PackedSequence)):
        refuse_input(input)
    batch_sizes = None
    state = (hx, hx.new_zeros(*hx.shape[:-1], 0)) if isinstance(hx, Tensor) else hx
    if isinstance(input, PackedSequence):
        x, batch_sizes = input.data, input.batch_sizes
    elif input.dim() == 2:
        x = input.unsqueeze(1)
        state = None if state is None else (state[0].unsqueeze(1), state[1].unsqueeze(1))
    else:
        x = input.transpose(0, 1) if layer.batch_first else input
    try:
        return decision_of(
            x,
            state,
            layer.all_weights,
            lengths=lengths,
            batch_sizes=batch_sizes,
            bidirectional=layer.bidirectional,
            dropout=layer.dropout if layer.training else 0.0,
            kernel=REFERENCE.name if return_steps else getattr(layer, "kernel", "auto"),
            memory=getattr(layer, "memory", NORMAL),
            by_pytorch=not isinstance(layer, _OURS),
            cell=cell_of(layer, layer.training),  # type: ignore[arg-type] - these layers have one
            resets=resets,
        )
    except CALL_ERRORS as error:
        restate(error, input, hx, layer.batch_first)
        raise


def _uncompiled() -> contextlib.AbstractContextManager[Any]:
    # Without `torch._dynamo` nothing is compiled, and importing it takes seconds.
    loaded = "torch._dynamo" in sys.modules
    return torch.compiler.set_stance("force_eager") if loaded else contextlib.nullcontext()


def _forward_and_backward(model: nn.Module, inputs: tuple, options: dict[str, Any]) -> None:
    outputs = model(*inputs, **options)
    if not torch.is_grad_enabled():
        return
    tensors = [tensor for tensor in tensors_in(outputs) if tensor.requires_grad]
    sources = [tensor for tensor in (*tensors_in((inputs, options)), *model.parameters()) if tensor.requires_grad]
    if tensors and sources:
        torch.autograd.grad(tensors, sources, [torch.ones_like(tensor) for tensor in tensors], allow_unused=True)


_SIGNATURE = inspect.signature(_decision)


def _takes(arguments: tuple, keywords: dict[str, Any]) -> bool:
    """Return whether a call of a layer with these arguments is a call of its `forward`."""
    try:
        _SIGNATURE.bind(None, *arguments, **keywords)
    except TypeError:
        return False
    return True


def _by_decision(calls: Iterable[_Call], passes: Iterable[profile.Passes]) -> Iterator[LayerRun]:
    together: dict[tuple[str, Decision], list[profile.Passes]] = {}
    for call, found in zip(calls, passes, strict=True):
        together.setdefault((call.name, call.decision), []).append(found)
    for (name, decision), several in together.items():
        forward = [_pass_run(found.forward, backward=False) for found in several]
        backward = [_pass_run(found.backward, backward=True) for found in several if found.backward]
        yield LayerRun(
            name,
            decision,
            len(several),
            _worst_run(forward, decision),
            _worst_run(backward, decision) if backward else None,
        )


def _pass_run(names: Counter[str], *, backward: bool) -> PassRun:
    return PassRun(kernels_among(names, backward=backward), names)


def _worst_run(runs: list[PassRun], decision: Decision) -> PassRun:
    # A wrong kernel in one call must be reported even if all other calls ran the right one.
    return max(runs, key=lambda run: set(run.kernels) != {decision.chosen})


def _error_text(found: Verification) -> str:
    sentences = []
    for layer in found.layers:
        if not layer.agrees:
            passes = {"forward": layer.forward, "backward": layer.backward}
            ran = "; ".join(
                f"{name} ran {run}"
                for name, run in passes.items()
                if run is not None and set(run.kernels) != {layer.decision.chosen}
            )
            sentences.append(f"`{layer.name or 'the model itself'}` should have run {layer.decision.chosen}: {ran}")
    return "\n".join(sentences)


def _layer_lines(layer: LayerRun) -> list[str]:
    decision = layer.decision
    calls = "" if layer.calls == 1 else f" ({layer.calls} calls)"
    lines = [
        *wrapped("", f"{layer.name or 'the model itself'}{calls}{'' if layer.agrees else ': NOT AS DECIDED'}"),
        *wrapped("  problem   ", str(decision.problem)),
        *wrapped("  decided   ", f"{decision.chosen} ({decision.reason})"),
        *wrapped("  forward   ", str(layer.forward)),
    ]
    return lines + (wrapped("  backward  ", str(layer.backward)) if layer.backward is not None else [])
