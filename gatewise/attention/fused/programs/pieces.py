"""Functions shared by the Triton kernels: special functions, matrix products and the length of a source."""

# Triton's compiler would interpret annotations as types.
# pyright: reportOperatorIssue=false, reportPossiblyUnboundVariable=false, reportArgumentType=false
# Triton comes with PyTorch's builds for GPUs alone.
# pyright: reportMissingImports=false
# ruff: noqa: ANN001, ANN201

import os

import triton
import triton.language as tl

# Triton's interpreter, which runs on the CPU, supports neither inline PTX nor matrix products in bfloat16.
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")

# tanh(q + k) = 1 - 2 / (1 + exp2(SLOPE * q) * exp2(SLOPE * k)): the whole feature map takes one exponential per query
# and per key, and one reciprocal per element. It is accurate while no product overflows: |SLOPE * k| <= KEY_REACH. A
# query may be clamped to QUERY_REACH, where the tanh is already 1 for any such key.
SLOPE = tl.constexpr(2.8853900817779268)  # 2 / ln 2
KEY_REACH = tl.constexpr(48.0)
QUERY_REACH = tl.constexpr(78.0)


@triton.jit
def exp2(x):
    """Return 2 to the power of x in one instruction, flushing subnormal numbers."""
    if INTERPRETED:
        return tl.exp2(tl.minimum(x, 126.0, propagate_nan=tl.PropagateNan.ALL))
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def reciprocal(x):
    """Return 1 / x in one instruction, flushing subnormal numbers."""
    if INTERPRETED:
        return 1.0 / x
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def tanh(x, HARDWARE: tl.constexpr):
    """Return the hyperbolic tangent: the GPU's own (relative error 2^-11), or one with a relative error of 2^-22."""
    if HARDWARE and not INTERPRETED:
        return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return 1.0 - 2.0 * reciprocal(1.0 + exp2(x * SLOPE))


@triton.jit
def query_power(q):
    """Return the exponential of a query, one factor of the exponential in the tanh of a sum."""
    return exp2(tl.clamp(q * SLOPE, -QUERY_REACH, QUERY_REACH, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def key_power(k):
    """Return the exponential of a key, the other factor; accurate for |SLOPE * k| <= KEY_REACH."""
    return exp2(tl.clamp(k * SLOPE, -KEY_REACH, KEY_REACH, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def rounded(x):
    """Round to the nearest TF32 number: the tensor cores truncate instead, which biases the result."""
    return tl.inline_asm_elementwise("cvt.rna.tf32.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def product(a, b, sums, PRECISION: tl.constexpr):
    """Return `sums` plus a matrix product, in float32."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), sums, input_precision="ieee")
    if PRECISION == "tf32" and a.dtype == tl.float32:
        return tl.dot(rounded(a), rounded(b), sums, input_precision=PRECISION)
    return tl.dot(a, b, sums, input_precision=PRECISION)


@triton.jit
def length_of(lengths, row, S, RAGGED: tl.constexpr):
    """Return the number of source positions of a sequence."""
    if RAGGED:
        return tl.minimum(tl.maximum(tl.load(lengths + row).to(tl.int32), 0), S)
    return S
