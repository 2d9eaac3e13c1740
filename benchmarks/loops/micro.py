import ctypes, os, sys, tempfile
from pathlib import Path
os.environ["GATEWISE_CACHE"] = tempfile.mkdtemp()
import torch
from concurrent.futures import ThreadPoolExecutor
from gatewise.kernels.cuda import toolchain, driver
class P(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("counters", ctypes.c_void_p), ("out", ctypes.c_void_p), ("iterations", ctypes.c_int)]
src = Path(__file__).with_name("micro.cu")
runs = []
base = dict(LOADS=1, KB=64, INFLIGHT=4, ROTATE=0, PIECE=1024, CLUSTER=1)
for pattern in (0, 1, 2):
    for inflight in (4, 8, 16):
        for rotate in (0, 1):
            runs.append(dict(base, PATTERN=pattern, INFLIGHT=inflight, ROTATE=rotate))
for pattern in (3, 4, 5): 
    for rotate in (0, 1): runs.append(dict(base, PATTERN=pattern, ROTATE=rotate))
for piece in (1024, 4096, 16384): runs.append(dict(base, PATTERN=6, PIECE=piece))
runs.append(dict(base, PATTERN=6, PIECE=1024, ROTATE=1))
for c in (2, 4, 8): runs.append(dict(base, PATTERN=7, CLUSTER=c, PIECE=1024)); runs.append(dict(base, PATTERN=7, CLUSTER=c, PIECE=4096))
for mode in (0, 1, 2, 4, 5): runs.append(dict(MODE=mode, CLUSTER=1))
for c in (2, 4): runs.append(dict(MODE=3, CLUSTER=c))
def build(m):
    try: return toolchain.compile_afresh(src, "sm_90a", m)
    except Exception as e: return e
if len(sys.argv) > 1: runs = runs[::1]
with ThreadPoolExecutor(8) as pool: built = list(pool.map(build, runs))
for m, b in zip(runs, built):
    if isinstance(b, Exception): print(m, str(b)[:800])
    elif b[1].spilled_bytes or len(sys.argv) > 1: print(m, b[1])
if len(sys.argv) > 1: sys.exit()
dev = torch.device("cuda:0")
torch.zeros(1, device=dev)
for m, b in zip(runs, built):
    if isinstance(b, Exception): continue
    loads = "LOADS" in m
    its = 204 if loads else 400
    data = torch.full((4 * 8 * 32 * 4096 if loads else 400 * 8 * 16384,), -1 if not loads else 1, dtype=torch.int8, device=dev)
    counters = torch.zeros(8 * 32, dtype=torch.int32, device=dev); out = torch.zeros(2000, dtype=torch.int64, device=dev)
    a = P(data.data_ptr(), counters.data_ptr(), out.data_ptr(), its)
    try:
        driver.launch(b[0], "kernel", driver.Shape((128, 1, 1), 256, 64 * 1024 if loads else 32768, m["CLUSTER"], m["CLUSTER"] == 1), a, dev)
        torch.cuda.synchronize()
        o = out[:128].float()
        print({k: v for k, v in m.items() if k in ("PATTERN", "INFLIGHT", "ROTATE", "PIECE", "CLUSTER", "MODE")}, "cycles", int(o.mean()), "max", int(o.max()), *(["B/clk", round(65536 / o.mean().item(), 1)] if loads else []), flush=True)
    except Exception as e: print(m, repr(e)[:300], flush=True)
