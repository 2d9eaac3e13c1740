"""Time a program's own model with the recurrent layers of PyTorch and with those of gatewise."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gatewise.contract.capture import captured_graph, first_cause, for_cuda_graph
from gatewise.contract.decision import format_bytes, format_seconds, wrapped
from gatewise.contract.errors import ArgumentError, sentence
from gatewise.nn.acceleration import accelerate, planned_swaps, restored
from gatewise.nn.nested_tensors import tensors_in

_ROUNDS = 7
_SECONDS = 0.05  # of each measurement in each round
_WARM_UPS = 10  # the first calls compile kernels, and on a GPU calls are replayed from the third one on

_OF_A_LAYER = re.compile(r"\b(LSTM|GRU|RNN)(Cell)?\.forward\(\)")
"""What Python calls a layer's `forward` in the error of a call with other arguments than it has."""

_Step = Callable[[], tuple[list[Tensor], list[Tensor | None]]]


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """The cost of a model's step with the layers of one library.

    Attributes:
        called: The time of a step that Python calls, in seconds.
        replayed: The time of a step that is replayed as a CUDA graph, in seconds; None on a CPU, and where the step
            cannot be captured.
        peak_bytes: The memory that a step allocates at its peak on the GPU, in bytes; None on a CPU.
        obstacle: The reason why the step cannot be captured as a CUDA graph, or "".
    """

    called: float
    replayed: float | None
    peak_bytes: int | None
    obstacle: str


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """The result of `compare`.

    Attributes:
        before: The cost with the layers of PyTorch.
        after: The cost after `gatewise.accelerate`.
        replaced: The names of the layers that `accelerate` replaces.
        training: Whether a step has a backward pass.
        outputs: The largest difference of an output, relative to the largest value of that output.
        gradients: The same for the gradients of inputs and parameters; None without a backward pass.
    """

    before: Measured
    after: Measured
    replaced: tuple[str, ...]
    training: bool
    outputs: float
    gradients: float | None

    def __str__(self) -> str:
        """Return a report of at most 80 columns."""
        step = "forward and backward pass" if self.training else "forward pass"
        lines = [f"{step:<26}{'torch.nn':>12}{'gatewise':>12}"]
        lines.append(_row("called from Python", self.before.called, self.after.called))
        if self.before.replayed or self.after.replayed:
            lines.append(_row("replayed as a CUDA graph", self.before.replayed, self.after.replayed))
        if self.before.peak_bytes and self.after.peak_bytes is not None:
            sizes = [format_bytes(each.peak_bytes) for each in (self.before, self.after)]
            share = self.after.peak_bytes / self.before.peak_bytes
            lines.append(f"{'peak memory':<26}{sizes[0]:>12}{sizes[1]:>12}  {share:.2f} of the memory")
        parts = [f"outputs {self.outputs:.1g}"]
        parts += [] if self.gradients is None else [f"gradients {self.gradients:.1g}"]
        lines += wrapped("largest difference  ", f"{', '.join(parts)} of the largest value")
        lines += wrapped("replaced  ", ", ".join(self.replaced))
        for library, each in (("torch.nn", self.before), ("gatewise", self.after)):
            if each.obstacle:
                lines += wrapped(f"no CUDA graph, {library}  ", each.obstacle)
        return "\n".join(lines)


def compare(model: nn.Module, *inputs: Any, **options: Any) -> Comparison:
    """Time a step of a model with the recurrent layers of PyTorch, and after `gatewise.accelerate`.

    A step is a call of the model and, if gradients are on and the model has parameters that require them, a backward
    pass from the sum of all outputs, without loss and optimizer. Both models are copies, whose steps are timed in turn.
    On a GPU a step is also timed as a replayed CUDA graph, captured inside `gatewise.for_cuda_graph`, if it can be
    captured. Results are compared with dropout switched off in all modules. The model, its gradients and buffers, and
    the random state remain as they are. On a GPU, a comparison of a small model takes some seconds, and the first one
    compiles kernels.

    Args:
        model: A module with recurrent layers of PyTorch, or of gatewise: their copy becomes PyTorch's by
            `gatewise.restore`.
        *inputs: The positional arguments of a call.
        **options: The keyword arguments of a call.

    Returns:
        The times, the memory and the largest differences of results, which can be printed.

    Raises:
        ArgumentError: `model` is not a module, has no layer that `accelerate` can replace, calls none, calls one with
            arguments that PyTorch's layers do not have, or returns no tensors.

    Examples:
        >>> import torch, gatewise
        >>> found = gatewise.compare(gatewise.LSTM(4, 8), torch.randn(5, 2, 4))
        >>> found.outputs < 1e-5 and found.gradients < 1e-5
        True
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(sentence("model", "a torch.nn.Module", type(model).__name__, "Give the model, or a layer."))
    before = copy.deepcopy(model)
    _, left = restored(before)
    swaps = [swap for swap in planned_swaps(before) if not swap.obstacle]
    replaced = [swap.names[0] or "the model itself" for swap in swaps]
    if not replaced:
        wanted = "a module with recurrent layers that both torch.nn and gatewise have"
        stays = "; ".join([*left, *(str(swap) for swap in planned_swaps(before))])
        advice = "Give a model with LSTM, GRU, RNN or their cells, of torch.nn or of gatewise."
        raise ArgumentError(sentence("model", wanted, f"none ({stays})" if stays else "none", advice))
    after = accelerate(copy.deepcopy(before), verbose=False)
    for layer in (*before.modules(), *after.modules()):
        if isinstance(layer, nn.RNNBase):
            layer.flatten_parameters()  # each weight of a copy has memory of its own, which cuDNN copies in every call
    given = (inputs, options, list(model.parameters()))
    devices = sorted({tensor.device.index for tensor in tensors_in(given) if tensor.is_cuda})
    with torch.random.fork_rng(devices):
        steps = [_step(each, *_copied((inputs, options))) for each in (before, after)]
        with _called([swap.module for swap in swaps]) as called, _explained():
            outputs, gradients = _largest_differences((before, after), steps, devices)
        if not called and not any(module._compiled_call_impl for module in before.modules()):
            advice = "Give the inputs for which the model calls them."
            raise ArgumentError(sentence("model", "a module that calls the layers to replace", "no call", advice))
        theirs, ours = _measured(steps, devices)
    return Comparison(theirs, ours, tuple(replaced), gradients is not None, outputs, gradients)


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Say what to do where a model gives PyTorch's layers arguments that only gatewise's have."""
    try:
        yield
    except TypeError as error:
        if not _OF_A_LAYER.search(str(error)):
            raise
        advice = "Compare it without `lengths` and `resets`, or with a PackedSequence."
        wanted = "a module that calls its layers as those of torch.nn"
        raise ArgumentError(sentence("model", wanted, f"another call ({error})", advice)) from error


def _copied(nested: Any) -> Any:
    """Return copies of all tensors, which a model may change."""
    return pytree.tree_map_only(
        Tensor, lambda tensor: tensor.detach().clone().requires_grad_(tensor.requires_grad), nested
    )


def _step(model: nn.Module, inputs: tuple, options: dict[str, Any]) -> _Step:
    """Return the function that computes a step, and returns the outputs, and the gradients if there are any."""
    sources = [
        tensor
        for tensor in (*tensors_in((inputs, options)), *model.parameters())
        if tensor.requires_grad and torch.is_grad_enabled()
    ]

    def step() -> tuple[list[Tensor], list[Tensor | None]]:
        outputs = tensors_in(model(*inputs, **options))
        differentiable = [tensor for tensor in outputs if tensor.requires_grad]
        if not (sources and differentiable):
            return outputs, []
        ones = [torch.ones_like(tensor) for tensor in differentiable]
        return outputs, list(torch.autograd.grad(differentiable, sources, ones, allow_unused=True))

    return step


def _largest_differences(
    models: Sequence[nn.Module], steps: Sequence[_Step], devices: Sequence[int]
) -> tuple[float, float | None]:
    """Return the largest relative difference of outputs, and of gradients if there are any, without dropout."""
    results = []
    for model, step in zip(models, steps, strict=True):
        for generator in (torch.default_generator, *[torch.cuda.default_generators[device] for device in devices]):
            generator.manual_seed(0)
        with _without_dropout(model):
            results.append(step())
    (outputs, gradients), found = results
    if not outputs:
        advice = "Return them as they are, or in tuples, lists, dictionaries or dataclasses."
        raise ArgumentError(sentence("model", "a module that returns tensors", "another output", advice))
    of_outputs, of_gradients = (
        [_difference(one, other) for one, other in zip(*pair, strict=True)]
        for pair in zip(found, (outputs, gradients), strict=True)
    )
    return max(of_outputs), max(of_gradients) if of_gradients else None


@contextlib.contextmanager
def _without_dropout(model: nn.Module) -> Iterator[None]:
    names = {nn.modules.dropout._DropoutNd: "p", nn.RNNBase: "dropout"}
    changed = [
        (module, name, getattr(module, name))
        for module in model.modules()
        for kind, name in names.items()
        if isinstance(module, kind)
    ]
    for module, name, _ in changed:
        setattr(module, name, 0.0)
    try:
        yield
    finally:
        for module, name, value in changed:
            setattr(module, name, value)


@contextlib.contextmanager
def _called(layers: Sequence[nn.Module]) -> Iterator[list[nn.Module]]:
    """Yield a list to which layers are added when they are called, also their replicas on other devices."""
    called: list[nn.Module] = []
    # Not by hooks, because some models call `forward` itself. The class is that whose method the layer has.
    kinds = {next(kind for kind in type(layer).__mro__ if "forward" in vars(kind)) for layer in layers}
    forwards = {kind: kind.forward for kind in kinds}

    def watched(forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def call(self: nn.Module, *arguments: Any, **options: Any) -> Any:
            if getattr(self, "_is_replica", False) or any(self is layer for layer in layers):
                called.append(self)
            return forward(self, *arguments, **options)

        return call

    for kind, forward in forwards.items():
        kind.forward = watched(forward)
    try:
        yield called
    finally:
        for kind, forward in forwards.items():
            kind.forward = forward


def _difference(found: Tensor | None, expected: Tensor | None) -> float:
    """Return the largest difference of two tensors, of which a missing one is zero."""
    if found is None or expected is None:
        one = found if expected is None else expected
        return 0.0 if one is None or not one.any() else math.inf
    wide = torch.complex128 if expected.is_complex() else torch.float64
    found, expected = (each.detach().to(wide) for each in (found, expected))
    if not found.numel():
        return 0.0
    apart = torch.where((found == expected) | (found.isnan() & expected.isnan()), 0.0, (found - expected).abs())
    most = expected.abs().nan_to_num(0.0, 0.0, 0.0).max()
    return float((apart / most.clamp_min(torch.finfo(torch.float64).tiny)).nan_to_num(torch.inf).max())


def _measured(steps: Sequence[_Step], devices: Sequence[int]) -> list[Measured]:
    """Measure steps in turn, on GPUs or on the CPU."""

    def now() -> float:
        for device in devices:
            torch.cuda.synchronize(device)
        return time.perf_counter()

    with torch.cuda.device(devices[0]) if devices else contextlib.nullcontext():
        for step in steps:
            for _ in range(_WARM_UPS):
                step()
        called = _times(steps, now)
        if not devices:
            return [Measured(seconds, None, None, "") for seconds in called]
        peaks = [_peak_bytes(step, devices) for step in steps]
        graphs = [_graph_of(step) if len(devices) == 1 else "the model is on several GPUs" for step in steps]
        times = iter(_times([graph.replay for graph in graphs if not isinstance(graph, str)], now))
    found = []
    for seconds, peak, graph in zip(called, peaks, graphs, strict=True):
        replayed, obstacle = (None, graph) if isinstance(graph, str) else (next(times), "")
        found.append(Measured(seconds, replayed, peak, obstacle))
    return found


def _times(functions: Sequence[Callable[[], object]], now: Callable[[], float]) -> list[float]:
    """Return the median time of each function, in seconds; they are measured in turn, by a clock."""
    from torch.utils.benchmark import Timer  # not with `import gatewise`

    threads = torch.get_num_threads()
    timers = [Timer("function()", globals={"function": each}, num_threads=threads, timer=now) for each in functions]
    rounds = [[timer.blocked_autorange(min_run_time=_SECONDS).median for timer in timers] for _ in range(_ROUNDS)]
    return [float(np.median(times)) for times in zip(*rounds, strict=True)]


def _peak_bytes(step: _Step, devices: Sequence[int]) -> int:
    before = 0
    for device in devices:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before += torch.cuda.memory_allocated(device)
    step()
    return sum(map(torch.cuda.max_memory_allocated, devices)) - before


def _graph_of(step: _Step) -> torch.cuda.CUDAGraph | str:
    """Return the CUDA graph of a step, or the reason why there is none."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    try:
        with for_cuda_graph():
            with torch.cuda.stream(side):
                for _ in range(_WARM_UPS):
                    step()
            torch.cuda.current_stream().wait_stream(side)
            return captured_graph(step)
    except Exception as error:  # noqa: BLE001  a model may raise anything while it is captured
        return first_cause(error)


def _row(name: str, before: float | None, after: float | None) -> str:
    cells = f"{name:<26}{format_seconds(before):>12}{format_seconds(after):>12}"
    return cells if before is None or after is None else f"{cells}  {before / after:.2f} times as fast"
