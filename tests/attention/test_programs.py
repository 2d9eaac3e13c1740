"""The Triton programs compile for GPUs that the machine need not have, and keep the feature map in registers."""

import json
import os
import subprocess
import sys

import pytest
import torch

from gatewise.attention.fused import launch
from gatewise.attention.problem import Problem
from tests.compilers import triton_version

# In a separate process, because this one may have turned Triton's interpreter on.
COMPILE = r"""
import json, re, subprocess, sys, tempfile
from pathlib import Path
import triton
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import torch
from gatewise.attention.fused import programs, tiles
from gatewise.attention.problem import Problem

FLOAT32 = {"scores", "lse", "statistics", "dscores", "dquery_sums", "parameters"}
SIZES = {"T", "B", "S", "H", "V"}
architecture, dtype, norm = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "True"
precision = torch.float32 if dtype == "fp32" else torch.bfloat16
problem = Problem(50, 50, 128, 512, 512, layer_norm=norm, dtype=precision)
flags = {"ADDITIVE": True, "NORM": norm, "RAGGED": True, "KEEP": True, "WEIGHTS": False, "ADD": False, "SUMS": True}
flags |= {"PRECISION": "tf32x3", "HARDWARE": dtype != "fp32"}
both, query = {"QUERY": True, "SOURCE": True}, {"QUERY": True, "SOURCE": False}
step = tiles.step_tile(problem.replace(steps=1))
all_of_it = tiles.step_tile(problem.replace(steps=1, layer_norm=False), source=True)
short = tiles.short_gradient_tile(problem)


def of_step(tile):
    features = {"CH": tile.feature_pieces, "WH": tile.features, "CV": tile.value_pieces, "WV": tile.values}
    return features | {"BS": tile.positions, "num_warps": tile.warps}


def sizes(tile, features):
    return {"BT": tile.steps, "BS": tile.positions, features: tile.features, "num_warps": tile.warps}


inputs = sizes(tiles.input_tile(problem), "BH") | {"maxnreg": tiles.input_registers(problem)}
cases = {
    "score": sizes(tiles.score_tile(problem), "BH"),
    "context": sizes(tiles.context_tile(problem), "BV"),
    "score_gradient": sizes(tiles.score_gradient_tile(problem), "BV"),
    "value_gradient": sizes(tiles.value_gradient_tile(problem), "BV"),
    "input_gradient": inputs | both,
    "input_gradient of the source": inputs | {"QUERY": False, "SOURCE": True},
    "short_gradient": sizes(short, "BV"),
    "step": of_step(step),
    "step_gradient": of_step(all_of_it) | both | {"NORM": False},
    "step_gradient of the query": of_step(step) | query,
}
found = {}
for name, constants in cases.items():
    program = getattr(programs, name.split()[0] + "_program")
    options = {"num_warps": constants["num_warps"], "maxnreg": constants.get("maxnreg")}
    constants = {key: value for key, value in (flags | constants).items() if key in program.arg_names}
    signature, aligned = {}, {}
    for place, argument in enumerate(program.arg_names):
        number = argument in SIZES or argument.endswith(("_step", "_row"))
        kind = "i32" if number else "*fp32" if argument in FLOAT32 else "*" + dtype
        kind = {"lengths": "*i64", "epsilon": "fp32"}.get(argument, kind)
        signature[argument] = "constexpr" if argument in constants else kind
        if signature[argument].startswith("*") or argument.endswith(("_step", "_row")):
            aligned[(place,)] = [["tt.divisibility", 16]]
    places = {(program.arg_names.index(key),): value for key, value in constants.items()}
    source = ASTSource(fn=program, signature=signature, constexprs=places, attrs=aligned)
    built = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "program.cubin"
        file.write_bytes(built.asm["cubin"])
        tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
        usage = subprocess.run([tool, "-res-usage", file], capture_output=True, text=True, check=True).stdout
    found[name] = [int(re.search(rf"{what}:(\d+)", usage).group(1)) for what in ("REG", "STACK")]
print(json.dumps(found))
"""


@pytest.mark.parametrize(
    ("architecture", "dtype", "norm"),
    [(80, "bf16", False), (90, "bf16", False), (90, "fp32", False), (90, "bf16", True), (90, "fp32", True)],
)
def test_programs_compile_and_spill_next_to_nothing(architecture, dtype, norm):
    pytest.importorskip("triton", reason="needs Triton: pip install triton")
    if triton_version() < (3, 3):
        pytest.skip("compiles by arguments that Triton 3.2 does not have")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    outcome = subprocess.run(
        [sys.executable, "-c", COMPILE, str(architecture), dtype, str(norm)],
        capture_output=True, text=True, check=False, timeout=200, env=environment,
    )  # fmt: skip
    assert outcome.returncode == 0, outcome.stderr
    found = json.loads(outcome.stdout)
    # A few words are for what surrounds the loops; the program with a cap of registers trades more of them for warps.
    # Releases of Triton differ by some: 544 bytes with 3.7.1, where 3.9 needs no more than 512.
    allowed = {name: 640 if name.startswith("input_gradient") else 128 for name in found}
    assert {name: stack for name, (_, stack) in found.items() if stack > allowed[name]} == {}
    assert all(0 < registers <= 255 for registers, _ in found.values())


def test_products_of_launches_that_are_only_noted_are_those_of_the_current_gpu(monkeypatch):
    current, tensor = [0], torch.empty(1, device="meta")
    problem = Problem(50, 50, 128, 512, 512, dtype=torch.float32, allow_tf32=True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: ((7, 5), (9, 0))[device])
    launch._capability_of.cache_clear()
    found = []
    for current[0] in (0, 1, 0):
        found.append(launch._precision(problem, tensor))
    launch._capability_of.cache_clear()
    assert found == ["ieee", "tf32", "ieee"]
