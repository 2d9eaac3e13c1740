"""Old and new form of the loads of the recurrent product, alternately in one process.

build: compiles everything, also for the tests, into GATEWISE_CACHE.  time: measures.  names: prints the launches.
"""
import importlib, json, os, statistics, sys, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

begun = time.time()
import cuda.core  # noqa: F401  before any thread
import torch
import gatewise
from gatewise import testing
from gatewise.contract.device import Device
from gatewise.contract.problem import Layout, Problem
from gatewise.kernels.cuda import toolchain
from gatewise.kernels.persistent.kernel import persistent
from gatewise.kernels.persistent.launches import compiled
from gatewise.kernels.persistent.launches.builds import copies_of as around
from gatewise.kernels.persistent.launches.builds import launches_of

kernel_module = importlib.import_module("gatewise.kernels.persistent.kernel")
kernel_module._stack_of = lambda: lambda problem: None  # no replays of the other form
OLD = Path(os.environ.get("OLD_SOURCES", "old"))
REAL = compiled.copied_loads_of
FORMS = {
    "old": (OLD / "p", OLD / "s", lambda cut, device: None),
    "new": (compiled.SOURCES, toolchain.SHARED, REAL),
}
CASES = [  # T, B, H, layers, precision
    (100, 64, 1024, 1, "bf16"), (50, 256, 512, 1, "bf16"), (50, 128, 512, 1, "bf16"), (35, 20, 1500, 2, "bf16"),
    (70, 80, 1150, 1, "bf16"), (100, 64, 512, 1, "bf16"), (200, 8, 512, 1, "bf16"), (100, 16, 256, 1, "bf16"),
    (1024, 16, 768, 1, "bf16"),
    (100, 64, 1024, 1, "tf32"), (50, 256, 512, 1, "tf32"), (50, 128, 512, 1, "tf32"), (35, 20, 1500, 2, "tf32"),
    (100, 64, 512, 1, "tf32"),
]
TESTS = [
    Problem(9, 64, 128, 1024), Problem(9, 70, 64, 1000, layout=Layout.DEVICE_LENGTHS), Problem(8, 20, 1500, 1500),
    Problem(5, 300, 64, 512), Problem(50, 64, 16, 1024),
    Problem(50, 40, 64, 512, bidirectional=True),
]


def problem_of(case):
    T, B, H, layers, dtype = case
    return Problem(T, B, H, H, num_layers=layers, needs_grad=True, **number(dtype))


def number(dtype):
    return {"dtype": torch.bfloat16} if dtype == "bf16" else {"dtype": torch.float32, "allow_tf32": True}


def switch(form):
    compiled.SOURCES, toolchain.SHARED, compiled.copied_loads_of = FORMS[form]
    compiled.launch_of.cache_clear()


def copied(launch):
    macros = dict(launch.source[2])
    return f"{macros['COPIED'] * macros['CHUNK']}/{macros['SPARE'] * macros['CHUNK']}" if "COPIED" in macros else "-"


def build(device, workers):
    for form in ("new", "old"):
        switch(form)
        problems = [problem_of(case) for case in CASES]
        if form == "new":
            problems = [each.replace(needs_grad=True, **number(dtype)) for dtype in ("bf16", "tf32") for each in TESTS] + problems
        # Launches look up the sources when they compile, so each form is compiled before the next one.
        needed = {launch.source: launch for problem in problems for launch in launches_of(problem, device)}
        if form == "new":
            needed.update({each.source: each for problem in problems for each in around(problem, device)})
        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(lambda launch: launch.compile(), needed.values()))
        print("built", form, round(time.time() - begun, 1), "s", flush=True)


def measure(device, limit):
    from torch.profiler import ProfilerActivity, profile

    print(f"{'shape':22} {'pass':9} {'copied':>7} {'old':>7} {'new':>7} {'ratio':>6}   (us a step; spans in flight as copies / with memory of their own)")
    for case in CASES:
        if time.time() - begun > limit:
            print("no time for", case, flush=True)
            continue
        try:
            problem = problem_of(case)
            inputs = testing.make_inputs(problem, "cuda")
            gradients = testing.make_gradients(problem, inputs)
            found, results, names = {}, {}, {}
            for turn in range(3):
                for form in FORMS:
                    switch(form)
                    step = lambda: testing.run_kernel(persistent, problem, inputs, gradients)  # noqa: B023
                    results[form] = testing.named(problem, *step())
                    step()
                    torch.cuda.synchronize()
                    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
                        for _ in range(4):
                            step()
                        torch.cuda.synchronize()
                    sums = {}
                    for event in profiled.events():
                        if event.device_type == torch.autograd.DeviceType.CUDA:
                            name = event.name[10:] if event.name in ("recurrent_forward", "recurrent_backward") else "others"
                            sums[name] = sums.get(name, 0) + event.time_range.elapsed_us() / case[0] / 4
                    sums["all"] = sum(sums.values())
                    for name, value in sums.items():
                        found.setdefault((name, form), []).append(value)
                    names.update({launch.source[0]: copied(launch) for launch in launches_of(problem, device)} if form == "new" else {})
            same = all(torch.equal(results["old"][name], value) for name, value in results["new"].items())
            for name in ("forward", "backward", "all"):
                old, new = (statistics.median(found[name, form]) for form in FORMS)
                shape = "-".join(map(str, case[:3])) + f" x{case[3]} {case[4]}"
                print(f"{shape:22} {name:9} {names.get(name, ''):>7} {old:7.3f} {new:7.3f} {new / old:6.3f}" + ("" if name != "all" else "   the same bits" if same else "   OTHER BITS"), flush=True)
                line = {"benchmark": "loops", "scripts": "benchmarks/loops/copied_loads.py", "torch": torch.__version__, "case": case, "pass": name, "copied": names.get(name), "us_a_step": {form: [round(value, 4) for value in found[name, form]] for form in FORMS}, "same_bits": same, "device": torch.cuda.get_device_name()}
                with open(os.environ.get("LOOPS_RECORD", "loops.jsonl"), "a") as file:
                    file.write(json.dumps(line) + "\n")
        except Exception as error:
            print("FAILED", case, repr(error)[:400], flush=True)
    print("measured", round(time.time() - begun, 1), "s", flush=True)


if __name__ == "__main__":
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    print(gatewise.__file__)
    if sys.argv[1] == "names":
        for form in FORMS:
            switch(form)
            for case in CASES:
                print(form, case, [(launch.source[0], copied(launch), launch.shape) for launch in launches_of(problem_of(case), Device.named("h200"))])
    elif sys.argv[1] == "build":
        build(Device.probe("cuda"), 15)
    else:
        measure(Device.probe("cuda"), float(sys.argv[2]))
