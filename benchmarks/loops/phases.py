"""Clock cycles of the phases of a step of the loops: sources are copied, marked and compiled."""
import os, re, shutil, sys, tempfile, statistics, time
from pathlib import Path
os.environ["GATEWISE_CACHE"] = tempfile.mkdtemp()
import torch, gatewise
from gatewise.kernels.cuda import toolchain
from gatewise.kernels.persistent.launches import compiled

MARKED = os.environ.get("MARKED", "1") == "1"
root = Path(tempfile.mkdtemp())
mine, shared = root / "persistent", root / "shared"
shutil.copytree(compiled.SOURCES, mine); shutil.copytree(toolchain.SHARED, shared)

def sub(text, old, new, count=1):
    assert old in text, old
    return text.replace(old, new, count) if count else text.replace(old, new)

def mark(n): return f"\n MARKP({n});\n"
HEAD = """
#define MARKP(n) { const u32 now_ = clock(); phase_[n] += now_ - last_; last_ = now_; }
"""
def report(name, n, steps="steps_"):
    args = ", ".join(f"phase_[{i}] / {steps}" for i in range(n))
    fmt = " %u" * n
    return f"""
    if (blockIdx.x == 1 % gridDim.x && blockIdx.y == 0 && blockIdx.z == 0 && (threadIdx.x == 0 || threadIdx.x == THREADS / 2)) printf("PH {name} %d %u polls %u waits |{fmt}\\n", (int)threadIdx.x, polls_ / {steps}, waited_ / {steps}, {args});
"""
def patch():
    path = mine / "product.cuh"; t = path.read_text()
    t = sub(t, "    while (is_missing(words, row) && patience.is_left()) load_item(words, row, poll);",
        "    const u32 began_ = clock(); while (is_missing(words, row) && patience.is_left()) { load_item(words, row, poll); ++patience.again; } patience.waited += clock() - began_;")
    path.write_text(t)
    path = shared / "exchange.cuh"; t = path.read_text()
    t = sub(t, "    bool lost;\n", "    bool lost;\n    u32 waited = 0, again = 0;\n"); path.write_text(t)
    for name in ("forward", "backward"):
        path = mine / f"{name}.cu"; t = path.read_text()
        t = t.replace("#include \"gate_sums.cuh\"", "#include \"gate_sums.cuh\"" + HEAD, 1)
        t = sub(t, "    for (int turn = 0, group = blockIdx.y;", "    u32 phase_[9] = {}, last_ = 0, steps_ = 0;\n    for (int turn = 0, group = blockIdx.y;")
        loop = "for (int step = 0; step < steps; ++step, parity ^= 1) {" if name == "forward" else "for (int step = 0; step <= steps; ++step, parity ^= 1) {"
        t = sub(t, loop, "last_ = clock(); " + loop + " ++steps_;")
        t = sub(t, "patience, scales);\n            if (between)", "patience, scales);" + mark(0) + "\n            if (between)")
        t = sub(t, "            __syncthreads();\n", "            __syncthreads();" + mark(1) + "\n")
        if name == "forward":
            t = sub(t, "#pragma unroll\n            for (int cell = 0; cell < CELLS; ++cell)\n                if (inside[cell] && lane % VALUES_PER_WORD == 0) store_exchanged(now",
                    mark(2) + "\n#pragma unroll\n            for (int cell = 0; cell < CELLS; ++cell)\n                if (inside[cell] && lane % VALUES_PER_WORD == 0) store_exchanged(now")
            t = sub(t, "store_exchanged(now + y_own[cell], output[cell]);", "store_exchanged(now + y_own[cell], output[cell]);" + mark(3))
            t = sub(t, "            if (narrow) store_unpadded", mark(4) + "            if (narrow) store_unpadded")
            t = sub(t, "            begin_product(words, row_at, step + 1);\n            episodes", mark(5) + "            begin_product(words, row_at, step + 1);" + mark(6) + "\n            episodes")
        else:
            t = sub(t, "            // First the arithmetic that does not depend", mark(2) + "            // First the arithmetic that does not depend")
            t = sub(t, "#if SPLIT > 1\n            // This wait", mark(3) + "\n#if SPLIT > 1\n            // This wait")
            t = sub(t, "            // First the arithmetic, then the stores that other blocks wait for, then the loads", mark(4) + "            // First the arithmetic, then the stores that other blocks wait for, then the loads")
            t = sub(t, "                grads[cell] = exchanged(grad, active);\n            }\n", "                grads[cell] = exchanged(grad, active);\n            }\n" + mark(5))
            t = sub(t, "first_unit + at.unit, grads[cell]);\n                }\n", "first_unit + at.unit, grads[cell]);\n                }\n" + mark(6))
            t = sub(t, "            if (!between) begin_product(words, row_at, step + 1);\n", mark(7) + "            if (!between) begin_product(words, row_at, step + 1);" + mark(8) + "\n")
        end = "    if (patience.lost) *(volatile int*)p.failure = 1;"
        t = sub(t, end, "    const u32 waited_ = patience.waited, polls_ = patience.again;" + report(name, 7 if name == "forward" else 9) + end)
        path.write_text(t)
def rotate():
    path = mine / "product.cuh"; t = path.read_text()
    t = sub(t, "using InFlight", "__device__ __forceinline__ int turned(int group) { return NEIGHBOURS > 1 ? (group + blockIdx.x) % NEIGHBOURS : group; }\nusing InFlight")
    t = sub(t, "row_at(row_of_lane(item / POLLS), step)", "row_at(row_of_lane(turned(item / POLLS)), step)")
    t = sub(t, "const int group = item / POLLS, poll = item % POLLS;\n        uint4(&here)", "const int group = turned(item / POLLS), poll = item % POLLS;\n        uint4(&here)")
    t = sub(t, "row_of_lane((item + AHEAD) / POLLS)", "row_of_lane(turned((item + AHEAD) / POLLS))")
    path.write_text(t)
if MARKED:
    patch()
if os.environ.get("ROT"):
    rotate()
compiled.SOURCES = mine; toolchain.SHARED = shared
CASES = [  # T, B, H, bidirectional, dtype
    (50, 256, 512, False, "bf16"), (50, 128, 512, True, "bf16"), (50, 128, 512, False, "bf16"), (100, 64, 512, False, "bf16"),
    (100, 64, 1024, False, "bf16"), (35, 20, 1500, False, "bf16"), (70, 80, 1150, False, "bf16"), (500, 32, 512, True, "bf16"), (35, 20, 650, False, "bf16"),
    (50, 256, 512, False, "tf32"), (100, 64, 1024, False, "tf32"), (35, 20, 1500, False, "tf32"),
]
if os.environ.get("ROT"): CASES = CASES[:-3]
NAMES = "forward: 0 product 1 sync 2 cells 3 store 4 load 5 keep 6 begin; backward: 0 product 1 sync 2 send 3 slopes 4 await 5 cells 6 store 7 load 8 begin"
def problem_of(case):
    from gatewise.contract.problem import Problem
    T, B, H, both, dtype = case
    return Problem(T, B, H, H, bidirectional=both, dtype=torch.bfloat16 if dtype == "bf16" else torch.float32, allow_tf32=dtype == "tf32", needs_grad=True)
if __name__ == "__main__":
    if sys.argv[1:] == ["compile"]:  # without a GPU
        from gatewise.contract.device import Device
        d = Device.named("h200")
        for case in CASES:
            p = problem_of(case); T, B, H, both, dtype = case
            for make in (compiled.forward_launch, compiled.backward_launch):
                for dirs in {1, 1 + both}:
                    l = make(p, B, dirs, False, d)
                    macros = dict(l.source[2]); t0 = time.time()
                    file = mine / f"{l.source[0]}.cu"
                    from gatewise.kernels.persistent.sizes.step import code_of
                    _, r = toolchain.compile_afresh(file, "sm_90a", macros, code_of(p.cell))
                    print(case, l.source[0], dirs, r, round(time.time() - t0, 1), flush=True)
        sys.exit()
    torch.backends.cudnn.allow_tf32 = True
    print(NAMES)
    from gatewise.contract.device import Device
    from gatewise.kernels.persistent.launches.builds import building, launches_of
    dev = Device.probe("cuda")
    with building([l for c in CASES for l in launches_of(problem_of(c), dev)], 15): pass
    def us(f, n):
        a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        a.record(); 
        for _ in range(n): f()
        b.record(); torch.cuda.synchronize(); return a.elapsed_time(b) * 1e3 / n
    for case in CASES:
        T, B, H, both, dtype = case
        torch.backends.cuda.matmul.allow_tf32 = True
        layer = gatewise.LSTM(H, H, bidirectional=both, kernel="persistent", device="cuda", dtype=torch.bfloat16 if dtype == "bf16" else torch.float32)
        x = torch.randn(T, B, H, device="cuda", dtype=layer.weight_hh_l0.dtype, requires_grad=True)
        print("CASE", case, flush=True)
        def fwd():
            with torch.no_grad(): layer(x)
        def both_():
            y, _ = layer(x); y.sum().backward()
        if MARKED:
            both_(); torch.cuda.synchronize(); print("--", flush=True); both_(); torch.cuda.synchronize()
        else:
            for f in (fwd, both_):
                for _ in range(4): f()
                torch.cuda.synchronize()
                side = torch.cuda.Stream()
                with torch.cuda.stream(side): f()
                torch.cuda.synchronize()
                g = torch.cuda.CUDAGraph()
                with torch.cuda.graph(g, stream=side): f()
                g.replay(); print(f.__name__, round(statistics.median(us(g.replay, 5) for _ in range(5)) / T, 2), flush=True)
