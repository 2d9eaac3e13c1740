"""Measurement of the peak memory of training steps, including weights and optimizer."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch

from gatewise.benchmarks.nmt import sentences
from gatewise.benchmarks.nmt.cases import TranslationCase
from gatewise.benchmarks.nmt.largest import largest_batch
from gatewise.benchmarks.nmt.memory import parts_of_step
from gatewise.benchmarks.nmt.parts import WEIGHTS
from gatewise.benchmarks.nmt.planned import largest_predicted
from gatewise.benchmarks.nmt.record import EAGER, GRAPH
from gatewise.benchmarks.nmt.side import Side
from gatewise.benchmarks.nmt.ways import Way, seq2seq
from gatewise.benchmarks.precision import Precision


def largest_of(way: Way, case: TranslationCase, precision: Precision, device: torch.device, budget: int) -> int | None:
    """Return the largest batch of a way whose measured peak memory is within a budget; None if there is none."""
    guess = None
    if way.planned:
        # A plan recomputes more for larger batches, so the memory cannot be extrapolated from small batches.
        with precision.applied():
            guess = largest_predicted(seq2seq(case, torch.device("meta")), case, precision, device, budget)
    return largest_batch(peaks_by_batch(way, case, precision, device, budget), budget, guess=guess)


def peaks_by_batch(
    way: Way, case: TranslationCase, precision: Precision, device: torch.device, budget: int | None = None
) -> Callable[[int], int]:
    """Return a function that measures the peak memory of an eager step for a batch size, with weights and optimizer."""

    def peak_of(batch: int) -> int:
        sized = case.with_batch(batch)
        clear(device)
        before = allocated(device)
        with precision.applied():
            side = Side(way, sized, precision, sentences.draw(sized, 1, device), None, budget)
            return step_peak(side, device) - before

    return peak_of


def peak_memory(side: Side, device: torch.device, before: int) -> tuple[dict[str, int], dict[str, int]]:
    """Return the peak memory of a step, eager and captured, and the memory by part at the peak of the eager step.

    A graph keeps its gradients between two replays, unlike an eager step, which is therefore measured first.

    Args:
        side: A side whose step has not been captured yet; its weights do not change.
        device: The device, a GPU.
        before: The number of bytes that were allocated before the side was created, which are not counted.
    """
    with side.frozen_weights():
        eager, parts = step_peak(side, device) - before, step_parts(side, device, before)
        torch.cuda.reset_peak_memory_stats(device)
        side.record()
        torch.cuda.synchronize(device)
        graph = torch.cuda.max_memory_allocated(device) - before
    return {EAGER: eager, GRAPH: graph}, parts


def step_peak(side: Side, device: torch.device) -> int:
    """Return the memory that is allocated at the peak of an eager step, in bytes."""
    side.launch()
    side.forget()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    side.launch()
    torch.cuda.synchronize(device)
    side.forget()
    return torch.cuda.max_memory_allocated(device)


def step_parts(side: Side, device: torch.device, before: int) -> dict[str, int]:
    """Return the bytes of each part at the peak of an eager step, without memory from before the side was created."""
    parts = parts_of_step(side.launch, device) or {}
    side.forget()
    return parts | {WEIGHTS: parts[WEIGHTS] - before} if parts else {}


def allocated(device: torch.device) -> int:
    """Return the number of allocated bytes on a device; 0 on a CPU, where PyTorch does not count them."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def clear(device: torch.device) -> None:
    """Release all unreferenced memory."""
    # A model and its step refer to each other, so only the garbage collector frees those of earlier ways.
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
