import os, sys, torch, gatewise
from torch.profiler import profile, ProfilerActivity
torch.backends.cuda.matmul.allow_tf32 = True
CASES = [(50, 256, 512, False, "bf16"), (50, 128, 512, True, "bf16"), (100, 64, 1024, False, "bf16"), (35, 20, 1500, False, "bf16"), (70, 80, 1150, False, "bf16"), (50, 128, 512, False, "bf16"), (50, 256, 512, False, "tf32")]
for case in CASES:
    T, B, H, both, dtype = case
    d = torch.bfloat16 if dtype == "bf16" else torch.float32
    layer = gatewise.LSTM(H, H, bidirectional=both, kernel="persistent", device="cuda", dtype=d)
    x = torch.randn(T, B, H, device="cuda", dtype=d, requires_grad=True)
    g = torch.randn(T, B, H * (1 + both), device="cuda", dtype=d)
    def step():
        y, _ = layer(x); y.backward(g)
        x.grad = None; layer.zero_grad()
    for _ in range(4): step()
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side): step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        y, _ = layer(x); grads = torch.autograd.grad(y, [x, *layer.parameters()], g)
    graph.replay(); torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as p:
        for _ in range(3): graph.replay()
        torch.cuda.synchronize()
    ev = [e for e in p.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    ev.sort(key=lambda e: e.time_range.start)
    n = len(ev) // 3
    last = ev[-n:]
    print("CASE", case, "total us/step", round((last[-1].time_range.end - last[0].time_range.start) / T, 2))
    before = None
    for e in last:
        gap = 0 if before is None else e.time_range.start - before
        before = e.time_range.end
        print(f"   {e.time_range.elapsed_us():9.1f} us  gap {gap:6.1f}  {e.name[:100]}")
