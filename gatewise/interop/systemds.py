"""The LSTM operators of SystemDS 3.4.0 and its BiLSTM layer, whose caches are matrices.

`gatewise.interop.systemml` has the same computations with an opaque state in place of the caches, on any kernel.

The caches have one row for each step, in the order in which a direction reads the steps: its output [T, N*M], its cell
state [T, N*M], and its gates after their activations [T, N*4M] in the order i f o g. For two directions the rows of the
reverse direction are below those of the forward direction. They are computed by PyTorch's operators, a step at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gatewise.cells import LSTM
from gatewise.contract.errors import ArgumentError, ShapeError, sentence
from gatewise.functional.differentiable import recurrent_with_steps
from gatewise.interop.systemml import sparse
from gatewise.interop.systemml.arguments import Arguments, flag, gradient_of, read, require_rows
from gatewise.interop.systemml.layout import flat_weights, sequences_of, steps_of

_GATES = "ifog"
_CACHES = ("cache_out", "cache_c", "cache_ifog")


class _Caches(NamedTuple):
    """The values of every step of one direction, in the order in which it reads the steps.

    Attributes:
        out: The outputs [T, N, M].
        c: The cell states [T, N, M].
        ifog: The gates after their activations [T, N, 4M].
    """

    out: Tensor
    c: Tensor
    ifog: Tensor


def lstm(X: Any, W: Any, b: Any, out0: Any, c0: Any, return_sequences: bool) -> tuple[Any, ...]:
    """Run an LSTM over a batch of sequences, like the built-in operator of SystemDS 3.4.0.

    Args:
        X: The input [N, T*D], as for `gatewise.interop.systemml.lstm`.
        W: The weights [D+M, 4M].
        b: The biases [1, 4M].
        out0: The initial output [N, M]; of more rows than X, the first N are used.
        c0: The initial cell state, of the same shape as out0.
        return_sequences: Whether to return the output of every step or of the last.

    Returns:
        out [N, T*M] or [N, M], the final c [N, M], and cache_out [T, N*M], cache_c [T, N*M] and cache_ifog [T, N*4M].

    Raises:
        GatewiseError: The same errors as for `gatewise.interop.systemml.lstm`.

    Source:
        Apache SystemDS 3.4.0, `scripts/nn/layers/lstm.dml`.

    Examples:
        >>> import numpy as np
        >>> from gatewise.interop import systemds, systemml
        >>> W, b, out0, c0 = systemml.init(20, 50, 10, seed=0)
        >>> X = np.random.default_rng(0).standard_normal((20, 13 * 50))
        >>> out, c, *caches = systemds.lstm(X, W, b, out0, c0, True)
        >>> [cache.shape for cache in caches]
        [(13, 200), (13, 200), (13, 800)]
        >>> dX, dW, db, dout0, dc0 = systemds.lstm_backward(X, W, b, out0, c0, True, out, c, *caches)
    """
    return _forward(read(X, [(W, b)], out0, c0), flag("return_sequences", return_sequences))


def lstm_backward(
    X: Any,
    W: Any,
    b: Any,
    out0: Any,
    c0: Any,
    given_sequences: bool,
    dout: Any,
    dc: Any,
    cache_out: Any,
    cache_c: Any,
    cache_ifog: Any,
) -> tuple[Any, ...]:
    """Run the backward pass of `lstm` from its caches; no forward pass is repeated.

    Args:
        X: The argument X of `lstm`; out0 and c0 must have exactly as many rows.
        W: The argument W of `lstm`.
        b: The argument b of `lstm`.
        out0: The argument out0 of `lstm`.
        c0: The argument c0 of `lstm`.
        given_sequences: Whether dout is the gradient for every step or for the last.
        dout: The gradient of out, [N, T*M] with `given_sequences`, otherwise [N, M].
        dc: The gradient of the final c [N, M].
        cache_out: The third result of `lstm` or of SystemDS [T, N*M].
        cache_c: The fourth result [T, N*M].
        cache_ifog: The fifth result [T, N*4M].

    Returns:
        dX [N, T*D], dW [D+M, 4M], db [1, 4M], dout0 [N, M], dc0 [N, M].

    Raises:
        GatewiseError: The same errors as for `gatewise.interop.systemml.lstm_backward`.
    """
    arguments = read(X, [(W, b)], out0, c0)
    caches = _caches_of(arguments, (cache_out, cache_c, cache_ifog))
    dX, (dW,), (db,), dout0, dc0 = _backward(arguments, flag("given_sequences", given_sequences), dout, dc, caches)
    return arguments.given_back((dX, dW, db, dout0, dc0))


def bilstm_forward(
    X: Any, W: Any, W_reverse: Any, b: Any, b_reverse: Any, T: int, D: int, seq: bool, out0: Any, c0: Any
) -> tuple[Any, ...]:
    """Run an LSTM in both directions, like `bilstm::forward` of SystemDS 3.4.0.

    Args:
        X: The input [N, T*D].
        W: The weights of the forward direction [D+M, 4M].
        W_reverse: The weights of the reverse direction [D+M, 4M].
        b: The biases of the forward direction [1, 4M].
        b_reverse: The biases of the reverse direction [1, 4M].
        T: The number of steps.
        D: The number of features of a step.
        seq: Whether to return the outputs of every step or the last of each direction.
        out0: The initial outputs [2N, M], the forward direction's rows above the reverse direction's.
        c0: The initial cell states, of the same shape as out0.

    Returns:
        out [N, T*2M] or [N, 2M], c [2N, M], cache_out [2T, N*M], cache_c [2T, N*M] and cache_ifog [2T, N*4M].

    Raises:
        GatewiseError: The same errors as for `gatewise.interop.systemml.bilstm`.

    Source:
        Apache SystemDS 3.4.0, `scripts/nn/layers/bilstm.dml`.
    """
    arguments = read(X, [(W, b), (W_reverse, b_reverse)], out0, c0)
    _check_sizes(arguments, T, D)
    return _forward(arguments, flag("seq", seq))


def bilstm_backward(
    dout: Any,
    dc: Any,
    X: Any,
    W: Any,
    W_reverse: Any,
    b: Any,
    b_reverse: Any,
    T: int,
    D: int,
    seq: bool,
    out0: Any,
    c0: Any,
    cache_out: Any,
    cache_c: Any,
    cache_ifog: Any,
) -> tuple[Any, ...]:
    """Run the backward pass of `bilstm_forward` from its caches, like `bilstm::backward` of SystemDS 3.4.0.

    Args:
        dout: The gradient of out, [N, T*2M] with `seq`, otherwise [N, 2M].
        dc: The gradient of c [2N, M].
        X: The argument X of `bilstm_forward`; out0 and c0 must have exactly twice as many rows.
        W: The argument W of `bilstm_forward`.
        W_reverse: The argument W_reverse of `bilstm_forward`.
        b: The argument b of `bilstm_forward`.
        b_reverse: The argument b_reverse of `bilstm_forward`.
        T: The number of steps.
        D: The number of features of a step.
        seq: Whether dout is the gradient for every step or for the last outputs.
        out0: The argument out0 of `bilstm_forward`.
        c0: The argument c0 of `bilstm_forward`.
        cache_out: The third result of `bilstm_forward` or of SystemDS [2T, N*M].
        cache_c: The fourth result [2T, N*M].
        cache_ifog: The fifth result [2T, N*4M].

    Returns:
        dX [N, T*D], dW [D+M, 4M], db [1, 4M], dW_reverse [D+M, 4M], db_reverse [1, 4M], dout0 and dc0 [2N, M].

    Raises:
        GatewiseError: The same errors as for `gatewise.interop.systemml.bilstm_backward`.
    """
    arguments = read(X, [(W, b), (W_reverse, b_reverse)], out0, c0)
    _check_sizes(arguments, T, D)
    caches = _caches_of(arguments, (cache_out, cache_c, cache_ifog))
    dX, dW, db, dout0, dc0 = _backward(arguments, flag("seq", seq), dout, dc, caches)
    return arguments.given_back((dX, dW[0], db[0], dW[1], db[1], dout0, dc0))


def _forward(arguments: Arguments, return_sequences: bool) -> tuple[Any, ...]:
    sizes = arguments.sizes
    weights = flat_weights(_dense_weights(arguments), sizes.M)
    x = steps_of(sparse.dense(arguments.X), sizes.D)
    with torch.no_grad():
        y, h_n, c_n, (layer,) = recurrent_with_steps(
            x.contiguous(),
            (arguments.out0, arguments.c0),
            tuple(weights),
            lengths=None,
            bidirectional=sizes.directions == 2,
            dropout=0.0,
            kernel="auto",
            memory="normal",
            cell=LSTM(),
        )
    gates = {gate: torch.tanh(layer.sums[gate]) if gate == "g" else torch.sigmoid(layer.sums[gate]) for gate in _GATES}
    caches = []
    for direction in range(sizes.directions):
        columns = slice(direction * sizes.M, (direction + 1) * sizes.M)
        ifog = torch.cat([gates[gate][..., columns] for gate in _GATES], -1)
        values = y[..., columns], layer.states["c"][..., columns], ifog
        caches.append([_turned(value, direction).flatten(1) for value in values])
    out = sequences_of(y if return_sequences else h_n)
    return arguments.given_back((out, c_n.flatten(0, 1), *(torch.cat(parts) for parts in zip(*caches, strict=True))))


def _backward(
    arguments: Arguments, given_sequences: bool, dout: Any, dc: Any, caches: Sequence[_Caches]
) -> tuple[Tensor, list[Tensor], list[Tensor], Tensor, Tensor]:
    """Return the gradients of X, of W and b of each direction, and of out0 and c0."""
    N, T, D, M, directions = arguments.sizes
    advice = f"The flag is {given_sequences}: dout is of {'every step' if given_sequences else 'the last step'}."
    shape = (N, (T if given_sequences else 1) * directions * M)
    outputs = gradient_of("dout", dout, shape, arguments, advice)
    cells = gradient_of("dc", dc, (directions * N, M), arguments)
    x = steps_of(sparse.dense(arguments.X), D)
    above = x.new_zeros(T, N, directions * M)
    if outputs is not None:
        above[0 if given_sequences else -1 :] = steps_of(outputs, directions * M)
    dX, dW, db, dout0, dc0 = torch.zeros_like(x), [], [], [], []
    for direction, (weight, _) in enumerate(_dense_weights(arguments)):
        dy = above[..., direction * M : (direction + 1) * M]
        dx, dw, dh, dcell = _of_direction(
            _turned(x, direction),
            weight,
            arguments.out0[direction],
            arguments.c0[direction],
            _turned(dy, direction) if given_sequences else dy,
            torch.zeros_like(arguments.c0[0]) if cells is None else cells[direction * N : (direction + 1) * N],
            caches[direction],
        )
        dX += _turned(dx, direction)
        dW.append(dw[1:])
        db.append(dw[:1])
        dout0.append(dh)
        dc0.append(dcell)
    return sequences_of(dX), dW, db, torch.cat(dout0), torch.cat(dc0)


def _of_direction(
    x: Tensor, weight: Tensor, out0: Tensor, c0: Tensor, dy: Tensor, dc: Tensor, caches: _Caches
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of x, of the bias above the weights [1+D+M, 4M], of out0 and of c0.

    The gradients of a step are linear in those of the step after it, with coefficients that are computed for all steps.
    """
    features = x.shape[-1]
    i, f, o, g = caches.ifog.chunk(4, -1)
    tanh_c = torch.tanh(caches.c)
    c_before = torch.cat((c0[None], caches.c[:-1]))
    of_c = torch.cat((g * i * (1 - i), c_before * f * (1 - f), torch.zeros_like(o), i * (1 - g * g)), -1)
    of_h = tanh_c * o * (1 - o)
    dsums = torch.empty_like(caches.ifog)
    dh = torch.zeros_like(out0)
    for step in reversed(range(x.shape[0])):
        dh = dh + dy[step]
        dc = dc + dh * o[step] * (1 - tanh_c[step] ** 2)
        torch.mul(of_c[step], dc.repeat(1, 4), out=dsums[step])
        dsums[step, :, 2 * len(dh[0]) : 3 * len(dh[0])] = dh * of_h[step]
        dh = dsums[step] @ weight[features:].t()
        dc = dc * f[step]
    inputs = torch.cat((torch.ones_like(x[..., :1]), x, torch.cat((out0[None], caches.out[:-1]))), -1)
    return dsums @ weight[:features].t(), inputs.flatten(0, 1).t() @ dsums.flatten(0, 1), dh, dc


def _dense_weights(arguments: Arguments) -> list[tuple[Tensor, Tensor]]:
    return [(sparse.dense(weight), bias) for weight, bias in zip(arguments.W, arguments.b, strict=True)]


def _turned(steps: Tensor, direction: int) -> Tensor:
    """Return [T, ...] in the order in which a direction reads the steps."""
    return steps.flip(0) if direction else steps


def _caches_of(arguments: Arguments, given: Sequence[Any]) -> list[_Caches]:
    N, T, _, M, directions = arguments.sizes
    require_rows(arguments)
    caches = []
    for name, value, count in zip(_CACHES, given, (1, 1, 4), strict=True):
        cache = gradient_of(
            name, value, (directions * T, N * count * M), arguments, "It is a result of the forward pass."
        )
        if cache is None:
            raise ArgumentError(sentence(name, "the matrix that the forward pass returned", "None"))
        caches.append(cache.view(directions, T, N, count * M))
    return [_Caches(*parts) for parts in zip(*caches, strict=True)]


def _check_sizes(arguments: Arguments, T: int, D: int) -> None:
    sizes = arguments.sizes
    if (T, D) != (sizes.T, sizes.D):
        raise ShapeError(sentence("T and D", f"{sizes.T} and {sizes.D}, by the shapes of X and W", f"{T} and {D}"))
