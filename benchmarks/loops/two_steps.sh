#!/bin/bash
# The two forms in which blocks exchange statistics, on a GPU: loads of the pairs of all blocks, and of totals (statistics.cuh).
#
#     bash benchmarks/loops/two_steps.sh FOLDER
#
# Runs from the root of the repository, in about 80 s and at most 120. FOLDER receives the records and all output. Each form
# runs in a copy of the sources with another limit: no bytes for totals everywhere, a gigabyte for pairs everywhere. GPU tests of
# cells with statistics come first, with totals everywhere; then `benchmarks.loops.rows` in both forms, layer norm LSTM in bf16.
#
# Predictions for an H200: 10 tests pass, in 30 s. Then in microseconds a time step, pairs / totals, the first column from run 12
# of benchmarks/results/loops.jsonl:
#
#                                  row_forward     row_backward    training step
#     100-64-1024 (16 to 32 KB)     9.9 / 7.8      11.8 / 9.8      25.2 / 21.3
#     100-16-1024 (3 to 8 KB)       4.4 / 4.9       5.6 / 6.4      11.3 / 12.5
#
# Clock cycles at 100-64-1024, for each of the four exchanges: with pairs, wait 3,100 to 4,500 and combine 200 to 400; with totals,
# wait 750, combine 250, totals pause 370, totals wait 700, and fewer than 0.5 polls beyond the first ones. Inference as row_forward.
# The limit in selection/rates/rankings (15,000 bytes) is right if 100-64-1024 is faster with totals and 100-16-1024 with pairs.
#
# Measured (runs 14 and 15 of benchmarks/results/loops.jsonl), pairs / totals: 10.4 / 7.7, 12.0 / 9.8 and 25.9 / 20.8 at 100-64-1024;
# 4.7 / 5.5, 5.7 / 6.6 and 11.7 / 13.5 at 100-16-1024. So the limit is right for both.
set -u
out=$(mkdir -p "$1" && cd "$1" && pwd)
copies=$(mktemp -d)
trap 'rm -rf "$copies"' EXIT
export GATEWISE_CACHE=$copies/cache

copy_of() {  # name, the most bytes of pairs
    mkdir "$copies/$1"
    cp -r gatewise benchmarks tests pyproject.toml "$copies/$1"
    local rankings="$copies/$1/gatewise/selection/rates/rankings/nvidia-h200.jsonl"
    sed -i "/persistent statistics/s/\"bytes\": [0-9]*/\"bytes\": $2/" "$rankings"
    grep -q "\"bytes\": $2}" "$rankings" || { echo "the limit of $1 was not changed"; exit 1; }
}

in_copy() {  # name, seconds, module and arguments of python
    (cd "$copies/$1" && PYTHONPATH=$copies/$1:${PYTHONPATH:-} timeout "$2" python -m "${@:3}")
}

copy_of totals 0
copy_of pairs 1000000000
echo "---- tests with totals"
in_copy totals 45 pytest -q -p no:cacheprovider -m "gpu and not exhaustive" tests/kernels/persistent/test_rows_on_gpu.py \
    -k "(clusters or odd or rows-in-turn) and (LayerNormLSTM or (LayerNormGRU and exact)) or same_bits and layer_norm_lstm" > "$out/tests.txt" 2>&1
echo "exit status $? after $SECONDS s"
grep -E "^(FAILED|ERROR|E  )|passed|failed|%\]" "$out/tests.txt" | head -n 20

for form in pairs totals; do
    in_copy "$form" 35 benchmarks.loops.rows --record "$out/$form.jsonl" --way layer_norm_lstm \
        --case 100-64-1024 --case 100-16-1024 > "$out/$form.txt" 2> "$out/$form.err"
    echo "$form: exit status $? after $SECONDS s"
    tail -n 3 "$out/$form.err"
done
for form in pairs totals; do
    echo "---- $form"
    cat "$out/$form.txt"
done
echo "---- us a step"
for form in pairs totals; do
    sed -n "s/^== /$form: /;s/ ([0-9.]* of plain)//p" "$out/$form.txt"
done
