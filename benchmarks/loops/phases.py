"""Sources of the persistent kernel that count the clock cycles of each phase of a step.

`counting_sources` copies the sources and inserts marks. Two threads of one block, the first one and the first one of
the second half, add up the cycles between neighbouring marks in shared memory, over all steps of a launch, and print
the sums at its end, in the form that `counts_of` reads. A mark stands behind the phase that it ends.
"""

from __future__ import annotations

import functools
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from gatewise.kernels.cuda import toolchain
from gatewise.kernels.persistent.launches import compiled

OF_TOTALS = ("totals pause", "totals wait")
OF_EXCHANGE = ("before", "quads", "barrier", "store", "pause", "wait", "combine", *OF_TOTALS, "results")
"""The phases of an exchange of statistics: the arithmetic since the phase before it, the numbers of four units each,
the barrier behind these, the numbers of the block and their store, the pause, the loads until all numbers of the row
have arrived, their combination, and the barrier behind it with the loads of the results. Where rows have owners among
the blocks, "combine" includes the store of the totals, and `OF_TOTALS` are the pause behind it and the loads until all
totals have arrived."""

_EXCHANGES = tuple(f"{place} {phase}" for place in ("first", "second") for phase in OF_EXCHANGE)
_COUNTERS = ("reloads of first", "reloads of second", "waits", "reloads", "steps")
"""What is no phase: loads of statistics beyond the first, the cycles of the product in which its operands arrive, the
loads of these beyond the first, and the steps."""

PHASES: dict[str, tuple[str, ...]] = {
    "forward": ("product", "barrier", "cells", "store", "loads", "masks", "keep", "pause", "begin"),
    "backward": ("product", "barrier", "send", "slopes", "await", "cells", "store", "loads", "masks", "pause", "begin"),
    "row_forward": ("product", "barrier", "sums", "output", "store", "loads", "masks", "keep", "begin"),
    "row_backward": (
        *("product", "barrier", "send", "await", "sums", "output", "store", "totals", "loads", "masks", "begin"),
        "statistics",
    ),
}
"""The phases of each pass, without those of exchanges."""

_HEADER = """
#ifndef __CUDACC__
extern "C" int printf(const char*, ...);
#endif

// Adds up clock cycles; all but two threads of one block do nothing.
struct Phases {
    static constexpr int ROOM = 40;
    u32 last;  // the clock at the last mark
    u32 place;  // the exchange of statistics at work

    __device__ __forceinline__ static u32* counts() {
        __shared__ u32 counted[2 * ROOM];
        return counted + (threadIdx.x ? ROOM : 0);
    }
    __device__ __forceinline__ static bool counts_here() { return threadIdx.x % (WARPS * 16) == 0; }
    __device__ __forceinline__ static u32 nanoseconds() {
        u64 found;
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(found)::"memory");
        return (u32)found;
    }
    __device__ __forceinline__ static void start() {
        if (!counts_here()) return;
        for (int i = 0; i < ROOM - 2; ++i) counts()[i] = 0;
        counts()[ROOM - 2] = (u32)clock64(), counts()[ROOM - 1] = nanoseconds();
    }
    __device__ __forceinline__ void begin() { last = (u32)clock64(); }
    __device__ __forceinline__ static void add(int counter, u32 number) {
        if (counts_here()) atomicAdd(counts() + counter, number);
    }
    __device__ __forceinline__ void mark(int phase) {
        const u32 now = (u32)clock64();
        add(phase, now - last);
        last = now;
    }
    __device__ __forceinline__ static void print(const char* pass) {
        if (!counts_here() || blockIdx.x != 1 % gridDim.x || blockIdx.y || blockIdx.z) return;
        const u32 time = nanoseconds() - counts()[ROOM - 1], cycles = (u32)clock64() - counts()[ROOM - 2];
        printf("PASS %s %d %u %u\\n", pass, (int)threadIdx.x, cycles, time);
        for (int i = 0; i < ROOM - 2; ++i) printf("COUNT %s %d %d %u\\n", pass, (int)threadIdx.x, i, counts()[i]);
    }
};

"""


class Counts(NamedTuple):
    """The counts of a thread in a launch of a pass.

    Attributes:
        thread: The index of the thread in its block.
        cycles: The clock cycles of the pass, until it printed what was counted.
        nanoseconds: The same as a time.
        steps: The steps, of all groups of batch rows that the block computed.
        phases: The clock cycles of each phase in a step, by name; those that did not occur are left out.
        waits: The clock cycles of a step in which the product waits for its operands, a part of the phase "product".
        reloads: The loads of operands in a step beyond the first of each.
        exchange_reloads: The loads of statistics in a step beyond the first, for each exchange.
    """

    thread: int
    cycles: int
    nanoseconds: int
    steps: int
    phases: dict[str, float]
    waits: float
    reloads: float
    exchange_reloads: tuple[float, float]


def counting_sources(folder: Path, left_out: Sequence[str] = ()) -> Path:
    """Write the sources with marks, and the headers that they include, to a folder; return it.

    Args:
        folder: The folder.
        left_out: The phases without a mark, which thus count to the phases behind them; with "waits", the waits of the
            product are not counted. Each mark takes registers, which some passes do not have.

    Raises:
        ValueError: A line next to which a mark belongs does not occur in a source, or occurs more than once.
    """
    for origin in (toolchain.SHARED, compiled.SOURCES):
        for path in origin.glob("*.cu*"):
            shutil.copy(path, folder / path.name)
    _rewrite(folder / "exchange.cuh", _in_exchange)
    if "waits" not in left_out:
        _rewrite(folder / "product.cuh", _in_product)
    _rewrite(folder / "statistics.cuh", _in_statistics)
    for name in PHASES:
        _rewrite(folder / f"{name}.cu", functools.partial(_in_pass, name=name, left_out=left_out))
    return folder


def counts_of(printed: str) -> dict[str, list[Counts]]:
    """Return the counts of the threads of the last launch of each pass.

    Args:
        printed: The output of the process that launched passes with marks.
    """
    last: dict[tuple[str, int], tuple[int, int, dict[int, int]]] = {}
    for line in printed.splitlines():
        kind, *words = line.split() or [""]
        if kind == "PASS":
            name, (thread, cycles, nanoseconds) = words[0], map(int, words[1:])
            last[name, thread] = cycles, nanoseconds, {}
        elif kind == "COUNT":
            name, (thread, counter, count) = words[0], map(int, words[1:])
            last[name, thread][2][counter] = count
    found: dict[str, list[Counts]] = {}
    for (name, thread), of_thread in last.items():
        found.setdefault(name, []).append(_counts(name, thread, *of_thread))
    return {name: sorted(threads) for name, threads in found.items()}


def _counts(name: str, thread: int, cycles: int, nanoseconds: int, found: dict[int, int]) -> Counts:
    steps = found[_index("steps")]

    def of_step(counter: str) -> float:
        return found[_index(counter, name)] / steps

    phases = {phase: of_step(phase) for phase in _in_order(name) if found[_index(phase, name)]}
    exchanges = of_step("reloads of first"), of_step("reloads of second")
    return Counts(thread, cycles, nanoseconds, steps, phases, of_step("waits"), of_step("reloads"), exchanges)


def _in_order(name: str) -> Sequence[str]:
    """Return the names of all phases of a pass in the order of a step."""
    if not name.startswith("row"):
        return PHASES[name]
    after = PHASES[name].index("sums") + 1
    return *PHASES[name][:after], *_EXCHANGES, *PHASES[name][after:]


def _index(phase: str, name: str = "") -> int:
    shared = (*_COUNTERS, *_EXCHANGES)
    return shared.index(phase) if phase in shared else len(shared) + PHASES[name].index(phase)


def _in_exchange(text: str) -> str:
    text = _before(text, "// Counts the polls of a wait.", _HEADER)
    return _after(text, "    bool lost;", "    Phases phases;")


def _in_product(text: str) -> str:
    loop = "while (is_missing(words, row_of, item) && patience.is_left())"
    return _once(
        text,
        f"    {loop} load_item(words, row_of, item);",
        f"    const u32 began = (u32)clock64();\n"
        f"    {loop} load_item(words, row_of, item), Phases::add({_index('reloads')}, 1);\n"
        f"    Phases::add({_index('waits')}, (u32)clock64() - began);",
    )


def _in_statistics(text: str) -> str:
    def mark(phase: str) -> str:
        first = _index(f"first {phase}")
        return f"patience->phases.mark({first} + patience->phases.place * {len(OF_EXCHANGE)});"

    quads, barrier = "        in_quads<MOMENTS>(pairs);\n", "        __syncthreads();\n"
    place = f"patience->phases.place = PLACE;\n{mark('before')}"
    text = _once(text, quads + barrier, f"{place}\n{quads}{mark('quads')}\n{barrier}{mark('barrier')}\n")
    pause = "        pause();\n        if constexpr"
    text = _once(text, pause, f"{mark('store')}\n        pause();\n{mark('pause')}\n{pause.partition(';')[2]}")
    totals = "            store_totals<MOMENTS, ITEMS>(slots, totals, mark);\n            pause();"
    text = _once(text, totals, totals.replace("\n", f"\n{mark('combine')}\n") + mark("totals pause"))
    text = _after(text, "            load_totals<ITEMS>(totals, found, mark);", mark("totals wait"))
    again = "            missing = __any_sync(EVERY_LANE, own) && patience->is_left();"
    text = _after(text, again, f"Phases::add({_index('reloads of first')} + patience->phases.place, missing);")
    text = _before(text, "        TwoNumbers parts[2 * LOADS];", mark("wait"))
    text = _after(
        text, "                if (item < ITEMS && threadIdx.x % LANES == 0) found[item] = total;", mark("combine")
    )
    last = "pairs[cell][i] = found[i * ROWS + (at.exists ? at.row : 0)];\n        }"
    return _after(text, last, mark("results"))


def _in_pass(text: str, name: str, left_out: Sequence[str]) -> str:
    def mark(phase: str) -> str:
        return f"patience.phases.mark({_index(phase, name)});"

    loops = re.findall(r"^        for \(int step = 0; .*\{$", text, re.MULTILINE)
    if len(loops) != 1:
        raise ValueError(f"{name}.cu has {len(loops)} loops over steps")
    text = _after(_before(text, loops[0], "patience.phases.begin();"), loops[0], f"Phases::add({_index('steps')}, 1);")
    text = _after(text, "    extern __shared__ float4 shared[];", "Phases::start();")
    text = _before(text, "    if (patience.lost) *(volatile int*)p.failure = 1;", f'Phases::print("{name}");')
    for where, line, phase in _MARKS[name]:
        if phase not in left_out:
            text = where(text, line, mark(phase))
    return text


def _rewrite(path: Path, change: Callable[[str], str]) -> None:
    path.write_text(change(path.read_text()))


def _once(text: str, old: str, new: str) -> str:
    if text.count(old) != 1:
        raise ValueError(f"a mark needs this in the source once, which has it {text.count(old)} times: {old!r}")
    return text.replace(old, new)


def _before(text: str, line: str, inserted: str) -> str:
    return _once(text, line, f"{inserted}\n{line}")


def _after(text: str, line: str, inserted: str) -> str:
    return _once(text, line, f"{line}\n{inserted}")


_PRODUCT = "finish_product(words, weights, row_at, step, sums + {} * PARTIAL_FLOATS, patience, scales);"
_OUTPUT = """#pragma unroll
            for (int cell = 0; cell < CELLS; ++cell)
                if ({} && lane % VALUES_PER_WORD == 0) store_exchanged(now + y_own[cell], output[cell]);"""
_OF_FORWARD, _OF_ROWS = _OUTPUT.format("stores(cell)"), _OUTPUT.format("inside[cell]")
_ADVANCE = (
    "                masks.advance(ends, first_unit, cell, reverse ? t {0} 1 : t {1} 1, reverse ? t {0} 2 : t {1} 2,"
    " reverse ? t {0} FETCHED_AHEAD : t {1} FETCHED_AHEAD);"
)
_FORWARD_MASKS, _BACKWARD_MASKS = _ADVANCE.format("-", "+"), _ADVANCE.format("+", "-")
_ARRIVAL = "                while (!has_arrived(&arrival, parity)) {}"
_NEXT = "            begin_product(words, row_at, step + 1);"
_DGATES = (
    "store_exchanged_gates(step_of(dgates, t, 4 * step_values), ends.batch_row(at.row) * p.row, first_unit + at.unit, "
)
_BARRIER = (_after, "            __syncthreads();", "barrier")
_BOTH = ((_after, _PRODUCT.format("warp"), "product"), _BARRIER)
_FORWARD = (
    (_before, _FORWARD_MASKS, "loads"),
    (_after, _FORWARD_MASKS, "masks"),
)
# In clusters (DISTRIBUTED): the product, and the stores that other blocks wait for. The wait for those of other blocks
# counts to the phase "begin", as the loads do that take its place elsewhere.
_STATES = "            states.multiply_before(step, weights, sums + part * PARTIAL_FLOATS);"
_SENT = (
    "#pragma unroll\n            for (int cell = 0; cell < CELLS; ++cell) {\n                u32 word = output[cell];"
)
_MARKS: dict[str, tuple[tuple[Callable[[str, str, str], str], str, str], ...]] = {
    "forward": (
        (_after, _PRODUCT.format("part"), "product"),
        _BARRIER,
        (_before, f"#else\n{_OF_FORWARD}", "store"),
        (_before, _OF_FORWARD, "cells"),
        (_after, _OF_FORWARD, "store"),
        *_FORWARD,
        (_before, "#if PAUSE\n            // Loads", "keep"),
        (_before, f"#if !DISTRIBUTED\n{_NEXT}", "pause"),
        (_after, _NEXT, "begin"),
        (_after, "            if (step > 0) states.arrivals.await(step - 1);", "begin"),
        (_after, _STATES, "product"),
        (_before, _SENT, "cells"),
    ),
    "row_forward": (
        *_BOTH,
        (_before, "            Returned returned[CELLS];", "sums"),
        (_before, _OF_ROWS, "output"),
        (_after, _OF_ROWS, "store"),
        *_FORWARD,
        (_before, _NEXT, "keep"),
        (_after, _NEXT, "begin"),
    ),
    "backward": (
        *_BOTH,
        (_before, "#endif\n#if !DISTRIBUTED\n            // First the arithmetic that does not depend", "send"),
        (_before, "#if SPLIT > 1\n            // This wait has no limit", "slopes"),
        (_after, _ARRIVAL, "await"),
        (_after, "            if (step > 0) own_gradients.arrivals.await(step - 1);", "begin"),
        (_after, "                grads[cell] = exchanged(grad, active);\n#endif\n            }", "cells"),
        (_after, "            make_visible();", "barrier"),
        (_after, "            if (step < steps) own_gradients.multiply(step, weights);", "product"),
        (_after, "row, first_unit + at.unit, grads[cell]);\n#endif\n            }", "store"),
        (_after, "            find_slopes(parity ^ 1);", "slopes"),
        (_before, _BACKWARD_MASKS, "loads"),
        (_after, _BACKWARD_MASKS, "masks"),
        (_before, "            if (!between) begin_product(words, row_at, step + 1);", "pause"),
        (_after, "            if (!between) begin_product(words, row_at, step + 1);", "begin"),
    ),
    "row_backward": (
        *_BOTH,
        (_before, "            // This wait has no limit", "send"),
        (_after, _ARRIVAL, "await"),
        (_before, "            if (step == steps) break;", "sums"),
        (_before, f"                if (inside[cell]) {_DGATES}exchange);", "output"),
        (_after, f"                if (inside[cell]) {_DGATES}exchange);", "store"),
        (
            _before,
            "#pragma unroll\n            for (int cell = 0; cell < CELLS; ++cell) {\n"
            "                if (!warp_owns(cell)) continue;\n                input[cell] = arrived(",
            "totals",
        ),
        (_before, _BACKWARD_MASKS, "loads"),
        (_after, _BACKWARD_MASKS, "masks"),
        (_after, _NEXT, "begin"),
        (_after, "            statistics.load(ends, reverse ? t + 2 : t - 2, p.step, p.row);", "statistics"),
    ),
}
