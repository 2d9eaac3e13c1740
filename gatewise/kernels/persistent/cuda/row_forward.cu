// The forward pass of a recurrent layer over a whole sequence, in one launch, for any cell: with several states, parameters,
// more than four sums, and steps that combine the hidden units of a row. For cells without these, forward.cu is faster.
//
// The blocks and the compile-time constants are those of forward.cu, without pairs of layers. PAUSE is the number of clock cycles
// between the store of a statistic and the first load of those of other blocks.
#define WIDTH HIDDEN
#define TILES (UNITS / 4)
#define MARKED 0
#define SPLIT 1
#include "row_sums.cuh"
#include "sequence.cuh"
#include "episodes.cuh"
#include "masks.cuh"
#include "row_memory.cuh"

// Arrays of two pointers are for the two directions. Tokens are in the order of steps or of rows, as forward.cu describes it.
struct Forward {
    Value* gates[2];            // [tokens, 4H]: x W_ih^T, overwritten by the sums of the first tensor if `cells` is not null
    Value* recurrent[2];        // [tokens, 4H]: the sums of the second tensor, written if APART and `cells` is not null
    const Value* weights[2];    // [GATES * SIZE, SIZE]
    const Value* bias_ih[2];    // [GATES * SIZE], or null
    const Value* bias_hh[2];
    const Value* parameters[2]; // [PARAMETERS, SIZE]
    Value* y[2];                // [tokens, y_width], all bits 1 beforehand unless there is a single step: the outputs, padded; with DROPS_HIDDEN as they enter the product
    Value* unpadded[2];         // [tokens, D * SIZE]: the outputs without padding, or null, but not with DROPS_HIDDEN
    float* cells[2];            // [tokens, CARRIED * H]: the carried states of every step, kept for the backward pass, or null
    float* statistics[2];       // [tokens, STATISTICS]: kept, too
    u32* ring;                  // [D, gridDim.y, RING_PAIRS] pairs of words, all bits 1 beforehand
    const Value* h0;            // [D, B, H]; with DROPS_HIDDEN as it enters the product
    const Value* c0;            // [D, B, CARRIED * SIZE]
    Value* h_n;                 // [D, B, SIZE]
    Value* c_n;                 // [D, B, CARRIED * SIZE]
    const i64* lengths;         // [B]: the sequence lengths; read only if RAGGED
    const int* order;           // [B]: the order in which batch rows form groups, or null; read only if RAGGED
    int* failure;               // set to 1 when a block gives up waiting
    int time, batch, groups, first_direction, directions;
    int step, row, y_width;
    u32 patience;
#if RESETS || WITH_MASKS
    const unsigned char* resets;  // [total, B]: the resets of the sequence
    int total;                  // its steps
#endif
#if WITH_MASKS
    MaskArguments masks;
#endif
};
static_assert(MASKS == STEP_MASKS, "the masks of the cell's code");

constexpr int PRODUCT_BYTES = 2 * WARPS * PARTIAL_FLOATS * 4 + LENT_WORDS * 16;
static_assert(PRODUCT_BYTES + (UNITS * UNIT_FLOATS + ROWS * ROW_FLOATS) * 4 == SHARED_BYTES, "the same as in tiling.py");
static_assert(PAIRS * ROWS * QUADS * 2 <= WARPS * PARTIAL_FLOATS, "pairs of quads fit in the memory of a step's partial sums");

extern "C" __global__ void __launch_bounds__(THREADS, 1) recurrent_row_forward(const Forward p) {
    extern __shared__ float4 shared[];
    __shared__ int row_ends[2 * ROWS];
    float* const partials = (float*)shared;  // [2, WARPS, ROWS, PARTIAL_STRIDE]
    uint4* const lent = (uint4*)(partials + 2 * WARPS * PARTIAL_FLOATS);
    float* const extra = (float*)((char*)shared + PRODUCT_BYTES);
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int first_unit = blockIdx.x * UNITS;
    const int direction = p.first_direction + blockIdx.z;
    const bool reverse = direction == 1;
    const u32 step_values = p.step * HIDDEN, y_step_values = (u32)p.step * p.y_width, y_row_values = (u32)p.row * p.y_width;
    const Value* const h0 = p.h0 + (size_t)direction * p.batch * HIDDEN;
    Value* const y = reverse ? p.y[1] : p.y[0];
    Value* const gates = reverse ? p.gates[1] : p.gates[0];
    Value* const recurrent = reverse ? p.recurrent[1] : p.recurrent[0];
    Value* const unpadded = reverse ? p.unpadded[1] : p.unpadded[0];
    float* const cells = reverse ? p.cells[1] : p.cells[0];
    float* const statistics = reverse ? p.statistics[1] : p.statistics[0];

    Weights weights;
    const Value* const source = reverse ? p.weights[1] : p.weights[0];
    load_weights(weights, lent, [](int) {}, [&](int tile, int span) -> Pair {
        auto words_at = [&](int row, int k) {
            const int unit = first_unit + row / 4, gate = gate_of(row & 3, false);
            return load_weight_words(source + (size_t)(gate * SIZE + unit) * SIZE, k, gate >= 0 && is_unit(unit));
        };
        const uint4 upper = words_at(tile * 16 + (lane >> 2), depth_of(span));
        const uint4 lower = words_at(tile * 16 + (lane >> 2) + 8, depth_of(span));
        return {{make_uint4(upper.x, lower.x, upper.y, lower.y), make_uint4(upper.z, lower.z, upper.w, lower.w)}};
    });
    const UnitValues unit_values = {extra + ROWS * ROW_FLOATS};
    unit_values.read(reverse ? p.bias_ih[1] : p.bias_ih[0], reverse ? p.bias_hh[1] : p.bias_hh[0], reverse ? p.parameters[1] : p.parameters[0], first_unit);
    Patience patience = {p.patience, 0, false};
    Masks masks(p, direction, first_unit);
    RowUnits units = {p.ring + (size_t)(direction * gridDim.y + blockIdx.y) * RING_PAIRS * 2, (TwoNumbers*)extra, first_unit, 0, nullptr, &patience};
    int parity = 0;

    for (int turn = 0, group = blockIdx.y; group < p.groups; group = group_of(++turn)) {
        const int first_row = group * ROWS;
        const int steps = read_ends(row_ends, p.lengths, p.order, 0, first_row, p.batch, p.time);
        const Ends ends = {row_ends, p.time, first_row, p.batch};
        Episodes episodes(p, 0, reverse);
        episodes.start(ends, reverse ? steps - 1 : 0, reverse ? steps - 2 : 1, parity);
        masks.start(ends, direction, first_unit, reverse ? steps - 1 : 0, reverse ? steps - 2 : 1);
        bool inside[CELLS];
        // The index of a cell's values at the first step: in tensors [tokens, 4H], and in the outputs.
        u32 four_own[CELLS], y_own[CELLS];
        float state[CELLS][CARRIED];
        FourGates input[CELLS], coming[CELLS];  // the input's part of the gate sums of the next step, and of the one after it, as loaded
        auto load = [&](int cell, int step) {
            const int t = reverse ? steps - 1 - step : step;
            return inside[cell] && step < steps ? load_gates(step_of(gates, t, 4 * step_values) + four_own[cell]) : four_zeros();
        };
#pragma unroll
        for (int cell = 0; cell < CELLS; ++cell) {
            const Place at = place_of(cell);
            const int unit = first_unit + at.unit, n = ends.batch_row(at.exists ? at.row : 0);
            inside[cell] = at.exists && has_place(unit) && first_row + at.row < p.batch;
            four_own[cell] = gates_place(n * p.row, unit);
            y_own[cell] = n * y_row_values + unit;
#pragma unroll
            for (int i = 0; i < CARRIED; ++i)
                state[cell][i] = inside[cell] && unit < SIZE ? widened(p.c0[((size_t)(direction * p.batch + n) * CARRIED + i) * SIZE + unit]) : 0.f;
            input[cell] = gathered(load(cell, 0));
            if (EARLIER == 2) coming[cell] = load(cell, 1);
        }
        auto row_at = [&](int row, int step) -> Row {
            const int t = reverse ? steps - 1 - step : step, before = reverse ? t + 1 : t - 1;
            const u32 n = min(ends.batch_row(row), p.batch - 1);
            const bool polled = step > 0 && step < steps && (!RAGGED || max(t, before) < ends.of(row));
            const u32 place = n * (polled ? y_row_values : HIDDEN) + depth_of(0);
            return {(polled ? step_of(y, before, y_step_values) : h0) + place, polled, !RAGGED || t < ends.of(row)};
        };
        InFlight words;
        Scales scales;
        scales.start();
        begin_product(words, row_at, 0);
        for (int step = 0; step < steps; ++step, parity ^= 1, ++units.step) {
            const int t = reverse ? steps - 1 - step : step;
            Value* const now = step_of(y, t, y_step_values);
            float* const sums = partials + parity * WARPS * PARTIAL_FLOATS;
            units.quads = (TwoNumbers*)(partials + (parity ^ 1) * WARPS * PARTIAL_FLOATS);
            finish_product(words, weights, row_at, step, sums + warp * PARTIAL_FLOATS, patience, scales);
            __syncthreads();
            // First the step, then the stores that other blocks wait for, then those for the backward pass.
            Given given[CELLS];
            bool active[CELLS];
#pragma unroll
            for (int cell = 0; cell < CELLS; ++cell) {
                const Place at = place_of(cell);
                const int unit = at.exists ? at.unit : 0;
                active[cell] = inside[cell] && is_unit(first_unit + at.unit) && (!RAGGED || t < ends.of(at.row));
                const bool begins = episodes.begins(at, parity);
                const float4 product = summed(sums, at.exists ? at.row : 0, unit * 4);
                Gates part = widened(input[cell]);
#pragma unroll
                for (int sum = 0; sum < SUMS; ++sum) {
                    const bool multiplied = recurrent_column(sum) >= 0 && !begins;
                    given[cell].sums[sum] = (multiplied ? element(product, recurrent_column(sum)) : 0.f) +
                                            (input_column(sum) >= 0 ? element(part, input_column(sum)) : 0.f) + unit_values.bias(sum, unit);
                }
#pragma unroll
                for (int i = 0; i < CARRIED; ++i) given[cell].states[i] = begins ? initial_state(i) : state[cell][i];
                unit_values.load_parameters(given[cell], unit);
#if STEP_MASKS
#pragma unroll
                for (int i = 0; i < MASKS; ++i) given[cell].masks[i] = masks.of(cell).of_cell(i);
#endif
            }
            Returned returned[CELLS];
            float found[CELLS][STATISTICS + 1];
            step_of_row(given, returned, found, units);
            u32 output[CELLS];
#pragma unroll
            for (int cell = 0; cell < CELLS; ++cell) {
                if (!warp_owns(cell)) continue;
#pragma unroll
                for (int i = 0; i < CARRIED; ++i)
                    if (active[cell]) state[cell][i] = i < STATES ? returned[cell].states[i] : returned[cell].hidden;
                output[cell] = exchanged(DROPS_HIDDEN ? returned[cell].hidden * masks.factor(cell) : returned[cell].hidden, active[cell]);
            }
#pragma unroll
            for (int cell = 0; cell < CELLS; ++cell)
                if (inside[cell] && lane % VALUES_PER_WORD == 0) store_exchanged(now + y_own[cell], output[cell]);
#pragma unroll
            for (int cell = 0; cell < CELLS; ++cell) {
                if (!warp_owns(cell)) continue;
                input[cell] = gathered(EARLIER == 2 ? coming[cell] : load(cell, step + 1));
                if (EARLIER == 2) coming[cell] = load(cell, step + 2);
                if (inside[cell] && step + FETCHED_AHEAD < steps) {
                    const int later = reverse ? t - FETCHED_AHEAD : t + FETCHED_AHEAD;
                    prefetch_gates(step_of(gates, later, 4 * step_values) + four_own[cell]);
                }
                masks.advance(ends, first_unit, cell, reverse ? t - 1 : t + 1, reverse ? t - 2 : t + 2, reverse ? t - FETCHED_AHEAD : t + FETCHED_AHEAD);
            }
            if (unpadded) {
#pragma unroll
                for (int cell = 0; cell < CELLS; ++cell) {
                    const Place at = place_of(cell);
                    if (!inside[cell] || first_unit + at.unit >= SIZE) continue;
                    const size_t token = t * (size_t)p.step + ends.batch_row(at.row) * p.row;
                    unpadded[token * p.directions * SIZE + first_unit + at.unit] = DROPS_HIDDEN ? own_value(active[cell] ? canonical(returned[cell].hidden) : 0u) : own_value(output[cell]);
                }
            }
            if (cells) {
#pragma unroll
                for (int cell = 0; cell < CELLS; ++cell) {
                    if (!warp_owns(cell)) continue;
                    const Place at = place_of(cell);
                    const Stored kept = stored(given[cell].sums);
                    const FourGates first = scattered(kept.first), second = APART ? scattered(kept.second) : four_zeros();
                    // A lane may store sums of its neighbours, which are active even if its own unit does not exist.
                    if (!inside[cell] || (RAGGED && t >= ends.of(at.row))) continue;
                    store_gates(step_of(gates, t, 4 * step_values) + four_own[cell], first);
                    if (APART) store_gates(step_of(recurrent, t, 4 * step_values) + four_own[cell], second);
                    const size_t token = t * (size_t)p.step + ends.batch_row(at.row) * p.row;
#pragma unroll
                    for (int i = 0; i < CARRIED; ++i) cells[(token * CARRIED + i) * HIDDEN + first_unit + at.unit] = state[cell][i];
                    if (first_unit + at.unit == 0)
#pragma unroll
                        for (int i = 0; i < STATISTICS; ++i) statistics[token * STATISTICS + i] = found[cell][i];
                }
            }
            begin_product(words, row_at, step + 1);
            episodes.advance(ends, reverse ? t - 2 : t + 2, parity);
        }
        __syncwarp();  // a neighbouring lane stored some of the last outputs
#pragma unroll
        for (int cell = 0; cell < CELLS; ++cell) {
            if (!inside[cell]) continue;
            const Place at = place_of(cell);
            const int end = ends.of(at.row);
            const int n = ends.batch_row(at.row), unit = first_unit + at.unit;
            Value* const column = y + (size_t)(n * p.row) * p.y_width + unit;
            if (unit < SIZE) {
                const size_t plane = direction * p.batch + n;
                const size_t last = (reverse ? 0 : end - 1) * (size_t)y_step_values;
#if DROPS_HIDDEN
                const size_t token = (reverse ? 0 : end - 1) * (size_t)p.step + n * p.row;
                p.h_n[plane * SIZE + unit] = end ? unpadded[token * p.directions * SIZE + unit] : p.masks.hidden[plane * SIZE + unit];
#else
                p.h_n[plane * SIZE + unit] = end ? *(volatile Value*)(column + last) : h0[n * HIDDEN + unit];
#endif
#pragma unroll
                for (int i = 0; i < CARRIED; ++i) p.c_n[(plane * CARRIED + i) * SIZE + unit] = (Value)canonical(state[cell][i]);
            }
            if (RAGGED && unpadded && unit < SIZE)
                for (int t = steps; t < p.time; ++t) unpadded[(t * (size_t)p.step + n * p.row) * p.directions * SIZE + unit] = 0;
        }
#if RAGGED
        fill_beyond(y, y_step_values, y_row_values, ends, first_unit, steps);
#endif
    }
    if (patience.lost) *(volatile int*)p.failure = 1;
}
