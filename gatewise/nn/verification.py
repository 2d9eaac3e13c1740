"""Holding one real call of a model to the decision: which kernels truly ran, by their traces in a profile."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from gatewise.contract.decision import Decision
from gatewise.contract.errors import ArgumentError, UnexpectedKernel, sentence
from gatewise.contract.problem import NORMAL
from gatewise.functional.plan import decision_of, kernels_among
from gatewise.nn import profile
from gatewise.nn.lstm import LSTM

_COLUMNS = 80


@dataclasses.dataclass(frozen=True, slots=True)
class PassRun:
    """What ran in one pass of one layer.

    Attributes:
        kernels: The kernels that left traces, and the traces.
        names: Every operator and GPU kernel of the pass, with how often each was there.
    """

    kernels: Mapping[str, tuple[str, ...]]
    names: Mapping[str, int]

    def __str__(self) -> str:
        """The kernels with their traces, or what was seen instead."""
        if self.kernels:
            return "; ".join(f"{kernel} ({', '.join(traces)})" for kernel, traces in self.kernels.items())
        seen = ", ".join(name for name, _ in Counter(self.names).most_common(5))
        return f"no kernel's traces; seen were {seen or 'no operators'}"


@dataclasses.dataclass(frozen=True, slots=True)
class LayerRun:
    """One layer's calls that were decided alike.

    Attributes:
        name: The layer's dotted name in the model; "" is the model itself.
        decision: What was to run.
        calls: How many calls these are.
        forward: What ran in the forward pass.
        backward: What ran in the backward pass; None when there was none.
    """

    name: str
    decision: Decision
    calls: int
    forward: PassRun
    backward: PassRun | None

    @property
    def agrees(self) -> bool:
        """Whether the chosen kernel ran, and no other."""
        passes = [self.forward] if self.backward is None else [self.forward, self.backward]
        if self.decision.problem.time * self.decision.problem.batch == 0:
            return all(set(ran.kernels) <= {self.decision.chosen} for ran in passes)
        return all(set(ran.kernels) == {self.decision.chosen} for ran in passes)


@dataclasses.dataclass(frozen=True, slots=True)
class Verification:
    """What one real call of a model ran, against what was decided.

    Attributes:
        layers: One record for each layer and decision, in the order of the calls.
        idle: Names of LSTM layers that the call did not use.
    """

    layers: tuple[LayerRun, ...]
    idle: tuple[str, ...]

    @property
    def agrees(self) -> bool:
        """Whether every layer ran as decided."""
        return all(layer.agrees for layer in self.layers)

    def __str__(self) -> str:
        """A report of at most 80 columns."""
        wrong = sum(not layer.agrees for layer in self.layers)
        count = len(self.layers)
        head = f"{wrong} of {count} ran otherwise than decided" if wrong else "every layer ran as decided"
        lines = [head]
        for layer in self.layers:
            lines += ["", *_layer_lines(layer)]
        if self.idle:
            lines += ["", *_wrapped("not called: ", ", ".join(self.idle))]
        return "\n".join(lines)


def verify(model: nn.Module, *inputs: Any, **options: Any) -> Verification:
    """Run a model once under PyTorch's profiler, and hold every LSTM layer to the decision about its kernel.

    For each call of a `gatewise.LSTM` or `torch.nn.LSTM` in the model, the operators and GPU kernels that truly ran in
    its forward pass and, where gradients are on, in its backward pass are compared with the traces that each kernel
    states. The decision is that of `gatewise.explain` for the very tensors of the call; for `torch.nn.LSTM` it is
    PyTorch's own rule.

    The call is a real one: hooks run, and buffers such as running means move. Parameters, their `.grad` and the random
    state stay as they are; the backward pass starts from the sum of all outputs. A compiled model runs uncompiled: a
    graph shows no layers.

    Args:
        model: Any module with LSTM layers, or such a layer.
        *inputs: What the model is called with.
        **options: Keywords it is called with.

    Returns:
        The report; print it.

    Raises:
        UnexpectedKernel: A layer ran on another kernel than decided, or on none that is known; the message says which,
            and is followed by the report.
        ArgumentError: `model` is no module, has no LSTM layer, or the call used none.

    Example:
        >>> import torch, gatewise
        >>> report = gatewise.verify(gatewise.LSTM(4, 8), torch.randn(5, 2, 4))
        >>> report.layers[0].decision.chosen in report.layers[0].forward.kernels
        True
    """
    layers = _layers(model)
    calls: list[_Call] = []
    handles = [handle for name, layer in layers.items() for handle in _watched(name, layer, calls)]
    on_gpu = any(tensor.is_cuda for tensor in _tensors((inputs, options, list(model.parameters()))))
    devices = range(torch.cuda.device_count()) if on_gpu else ()
    try:
        with torch.random.fork_rng(devices), _uncompiled(), profile.profiler(on_gpu) as profiler:
            _forward_and_backward(model, inputs, options)
            if on_gpu:
                torch.cuda.synchronize()
    finally:
        for handle in handles:
            handle.remove()
    if not calls:
        message = sentence("model", "called so that its LSTM layers run", f"no call of {', '.join(layers)}")
        raise ArgumentError(message)
    passes = profile.read(profiler.events() or (), [call.span for call in calls])
    used = {call.name for call in calls}
    found = Verification(tuple(_merged(calls, passes)), tuple(name for name in layers if name not in used))
    if not found.agrees:
        raise UnexpectedKernel(f"{_complaint(found)}\n\n{found}")
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
        name: layer for name, layer in model.named_modules() if isinstance(layer, LSTM | nn.LSTM)
    }
    if not found:
        advice = "Only registered layers are found; functional calls are not."
        raise ArgumentError(sentence("model", "a module with gatewise.LSTM or torch.nn.LSTM layers", "none", advice))
    return found


def _watched(name: str, layer: nn.Module, calls: list[_Call]) -> Iterator[Any]:
    """Hook a layer so that each of its calls is decided beforehand and marked in the profile."""
    running: list[profile.Range] = []

    def before(module: nn.Module, arguments: tuple, keywords: dict[str, Any]) -> None:
        # Deciding may time kernels (policy "measure"): outside of the range.
        decision = _decision(module, *arguments, **keywords)
        span = profile.Range(len(calls))
        calls.append(_Call(name, decision, span))
        running.append(span.open())

    def after(module: nn.Module, arguments: tuple, output: Any) -> None:
        if running:
            running.pop().close()

    yield layer.register_forward_pre_hook(before, with_kwargs=True)
    yield layer.register_forward_hook(after, prepend=True, always_call=True)


def _decision(
    layer: Any,
    input: Tensor | PackedSequence,
    hx: tuple[Tensor, Tensor] | None = None,
    lengths: Any = None,
) -> Decision:
    """Return the decision about a layer's call, from the arguments of its `forward`."""
    batch_sizes = None
    if isinstance(input, PackedSequence):
        x, batch_sizes = input.data, input.batch_sizes
    elif input.dim() == 2:
        x = input.unsqueeze(1)
        hx = None if hx is None else (hx[0].unsqueeze(1), hx[1].unsqueeze(1))
    else:
        x = input.transpose(0, 1) if layer.batch_first else input
    return decision_of(
        x,
        hx,
        layer.all_weights,
        lengths=lengths,
        batch_sizes=batch_sizes,
        bidirectional=layer.bidirectional,
        dropout=layer.dropout if layer.training else 0.0,
        kernel=getattr(layer, "kernel", "auto"),
        memory=getattr(layer, "memory", NORMAL),
        by_pytorch=isinstance(layer, nn.LSTM),
    )


def _uncompiled() -> contextlib.AbstractContextManager[Any]:
    # Without the compiler loaded there is nothing compiled, and loading it takes seconds.
    loaded = "torch._dynamo" in sys.modules
    return torch.compiler.set_stance("force_eager") if loaded else contextlib.nullcontext()


def _forward_and_backward(model: nn.Module, inputs: tuple, options: dict[str, Any]) -> None:
    outputs = model(*inputs, **options)
    if not torch.is_grad_enabled():
        return
    tensors = [tensor for tensor in _tensors(outputs) if tensor.requires_grad]
    sources = [tensor for tensor in (*_tensors((inputs, options)), *model.parameters()) if tensor.requires_grad]
    if tensors and sources:
        torch.autograd.grad(tensors, sources, [torch.ones_like(tensor) for tensor in tensors], allow_unused=True)


def _tensors(nested: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(nested) if isinstance(leaf, Tensor)]


def _merged(calls: Iterable[_Call], passes: Iterable[profile.Passes]) -> Iterator[LayerRun]:
    together: dict[tuple[str, Decision], list[profile.Passes]] = {}
    for call, found in zip(calls, passes, strict=True):
        together.setdefault((call.name, call.decision), []).append(found)
    for (name, decision), several in together.items():
        forward = [_pass_run(found.forward, backward=False) for found in several]
        backward = [_pass_run(found.backward, backward=True) for found in several if found.backward]
        yield LayerRun(
            name, decision, len(several), _worst(forward, decision), _worst(backward, decision) if backward else None
        )


def _pass_run(names: Counter[str], *, backward: bool) -> PassRun:
    return PassRun(kernels_among(names, backward=backward), names)


def _worst(runs: list[PassRun], decision: Decision) -> PassRun:
    # One call that ran otherwise is not made good by the others.
    return max(runs, key=lambda run: set(run.kernels) != {decision.chosen})


def _complaint(found: Verification) -> str:
    sentences = []
    for layer in found.layers:
        if not layer.agrees:
            passes = {"forward": layer.forward, "backward": layer.backward}
            ran = "; ".join(
                f"{name} ran {run}"
                for name, run in passes.items()
                if run is not None and set(run.kernels) != {layer.decision.chosen}
            )
            sentences.append(f"`{layer.name or 'the model itself'}` was decided to run {layer.decision.chosen}: {ran}")
    return "\n".join(sentences)


def _layer_lines(layer: LayerRun) -> list[str]:
    decision = layer.decision
    calls = "" if layer.calls == 1 else f" ({layer.calls} calls)"
    lines = [
        *_wrapped("", f"{layer.name or 'the model itself'}{calls}{'' if layer.agrees else ': NOT AS DECIDED'}"),
        *_wrapped("  problem   ", str(decision.problem)),
        *_wrapped("  decided   ", f"{decision.chosen} ({decision.reason})"),
        *_wrapped("  forward   ", str(layer.forward)),
    ]
    return lines + (_wrapped("  backward  ", str(layer.backward)) if layer.backward is not None else [])


def _wrapped(lead: str, text: str) -> list[str]:
    return textwrap.wrap(text, _COLUMNS, initial_indent=lead, subsequent_indent=" " * len(lead))
