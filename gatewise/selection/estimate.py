"""Estimates of times: the roofline of stated work on a device, which `correction` holds to measured calls."""

from __future__ import annotations

import torch

from gatewise.contract.device import Device
from gatewise.contract.kernel import Work
from gatewise.contract.problem import Problem


def busy(work: Work, problem: Problem, device: Device) -> float:
    """Return the estimated seconds of the device: the roofline, and launches and exchanges besides."""
    exact_rate = device.matmul_rate(problem.dtype)
    rate = device.matmul_rate(problem.dtype, allow_tf32=problem.allow_tf32)
    half_rate = device.matmul_rate(torch.float16)
    others = work.matmul_flops - work.exact_flops - work.half_flops
    arithmetic = others / rate + work.exact_flops / exact_rate + work.half_flops / half_rate
    traffic = work.bytes_moved / device.memory_bandwidth + work.cached_bytes / device.cache_bandwidth
    resident = work.resident_flops / (exact_rate if work.exact_flops else rate)
    waiting = work.launches * device.launch_seconds + work.exchanges * device.exchange_seconds
    return waiting + resident + max(arithmetic, traffic)


def estimated(work: Work, problem: Problem, device: Device) -> float:
    """Return the estimated seconds of a call in a CUDA graph; on a CPU, where nothing overlaps, of any call."""
    return busy(work, problem, device) + (issue(work, device) if device.kind == "cpu" else 0.0)


def issue(work: Work, device: Device) -> float:
    """Return the estimated seconds of the CPU that issues the work."""
    return work.operators * device.operator_seconds + (work.launches - work.replayed) * device.issue_seconds
