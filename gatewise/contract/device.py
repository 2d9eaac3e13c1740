"""The properties of a device that the choice of a kernel reads: probed on this machine, or known by a GPU's name."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import os

import torch

from gatewise.contract.errors import ArgumentError, DeviceError, sentence
from gatewise.contract.hashing import hash_once

_OF_OTHERS = "explain(..., device='h200') predicts for a GPU that need not be present."


@dataclasses.dataclass(frozen=True, slots=True)
class Device:
    """The properties of a CPU or GPU that the prediction of times and memory reads.

    Attributes:
        kind: "cpu" or "cuda".
        name: The name that the vendor's driver reports.
        capability: The CUDA compute capability; (0, 0) for a CPU.
        multiprocessors: The number of streaming multiprocessors, or of CPU cores.
        memory_bytes: The size of the device's memory in bytes.
        memory_bandwidth: The bandwidth of the device's memory in bytes per second.
        matmul_rates: The achievable floating-point operations per second of large matrix products, by the names
            "float64", "float32", "tf32", "float16", "bfloat16".
        launch_seconds: The time of an empty device kernel in a sequence of kernels.
        issue_seconds: The CPU time that a library needs to launch one device kernel.
        operator_seconds: The CPU time of one PyTorch operator, from Python to the launch.
        exchange_seconds: The time until a value stored by one multiprocessor can be read by another.
        cache_bytes: The size of the second-level cache in bytes.
        cache_bandwidth: The bandwidth between the multiprocessors and the second-level cache, in bytes per second.
        cudnn_version: The result of `torch.backends.cudnn.version()`; 0 without cuDNN.
        compiles: Whether CUDA sources can be compiled and launched, which needs the packages of the extra `cuda`.
        triton: Whether Triton programs can run: Triton is installed and, on a CPU, its interpreter is on
            (TRITON_INTERPRET=1).
    """

    kind: str
    name: str
    capability: tuple[int, int] = (0, 0)
    multiprocessors: int = 1
    memory_bytes: int = 0
    memory_bandwidth: float = 2e10
    matmul_rates: tuple[tuple[str, float], ...] = ()
    launch_seconds: float = 2.5e-6
    issue_seconds: float = 5e-6
    operator_seconds: float = 1e-5
    exchange_seconds: float = 0.7e-6
    cache_bytes: int = 32 << 20
    cache_bandwidth: float = 2e11
    cudnn_version: int = 0
    compiles: bool = False
    triton: bool = False
    _hash: int | None = dataclasses.field(default=None, init=False, repr=False, compare=False)

    def __hash__(self) -> int:
        return hash_once(self)

    @property
    def architecture(self) -> str:
        """The GPU's architecture, as compilers name it, for example "sm_90"."""
        return "sm_{}{}".format(*self.capability)

    def matmul_rate(self, dtype: torch.dtype, *, allow_tf32: bool = False) -> float:
        """Return the achievable rate of large matrix products, in floating-point operations per second.

        Args:
            dtype: The dtype of the operands.
            allow_tf32: Whether float32 products may run in TF32; ignored on devices without TF32.
        """
        rates = dict(self.matmul_rates)
        name = str(dtype).removeprefix("torch.")
        if name == "float32" and allow_tf32 and "tf32" in rates:
            name = "tf32"
        return rates.get(name) or min(rates.values(), default=1e10)

    def replace(self, **changes: object) -> Device:
        """Return a copy with the given fields changed, for example to describe a device that does not exist."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]

    @classmethod
    def named(cls, name: str) -> Device:
        """Return the properties of a known device; the machine need not have one.

        Args:
            name: One of `Device.names()`; upper and lower case are equal.

        Raises:
            ArgumentError: The name is unknown; the message lists the known ones.
        """
        try:
            return _KNOWN[name.lower()]
        except KeyError:
            raise ArgumentError(sentence("device", f"one of {', '.join(_KNOWN)}", repr(name))) from None

    @staticmethod
    def names() -> tuple[str, ...]:
        """Return the names that `named` knows."""
        return tuple(_KNOWN)

    @classmethod
    def probe(cls, device: torch.device | str) -> Device:
        """Return the properties of a device of this machine; later calls return the stored result.

        Raises:
            DeviceError: The device is neither a CPU nor a CUDA device, for example "meta", or it is a GPU that is not
                there; or PyTorch knows no device of that name.
        """
        try:
            device = torch.device(device)
        except (RuntimeError, TypeError):
            raise DeviceError(sentence("device", "a CPU or CUDA device", repr(device), _OF_OTHERS)) from None
        if device.type == "cpu":
            return _probe_cpu()
        if device.type == "cuda" and device.index is None:
            return _probe_cuda(torch.cuda.current_device() if torch.cuda.is_available() else 0)
        if device.type == "cuda":
            return _probe_cuda(device.index)
        advice = f"gatewise computes on these; {_OF_OTHERS}"
        raise DeviceError(sentence("device", "a CPU or CUDA device", f"'{device}'", advice))


# Rates of dense products that large matrices reach: about 80 % of the vendor's figures. On the H200 this was measured
# (788 TFLOP/s in bfloat16).
def _known(
    name: str,
    capability: tuple[int, int],
    multiprocessors: int,
    gigabytes: int,
    bandwidth: float,
    clock: float,
    cache_megabytes: int,
    *,
    double: float,
    single: float,
    tf32: float,
    half: float,
    bfloat16: float,
) -> Device:
    rates = {"float64": double, "float32": single, "tf32": tf32, "float16": half, "bfloat16": bfloat16}
    return Device(
        kind="cuda",
        name=name,
        capability=capability,
        multiprocessors=multiprocessors,
        memory_bytes=gigabytes << 30,
        memory_bandwidth=bandwidth,
        matmul_rates=tuple((key, rate * 1e12) for key, rate in rates.items() if rate),
        launch_seconds=_LAUNCH_CYCLES / (clock * 1e9),
        exchange_seconds=_EXCHANGE_CYCLES / (clock * 1e9),
        cache_bytes=cache_megabytes << 20,
        cache_bandwidth=_CACHE_BYTES_A_CYCLE * multiprocessors * clock * 1e9,
        cudnn_version=91900,
        compiles=True,
        triton=True,
    )


# Launches, exchanges and the second-level cache were measured on an H200 at 1.98 GHz (2.5 us, 0.7 us, 5.5 TB/s); every
# GPU is taken to need as many cycles.
_LAUNCH_CYCLES, _EXCHANGE_CYCLES, _CACHE_BYTES_A_CYCLE = 4950, 1386, 21

# Multiprocessors, memory size, bandwidth (less 10 %), boost clock (GHz) and second-level cache (MB) are the vendor's
# figures as well. The names are those that the driver reports, so that a GPU of this machine is found here.
_KNOWN = {
    "h200": _known(
        "NVIDIA H200", (9, 0), 132, 140, 4.3e12, 1.98, 50, double=53, single=53, tf32=390, half=790, bfloat16=790
    ),
    "h100": _known(
        "NVIDIA H100 80GB HBM3",
        (9, 0),
        132,
        80,
        3.0e12,
        1.98,
        50,
        double=53,
        single=53,
        tf32=390,
        half=790,
        bfloat16=790,
    ),
    "h100-pcie": _known(
        "NVIDIA H100 PCIe", (9, 0), 114, 80, 1.8e12, 1.755, 50, double=41, single=41, tf32=300, half=600, bfloat16=600
    ),
    "b200": _known(
        "NVIDIA B200", (10, 0), 148, 180, 7.2e12, 1.965, 126, double=30, single=64, tf32=880, half=1800, bfloat16=1800
    ),
    "a100": _known(
        "NVIDIA A100-SXM4-80GB",
        (8, 0),
        108,
        80,
        1.8e12,
        1.41,
        40,
        double=15,
        single=16,
        tf32=125,
        half=250,
        bfloat16=250,
    ),
    "a100-40gb": _known(
        "NVIDIA A100-SXM4-40GB",
        (8, 0),
        108,
        40,
        1.4e12,
        1.41,
        40,
        double=15,
        single=16,
        tf32=125,
        half=250,
        bfloat16=250,
    ),
    "rtx5090": _known(
        "NVIDIA GeForce RTX 5090",
        (12, 0),
        170,
        32,
        1.6e12,
        2.407,
        96,
        double=1.3,
        single=84,
        tf32=84,
        half=168,
        bfloat16=168,
    ),
    "rtx4090": _known(
        "NVIDIA GeForce RTX 4090",
        (8, 9),
        128,
        24,
        0.9e12,
        2.52,
        72,
        double=1,
        single=66,
        tf32=66,
        half=132,
        bfloat16=132,
    ),
    "l40s": _known(
        "NVIDIA L40S", (8, 9), 142, 48, 0.78e12, 2.52, 48, double=1.1, single=73, tf32=146, half=290, bfloat16=290
    ),
    "l4": _known("NVIDIA L4", (8, 9), 58, 24, 0.27e12, 2.04, 48, double=0.4, single=24, tf32=48, half=97, bfloat16=97),
    "rtx3090": _known(
        "NVIDIA GeForce RTX 3090",
        (8, 6),
        82,
        24,
        0.84e12,
        1.695,
        6,
        double=0.45,
        single=28,
        tf32=28,
        half=57,
        bfloat16=57,
    ),
    "a10": _known(
        "NVIDIA A10", (8, 6), 72, 24, 0.54e12, 1.695, 6, double=0.4, single=25, tf32=50, half=100, bfloat16=100
    ),
    "v100": _known(
        "Tesla V100-SXM2-32GB", (7, 0), 80, 32, 0.8e12, 1.53, 6, double=6, single=12, tf32=0, half=90, bfloat16=0
    ),
    "t4": _known("Tesla T4", (7, 5), 40, 16, 0.26e12, 1.59, 4, double=0.2, single=6, tf32=0, half=40, bfloat16=0),
    "cpu": Device(
        kind="cpu",
        name="a CPU with 8 cores",
        multiprocessors=8,
        memory_bytes=32 << 30,
        memory_bandwidth=4e10,
        matmul_rates=(("float32", 3e11), ("float64", 1.5e11)),
        launch_seconds=2e-6,
        issue_seconds=1e-6,
        operator_seconds=6e-6,
    ),
}


def tf32_allowed() -> bool:
    """Return whether the user's PyTorch settings allow TF32 in cuDNN's recurrent layers."""
    try:
        return torch.backends.cudnn.allow_tf32
    except RuntimeError:  # the newer setting is in use, with different values for convolutions and recurrent layers
        return torch.backends.cudnn.rnn.fp32_precision == "tf32"  # type: ignore[attr-defined]


def tf32_products_allowed() -> bool:
    """Return whether the user's PyTorch settings allow TF32 in matrix products on a GPU."""
    try:
        return bool(torch.backends.cuda.matmul.allow_tf32)
    except RuntimeError:  # the newer setting is in use, and has a value that the older one does not have
        return torch.backends.cuda.matmul.fp32_precision == "tf32"


@functools.lru_cache(maxsize=1)
def _probe_cpu() -> Device:
    cores = torch.get_num_threads()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
    return _KNOWN["cpu"].replace(
        name=f"CPU with {cores} thread{'s' if cores > 1 else ''}",
        multiprocessors=cores,
        memory_bytes=memory,
        matmul_rates=(("float32", 4e10 * cores), ("float64", 2e10 * cores)),
        triton=os.environ.get("TRITON_INTERPRET") == "1" and _found("triton"),
    )


@functools.cache
def _probe_cuda(index: int) -> Device:
    if index >= (count := torch.cuda.device_count()):
        expectation = f"a GPU of this machine, where PyTorch finds {count}"
        raise DeviceError(sentence("device", expectation, f"'cuda:{index}'", _OF_OTHERS))
    properties = torch.cuda.get_device_properties(index)
    capability = (properties.major, properties.minor)
    cudnn_version = (torch.backends.cudnn.version() or 0) if torch.backends.cudnn.is_available() else 0
    same_chip = next((known for known in _KNOWN.values() if known.name == properties.name), None)
    # An unknown GPU gets the rates of the known GPU of the nearest generation, scaled by the number of multiprocessors.
    relative = same_chip or min(
        (known for known in _KNOWN.values() if known.kind == "cuda"),
        key=lambda known: abs(10 * (known.capability[0] - capability[0]) + known.capability[1] - capability[1]),
    )
    share = properties.multi_processor_count / relative.multiprocessors
    return relative.replace(
        name=properties.name,
        capability=capability,
        multiprocessors=properties.multi_processor_count,
        memory_bytes=properties.total_memory,
        memory_bandwidth=relative.memory_bandwidth * share,
        matmul_rates=tuple((name, rate * share) for name, rate in relative.matmul_rates),
        cache_bytes=relative.cache_bytes if same_chip else getattr(properties, "L2_cache_size", relative.cache_bytes),
        cache_bandwidth=relative.cache_bandwidth * share,
        cudnn_version=cudnn_version,
        compiles=all(_found(package) for package in ("cuda.core", "cuda.bindings")),
        triton=_found("triton"),
    )


def _found(package: str) -> bool:
    # `find_spec` raises if the parent package is missing, instead of returning None.
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False
