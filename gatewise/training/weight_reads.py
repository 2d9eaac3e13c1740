"""What the autograd graph of a loss says of weights: which one node alone reads, and which rows are looked up."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

_LOOK_UP = "EmbeddingBackward0"
_REENTRANT_CHECKPOINT = "CheckpointFunctionBackward"
_LEAF = "torch::autograd::AccumulateGrad"


def weights_read_once(loss: torch.Tensor, weights: Sequence[torch.Tensor]) -> set[torch.Tensor]:
    """Return those weights that one autograd node alone reads, which computes all of their gradient.

    Args:
        loss: The loss, before its backward pass.
        weights: The weights.
    """
    reads = dict.fromkeys(weights, 0)
    for node, leaf in _reads(loss):
        if node.name() == _REENTRANT_CHECKPOINT:
            return set()
        if leaf is not None and leaf in reads:
            reads[leaf] += 1
    return {weight for weight, count in reads.items() if count == 1}


def rows_read(loss: torch.Tensor, tables: Iterable[torch.Tensor]) -> list[torch.Tensor | None]:
    """Return the rows of matrices that a loss depends on, from its autograd graph.

    Args:
        loss: The loss, before its backward pass.
        tables: The matrices, which require gradients.

    Returns:
        For each matrix the row numbers, int64 [N] with repetitions, if the loss uses it in lookups of embeddings only
        (`torch.nn.functional.embedding`); otherwise None.
    """
    lookups: dict[torch.Tensor, list[torch.Tensor]] = {table: [] for table in tables}
    used_otherwise: set[torch.Tensor] = set()
    for node, leaf in _reads(loss):
        if node.name() == _REENTRANT_CHECKPOINT:  # it hides a part of the graph
            used_otherwise.update(lookups)
        elif leaf is not None and leaf in lookups:
            # The lookups of gatewise's models have nodes of their own: `gatewise.models.lookup`.
            rows = node._saved_indices if node.name() == _LOOK_UP else getattr(node, "rows_read", None)
            if rows is not None:
                lookups[leaf].append(rows.flatten().long())
            else:
                used_otherwise.add(leaf)
    return [None if not found or table in used_otherwise else torch.cat(found) for table, found in lookups.items()]


def nodes_with_leaves(loss: torch.Tensor) -> Iterator[tuple[Any, list[torch.Tensor | None]]]:
    """Yield each node of an autograd graph with the leaves that it reads, in the order of its `next_functions`.

    Args:
        loss: The loss, before its backward pass.

    Yields:
        The node, and its leaves; None in the place of what another node computes.
    """
    for node, leaf in _reads(loss):
        if leaf is None:
            parents = [parent for parent, _ in node.next_functions]
            yield node, [each.variable if each is not None and each.name() == _LEAF else None for each in parents]


def _reads(loss: torch.Tensor) -> Iterator[tuple[Any, torch.Tensor | None]]:
    """Yield each node of an autograd graph with each leaf that it reads, and once more without a leaf."""
    nodes: list[Any] = [] if loss.grad_fn is None else [loss.grad_fn]
    seen = set(nodes)
    for node in nodes:  # to which the loop appends
        yield node, None
        for parent, _ in node.next_functions:
            if parent is not None and parent.name() == _LEAF:
                yield node, parent.variable
            elif parent is not None and parent not in seen:
                seen.add(parent)
                nodes.append(parent)
