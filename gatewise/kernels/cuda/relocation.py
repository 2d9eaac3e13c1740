"""Which words of recorded launches are addresses of which tensors, from two recordings of the same work elsewhere.

Where a tensor lay at one address in one recording and at another in the other, every word that depends on it differs by
just that distance, and every other word is the same. That is checked for all words, so what is found is complete: for a
recording at a third place, the words of the tensors that were seen to move are computed, and the rest stay. Where a
kernel's parameters have gaps, which may hold anything, a word that differs by another distance is no address.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from gatewise.kernels.cuda.nodes import Node, Words


class Spans(NamedTuple):
    """Where the tensors of a call lie.

    Attributes:
        starts: Addresses; 0 for none.
        sizes: Bytes.
    """

    starts: tuple[int, ...]
    sizes: tuple[int, ...]

    def are_apart(self) -> bool:
        """Whether no two tensors share memory, unless they begin at the same address."""
        ends: dict[int, int] = {}
        for start, size in zip(self.starts, self.sizes, strict=True):
            ends[start] = max(ends.get(start, 0), start + size)
        ordered = sorted(ends.items())
        return all(end <= begin for (_, end), (begin, _) in itertools.pairwise(ordered))


class Place(NamedTuple):
    """A word of a recording that is an address."""

    node: int
    word: int


def places(
    nodes: Sequence[Node | Words], spans: Spans, others: Sequence[Node | Words], other_starts: Sequence[int]
) -> dict[Place, int] | str:
    """Return the words that follow tensors which lay elsewhere in another recording, each with its tensor's number.

    Args:
        nodes: A recording.
        spans: Where its tensors lie, apart.
        others: A recording of the same work.
        other_starts: Where its tensors lie.

    Returns:
        The words; or, where a difference is not that of a tensor, a sentence that says which.
    """
    if [node.identity for node in nodes] != [node.identity for node in others]:
        return "it was not recorded as the same kernels"
    moved = {
        index: there - here
        for index, (here, there) in enumerate(zip(spans.starts, other_starts, strict=True))
        if here != there and spans.starts.index(here) == index
    }
    found: dict[Place, int] = {}
    for number, (node, other) in enumerate(zip(nodes, others, strict=True)):
        for word, (here, there) in enumerate(zip(node.words, other.words, strict=True)):
            if here == there:
                continue
            tensor = _tensor(here, there - here, spans, moved)
            if tensor is not None:
                found[Place(number, word)] = tensor
            elif not node.has_gaps:
                return f"word {word} of node {number}, {node.identity}, went from {here:#x} to {there:#x}"
    return found


def _tensor(address: int, distance: int, spans: Spans, moved: dict[int, int]) -> int | None:
    alike = [index for index, own in moved.items() if own == distance]
    within = [index for index in alike if 0 <= address - spans.starts[index] < spans.sizes[index]]
    if within:
        return within[0]
    # Beyond the end of a tensor, or beside other bits: right if no other tensor went as far.
    return alike[0] if len(alike) == 1 else None
