"""Times of the loops with pauses between the stores of a step and the first loads of the next one."""
import os, sys, shutil, tempfile, statistics, time, functools, itertools
from pathlib import Path
begun = time.time()
cache = Path(__file__).parent / "cache"
if sys.argv[1:] != ["dry"] and cache.exists():
    shutil.copytree(cache, folder := Path(tempfile.mkdtemp()) / "c"); os.environ["GATEWISE_CACHE"] = str(folder)
else:
    os.environ["GATEWISE_CACHE"] = str(cache)
import torch, gatewise
from gatewise.kernels.cuda import toolchain
from gatewise.kernels.persistent.launches import compiled
from gatewise.contract.device import Device
from gatewise.contract.problem import Problem
from gatewise.kernels.persistent.launches.builds import building, launches_of
from gatewise import testing
from gatewise.kernels.persistent.kernel import persistent
import gatewise.kernels.persistent.kernel; kernel_module = sys.modules["gatewise.kernels.persistent.kernel"]
kernel_module._stack_of = lambda: (lambda problem: None)  # no replays of another variant
here = Path(__file__).parent / "new"
OLD = Path(__file__).parent / "old" / "p", Path(__file__).parent / "old" / "s"
NEW = here / "p", here / "s"
extra = {}
toolchain._compiler_version = lambda: 'probe'
real = toolchain.compile_source
def patched(source, architecture, macros, code=None):
    return real(source, architecture, {**macros, **extra}, code)
toolchain.compile_source = patched
CASES = [(100, 64, 512, False, "bf16"), (100, 32, 512, True, "bf16"), (200, 32, 256, False, "bf16"), (200, 8, 512, False, "bf16"), (200, 16, 128, False, "bf16"), (35, 20, 650, False, "bf16"), (100, 64, 1024, False, "bf16"), (50, 256, 512, False, "bf16"), (50, 128, 512, False, "bf16"), (35, 80, 1150, False, "bf16"), (35, 20, 1500, False, "bf16"), (100, 64, 1024, False, "tf32"), (100, 64, 512, False, "tf32"), (200, 1, 1024, False, "bf16")]
def problem_of(case):
    T, B, H, both, dtype = case
    return Problem(T, B, H, H, bidirectional=both, dtype=torch.bfloat16 if dtype == "bf16" else torch.float32, allow_tf32=dtype == "tf32", needs_grad=True)
HERE = Path(__file__).parent
VARIANTS = [(OLD, {})] + [((HERE / "A" / "p", HERE / "A" / "s"), {"REFILL": 1})] + [((HERE / "B" / "p", HERE / "B" / "s"), {"REFILL": 2, "PAUSE": pause}) for pause in (400, 550)]
torch.backends.cuda.matmul.allow_tf32 = True; torch.backends.cudnn.allow_tf32 = True
dry = sys.argv[1:] == ["dry"]
dev = Device.named("h200") if dry else Device.probe("cuda")
from torch.profiler import profile, ProfilerActivity
for (sources, shared), macros in VARIANTS:
    compiled.SOURCES, toolchain.SHARED = sources, shared
    toolchain._digest.cache_clear() if hasattr(toolchain._digest, "cache_clear") else None
    compiled.launch_of.cache_clear()
    extra.clear(); extra.update(macros)
    needed = [l for c in CASES for l in launches_of(problem_of(c), dev)]
    if dry:
        from concurrent.futures import ThreadPoolExecutor
        with ThreadPoolExecutor(2) as pool: list(pool.map(lambda l: l.binary, needed))
        print(macros, time.time() - begun, flush=True)
        continue
    for l in needed: l.binary
    for c in CASES:
        try:
            p = problem_of(c)
            inputs = testing.make_inputs(p, "cuda"); g = testing.make_gradients(p, inputs)
            step = lambda: testing.run_kernel(persistent, p, inputs, g)
            for _ in range(2): step()
            torch.cuda.synchronize()
            found = {}
            with profile(activities=[ProfilerActivity.CUDA]) as pr:
                for _ in range(4): step()
                torch.cuda.synchronize()
            for e in pr.events():
                if e.name in ("recurrent_forward", "recurrent_backward"):
                    found.setdefault(e.name, []).append(e.time_range.elapsed_us() / c[0])
            print("R", repr((macros, c, {k[10:]: round(statistics.median(v) * (len(v) // 4), 3) for k, v in sorted(found.items())})), flush=True)
        except Exception as e: print("FAILED", c, macros, repr(e)[:300], flush=True)
    print("T", round(time.time() - begun, 1), flush=True)
