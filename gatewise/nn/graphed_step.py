"""Training steps of programs as CUDA graphs: one for each kind of call that occurs again."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gatewise.contract.capture import captured_graph, first_cause, for_cuda_graph
from gatewise.contract.errors import ArgumentError, callers_level, sentence
from gatewise.nn.step_generators import without_random_numbers
from gatewise.nn.step_reads import Kind, StepReads, obstacle
from gatewise.nn.step_variables import (
    Unreadable,
    Variable,
    constants,
    held_tensors,
    read_of,
    replaced,
    unreadable,
)

_log = logging.getLogger(__name__)

WARMUPS = 3
"""The calls of the first kind before its capture, which initialise libraries and the state of optimizers, too."""

LATER_WARMUPS = 1
"""The calls of each further kind before its capture, which load its kernels."""

A_RATE = "a tensor in the hyperparameters of an optimizer, such as its learning rate"

MOST_KINDS = 64
"""The largest number of kinds of calls; if there are more, steps are not captured any longer."""

Work = Callable[[], None]


def make_graphed_step(
    step: Callable[..., Any],
    model: nn.Module | Iterable[nn.Module],
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
) -> GraphedStep:
    """Return a function that trains like `step`, and replays it as a CUDA graph where calls repeat.

    Calling the hundreds of operators of a training step from Python often takes longer than the GPU needs for them. A
    replay is a single call for the CPU. The function `step` must be a whole training step: forward pass, loss, backward
    pass and update. It runs as it is in the first three calls; then it is captured, and replayed from that call on.
    Calls of another kind, such as those of another batch size, have a CUDA graph of their own from their second
    occurrence on, in one memory pool.

    A graph is replayed only if everything is as it was at its capture that the step can read as a Python value, as far
    as it is known here: the shapes, dtypes and devices of tensors in its arguments, and all other arguments; the class
    of every module, its hooks, and the numbers, strings and functions in its attributes, such as whether it is in
    training mode; the addresses of parameters, buffers and the state of optimizers, and numbers in that state; which
    parameters require gradients; hyperparameters of optimizers that are numbers; grad mode, autocast, PyTorch's
    settings for float32 products, and the kernel that `gatewise.use_kernel` names. If anything differs, the call is one
    of another kind.

    Whatever else `step` reads must stay the same: numbers in global variables, and tensors that are not among its
    arguments, the model and the optimizer. Pass such values as arguments. A replay does not run any Python code: count
    steps, print, draw random numbers on the CPU, and change learning rates outside of `step`.

    Args:
        step: The function. Its arguments are tensors on the GPU that require no gradients, numbers, strings, dtypes,
            devices or None, and may be nested in tuples, lists and dicts. It returns tensors or None, or tuples, lists
            and dicts of these.
        model: The module that the step trains, or several.
        optimizer: The optimizer, or several. Its learning rate should be a tensor on the GPU: a schedule that writes
            numbers makes every step one of another kind. Adam must be made with `capturable=True`, and SGD with
            `fused=True` if its learning rate is a tensor.

    Returns:
        A function with the arguments and results of `step`. The tensors that it returns are copies, detached from the
        autograd graph. The gradients of the model are None when `step` begins, and again after the call; return what
        is wanted of them, such as their norm.

    Warns:
        UserWarning: Steps are not captured, once, with the reason: the model is not on a GPU, several processes train
            together, or the step does something that cannot be captured, such as `loss.item()`. All calls then run
            `step` as it is.

    Raises:
        ArgumentError: `step` cannot be called, `model` is no module, or `optimizer` is no optimizer.

    Note:
        Replays return the same bits as warm-up calls do. Kernels are chosen for replays (`gatewise.for_cuda_graph`).
        Random numbers of the GPU, such as those of dropout, are new in each replay. In-place changes by a replay do not
        increase the version counters of tensors, by which autograd notices changes.

    Examples:
        >>> import torch, gatewise
        >>> model = gatewise.LSTM(4, 8)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> def step(x, target):
        ...     loss = torch.nn.functional.mse_loss(model(x)[0], target)
        ...     loss.backward()
        ...     optimizer.step()
        ...     return loss
        >>> graphed = gatewise.make_graphed_step(step, model, optimizer)
        >>> loss = graphed(torch.randn(5, 2, 4), torch.zeros(5, 2, 8))  # a warning: there is no GPU
    """
    if not callable(step):
        raise ArgumentError(sentence("step", "a function", repr(step)))
    models = _each(model, nn.Module, "model", "a torch.nn.Module, or several")
    optimizers = _each(optimizer, torch.optim.Optimizer, "optimizer", "an optimizer of torch.optim, or several")
    return GraphedStep(step, models, optimizers)


def _each(given: Any, kind: type, name: str, expectation: str) -> tuple[Any, ...]:
    # A container such as nn.Sequential is itself a module.
    found = (given,) if isinstance(given, kind) or not isinstance(given, Iterable) else tuple(given)
    wrong = next((each for each in found if not isinstance(each, kind)), None)
    if wrong is not None or not found:
        raise ArgumentError(sentence(name, expectation, f"an object of {type(wrong).__name__}" if found else "none"))
    return found


class GraphedStep:
    """A training step that is replayed as a CUDA graph where calls repeat; see `make_graphed_step`.

    Args:
        step: The function.
        models: The modules that it trains.
        optimizers: Their optimizers.
        capture: A function that captures work on the current device and returns its replay; None for CUDA graphs of the
            device of the models.

    Attributes:
        refusal: The reason why steps are not captured; empty if they are.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        capture: Callable[[Work], Work] | None = None,
    ) -> None:
        functools.update_wrapper(self, step, updated=())
        self._step = step
        self._reads = StepReads(models, optimizers)
        self._capture = capture
        self._device: torch.device | None = None  # of CUDA graphs
        self.refusal = ""
        self._seen: dict[Kind, int] = {}
        self._last: Kind | None = None
        self._graphs: dict[Kind, _Graph] = {}
        self._dropped = 0  # graphs, because a tensor in an attribute was replaced
        self._replaced: list[Variable] = []  # by the last call that ran as it is

    @property
    def graphs(self) -> int:
        """The number of captured graphs."""
        return len(self._graphs)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Train; see `make_graphed_step`."""
        modules = self._reads.modules()
        weights = self._reads.parameters(modules)
        _forget_gradients(weights)
        if not self.refusal and self._capture is None:
            self._prepare(weights)
        # A call while the program captures a graph of its own becomes a part of that graph.
        if self.refusal or (self._device is not None and torch.cuda.is_current_stream_capturing()):
            return self._called(arguments, named, weights)
        leaves, form = pytree.tree_flatten((arguments, named))
        reason = next(filter(None, map(obstacle, leaves)), "")
        if reason:
            self._refuse(reason)
            return self._called(arguments, named, weights)
        with for_cuda_graph():
            kind = self._reads.kind(modules, weights, leaves, form)
            graph = self._fitting(kind)
            is_due = self._seen.get(kind, 0) >= (LATER_WARMUPS if self._graphs else WARMUPS)
            if graph is None and is_due and not self.refusal:
                graph = self._captured(kind, modules, weights, leaves, form)
            if graph is not None:
                return graph.replay(leaves)
            if not self.refusal:
                before = held_tensors(self._step, modules)
                found = self._called(arguments, named, weights)
                modules = self._reads.modules()
                self._replaced = replaced(before, held_tensors(self._step, modules))
                # As the call leaves it: the first call of an optimizer creates its state.
                self._count(self._reads.kind(modules, self._reads.parameters(modules), leaves, form), kind)
                return pytree.tree_map(lambda each: each.clone() if isinstance(each, Tensor) else each, found)
        return self._called(arguments, named, weights)

    def _fitting(self, kind: Kind) -> _Graph | None:
        """Return the graph of a kind of calls; None if there is none, or a tensor that it reads was replaced."""
        graph = self._graphs.get(kind)
        if graph is None or graph.fits():
            return graph
        del self._graphs[kind]
        self._dropped += 1
        if self._dropped > MOST_KINDS:
            self._refuse("tensors in attributes of modules, which are no buffers, are replaced again and again")
        return None

    def _called(self, arguments: tuple[Any, ...], named: dict[str, Any], weights: Sequence[nn.Parameter]) -> Any:
        """Call the step as it is."""
        try:
            found = self._step(*arguments, **named)
            return pytree.tree_map(lambda each: each.detach() if isinstance(each, Tensor) else each, found)
        finally:
            _forget_gradients(weights)

    def _prepare(self, weights: Sequence[nn.Parameter]) -> None:
        """Choose the device and its graphs, or refuse."""
        devices = {weight.device for weight in weights}
        (device, *others) = devices or {torch.device("cpu")}
        if device.type != "cuda":
            self._refuse(f"CUDA graphs need a GPU, and the model is on {device}")
        elif others:
            self._refuse("the parameters are on several devices")
        elif torch.distributed.is_available() and torch.distributed.is_initialized() and _processes() > 1:
            self._refuse(f"{_processes()} processes train together, which would have to replay the same steps")
        else:
            pool = torch.cuda.graph_pool_handle()
            self._capture, self._device = functools.partial(_cuda_graph, device=device, pool=pool), device

    def _captured(
        self, kind: Kind, modules: list[nn.Module], weights: list[nn.Parameter], leaves: list[Any], form: Any
    ) -> _Graph | None:
        """Capture the step for calls of a kind; return None, and capture no other, if it cannot be captured."""
        assert self._capture is not None
        written = self._reads.versions()
        try:
            moved = [weight.device for weight in weights if weight.device != self._device]
            if moved and self._device is not None:
                raise RuntimeError(f"a parameter has moved from {self._device} to {moved[0]}")
            if name := self._reads.kept_on_cpu():
                advice = "Adam and AdamW keep it on the GPU with `capturable=True`"
                raise RuntimeError(
                    f"the optimizer has `{name}` on the CPU, where replays would not change it; {advice}"
                )
            held = constants(held_tensors(self._step, modules), self._replaced, modules)
            with (
                self._reads.restored_after_errors(modules),
                without_random_numbers(self._step, modules),
                unreadable(self._replaced),
            ):
                graph = _Graph(self._step, leaves, form, weights, self._capture)
                graph.constants = held
                modules = self._reads.modules()
                after = self._reads.kind(modules, self._reads.parameters(modules), leaves, form)
                changed = after.difference(kind)
                if changed or self._reads.versions() != written:
                    raise RuntimeError(
                        f"the step changes {changed or A_RATE}, which replays would not do; do it outside"
                    )
        except Exception as error:
            _forget_gradients(weights)
            if isinstance(error, RuntimeError):
                self._refuse(first_cause(error))
            elif Unreadable.__name__ in str(error):  # of an operation that Python or PyTorch has refused
                self._refuse(read_of([place.name for place in self._replaced]))
            else:
                raise
            return None
        self._graphs[kind] = graph
        _log.info("Captured a training step as CUDA graph %d", self.graphs)
        return graph

    def _count(self, kind: Kind, before: Kind) -> None:
        """Count a call of a kind; `before` is what it was when the call began."""
        if len(self._seen) >= MOST_KINDS and kind not in self._seen and self._last is not None:
            differs = before.difference(self._last) or kind.difference(self._last)
            self._refuse(f"there were more than {MOST_KINDS} kinds of calls; the last two differ in {differs}")
            return
        self._seen[kind] = self._seen.get(kind, 0) + 1
        self._last = kind

    def _refuse(self, reason: str) -> None:
        self.refusal = reason
        self._graphs.clear()
        message = f"steps are not captured as a CUDA graph, and run as they are: {reason}"
        warnings.warn(message, stacklevel=callers_level())


class _Graph:
    """A captured step with the tensors that it reads and writes.

    Attributes:
        constants: Attributes of modules that hold tensors other than parameters and buffers, and their values.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        leaves: list[Any],
        form: Any,
        weights: list[nn.Parameter],
        capture: Callable[[Work], Work],
    ) -> None:
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                _check_argument(leaf, weights[0].device)
        # Outside of the graph's memory pool, because they outlive a replay.
        still = [torch.empty_like(leaf).copy_(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._inputs = [each for each in still if isinstance(each, Tensor)]
        written = [each._version for each in self._inputs]
        self.constants: list[tuple[Variable, Any]] = []
        self._outputs: list[Tensor | None] = []
        self._form: Any = None

        def work() -> None:
            arguments, named = pytree.tree_unflatten(still, form)
            # In a second thread, other calls of the program could disturb the capture.
            with torch.autograd.set_multithreading_enabled(False):
                found = step(*arguments, **named)
            outputs, self._form = pytree.tree_flatten(found)
            wrong = next((each for each in outputs if each is not None and not isinstance(each, Tensor)), None)
            if wrong is not None:
                raise RuntimeError(f"the step returns {wrong!r}, and replays can only return tensors")
            self._outputs = [None if each is None else each.detach() for each in outputs]
            _forget_gradients(weights)  # whose memory the next graph may use

        self._replay = capture(work)
        self._changed = [each._version != version for each, version in zip(self._inputs, written, strict=True)]

    def fits(self) -> bool:
        """Return whether attributes of modules hold the tensors that the graph reads."""
        return all([place.value() is value for place, value in self.constants])  # noqa: C419  no generator

    def replay(self, leaves: list[Any]) -> Any:
        """Train on other tensors of the same forms."""
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        for own, leaf in zip(self._inputs, given, strict=True):
            own.copy_(leaf)
        self._replay()
        for own, leaf, changed in zip(self._inputs, given, self._changed, strict=True):
            if changed:  # by the step, in place
                leaf.copy_(own)
        outputs = [None if each is None else each.clone() for each in self._outputs]
        return pytree.tree_unflatten(outputs, self._form)


def _check_argument(leaf: Tensor, device: torch.device) -> None:
    if leaf.device != device:
        raise RuntimeError(f"a tensor in the arguments is on {leaf.device}, and the model is on {device}")
    if leaf.requires_grad:
        raise RuntimeError("a tensor in the arguments requires gradients")


def _forget_gradients(weights: Sequence[nn.Parameter]) -> None:
    for weight in weights:
        weight.grad = None


def _processes() -> int:
    return torch.distributed.get_world_size()


def _cuda_graph(work: Work, device: torch.device, pool: Any) -> Work:
    """Capture work on a device, and return a function that replays it there on the current stream."""
    with torch.cuda.device(device):
        # Other threads, such as one that moves batches to page-locked memory, may go on.
        graph = captured_graph(work, pool=pool, mode="thread_local")

    def replay() -> None:
        with torch.cuda.device(device):
            graph.replay()

    return replay
