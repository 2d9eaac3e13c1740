// The backward pass of a recurrent layer over a whole sequence, in one launch, for any cell; see row_forward.cu.
//
// The blocks and the compile-time constants are those of backward.cu and row_forward.cu, without pairs of layers.
#define WIDTH (4 * HIDDEN / SPLIT)
#define TILES ((SPLIT * UNITS + 15) / 16)
#define MARKED SCALED
#include "row_sums.cuh"
#include "sequence.cuh"
#include "episodes.cuh"
#include "masks.cuh"
#include "row_memory.cuh"
#if VALUE_BYTES == 4
constexpr int STAGING_BYTES = 0;
#else
#include "staging.cuh"
constexpr int STAGING_BYTES = WARPS * STAGED * SPAN_PITCH;
#endif
constexpr int SUM_BYTES = 2 * WARPS * PARTIAL_FLOATS * 4;
constexpr int WORKING_BYTES = SUM_BYTES > STAGING_BYTES ? SUM_BYTES : STAGING_BYTES;  // of shared memory
#if SPLIT > 1
#include "cluster.cuh"

constexpr int RECEIVED = SPLIT * ROWS * UNITS;  // floats a block receives in a step
#else
constexpr int RECEIVED = 0;
#endif
constexpr int PRODUCT_BYTES = WORKING_BYTES + LENT_WORDS * 16 + 2 * RECEIVED * 4;
constexpr int CELL_FLOATS = PARAMETERS + SUMS;  // of each cell: the gradients of the parameters and the sums, over all steps
static_assert(PRODUCT_BYTES + (UNITS * UNIT_FLOATS + ROWS * ROW_FLOATS + ROWS * UNITS * CELL_FLOATS) * 4 == SHARED_BYTES, "the same as in tiling.py");
static_assert(PAIRS * ROWS * QUADS * 2 <= WARPS * PARTIAL_FLOATS, "pairs of quads fit in the memory of a step's partial sums");

// Arrays of two pointers are for the two directions. Tokens are in the order of steps or of rows, as backward.cu describes it.
struct Backward {
    const Value* weights[2];     // [GATES * SIZE, SIZE]
    const Value* bias_ih[2];     // [GATES * SIZE], or null
    const Value* bias_hh[2];
    const Value* parameters[2];  // [PARAMETERS, SIZE]
    const Value* gates[2];       // [tokens, 4H]: the kept sums of the first tensor
    const Value* recurrent[2];   // [tokens, 4H]: those of the second tensor; read only if APART
    const float* cells[2];       // [tokens, CARRIED * H]: the kept states
    const float* statistics[2];  // [tokens, STATISTICS]: the kept statistics
    const Value* dy[2];          // [tokens, D * SIZE], or null for zeros
    Value* dgates[2];            // [tokens, 4H], all bits 1 beforehand: the gradients of the sums that have a recurrent product
    Value* dinput[2];            // [tokens, 4H]: the gradients of the sums of the first tensor; written only if APART
    float* dvalues;              // [gridDim.y, D, CELL_FLOATS, H]: the gradients of parameters and sums, added up over each block's rows
    u32* ring;                   // [D, gridDim.y, RING_PAIRS] pairs of words, all bits 1 beforehand
    const Value* c0;             // [D, B, CARRIED * SIZE]
    const Value* dh_n;           // [D, B, SIZE], or null for zeros
    const Value* dc_n;           // [D, B, CARRIED * SIZE], or null for zeros
    Value* dh0;                  // [D, B, SIZE]
    Value* dc0;                  // [D, B, CARRIED * SIZE]
    const i64* lengths;          // [B]: the sequence lengths; read only if RAGGED
    const int* order;            // [B]: the order in which batch rows form groups, or null; read only if RAGGED
    int* failure;                // set to 1 when a block gives up waiting
    int time, batch, groups, first_direction, directions;
    int step, row;
    u32 patience;
#if RESETS || WITH_MASKS
    const unsigned char* resets;  // [total, B]: the resets of the sequence
    int total;                   // its steps
#endif
#if WITH_MASKS
    MaskArguments masks;
#endif
};
static_assert(MASKS == STEP_MASKS, "the masks of the cell's code");

// The values that a cell reads at one step.
struct Inputs {
    FourGates first, second;
    float before[CARRIED];  // the carried states of the step before
    u32 dy;                 // the gradient of the output
};

constexpr bool FETCHES = !EXACT;  // exact products leave no registers for prefetching

extern "C" __global__ void __launch_bounds__(THREADS, 1) recurrent_row_backward(const Backward p) {
    extern __shared__ float4 shared[];
    __shared__ int row_ends[2 * ROWS];
    float* const partials = (float*)shared;  // [2, WARPS, ROWS, PARTIAL_STRIDE]
    uint4* const lent = (uint4*)((char*)shared + WORKING_BYTES);
    float* const extra = (float*)((char*)shared + PRODUCT_BYTES);
#if SPLIT > 1
    __shared__ u64 arrival;
    float* const received = (float*)(lent + LENT_WORDS);  // [2, SPLIT, ROWS, UNITS]
    const u32 rank = cluster_rank();
    if (threadIdx.x == 0) initialise_arrival(&arrival);
    arrive_at_cluster_barrier();
#else
    const u32 rank = 0;
#endif
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int first_unit = blockIdx.x * UNITS;
    const int direction = p.first_direction + blockIdx.z;
    const bool reverse = direction == 1;
    const Value* const dy = reverse ? p.dy[1] : p.dy[0];
    const u32 step_values = p.step * HIDDEN, dy_step_values = p.step * p.directions * SIZE;
    const Value* const gates = reverse ? p.gates[1] : p.gates[0];
    const Value* const recurrent_sums = reverse ? p.recurrent[1] : p.recurrent[0];
    const float* const cells = reverse ? p.cells[1] : p.cells[0];
    Value* const dgates = reverse ? p.dgates[1] : p.dgates[0];
    Value* const dinput = reverse ? p.dinput[1] : p.dinput[0];

    // The rows of W_hh run along the units; the columns of a tile do.
    Weights weights;
    const int tile_units = first_unit - (int)rank * UNITS;  // the first unit of the tiles
    const Value* const matrix = (reverse ? p.weights[1] : p.weights[0]) + tile_units;
    const int first_sum = (int)rank * (4 / SPLIT);
#if VALUE_BYTES == 4
    load_weights(weights, lent, [](int) {}, [&](int tile, int span) -> Pair {
        const int depth = depth_of(span), sum = (SUMS_ARE_GATES && HIDDEN == SIZE) || SPLIT == 4 ? 0 : depth / HIDDEN;
        const int within = depth - sum * HIDDEN, gate = gate_of(first_sum + sum, false);
        const int column = tile * 16 + (lane >> 2);
        const Value* const from = matrix + (size_t)(gate * SIZE + within) * SIZE + column;
        u32 turned[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int k = i >> 1, further = (i & 1) * 8;
            const bool exists = (WARPS * SPANS * SPAN == WIDTH || depth + k < WIDTH) && (HIDDEN == SIZE || within + k < SIZE) &&
                                (SUMS_ARE_GATES || gate >= 0) && is_unit(tile_units + column + further);
            turned[i] = exists ? from[k * SIZE + further] : 0u;
        }
        return {{make_uint4(turned[0], turned[1], turned[2], turned[3]), make_uint4(turned[4], turned[5], turned[6], turned[7])}};
    });
#else
    const Staging staging = {(char*)shared + warp * STAGED * SPAN_PITCH, matrix, first_sum, false};
    load_weights(weights, lent, [&](int span) { staging.arrive(span, tile_units); }, [&](int tile, int span) { return staging.pair_at(tile, span); });
#endif
    RowStatistics statistics = {reverse ? p.statistics[1] : p.statistics[0], extra + 2 * RowUnits::SHARED_PAIRS};
    const UnitValues unit_values = {extra + ROWS * ROW_FLOATS};
    unit_values.read(reverse ? p.bias_ih[1] : p.bias_ih[0], reverse ? p.bias_hh[1] : p.bias_hh[0], reverse ? p.parameters[1] : p.parameters[0], first_unit);
    float* const totals = unit_values.values + UNITS * UNIT_FLOATS;  // [CELL_FLOATS, ROWS, UNITS]
    for (int i = threadIdx.x; i < CELL_FLOATS * ROWS * UNITS; i += THREADS) totals[i] = 0.f;
    Patience patience = {p.patience, 0, false};
    Masks masks(p, direction, first_unit);
    RowUnits units = {p.ring + (size_t)(direction * gridDim.y + blockIdx.y) * RING_PAIRS * 2, (TwoNumbers*)extra, first_unit, 0, nullptr, &patience};
    int parity = 0;
#if SPLIT > 1
    await_cluster_barrier();
#endif
    __syncthreads();  // the weights were staged in the memory of the partial sums

    for (int turn = 0, group = blockIdx.y; group < p.groups; group = group_of(++turn)) {
        const int first_row = group * ROWS;
        const int steps = read_ends(row_ends, p.lengths, p.order, 0, first_row, p.batch, p.time);
        const Ends ends = {row_ends, p.time, first_row, p.batch};
        Episodes episodes(p, 0, reverse);
        episodes.start(ends, reverse ? 0 : steps - 1, reverse ? 1 : steps - 2, parity);
        masks.start(ends, direction, first_unit, reverse ? 0 : steps - 1, reverse ? 1 : steps - 2);
        statistics.load(ends, reverse ? 0 : steps - 1, p.step, p.row);
        statistics.store(parity);
        statistics.load(ends, reverse ? 1 : steps - 2, p.step, p.row);
        bool inside[CELLS];
        u32 own[CELLS], four_own[CELLS];  // the index of a cell's values at the first step, in tensors [tokens, CARRIED * H] and [tokens, 4H]
        float dstate[CELLS][CARRIED];
        Inputs input[CELLS], coming[CELLS];  // the values for the next step, and for the one after it, as loaded
        auto own_state = [&](Place at, int i) { return (((size_t)direction * p.batch + ends.batch_row(at.row)) * CARRIED + i) * SIZE + first_unit + at.unit; };
        auto own_hidden = [&](Place at) { return ((size_t)direction * p.batch + ends.batch_row(at.row)) * SIZE + first_unit + at.unit; };
        auto is_real = [&](Place at) { return first_unit + at.unit < SIZE; };
        auto dy_column = [&](Place at) { return (u32)(ends.batch_row(at.row) * p.row * p.directions * SIZE + first_unit + at.unit); };
        auto cells_at = [&](int t) { return cells + (size_t)t * step_values * CARRIED; };
        auto load = [&](int cell, int step) -> Inputs {
            const int t = reverse ? step : steps - 1 - step;
            Inputs found = {four_zeros(), four_zeros(), {}, 0};
            if (!inside[cell] || step >= steps) return found;
            const Place at = place_of(cell);
            const bool first = reverse ? t + 1 >= ends.of(at.row) : t == 0;
            found.first = load_gates(step_of(gates, t, 4 * step_values) + four_own[cell]);
            if (APART) found.second = load_gates(step_of(recurrent_sums, t, 4 * step_values) + four_own[cell]);
            if (!is_real(at)) return found;
#pragma unroll
            for (int i = 0; i < CARRIED; ++i)
                found.before[i] = first ? widened(p.c0[own_state(at, i)]) : cells_at(reverse ? t + 1 : t - 1)[own[cell] + i * HIDDEN];
            if (dy) found.dy = step_of(dy, t, dy_step_values)[dy_column(at)];
            return found;
        };
        auto arrived = [&](Inputs found) {
            found.first = gathered(found.first);
            if (APART) found.second = gathered(found.second);
            return found;
        };
#pragma unroll
        for (int cell = 0; cell < CELLS; ++cell) {
            const Place at = place_of(cell);
            const int unit = first_unit + at.unit, n = ends.batch_row(at.exists ? at.row : 0);
            inside[cell] = at.exists && has_place(unit) && first_row + at.row < p.batch;
            own[cell] = n * p.row * CARRIED * HIDDEN + unit;
            four_own[cell] = gates_place(n * p.row, unit);
#pragma unroll
            for (int i = 0; i < CARRIED; ++i)
                dstate[cell][i] = inside[cell] && is_real(at) && p.dc_n ? widened(p.dc_n[own_state(at, i)]) : 0.f;
            input[cell] = arrived(load(cell, 0));
            if (EARLIER == 2) coming[cell] = load(cell, 1);
        }
        auto row_at = [&](int row, int step) -> Row {
            const int after = reverse ? step - 1 : steps - step;  // the step visited before
            const u32 n = min(ends.batch_row(row), p.batch - 1);
            const bool polled = step > 0 && step <= steps && (!RAGGED || after < ends.of(row));
            const u32 place = n * (p.row * 4 * HIDDEN) + rank * WIDTH + depth_of(0);
            return {step_of(dgates, polled ? after : 0, 4 * step_values) + place, polled, polled};
        };
        InFlight words;
        Scales scales;
        scales.start();
        begin_product(words, row_at, 0);
        // There is one more step than the sequence has, which computes the gradients of the initial states.
        for (int step = 0; step <= steps; ++step, parity ^= 1) {
            const int t = reverse ? step : steps - 1 - step;
            float* const sums = partials + parity * WARPS * PARTIAL_FLOATS;
            units.quads = (TwoNumbers*)(partials + (parity ^ 1) * WARPS * PARTIAL_FLOATS);
            finish_product(words, weights, row_at, step, sums + warp * PARTIAL_FLOATS, patience, scales);
            __syncthreads();
#if SPLIT > 1
            float* const inbox = received + parity * RECEIVED;
            if (threadIdx.x == 0) expect_bytes(&arrival, RECEIVED * 4);
#pragma unroll
            for (int first = 0; first < RECEIVED / 4; first += THREADS) {
                const int item = first + threadIdx.x;
                if (first + THREADS > RECEIVED / 4 && item >= RECEIVED / 4) continue;
                const int row = item / (SPLIT * UNITS / 4), column = item % (SPLIT * UNITS / 4) * 4;
                const u32 to = column / UNITS;
                send(address_in(shared_address(inbox + (rank * ROWS + row) * UNITS + column % UNITS), to),
                     summed(sums, row, column), address_in(shared_address(&arrival), to));
            }
            // This wait has no limit, as in backward.cu.
            if (warp_owns(0))
                while (!has_arrived(&arrival, parity)) {}
#endif
            Given given[CELLS], grads[CELLS];
            Returned above[CELLS];
            float found[CELLS][STATISTICS + 1];
            bool active[CELLS];
#pragma unroll
            for (int cell = 0; cell < CELLS; ++cell) {
                const Place at = place_of(cell);
                const int row = at.exists ? at.row : 0, end = ends.of(row);
                const bool start = !RAGGED ? step == 0 : reverse ? t == 0 : t + 1 == end;
                const bool finish = !RAGGED ? step == steps : reverse ? t == end : t < 0;
                active[cell] = inside[cell] && is_real(at) && (RAGGED ? t >= 0 && t < end : step < steps);
                float recurrent = 0.f;
                if (at.exists) {
#if SPLIT > 1
#pragma unroll
                    for (int from = 0; from < SPLIT; ++from) recurrent += inbox[(from * ROWS + at.row) * UNITS + at.unit];
                    if (patience.lost) recurrent = Float32::not_a_number();  // some of the sums never arrived
#else
                    const float* sum = sums + at.row * PARTIAL_STRIDE + at.unit;
#pragma unroll
                    for (int part = 0; part < WARPS; ++part) recurrent += sum[part * PARTIAL_FLOATS];
#endif
                }
#if DROPS_HIDDEN
                recurrent *= masks.factor(cell);
#endif
                // The step visited before did not read the states of this one.
                if (episodes.followed(at, parity)) {
                    recurrent = 0.f;
#pragma unroll
                    for (int i = 0; i < CARRIED; ++i) dstate[cell][i] = 0.f;
                }
                // At a row's first step here, this gradient is that of its final state.
                if (inside[cell] && start) recurrent = p.dh_n && is_real(at) ? widened(p.dh_n[own_hidden(at)]) : 0.f;
                if (CARRIED > STATES) recurrent += dstate[cell][CARRIED - 1];
                if (inside[cell] && finish && is_real(at)) {
                    p.dh0[own_hidden(at)] = (Value)canonical(recurrent);
#pragma unroll
                    for (int i = 0; i < CARRIED; ++i) p.dc0[own_state(at, i)] = (Value)canonical(dstate[cell][i]);
                }
                const Inputs& in = input[cell];
                const bool begins = episodes.begins(at, parity);
                load_stored(given[cell].sums, {widened(in.first), APART ? widened(in.second) : Gates{0.f, 0.f, 0.f, 0.f}});
#pragma unroll
                for (int i = 0; i < CARRIED; ++i) given[cell].states[i] = begins ? initial_state(i) : in.before[i];
                unit_values.load_parameters(given[cell], at.exists ? at.unit : 0);
#if STEP_MASKS
#pragma unroll
                for (int i = 0; i < MASKS; ++i) given[cell].masks[i] = masks.of(cell).of_cell(i);
#endif
#pragma unroll
                for (int i = 0; i < STATISTICS; ++i) found[cell][i] = statistics.of(row, i, parity);
                above[cell].hidden = recurrent + widened(in.dy);
#pragma unroll
                for (int i = 0; i < STATES; ++i) above[cell].states[i] = dstate[cell][i];
            }
            if (step == steps) break;
            adjoint_of_row(given, above, grads, found, units);
            ++units.step;
            // First the stores that other blocks wait for, then the others, then the loads for later steps.
#pragma unroll
            for (int cell = 0; cell < CELLS; ++cell) {
                if (!warp_owns(cell)) continue;
                const Place at = place_of(cell);
                const Stored gradients = stored(grads[cell].sums);
                const FourGates exchange = exchanged(APART ? gradients.second : gradients.first, active[cell]);
                if (inside[cell]) store_exchanged_gates(step_of(dgates, t, 4 * step_values), ends.batch_row(at.row) * p.row, first_unit + at.unit, exchange);
            }
#pragma unroll
            for (int cell = 0; cell < CELLS; ++cell) {
                if (!warp_owns(cell)) continue;
                const Place at = place_of(cell);
                if (APART) {
                    const FourGates gradients = exchanged(stored(grads[cell].sums).first, active[cell]);
                    if (inside[cell]) store_exchanged_gates(step_of(dinput, t, 4 * step_values), ends.batch_row(at.row) * p.row, first_unit + at.unit, gradients);
                }
                if (!active[cell]) continue;
#pragma unroll
                for (int i = 0; i < CARRIED; ++i) dstate[cell][i] = grads[cell].states[i];
#pragma unroll
                for (int i = 0; i < PARAMETERS; ++i) totals[(i * ROWS + at.row) * UNITS + at.unit] += grads[cell].parameters[i];
                if (p.bias_ih[0])
#pragma unroll
                    for (int i = 0; i < SUMS; ++i) totals[((PARAMETERS + i) * ROWS + at.row) * UNITS + at.unit] += grads[cell].sums[i];
            }
#pragma unroll
            for (int cell = 0; cell < CELLS; ++cell) {
                if (!warp_owns(cell)) continue;
                input[cell] = arrived(EARLIER == 2 ? coming[cell] : load(cell, step + 1));
                if (EARLIER == 2) coming[cell] = load(cell, step + 2);
                if (FETCHES && inside[cell] && step + FETCHED_AHEAD < steps) {
                    const int later = reverse ? t + FETCHED_AHEAD : t - FETCHED_AHEAD;
                    prefetch_gates(step_of(gates, later, 4 * step_values) + four_own[cell]);
                    if (APART) prefetch_gates(step_of(recurrent_sums, later, 4 * step_values) + four_own[cell]);
#pragma unroll
                    for (int i = 0; i < CARRIED; ++i) prefetch(cells_at(later) + own[cell] + i * HIDDEN);
                    if (dy && is_real(place_of(cell))) prefetch(step_of(dy, later, dy_step_values) + dy_column(place_of(cell)));
                }
                masks.advance(ends, first_unit, cell, reverse ? t + 1 : t - 1, reverse ? t + 2 : t - 2, reverse ? t + FETCHED_AHEAD : t - FETCHED_AHEAD);
            }
            begin_product(words, row_at, step + 1);
            episodes.advance(ends, reverse ? t + 2 : t - 2, parity);
            statistics.store(parity ^ 1);
            statistics.load(ends, reverse ? t + 2 : t - 2, p.step, p.row);
        }
        parity ^= 1;  // the loop ends before it changes
#if RAGGED
        for (int gate = 0; gate < 4; ++gate) {
            fill_beyond(dgates + gate * HIDDEN, 4 * step_values, 4 * HIDDEN * p.row, ends, first_unit, steps);
            if (APART) fill_beyond(dinput + gate * HIDDEN, 4 * step_values, 4 * HIDDEN * p.row, ends, first_unit, steps);
        }
#endif
    }
    __syncthreads();
    for (int i = threadIdx.x; i < CELL_FLOATS * UNITS; i += THREADS) {
        const int value = i / UNITS, unit = i % UNITS;
        if (first_unit + unit >= HIDDEN) continue;
        float total = 0.f;
        for (int row = 0; row < ROWS; ++row) total += totals[(value * ROWS + row) * UNITS + unit];
        p.dvalues[((blockIdx.y * p.directions + direction) * CELL_FLOATS + value) * HIDDEN + first_unit + unit] = total;
    }
    if (patience.lost) *(volatile int*)p.failure = 1;
#if SPLIT > 1
    cluster_barrier();
#endif
}
