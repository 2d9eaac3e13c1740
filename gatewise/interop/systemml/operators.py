"""The public operators."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from gatewise.contract.device import Device
from gatewise.contract.errors import ArgumentError, DtypeError, sentence
from gatewise.interop.systemml import passes
from gatewise.interop.systemml.arguments import Arguments, flag, gradient_of, read
from gatewise.interop.systemml.layout import steps_of
from gatewise.interop.systemml.state import State


def init(
    N: int,
    D: int,
    M: int,
    *,
    dtype: Any = np.float64,
    device: torch.device | str | None = None,
    seed: int | None = None,
) -> tuple[Any, Any, Any, Any]:
    """Return initial weights, biases, output and cell state of an LSTM.

        W ~ uniform(-s, s), s = sqrt(6 / ((D + M) + 4M));  b = out0 = c0 = 0

    Args:
        N: The number of sequences in a batch.
        D: The number of features of a step.
        M: The number of units.
        dtype: `numpy.float64` (default) or `numpy.float32` for NumPy arrays; `torch.float64` or `torch.float32` for
            tensors.
        device: The device of tensors; not allowed for NumPy arrays. Default: the CPU.
        seed: The seed of the random numbers, which are the same for every kind and device; None draws a new seed.

    Returns:
        W [D+M, 4M], b [1, 4M], out0 [N, M], c0 [N, M]. The forget gate has no additional bias.

    Raises:
        ArgumentError: A size is not a positive integer, the seed is negative, or a device is named for NumPy arrays.
        DtypeError: The dtype is neither float64 nor float32.
        DeviceError: The device is neither a CPU nor a GPU of this machine.

    Source:
        X. Glorot and Y. Bengio, Understanding the difficulty of training deep feedforward neural networks, 2010.

    Examples:
        >>> from gatewise.interop import systemml
        >>> W, b, out0, c0 = systemml.init(20, 50, 10, seed=0)
        >>> W.shape, b.shape, out0.shape
        ((60, 40), (1, 40), (20, 10))
    """
    for name, size in (("N", N), ("D", D), ("M", M)):
        if not isinstance(size, (int, np.integer)) or isinstance(size, bool) or size < 1:
            raise ArgumentError(sentence(name, "a positive integer", repr(size)))
    of_torch = isinstance(dtype, torch.dtype)
    try:
        name = str(dtype).removeprefix("torch.") if of_torch else np.dtype(dtype).name
    except TypeError:  # of NumPy, for what is no dtype
        name = repr(dtype)
    if name not in ("float64", "float32"):
        raise DtypeError(sentence("dtype", "float64 or float32, of NumPy or of torch", name))
    if device is not None and not of_torch:
        advice = "Give a torch dtype for tensors."
        raise ArgumentError(sentence("device", "None for NumPy arrays", repr(device), advice))
    if seed is not None and (not isinstance(seed, (int, np.integer)) or seed < 0):
        raise ArgumentError(sentence("seed", "None or an integer of 0 or more", repr(seed)))
    if device is not None:
        Device.probe(device)
    scale = (6 / ((D + M) + 4 * M)) ** 0.5
    uniform = np.random.default_rng(seed).uniform(-scale, scale, (D + M, 4 * M))
    arrays = (uniform.astype(name), *(np.zeros(shape, name) for shape in ((1, 4 * M), (N, M), (N, M))))
    if of_torch:
        arrays = tuple(torch.from_numpy(array).to(device or "cpu") for array in arrays)
    W, b, out0, c0 = arrays
    return W, b, out0, c0


def lstm(
    X: Any,
    W: Any,
    b: Any,
    out0: Any,
    c0: Any,
    return_sequences: bool,
    *,
    kernel: str = "auto",
    device: torch.device | str | None = None,
    memory_budget: float | None = None,
) -> tuple[Any, Any, State]:
    """Run an LSTM over a batch of sequences, like SystemML's built-in operator of this name.

        i, f, o, g = [X_t, out_{t-1}] W + b        (columns in this order, M each)
        c_t = sigmoid(f) c_{t-1} + sigmoid(i) tanh(g)
        out_t = sigmoid(o) tanh(c_t)

    The sizes follow from the shapes: M is the number of columns of out0, D the number of rows of W minus M, T the
    number of columns of X divided by D.

    Args:
        X: The input [N, T*D], one row per sequence, with its steps side by side. A NumPy array, PyTorch tensor,
            `scipy.sparse` matrix or sparse PyTorch tensor, in float64 or float32 like all other arguments.
        W: The weights [D+M, 4M], input rows first; may be sparse too.
        b: The biases [1, 4M].
        out0: The initial output [N, M]. It may have more rows than X, as before a smaller last batch; the first N rows
            are used.
        c0: The initial cell state, of the same shape as out0.
        return_sequences: Whether to return the output of every step or of the last.
        kernel: A name from `gatewise.kernel_names()`, or "auto"; `gatewise.use_kernel` and GATEWISE_KERNEL apply.
        device: The device of the computation. Default: the device of X; NumPy arrays are on the CPU.
        memory_budget: The maximum predicted memory of the pass in bytes. Kernels that need more are skipped, with a
            line in the log. Default: the free memory of the GPU; no limit on the CPU. It does not apply to a kernel
            that is named.

    Returns:
        out [N, T*M] or [N, M] and the final c [N, M], both of the kind and on the device of X; and the state to pass to
        `lstm_backward`.

    Raises:
        ShapeError: Shapes do not fit together.
        DtypeError: A dtype is neither float64 nor float32, or the dtypes differ.
        DeviceError: Tensors are on different devices.
        ArgumentError: An argument is not a matrix, NumPy arrays and PyTorch tensors are mixed, or `return_sequences` is
            not True or False.
        KernelRefused: The named kernel cannot run the call.
        OutOfMemoryPredicted: No kernel fits into the memory budget.

    Numerics:
        Products with a sparse X or W use the stored entries as long as their fraction is below
        `gatewise.interop.systemml.DENSITY`: a tenth on a CPU, a hundredth on a GPU. The recurrent products are
        always dense. No entry is dropped. float32 on a GPU follows PyTorch's setting for TF32.

    Source:
        Apache SystemDS, `scripts/nn/layers/lstm.dml`.

    Examples:
        >>> import numpy as np
        >>> from gatewise.interop import systemml
        >>> W, b, out0, c0 = systemml.init(20, 50, 10, seed=0)
        >>> X = np.random.default_rng(0).standard_normal((20, 13 * 50))
        >>> out, c, state = systemml.lstm(X, W, b, out0, c0, True)
        >>> dX, dW, db, dout0, dc0 = systemml.lstm_backward(X, W, b, out0, c0, True, np.ones_like(out), None, state)
        >>> out.shape, dX.shape, dW.shape
        ((20, 130), (20, 650), (60, 40))
    """
    arguments = read(X, [(W, b)], out0, c0)
    out, c, state = passes.forward(arguments, flag("return_sequences", return_sequences), kernel, device, memory_budget)
    out, c = arguments.given_back((out, c))
    return out, c, state


def lstm_backward(
    X: Any,
    W: Any,
    b: Any,
    out0: Any,
    c0: Any,
    given_sequences: bool,
    dout: Any,
    dc: Any,
    state: State | None = None,
    *,
    kernel: str = "auto",
    device: torch.device | str | None = None,
    memory_budget: float | None = None,
) -> tuple[Any, ...]:
    """Run the backward pass of `lstm`, without repeating its forward pass if the state is given.

    With a state from the same kernel on the same device, no forward pass runs. Without a state (None), or when the
    backward pass runs on another kernel or device, the forward pass is repeated there first, and one
    `RepeatedForwardWarning` names both. A state of cuDNN can be used once.

    Args:
        X: The argument X of `lstm`. Unlike for `lstm`, out0 and c0 must have exactly as many rows as X.
        W: The argument W of `lstm`.
        b: The argument b of `lstm`.
        out0: The argument out0 of `lstm`.
        c0: The argument c0 of `lstm`.
        given_sequences: Whether dout is the gradient for every step or for the last.
        dout: The gradient of out, [N, T*M] with `given_sequences`, otherwise [N, M]; None for zero.
        dc: The gradient of the final c [N, M]; None for zero.
        state: The third result of `lstm` for the same arguments; None to repeat the forward pass.
        kernel: The kernel, as for `lstm`. Default: the kernel that made the state.
        device: The device, as for `lstm`. Default: the device that made the state, if X is on the same device as then;
            otherwise the device of X.
        memory_budget: The memory budget, as for `lstm`, of a forward pass that must be repeated.

    Returns:
        dX [N, T*D], dW [D+M, 4M], db [1, 4M], dout0 [N, M], dc0 [N, M]: dense, of the kind and on the device of X.

    Raises:
        ShapeError: Shapes do not fit together, dout does not have the shape that `given_sequences` requires, or the
            state is of another problem.
        DtypeError: A dtype is neither float64 nor float32, or the dtypes of arguments and state differ.
        DeviceError: Tensors are on different devices.
        ArgumentError: An argument is not a matrix, NumPy arrays and PyTorch tensors are mixed, `given_sequences` is not
            True or False, or `state` is not the result of `lstm` for arguments of the same values.
        KernelRefused: The named kernel cannot run the call.
        OutOfMemoryPredicted: No kernel fits into the memory budget.
    """
    arguments = read(X, [(W, b)], out0, c0)
    above = _above(arguments, flag("given_sequences", given_sequences), dout, dc)
    found = passes.backward(arguments, above, state, kernel, device, memory_budget)
    return arguments.given_back((found.X, *found.W, *found.b, found.out0, found.c0))


def bilstm(
    X: Any,
    W: Any,
    W_reverse: Any,
    b: Any,
    b_reverse: Any,
    out0: Any,
    c0: Any,
    return_sequences: bool,
    *,
    kernel: str = "auto",
    device: torch.device | str | None = None,
    memory_budget: float | None = None,
) -> tuple[Any, Any, State]:
    """Run an LSTM in both directions, with the weights of SystemDS' layer of this name and an opaque state.

    `gatewise.interop.systemds.bilstm_forward` has the results of that layer: final states above each other, and caches.

    Args:
        X: The input [N, T*D], as for `lstm`.
        W: The weights of the forward direction [D+M, 4M].
        W_reverse: The weights of the reverse direction [D+M, 4M].
        b: The biases of the forward direction [1, 4M].
        b_reverse: The biases of the reverse direction [1, 4M].
        out0: The initial outputs [2N, M], the forward direction's rows above the reverse direction's.
        c0: The initial cell states, of the same shape as out0.
        return_sequences: Whether to return the outputs of every step or the last of each direction.
        kernel: The kernel, as for `lstm`.
        device: The device, as for `lstm`.
        memory_budget: The memory budget, as for `lstm`.

    Returns:
        out [N, T*2M], with the forward output beside the reverse output in each step, or [N, 2M], where the reverse
        output is that of the first step; c [N, 2M]; and the state to pass to `bilstm_backward`.

    Raises:
        GatewiseError: The same errors as for `lstm`.

    Source:
        Apache SystemDS, `scripts/nn/layers/bilstm.dml`.
    """
    arguments = read(X, [(W, b), (W_reverse, b_reverse)], out0, c0)
    out, c, state = passes.forward(arguments, flag("return_sequences", return_sequences), kernel, device, memory_budget)
    out, c = arguments.given_back((out, c))
    return out, c, state


def bilstm_backward(
    X: Any,
    W: Any,
    W_reverse: Any,
    b: Any,
    b_reverse: Any,
    out0: Any,
    c0: Any,
    given_sequences: bool,
    dout: Any,
    dc: Any,
    state: State | None = None,
    *,
    kernel: str = "auto",
    device: torch.device | str | None = None,
    memory_budget: float | None = None,
) -> tuple[Any, ...]:
    """Run the backward pass of `bilstm`; states, kernels and devices are handled as by `lstm_backward`.

    Args:
        X: The argument X of `bilstm`.
        W: The argument W of `bilstm`.
        W_reverse: The argument W_reverse of `bilstm`.
        b: The argument b of `bilstm`.
        b_reverse: The argument b_reverse of `bilstm`.
        out0: The argument out0 of `bilstm`.
        c0: The argument c0 of `bilstm`.
        given_sequences: Whether dout is the gradient for every step or for the last outputs.
        dout: The gradient of out, [N, T*2M] with `given_sequences`, otherwise [N, 2M]; None for zero.
        dc: The gradient of c [N, 2M]; None for zero.
        state: The third result of `bilstm` for the same arguments; None to repeat the forward pass.
        kernel: The kernel, as for `lstm_backward`.
        device: The device, as for `lstm_backward`.
        memory_budget: The memory budget, as for `lstm_backward`.

    Returns:
        dX [N, T*D], dW, dW_reverse [D+M, 4M], db, db_reverse [1, 4M], dout0, dc0 [2N, M].

    Raises:
        GatewiseError: The same errors as for `lstm_backward`.
    """
    arguments = read(X, [(W, b), (W_reverse, b_reverse)], out0, c0)
    above = _above(arguments, flag("given_sequences", given_sequences), dout, dc)
    found = passes.backward(arguments, above, state, kernel, device, memory_budget)
    return arguments.given_back((found.X, *found.W, *found.b, found.out0, found.c0))


def _above(arguments: Arguments, given_sequences: bool, dout: Any, dc: Any) -> passes.Above:
    sizes = arguments.sizes
    units = sizes.directions * sizes.M
    shape = (sizes.N, sizes.T * units if given_sequences else units)
    advice = f"given_sequences is {given_sequences}: dout is of {'every step' if given_sequences else 'the last step'}."
    outputs = gradient_of("dout", dout, shape, arguments, advice)
    cells = gradient_of("dc", dc, (sizes.N, units), arguments)
    if outputs is not None:
        outputs = steps_of(outputs, units if given_sequences else sizes.M)
    # [N, directions * M] is read as [directions, N, M], like `directions` steps of M features each.
    cells = None if cells is None else steps_of(cells, sizes.M)
    return passes.Above(outputs, None, cells) if given_sequences else passes.Above(None, outputs, cells)
