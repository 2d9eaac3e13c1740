"""A CUDA graph of a function, captured as PyTorch's documentation advises."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

Found = TypeVar("Found")


def captured(function: Callable[[], Found]) -> tuple[torch.cuda.CUDAGraph, Found]:
    """Call a function three times on a stream of its own, and return its graph and the result that replays fill."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = function()
    return graph, found
