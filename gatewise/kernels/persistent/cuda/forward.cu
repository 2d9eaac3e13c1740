// LSTM over a whole sequence in one launch.
//
// Block (x, y, z) owns hidden units x * UNITS.. of direction z and goes through batch groups y, y + gridDim.y, ... of ROWS
// rows each.
// Compile-time: HIDDEN (a multiple of 8), UNITS (of 4), ROWS (of 8), WARPS, SPANS, RESIDENT, CHUNK, DEPTH, RAGGED, FLOAT16,
// FLOAT32.
#define WIDTH HIDDEN
#define TILES (UNITS / 4)
#if FLOAT32
#define ADDED_TO_ROUND 0x1000u  // hidden states travel in the tensor that is returned, and are rounded when they arrive
#endif
#include "gates.cuh"
#include "sequence.cuh"

struct Forward {
    Value* gates;             // [D, T, B, 4H]: x W_ih^T + biases; the activated gates take its place where `cells` is given
    const Value* weights[2];  // [4H, H] for each direction
    Value* y;                 // [T, B, D * H], filled with ones
    const Value* h0;          // [D, B, H]
    const Value* c0;          // [D, B, H]
    Value* h_n;               // [D, B, H]
    Value* c_n;               // [D, B, H]
    Value* cells;             // [D, T, B, H]: every c_t for the backward pass, or null
    const i64* lengths;       // [B]; read only if RAGGED
    int* failure;             // set to 1 when a wait is given up
    int time, batch, groups, first_direction, directions;
    u32 patience;
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) lstm_forward(const Forward p) {
    extern __shared__ float4 shared[];
    __shared__ int row_ends[ROWS];
    float* const partials = (float*)shared;  // [2, WARPS, ROWS, PARTIAL_STRIDE]
    uint4* const lent = (uint4*)(partials + 2 * WARPS * PARTIAL_FLOATS);
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int first_unit = blockIdx.x * UNITS, direction = p.first_direction + blockIdx.z;
    const bool reverse = direction == 1;
    const int y_stride = p.directions * HIDDEN;
    const size_t plane = (size_t)p.batch * HIDDEN, state = direction * plane;  // of one step
    Value* const y = p.y + direction * HIDDEN;
    Value* const gates = p.gates + state * 4 * p.time;
    Value* const cells = p.cells ? p.cells + state * p.time : nullptr;

    // Tile row r is gate r % 4 of unit r / 4, so that the four sums of a cell lie side by side.
    Weights weights;
    const Value* source = reverse ? p.weights[1] : p.weights[0];
    auto words_at = [&](int row, int k) {
        const int unit = first_unit + row / 4;
        const bool exists = unit < HIDDEN && k < WIDTH;
        return exists ? *(const uint4*)(source + (size_t)((row & 3) * HIDDEN + unit) * HIDDEN + k) : make_uint4(0, 0, 0, 0);
    };
    load_weights(weights, lent, [&](int tile, int span) -> Pair {
        const uint4 upper = words_at(tile * 16 + (lane >> 2), depth_of(span));
        const uint4 lower = words_at(tile * 16 + (lane >> 2) + 8, depth_of(span));
        return {{make_uint4(upper.x, lower.x, upper.y, lower.y), make_uint4(upper.z, lower.z, upper.w, lower.w)}};
    });
    Patience patience = {p.patience, 0, false};
    int parity = 0;

    for (int group = blockIdx.y; group < p.groups; group += gridDim.y) {
        const int first_row = group * ROWS;
        const int steps = read_ends(row_ends, p.lengths, first_row, p.batch, p.time);
        const Ends ends = {row_ends, p.time, p.batch - first_row};
        bool inside[CELLS];
        u32 own[CELLS], four_own[CELLS];  // a cell's place in a plane [B, H], and in [B, 4H] where the lane reads gates
        float c[CELLS];
        FourGates input[CELLS], coming[CELLS];  // the gate sums of the next step, and of the one after it, as they were loaded
        auto load = [&](int cell, int step) {
            const int t = reverse ? steps - 1 - step : step;
            return inside[cell] && step < steps ? load_gates(gates + t * plane * 4 + four_own[cell]) : no_gates();
        };
#pragma unroll
        for (int cell = 0; cell < CELLS; ++cell) {
            const Place at = place_of(cell);
            const int unit = first_unit + at.unit, n = first_row + at.row;
            inside[cell] = at.exists && unit < HIDDEN && n < p.batch;
            own[cell] = n * HIDDEN + unit;
            four_own[cell] = gates_place(n, unit);
            c[cell] = inside[cell] ? widened(p.c0[state + own[cell]]) : 0.f;
            input[cell] = gathered(load(cell, 0));
            coming[cell] = load(cell, 1);
        }
        auto row_at = [&](int row, int step) -> Row {
            const int t = reverse ? steps - 1 - step : step, n = first_row + row, end = ends.of(row);
            if (step >= steps || t >= end) return {nullptr, ABSENT};
            if (reverse ? t + 1 == end : t == 0) return {p.h0 + state + (size_t)n * HIDDEN, FINISHED};
            return {y + (reverse ? t + 1 : t - 1) * plane * p.directions + (size_t)n * y_stride, EXCHANGED};
        };
        InFlight words;
        begin_product(words, [&](int row) { return row_at(row, 0); });
        for (int step = 0; step < steps; ++step, parity ^= 1) {
            const int t = reverse ? steps - 1 - step : step;
            Value* const now = y + t * plane * p.directions;
            float* const sums = partials + parity * WARPS * PARTIAL_FLOATS;
            finish_product(words, weights, [&](int row) { return row_at(row, step); }, sums + warp * PARTIAL_FLOATS, patience);
            __syncthreads();
            // First the arithmetic, then what other blocks wait for, then what only the backward pass needs.
            Gates gate[CELLS];
            u32 output[CELLS];
            bool active[CELLS];
#pragma unroll
            for (int cell = 0; cell < CELLS; ++cell) {
                if (!warp_owns(cell)) continue;
                const Place at = place_of(cell);
                active[cell] = inside[cell] && (!RAGGED || t < ends.of(at.row));
                const float4 sum = summed(sums, at.exists ? at.row : 0, at.unit * 4);
                const Gates in = widened(input[cell]);
                gate[cell] = activated({sum.x + in.i, sum.y + in.f, sum.z + in.g, sum.w + in.o});
                const float updated = next_cell(gate[cell], c[cell]);
                if (active[cell]) c[cell] = updated;
                output[cell] = exchanged(hidden(gate[cell], updated), active[cell]);
            }
#pragma unroll
            for (int cell = 0; cell < CELLS; ++cell)
                if (inside[cell] && lane % VALUES_PER_WORD == 0) {
                    const Place at = place_of(cell);
                    store_exchanged(now + (u32)((first_row + at.row) * y_stride + first_unit + at.unit), output[cell]);
                }
            begin_product(words, [&](int row) { return row_at(row, step + 1); });
#pragma unroll
            for (int cell = 0; cell < CELLS; ++cell) {
                if (!warp_owns(cell)) continue;
                input[cell] = gathered(coming[cell]);
                coming[cell] = load(cell, step + 2);
            }
            if (!cells) continue;
#pragma unroll
            for (int cell = 0; cell < CELLS; ++cell) {
                if (!warp_owns(cell)) continue;
                const FourGates turned = scattered(gate[cell]);
                if (!active[cell]) continue;
                store_gates(gates + t * plane * 4 + four_own[cell], turned);
                cells[t * plane + own[cell]] = (Value)narrowed(c[cell]);
            }
        }
        __syncwarp();  // some of the last outputs were stored by a neighbouring lane
#pragma unroll
        for (int cell = 0; cell < CELLS; ++cell) {
            if (!inside[cell]) continue;
            const Place at = place_of(cell);
            const int end = ends.of(at.row);
            Value* const column = y + (size_t)(first_row + at.row) * y_stride + first_unit + at.unit;
            const size_t last = (reverse ? 0 : end - 1) * plane * p.directions;
            p.h_n[state + own[cell]] = end ? *(volatile Value*)(column + last) : p.h0[state + own[cell]];
            p.c_n[state + own[cell]] = (Value)narrowed(c[cell]);
            if (RAGGED)
                for (int t = steps; t < p.time; ++t) column[t * plane * p.directions] = 0;
        }
    }
    if (patience.lost) *(volatile int*)p.failure = 1;
}
