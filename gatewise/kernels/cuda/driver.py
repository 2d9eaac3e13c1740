"""Loading machine code and launching it: a thin layer over the CUDA driver."""

from __future__ import annotations

import ctypes
import functools
import threading
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from gatewise.contract.errors import DeviceError, MissingExtra


class Shape(NamedTuple):
    """How a kernel is launched.

    Attributes:
        grid: Blocks in x, y and z.
        threads: Threads of a block.
        shared_bytes: Dynamic shared memory of a block.
        cluster: Blocks of a cluster, along x; 1 for none.
        cooperative: Whether all blocks must run at once.
        early: Whether it may begin while the kernel before it ends (programmatic dependent launch, from compute
            capability 9.0); it waits for that kernel's results itself.
    """

    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int
    cluster: int = 1
    cooperative: bool = True
    early: bool = False


def launch(binary: bytes, entry: str, shape: Shape, arguments: ctypes.Structure, device: torch.device) -> None:
    """Launch a kernel on the current stream of a device; cooperatively, all of its blocks run or none does.

    Args:
        binary: Machine code for the device.
        entry: Name of the kernel, which takes one struct by value.
        shape: Grid, block and shared memory.
        arguments: The struct.
        device: A CUDA device with an index, current.

    Raises:
        DeviceError: The driver refused, as when the grid cannot be resident at once.
    """
    ensure_context(device.index)
    function = _function(binary, entry, shape.shared_bytes, device.index)
    configuration = _configuration(shape, current_stream(device))
    pointer = ctypes.c_void_p(ctypes.addressof(arguments))
    _check(_driver().cuLaunchKernelEx(configuration, function, ctypes.addressof(pointer), 0), entry)


def fill_with_ones(tensor: Tensor) -> None:
    """Set every bit of a tensor, which lies in memory without gaps, on the current stream of its device; current."""
    index = tensor.device.index
    ensure_context(index)
    _check(_driver().cuMemsetD8Async(tensor.data_ptr(), 0xFF, tensor.nbytes, current_stream(tensor.device)), "a memset")


class Graph:
    """Launches recorded from a stream; use `Graph.recorded`."""

    def __init__(self, executable: object) -> None:
        self._driver = _driver()
        self._executable = executable
        # At the end of the process the driver clears up by itself.
        weakref.finalize(self, self._driver.cuGraphExecDestroy, executable).atexit = False

    @classmethod
    def recorded(cls, stream: int, issue: Callable[[], None]) -> Graph:
        """Record what a function issues on a stream, without doing any of it.

        Raises:
            DeviceError: It issues what cannot be recorded.
        """
        driver, entry = _driver(), "a recording"
        _check(
            driver.cuStreamBeginCapture(stream, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL), entry
        )
        try:
            issue()
        except BaseException:
            status, graph = driver.cuStreamEndCapture(stream)
            if int(status) == 0:
                driver.cuGraphDestroy(graph)
            raise
        graph = _check(driver.cuStreamEndCapture(stream), entry)
        try:
            return cls(_check(driver.cuGraphInstantiate(graph, 0), entry))
        finally:
            driver.cuGraphDestroy(graph)

    def launch(self, stream: int, device: torch.device) -> None:
        """Launch all of it on a stream of a device, which is current."""
        if not getattr(_threads, "have_context", False):
            ensure_context(device.index)
        outcome = self._driver.cuGraphLaunch(self._executable, stream)
        if outcome[0] != 0:
            _check(outcome, "a recording")


def ensure_context(device_index: int) -> None:
    """Give the calling thread the CUDA context that PyTorch uses on a device, if it has none."""
    # A thread, as autograd starts one for backward passes, has none until something asks CUDA's runtime for one, and
    # PyTorch does not where it finds all memory in its cache.
    if getattr(_threads, "have_context", False):
        return
    driver = _driver()
    if not int(_check(driver.cuCtxGetCurrent(), "a context")):  # type: ignore[call-overload]
        device = _check(driver.cuDeviceGet(device_index), "a device")
        _check(driver.cuCtxSetCurrent(_check(driver.cuDevicePrimaryCtxRetain(device), "a context")), "a context")
    _threads.have_context = True


_threads = threading.local()


def current_stream(device: torch.device) -> int:
    """Return the current stream of a device, as the driver knows it."""
    # `torch.cuda.current_stream` makes an object of it, which takes as long as a launch.
    return torch._C._cuda_getCurrentRawStream(device.index)


def new_stream(device: torch.device) -> int:
    """Return a stream that PyTorch's pool does not hand out; it lasts as long as the process."""
    driver = _driver()
    with torch.cuda.device(device):
        flags = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        return int(_check(driver.cuStreamCreate(flags), "a stream"))  # type: ignore[call-overload]


@functools.cache
def _driver() -> ModuleType:
    try:
        from cuda.bindings import driver  # pyright: ignore[reportAttributeAccessIssue] - compiled, and without stubs
    except ImportError as error:
        raise MissingExtra.for_package("cuda-core", "Launching CUDA kernels", "cuda") from error
    return driver


@functools.lru_cache(maxsize=512)
def _function(binary: bytes, entry: str, shared_bytes: int, device_index: int) -> object:
    driver = _driver()
    module = _check(driver.cuModuleLoadData(binary), entry)
    function = _check(driver.cuModuleGetFunction(module, entry.encode()), entry)
    limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    _check(driver.cuFuncSetAttribute(function, limit, shared_bytes), entry)
    return function


@functools.lru_cache(maxsize=4096)
def _configuration(shape: Shape, stream: int) -> object:
    driver = _driver()
    configuration = driver.CUlaunchConfig()
    configuration.gridDimX, configuration.gridDimY, configuration.gridDimZ = shape.grid
    configuration.blockDimX, configuration.blockDimY, configuration.blockDimZ = shape.threads, 1, 1
    configuration.sharedMemBytes = shape.shared_bytes
    configuration.hStream = stream
    attributes = []
    if shape.cooperative:
        cooperative = driver.CUlaunchAttribute()
        cooperative.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
        cooperative.value.cooperative = 1
        attributes.append(cooperative)
    if shape.early:
        early = driver.CUlaunchAttribute()
        early.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        early.value.programmaticStreamSerializationAllowed = 1
        attributes.append(early)
    if shape.cluster > 1:
        cluster = driver.CUlaunchAttribute()
        cluster.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        cluster.value.clusterDim.x = shape.cluster
        cluster.value.clusterDim.y = 1
        cluster.value.clusterDim.z = 1
        attributes.append(cluster)
    configuration.attrs = attributes
    configuration.numAttrs = len(attributes)
    return configuration


def _check(outcome: tuple, entry: str) -> object:
    status = outcome[0]
    if int(status) != 0:
        advice = "Report it with the output of `gatewise doctor`, or name another kernel."
        raise DeviceError(f"the CUDA driver refused the kernel `{entry}`: {status.name}. {advice}")
    return outcome[1] if len(outcome) > 1 else None
