"""The recurrent layers of a model alone: their calls in one step are recorded, and made again to be timed.

The time of the layers in a step is that of their calls made again with the same inputs: forward, and in training
backward with the gradients that the outputs had in the step. The calls follow each other as in the step, without what
the step does between them.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from gatewise.benchmarks.models.step import InferenceStep, TrainingStep, autocasting
from gatewise.benchmarks.models.workload import Workload
from gatewise.functional.plan import decision_of
from gatewise.nn import LSTM


@dataclasses.dataclass(slots=True)
class Call:
    """A call of a recurrent layer in a step.

    Attributes:
        layer: The layer.
        arguments: The positional arguments, detached.
        options: The arguments by name, detached.
        gradients: The gradients of the outputs, one for each tensor, None where there was none.
    """

    layer: nn.RNNBase
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    gradients: list[Tensor | None]

    @property
    def trained(self) -> bool:
        """Whether the step had a backward pass through the call."""
        return any(gradient is not None for gradient in self.gradients)


def recorded(step: TrainingStep | InferenceStep) -> list[Call]:
    """Run a step, and return the calls of all recurrent layers of its model, in order."""
    calls: list[Call] = []
    with contextlib.ExitStack() as hooks:
        for module in step.model.modules():
            if isinstance(module, nn.RNNBase):
                hooks.callback(module.register_forward_hook(_recorder(calls), with_kwargs=True).remove)
        step()
    return calls


def repeated(calls: Sequence[Call], workload: Workload, device: torch.device) -> Callable[[], None]:
    """Return a function that makes the calls again, forward and, where there are gradients, backward."""
    given = _leaves([(call.arguments, call.options) for call in calls if call.trained])
    inputs = [leaf for leaf in given if isinstance(leaf, Tensor) and leaf.requires_grad]
    weights = dict.fromkeys(weight for call in calls for weight in call.layer.parameters())
    above = [gradient for call in calls for gradient in call.gradients if gradient is not None]

    def again() -> None:
        ends = []
        with autocasting(workload, device):
            for call in calls:
                with torch.set_grad_enabled(call.trained):
                    outputs = _leaves(call.layer(*call.arguments, **call.options))
                ends += [y for y, gradient in zip(outputs, call.gradients, strict=True) if gradient is not None]
        if ends:
            torch.autograd.grad(ends, [*inputs, *weights], above)

    return again


def kernels_of(calls: Sequence[Call], workload: Workload, device: torch.device) -> tuple[str, ...]:
    """Return the kernels of gatewise that run the calls, each once; none for layers of PyTorch."""
    found = []
    with autocasting(workload, device):
        for call in calls:
            if isinstance(call.layer, LSTM):
                with torch.set_grad_enabled(call.trained):
                    found.append(_kernel(call.layer, *call.arguments, **call.options))
    return tuple(dict.fromkeys(found))


def _kernel(layer: LSTM, x: Tensor | PackedSequence, hx: Any = None, resets: Tensor | None = None) -> str:
    packed = isinstance(x, PackedSequence)
    found = decision_of(
        x.data if packed else x.transpose(0, 1) if layer.batch_first else x,
        hx,
        layer.all_weights,
        batch_sizes=x.batch_sizes if packed else None,
        bidirectional=layer.bidirectional,
        resets=resets,
    )
    return found.chosen or ""


def _recorder(calls: list[Call]) -> Callable[..., None]:
    def record(layer: nn.RNNBase, arguments: tuple[Any, ...], options: dict[str, Any], outputs: Any) -> None:
        given = pytree.tree_map_only((Tensor, PackedSequence), _detached, (arguments, options))
        leaves = _leaves(outputs)
        call = Call(layer, *given, gradients=[None] * len(leaves))
        calls.append(call)
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(lambda gradient, place=place: _keep(call, place, gradient))

    return record


def _keep(call: Call, place: int, gradient: Tensor | None) -> None:
    if gradient is not None:  # an output of which the step has used another part
        call.gradients[place] = gradient.detach().clone()


def _detached(value: Any) -> Any:
    if isinstance(value, PackedSequence):  # which only later versions than PyTorch 2.6 take apart
        return value._replace(data=_detached(value.data))
    return value.detach().requires_grad_(value.requires_grad)


def _leaves(tree: Any) -> list[Any]:
    found = [[*leaf] if isinstance(leaf, PackedSequence) else [leaf] for leaf in pytree.tree_leaves(tree)]
    return [part for parts in found for part in parts]
