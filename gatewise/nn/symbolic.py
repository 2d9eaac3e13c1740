"""The calls of layers in `torch.fx.symbolic_trace`."""

from __future__ import annotations

from typing import Any

from torch import fx, nn

from gatewise.contract.errors import ArgumentError, sentence
from gatewise.nn.arguments import refuse_input


def recorded(layer: nn.Module, input: object, **options: Any) -> Any:
    """Record a call with a symbol of `torch.fx` as one node of the graph, as `torch.fx` does for layers of PyTorch.

    Args:
        layer: The layer.
        input: The input, a value that records operations instead of a tensor.
        options: The other arguments of the call; those that are None are left out.

    Returns:
        The symbol of the result.

    Raises:
        ArgumentError: The input is no symbol either, the layer itself is traced, or the layer has forward hooks or a
            forward of its own.
    """
    if not isinstance(input, fx.Proxy):
        refuse_input(input)
    tracer: Any = input.tracer
    if tracer.root is layer:
        advice = "torch.fx traces a model that holds the layer, not the layer itself."
        raise ArgumentError(sentence("input", "a tensor", "a torch.fx.Proxy", advice))
    # The node stands for a whole call of the layer, of which this one is a part.
    kind = type(layer)
    own = [] if kind.forward.__module__.startswith("gatewise.") else [f"the forward of {kind.__qualname__}"]
    own += ["forward hooks"] if layer._forward_pre_hooks or layer._forward_hooks else []
    if own:
        advice = "This tracer would run them twice; its is_leaf_module must be True for the layer."
        expectation = "a layer without forward hooks and without a forward of its own for torch.fx"
        raise ArgumentError(sentence("layer", expectation, " and ".join(own), advice))
    given = {name: value for name, value in options.items() if value is not None}
    return tracer.create_proxy("call_module", tracer.path_of_module(layer), (input,), given)
