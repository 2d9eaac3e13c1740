"""The number formats, compiled for the CPU, convert as PyTorch does."""

import ctypes
import functools
import math
import shutil

import pytest
import torch

from gatewise.kernels.cuda import formats
from gatewise.kernels.cuda.toolchain import SHARED
from tests.kernels.cuda_on_cpu import PRELUDE, compile_cpp, precompiled, rewritten

_FUNCTIONS = """
#include "numbers.cuh"
#define ELEMENTWISE(name, From, To, result) \\
    extern "C" void name(const From* from, To* to, int n) { for (int k = 0; k < n; k++) to[k] = result; }
ELEMENTWISE(widen, Number::Value, Real, Number::widened(from[k]))
ELEMENTWISE(narrow, Real, Number::Value, Number::narrowed(from[k]))
#if VALUE_BYTES <= 4
static_assert(sizeof(Number::Bits) == sizeof(Number::Value), "the same number");
ELEMENTWISE(bits, float, u32, Number::canonical_bits(from[k]))
ELEMENTWISE(of_bits, u32, float, Number::from_bits(from[k]))
#endif
#if VALUE_BYTES == 2
ELEMENTWISE(pairs, float, u32, Number::pair(from[k], -from[k]))
ELEMENTWISE(halves, u32, float, Number::low(from[k]) - Number::high(from[k]))
#endif
inline float sum_of_parts(u32 bits) {
    const u32 high = TF32::high_part(bits), low = TF32::low_part(bits, high);
    return __uint_as_float(high) + __uint_as_float(low & 0xffffe000u);
}
ELEMENTWISE(parts, u32, float, sum_of_parts(from[k]))
ELEMENTWISE(powers, float, float, Float32::power_of_two(Float32::exponent_of(from[k])))
ELEMENTWISE(magnitudes, u32, u32, Float32::finite_magnitude(from[k]))
"""

DTYPES = pytest.mark.parametrize("dtype", formats.NUMBERS, ids=lambda dtype: formats.names([dtype]))
SPECIAL = (0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, 65504.0, 1e-7, 3e38, 0.1)


@functools.cache
def library(dtype):
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    return compile_cpp(_FUNCTIONS, rewritten(SHARED), precompiled(PRELUDE), (), formats.macros(dtype).items())


def run(dtype, name, given, result):
    given = given.contiguous()
    to = torch.empty(len(given), dtype=result)
    getattr(library(dtype), name)(ctypes.c_void_p(given.data_ptr()), ctypes.c_void_p(to.data_ptr()), len(given))
    return to


def numbers():
    drawn = torch.randn(500, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 6, 500)
    return torch.cat([torch.tensor(SPECIAL), drawn])


def computed_in(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


@DTYPES
def test_conversions_are_those_of_pytorch(dtype):
    real = numbers().to(computed_in(dtype))
    narrow = run(dtype, "narrow", real, dtype)
    assert torch.equal(narrow, real.to(dtype))
    assert torch.equal(run(dtype, "widen", narrow, real.dtype), narrow.to(real.dtype))


@pytest.mark.parametrize("dtype", formats.TENSOR_CORE_DTYPES, ids=str)
def test_canonical_bits_are_never_all_ones(dtype):
    """The pattern of all ones marks values that are not yet written; a NaN with these bits must not be stored."""
    given = torch.cat([numbers(), torch.tensor([-1, 0x7FFFFFFF, -0x400000], dtype=torch.int32).view(torch.float32)])
    found = run(dtype, "bits", given, torch.int32)
    ones = (1 << 8 * dtype.itemsize) - 1
    assert not any(word & ones == ones for word in found.tolist())
    back = run(dtype, "of_bits", found, torch.float32)
    torch.testing.assert_close(back, given.to(dtype).float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_pairs_have_the_first_number_in_the_low_half(dtype):
    given = numbers()[6:].clamp(-60000, 60000)
    pairs = run(dtype, "pairs", given, torch.int32)
    assert torch.equal(pairs.view(dtype)[::2], given.to(dtype))
    assert torch.equal(pairs.view(dtype)[1::2], -given.to(dtype))
    assert torch.equal(run(dtype, "halves", pairs, torch.float32), 2 * given.to(dtype).float())


def test_the_parts_of_float32_have_its_accuracy():
    given = numbers()[10:]
    found = run(torch.float32, "parts", given.view(torch.int32), torch.float32)
    error = (found.double() - given.double()).abs() / given.double().abs()
    assert error.max() < 2**-22
    assert error.max() > 2**-26  # the parts are rounded


def test_powers_and_magnitudes_are_read_from_the_bits():
    given = numbers()[10:].abs()
    assert torch.equal(run(torch.float32, "powers", given, torch.float32), torch.exp2(given.log2().floor()))
    words = torch.tensor([1.5, -1.5, math.inf, -math.inf, math.nan, 0.0]).view(torch.int32)
    found = run(torch.float32, "magnitudes", words, torch.int32).view(torch.float32)
    assert found.tolist() == [1.5, 1.5, 0, 0, 0, 0]
