"""Inline assembly and conversions between number formats are only in the backend folder, `kernels/cuda`."""

import re
from collections import Counter
from pathlib import Path

import pytest

import gatewise
from gatewise.kernels.cuda import formats
from gatewise.kernels.cuda.toolchain import SHARED

PACKAGE = Path(gatewise.__file__).parent
SOURCES = [path for path in sorted(PACKAGE.rglob("*.cu*")) if path.suffix in (".cu", ".cuh")]
KERNELS = [path for path in SOURCES if SHARED not in path.parents]
FORMATS = ("BFloat16", "Float16", "Float32", "Float64")

# What code outside the backend must not contain.
FORBIDDEN = {
    "inline assembly": r"\basm\b|\b__asm__\b",
    "the bits of a number": r"__\w*_as_\w+|__byte_perm",
    "a conversion of CUDA": r"__(?:float|half|nv_|bfloat|double|int|uint)\w*2\w*|\bcvta?\b",
    "a type of CUDA's number formats": r"\b(?:__half|__nv_)\w*|\bhalf2?\b\s*[(&*]",
    "the macro of a format": r"\bDTYPE\b",
    "an address of shared memory": r"__cvta_\w+",
}
EXAMPLES = {
    "inline assembly": 'asm volatile("" ::: "memory");',
    "the bits of a number": "const unsigned bits = __float_as_uint(x);",
    "a conversion of CUDA": "const auto half = __float2half_rn(x);",
    "a type of CUDA's number formats": "__nv_bfloat16 x;",
    "the macro of a format": "#if DTYPE == 2",
    "an address of shared memory": "__cvta_generic_to_shared(to)",
}


def code_of(path):
    """Return a source without its comments."""
    return without_comments(path.read_text())


def without_comments(text):
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)


@pytest.mark.parametrize("what", FORBIDDEN)
def test_only_the_backend_has(what):
    assert re.search(FORBIDDEN[what], EXAMPLES[what])
    found = {str(path.relative_to(PACKAGE)) for path in KERNELS if re.search(FORBIDDEN[what], code_of(path))}
    assert not found, f"{what} belongs into {SHARED.relative_to(PACKAGE)}"


def test_all_kernels_are_searched():
    assert {path.parents[1].name for path in KERNELS} == {"persistent", "stepwise", "factors", "feeding"}


def test_every_instruction_is_written_once():
    assembly = re.compile(r'\basm(?: volatile)?\(\s*((?:"(?:[^"\\]|\\.)*"\s*)+)')
    backend = [path for path in SOURCES if path not in KERNELS]
    times = Counter(template.strip() for path in backend for template in assembly.findall(code_of(path)))
    assert len(times) > 20
    assert not [template for template, found in times.items() if found > 1]


def test_triton_programs_have_their_ptx_in_one_file():
    found = {path.name for path in PACKAGE.rglob("*.py") if "inline_asm_elementwise" in path.read_text()}
    assert found == {"pieces.py"}


def test_every_format_is_one_struct():
    structs = re.findall(r"^struct (\w+)", (SHARED / "numbers.cuh").read_text(), re.MULTILINE)
    assert sorted(structs) == sorted((*FORMATS, "TF32"))


def test_every_format_can_be_selected():
    text = (SHARED / "numbers.cuh").read_text()
    chosen = re.findall(r"^#(?:if|elif) DTYPE == (\d)\nusing Number = (\w+);", text, re.MULTILINE)
    chosen += [("3", name) for name in re.findall(r"^#else\nusing Number = (\w+);", text, re.MULTILINE)]
    names = {str(number): str(dtype).removeprefix("torch.") for dtype, number in formats.NUMBERS.items()}
    assert {number: name.lower() for number, name in chosen} == names
