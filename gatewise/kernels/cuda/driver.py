"""Load compiled kernels, launch them and capture CUDA graphs: a thin layer over the CUDA driver API."""

from __future__ import annotations

import contextlib
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
    """The launch configuration of a kernel.

    Attributes:
        grid: The number of blocks in x, y and z.
        threads: The number of threads per block.
        shared_bytes: The dynamic shared memory per block in bytes.
        cluster: The number of blocks per cluster, along x; 0 for a launch without clusters.
        cooperative: Whether all blocks must be resident at once (cooperative launch).
        early: Whether the kernel may start before the preceding kernel has finished (programmatic dependent launch,
            from compute capability 9.0); its code must wait for the results of that kernel.
    """

    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int
    cluster: int = 0
    cooperative: bool = True
    early: bool = False


def launch(binary: bytes, entry: str, shape: Shape, arguments: ctypes.Structure, device: torch.device) -> None:
    """Launch a kernel on the current stream of a device.

    Args:
        binary: The machine code for the device (cubin).
        entry: The name of the kernel, which takes one struct by value.
        shape: The launch configuration.
        arguments: The struct.
        device: A CUDA device with an index, which must be current.

    Raises:
        DeviceError: The driver rejected the launch, for example because not all blocks of a cooperative launch can be
            resident at once.
    """
    ensure_context(device.index)
    function = _function(binary, entry, shape.shared_bytes, device.index)
    configuration = _configuration(shape, current_stream(device))
    pointer = ctypes.c_void_p(ctypes.addressof(arguments))
    _check(_driver().cuLaunchKernelEx(configuration, function, ctypes.addressof(pointer), 0), entry)


def prepared(
    binary: bytes, entry: str, shape: Shape, arguments: ctypes.Structure, device: torch.device
) -> Callable[[], None]:
    """Return a function that launches a kernel on the current stream, with the struct as it is at that time.

    A call of the function takes less time than `launch`, which looks up the kernel and the launch configuration. The
    arguments are those of `launch`. The device must be current in each call, too.
    """
    ensure_context(device.index)
    function, index = _function(binary, entry, shape.shared_bytes, device.index), device.index
    pointer = ctypes.c_void_p(ctypes.addressof(arguments))
    parameters, kernel_launch = ctypes.addressof(pointer), _driver().cuLaunchKernelEx
    # A configuration consists of the shape and the handle of the stream, and of nothing else of the stream.
    configurations: dict[int, object] = {}

    def issue(*, _read_by_the_driver: tuple[object, ...] = (arguments, pointer)) -> None:
        if not getattr(_threads, "have_context", False):
            ensure_context(index)
        stream = torch._C._cuda_getCurrentRawStream(index)
        configuration = configurations.get(stream)
        if configuration is None:
            configuration = configurations[stream] = _configuration(shape, stream)
        outcome = kernel_launch(configuration, function, parameters, 0)
        if outcome[0] != 0:
            _check(outcome, entry)

    return issue


def fill_with_ones(tensor: Tensor) -> None:
    """Set every bit of a contiguous tensor, on the current stream of its device, which must be current."""
    index = tensor.device.index
    ensure_context(index)
    _check(_driver().cuMemsetD8Async(tensor.data_ptr(), 0xFF, tensor.nbytes, current_stream(tensor.device)), "a memset")


class Graph:
    """An executable CUDA graph; `Graph.recorded` captures one."""

    def __init__(self, executable: object) -> None:
        self._driver = _driver()
        self._executable = executable
        # At the exit of the process the driver frees the graph itself.
        weakref.finalize(self, self._driver.cuGraphExecDestroy, executable).atexit = False

    @classmethod
    def recorded(cls, stream: int, issue: Callable[[], None]) -> Graph:
        """Capture the launches that a function issues on a stream; capture does not execute them.

        Args:
            stream: The stream, as the driver's handle.
            issue: The function.

        Raises:
            DeviceError: The function issues an operation that cannot be captured.
        """
        driver, entry = _driver(), "the capture of a CUDA graph"
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
        """Launch the graph on a stream of a device, which must be current."""
        if not getattr(_threads, "have_context", False):
            ensure_context(device.index)
        # PyTorch's profiler connects kernels with launches of graphs by the CUDA runtime, but not by the driver, whose
        # launch takes less time. `verify` reads these connections.
        launch = _runtime().cudaGraphLaunch if torch.autograd._profiler_enabled() else self._driver.cuGraphLaunch
        outcome = launch(self._executable, stream)
        if outcome[0] != 0:
            _check(outcome, "the launch of a CUDA graph")


def ensure_context(device_index: int) -> None:
    """Make the device's primary context, which PyTorch uses, current in the calling thread if it has no context."""
    # A new thread, such as autograd's for backward passes, has no context until it calls the CUDA runtime. PyTorch
    # makes no such call if its caching allocator provides all memory.
    if getattr(_threads, "have_context", False):
        return
    driver = _driver()
    if not int(_check(driver.cuCtxGetCurrent(), "a CUDA context")):  # type: ignore[call-overload]
        device = _check(driver.cuDeviceGet(device_index), "a CUDA device")
        context = _check(driver.cuDevicePrimaryCtxRetain(device), "a CUDA context")
        _check(driver.cuCtxSetCurrent(context), "a CUDA context")
    _threads.have_context = True


_threads = threading.local()
_NO_CHANGE = contextlib.nullcontext()


def on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Return a context in which a device is the current one, which does nothing where it already is, or for a CPU."""
    # A tensor of the device exists, so CUDA is initialised.
    if device.type != "cuda" or device.index == torch._C._cuda_getDevice():
        return _NO_CHANGE
    return torch.cuda.device(device)


def current_stream(device: torch.device) -> int:
    """Return the driver's handle of the current stream of a device."""
    # `torch.cuda.current_stream` creates an object, which takes as long as a launch.
    return torch._C._cuda_getCurrentRawStream(device.index)


def new_stream(device: torch.device) -> int:
    """Return a new stream that is not part of PyTorch's stream pool; it is never destroyed."""
    driver = _driver()
    with torch.cuda.device(device):
        flags = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        return int(_check(driver.cuStreamCreate(flags), "a new stream"))  # type: ignore[call-overload]


@functools.cache
def _driver() -> ModuleType:
    try:
        from cuda.bindings import driver  # pyright: ignore[reportAttributeAccessIssue] - compiled, and without stubs
    except ImportError as error:
        raise MissingExtra.for_package("cuda-core", "Launching CUDA kernels", "cuda") from error
    return driver


@functools.cache
def _runtime() -> ModuleType:
    from cuda.bindings import runtime  # pyright: ignore[reportAttributeAccessIssue] - as above

    return runtime


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
    if shape.cluster:
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
    """Return the result of a driver call; raise an error that names the kernel or, in words, another operation."""
    status = outcome[0]
    if int(status) != 0:
        subject = entry if " " in entry else f"the kernel `{entry}`"
        advice = "Report it with the output of `gatewise doctor`, or name another kernel."
        raise DeviceError(f"the CUDA driver rejected {subject}: {status.name}. {advice}")
    return outcome[1] if len(outcome) > 1 else None
