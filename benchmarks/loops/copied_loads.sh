#!/bin/bash
# The operands of the recurrent product in two forms, on an H200: loads to registers (old), and copies to shared memory in whole
# lines (cp.async), with 1.3 to 4 times the bytes in flight (new).
#
#     mkdir -p old/p old/s                # once, where git is: the sources of the old form
#     git archive 753f7394 gatewise/kernels/persistent/cuda gatewise/kernels/cuda | tar -x -C old
#     cp old/gatewise/kernels/persistent/cuda/* old/p/; cp old/gatewise/kernels/cuda/*.cuh old/s/
#     bash benchmarks/loops/copied_loads.sh old FOLDER    # from the root of a checkout; at most 110 s; FOLDER receives everything
#
# Both run alternately in one process, three times four steps each.
#
# Predictions, us a step and layer (the table has the sum of both layers of 35-20-1500; old values are those of loops.jsonl, of
# days ago). A block has 16 to 32 KB in flight in registers (256 threads x 4 to 8 loads of 16 bytes), 48 to 72 KB as copies. The
# microbenchmark of loops.jsonl: 64 KB in 2,300 (4 loads) and 2,155 cycles (8 loads, halves of lines), 1,250 as copies.
#
#     shape          pass      old   new   ratio   why
#     100-64-1024    forward   3.75  3.2   0.85    all 64 KB in flight, before 32; product 4,050 -> 3,000 cycles (-900 by the microbenchmark)
#     100-64-1024    backward  4.1   3.6   0.88    48 of 64 KB; product 4,000 -> 3,100: reads of weights from shared memory take 2,050
#     50-256-512     backward  4.9   4.35  0.89    all 64 KB; product 3,700 -> 2,750
#     50-128-512     backward  3.25  2.95  0.91    all 64 KB; product 3,000 -> 2,450
#     35-20-1500     forward   4.15  3.45  0.83    all 70 KB; product 3,850 -> 2,600
#     35-20-1500     backward  4.9   4.5   0.92    56 of 72 KB
#     70-80-1150     both      8.2, 10.2           0.93, 0.95 (44 bytes spilled)
#     tf32 100-64-1024 forward 5.3   4.4   0.83    96 of 128 KB; backward 6.9 -> 6.3 (0.91)
#     tf32 35-20-1500 forward  7     6     0.86
#     tf32 50-128-512, 50-256-512: forward 1.00 (6 of 8 loads were in flight before: if slower, leave these out), backward 0.93 and 1.00
#     tf32 100-64-512 backward 0.98
#     all others have no copies: 1.00. All results have the same bits in both forms, at each shape.
# What would refute the idea: ratios above 0.95 in the forward pass of 100-64-1024. Then look at "waits" and "polls" of the phases
# printed last: polls above 0.3 mean that copies begin before the values are there (a pause would help), waits above 1,500 that
# copies in flight do not arrive faster than loads.
#
# The tests: 10 pass.
set -u
cd "$(dirname "$0")/../.."
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1 OLD_SOURCES=$(cd "$1" && pwd)
out=$(mkdir -p "$2" && cd "$2" && pwd)
export GATEWISE_CACHE=$(mktemp -d)
trap 'rm -rf "$GATEWISE_CACHE"' EXIT
export LOOPS_RECORD=$out/loops.jsonl

timeout 45 python3 benchmarks/loops/copied_loads.py build > "$out/build.txt" 2>&1
echo "build: exit status $? after $SECONDS s"; tail -n 3 "$out/build.txt"

timeout $((SECONDS < 40 ? 38 : 30)) python3 -m pytest -q -x -p no:cacheprovider -m "gpu and not exhaustive" \
    tests/kernels/persistent/test_on_gpu.py tests/kernels/persistent/test_tf32_on_gpu.py \
    -k "test_shapes and bfloat16 and (clusters or large or beyond) or test_shapes and tf32_on_gpu and clusters or same_bits or given_up" \
    > "$out/tests.txt" 2>&1
echo "tests: exit status $? after $SECONDS s"
grep -E "^(FAILED|ERROR|E  )|passed|failed|%\]" "$out/tests.txt" | head -n 12

timeout $((106 - SECONDS)) python3 benchmarks/loops/copied_loads.py time $((98 - SECONDS)) > "$out/times.txt" 2> "$out/times.err"
echo "times: exit status $? after $SECONDS s"
cat "$out/times.txt"
tail -n 2 "$out/times.err"

if [ $SECONDS -lt 88 ]; then
    timeout $((108 - SECONDS)) python3 -m benchmarks.loops.rows --record "$out/phases.jsonl" --way lstm --case 100-64-1024 > "$out/phases.txt" 2> "$out/phases.err"
    echo "phases: exit status $? after $SECONDS s"
    cat "$out/phases.txt"
fi
