// The forward pass of a recurrent layer over a whole sequence, in one launch.
//
// Block (x, y, z) computes the hidden units from x * UNITS on of direction z, for the batch groups y, y + gridDim.y, ... of
// ROWS rows each.
// The product of a step has the depth H. With SPLIT > 1 the blocks of a cluster share the depth: block r multiplies the hidden
// states from r * H / SPLIT on for the units of the whole cluster, and receives the partial sums of its own units from the
// other blocks.
// With STACKED the launch computes a pair of layers with one direction, the second layer a step behind the first: blocks of
// z = 0 compute the first layer, those of z = 1 multiply its outputs with the input weights of the second layer, and those of
// z = 2 compute the second layer.
//
// Compile-time constants (the tiling, see tiling.py): SIZE (H), HIDDEN (H padded to a multiple of 8), UNITS (a multiple of 4),
// SPLIT (1 or 2), ROWS (a multiple of 8), WARPS, EIGHTS, SPANS, RESIDENT, CHUNK and MOST_AHEAD (see product.cuh), BUFFERS (see
// sequence.cuh), SHARED_BYTES; WARPGROUPS (the product is that of warpgroup_product.cuh); DISTRIBUTED (the BLOCKS of a group of
// rows are one cluster, and exchange values as in distributed_states.cuh); INTERLEAVED and SKIPPED_BEYOND (see sequence.cuh);
// RAGGED (rows have lengths), STACKED; PAUSE (the clock cycles between the stores of a step and the first loads of those of
// other blocks); RESETS (see episodes.cuh); DTYPE (see numbers.cuh), EXACT (see matrix.cuh), ONE_ROW (the batch size is 1);
// with masks, those of masks.cuh.
#define WIDTH (HIDDEN / SPLIT)
#define TILES (SPLIT * UNITS / 4)
#define MARKED 0
#define EARLY_LOADS 1
#include "gate_sums.cuh"
#include "sequence.cuh"
#include "episodes.cuh"
#include "masks.cuh"
#if SPLIT > 1
#include "cluster.cuh"
#elif DISTRIBUTED
#include "distributed_states.cuh"
#endif

// Arrays of two pointers are for the two directions, with STACKED for the two layers of a pair; then D is 2 in the shapes of
// states and 1 in the shapes of columns. A tensor with a value for each token has that of step t and row n at index
// t * step + n * row, so that tokens are in the order of steps or in the order of rows.
struct Forward {
    Value* gates[2];            // [tokens, 4H]: x W_ih^T, overwritten by the kept gates if `keep_gates`
    const Value* weights[2];    // [GATES * SIZE, SIZE]
    const Value* bias_ih[2];    // [GATES * SIZE], or null
    const Value* bias_hh[2];
    Value* y[2];                // [tokens, y_width], all bits 1 beforehand unless DISTRIBUTED or of a single step: the outputs, padded; with DROPS_HIDDEN as they enter the product; with INTERLEAVED the states before the first step and after each, [time + 1, groups * ROWS / 8, y_width / SPAN, 8, SPAN]
    Value* unpadded[2];         // [tokens, D * SIZE]: the outputs without padding, or null, but not with DROPS_HIDDEN or INTERLEAVED
    Value* cells[2];            // [tokens, H]: the state c of every step, kept for the backward pass, or null
    const Value* h0;            // [D, B, H], with INTERLEAVED [D, B, SIZE]; with DROPS_HIDDEN as it enters the product
    const Value* c0;            // [D, B, SIZE]
    Value* h_n;                 // [D, B, SIZE]
    Value* c_n;                 // [D, B, SIZE]
    const i64* lengths;         // [B]: the sequence lengths; read only if RAGGED
    const int* order;           // [B]: the order in which batch rows form groups, or null; read only if RAGGED
    int* failure;               // set to 1 when a block gives up waiting
    int start[2];               // the steps of the sequence before the first one here, for each direction
    int keep_gates;
    int time, batch, groups, first_direction, directions;
    int step, row, y_width;
    u32 patience;
    // Only with STACKED.
    const Value* between;       // [GATES * SIZE, SIZE]: the input weights of the second layer, whose `gates` have all bits 1 beforehand
    Value* dropped;             // all bits 1 beforehand: the outputs of the first layer after dropout, as in `y`; used only with a mask
    const unsigned char* mask;  // the dropout mask between the layers, with step t and row n at t * mask_step + n * mask_row; or null
    int mask_step, mask_row;
    float scale;                // the factor of outputs that survive dropout
#if RESETS || WITH_MASKS
    const unsigned char* resets;  // [total, B]: the resets of the whole sequence
    int total;                  // the steps of the whole sequence
#endif
#if WITH_MASKS
    MaskArguments masks;
#endif
};

constexpr int RECEIVED = (SPLIT - 1) * ROWS * UNITS;  // units' gate sums that a block receives in a step, four floats each
#if !DISTRIBUTED
static_assert(BUFFERS * PARTS * PARTIAL_FLOATS * 4 + LENT_WORDS * 16 + 2 * RECEIVED * 16 == SHARED_BYTES, "the same as in tiling.py");
#endif
static_assert(SPLIT == 1 || (WIDTH * sizeof(Value) % 16 == 0 && WIDTH * SPLIT == HIDDEN), "loads of 16 bytes begin at a block's depth");
static_assert(SPLIT == 1 || !STACKED, "blocks of layers in pairs share no depth");
static_assert(!WITH_MASKS || !STACKED, "layers with masks are computed one by one");
#if INTERLEAVED && (DISTRIBUTED || WARPGROUPS || DROPS_HIDDEN)
#error "INTERLEAVED excludes DISTRIBUTED, WARPGROUPS and DROPS_HIDDEN"
#endif
#if WARPGROUPS
constexpr int MOST_STATIC_BYTES = 2048;  // that tilings leave of a block's memory
#else
constexpr int MOST_STATIC_BYTES = 1024;
#endif
static_assert(!RESETS || 2 * ROWS * 4 + UNITS * 16 + 2 * ROWS <= MOST_STATIC_BYTES, "as much as tilings leave for static memory");

// Loads the weights of the block's tiles from rows of `source`: row r of the tiles is gate sum r % 4 of unit r / 4, so that the
// four sums of a cell are neighbours. The depth begins at `first_depth`.
__device__ __forceinline__ void load_rows(Weights& weights, uint4* lent, const Value* source, const int first_unit, const int first_depth, const bool between, const int lane) {
    auto words_at = [&](int row, int k) {
        const int unit = first_unit + row / 4, gate = gate_of(row & 3, between);
        return load_weight_words(source + (size_t)(gate * SIZE + unit) * SIZE, first_depth + k, gate >= 0 && is_unit(unit) && (SPLIT == 1 || k < WIDTH));
    };
    auto pair_at = [&](int tile, int span) -> Pair {
        const uint4 upper = words_at(tile * 16 + (lane >> 2), depth_of(span));
        const uint4 lower = words_at(tile * 16 + (lane >> 2) + 8, depth_of(span));
        return {{make_uint4(upper.x, lower.x, upper.y, lower.y), make_uint4(upper.z, lower.z, upper.w, lower.w)}};
    };
#if DISTRIBUTED
    load_weights(weights, pair_at);
#else
    load_weights(weights, lent, [](int) {}, pair_at);
#endif
}

// Stores the products of step t with the input weights of the second layer, whose blocks wait for them.
__device__ __forceinline__ void pass_to_second_layer(Value* const gates, float* const sums, const bool (&inside)[CELLS], const u32 (&four_own)[CELLS], const u32 step_values, const int t) {
#pragma unroll
    for (int cell = 0; cell < CELLS; ++cell) {
        if (!warp_owns(cell)) continue;
        const Place at = place_of(cell);
        const float4 sum = summed(sums, at.exists ? at.row : 0, at.unit * 4);
        const FourGates turned = scattered({sum.x, sum.y, sum.z, sum.w});
        if (inside[cell]) store_gates_exchanged(step_of(gates, t, 4 * step_values) + four_own[cell], turned);
    }
}

// Whether there can be outputs without padding. In a loop without other branches, one that is never taken takes time.
constexpr bool MAY_BE_UNPADDED = !DISTRIBUTED || SIZE != HIDDEN || DROPS_HIDDEN;

// Stores the outputs of step t without padding.
__device__ __forceinline__ void store_unpadded(const Forward& p, Value* const unpadded, const u32 (&output)[CELLS], const bool (&inside)[CELLS], const Ends& ends, const int first_unit, const int t) {
#pragma unroll
    for (int cell = 0; cell < CELLS; ++cell) {
        const Place at = place_of(cell);
        if (!inside[cell] || first_unit + at.unit >= SIZE) continue;
        const size_t token = t * (size_t)p.step + ends.batch_row(at.row) * p.row;
        unpadded[token * p.directions * SIZE + first_unit + at.unit] = own_value(output[cell]);
    }
}

#if INTERLEAVED
// Stores the initial hidden states of the block's units, of all its groups of rows, where the first step of each row loads them.
// The states after step t follow those before it; in the reverse direction, it is the other way round.
__device__ __forceinline__ void store_initial_states(const Forward& p, Value* const y, const int direction, const int first_unit, const int skipped, const bool reverse) {
    const Value* const h0 = p.h0 + (size_t)direction * p.batch * SIZE;
    for (int turn = 0, group = blockIdx.y; group < p.groups; group = group_of(++turn))
#pragma unroll
        for (int cell = 0; cell < CELLS; ++cell) {
            if (!warp_owns(cell)) continue;
            const Place at = place_of(cell);
            const int unit = first_unit + at.unit, place = group * ROWS + at.row;
            const bool counts = at.exists && place < p.batch;
            const int n = !counts ? 0 : RAGGED && p.order ? p.order[place] : place;
            const u32 word = exchanged(counts && unit < SIZE ? widened(h0[(size_t)n * SIZE + unit]) : 0.f, true);
            if (!at.exists || !has_place(unit) || threadIdx.x % VALUES_PER_WORD) continue;
            int step = 0;
            if (reverse) step = RAGGED ? (int)max((i64)0, min((i64)p.time, p.lengths[n] - skipped)) : p.time;
            store_exchanged(step_of(y, step, p.groups * ROWS * EXCHANGED_WIDTH) + interleaved_place(group * ROWS, at.row, unit), word);
        }
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT_BLOCKS) recurrent_forward(const Forward p) {
    extern __shared__ float4 shared[];
    __shared__ int row_ends[2 * ROWS];
    __shared__ float4 biases[UNITS];
    float* const partials = (float*)shared;  // [BUFFERS, PARTS, ROWS, PARTIAL_STRIDE]
    uint4* const lent = (uint4*)(partials + BUFFERS * PARTS * PARTIAL_FLOATS);
#if SPLIT > 1 || DISTRIBUTED
    // A block that has all sums of a step can send those of the next one while another block still waits for those of the step,
    // so that the two have barriers and memory of their own.
    __shared__ u64 arrival_of_even;
    __shared__ u64 arrival_of_odd;
    if (threadIdx.x == 0) {
        initialise_arrival(&arrival_of_even);
        initialise_arrival(&arrival_of_odd);
    }
    arrive_at_cluster_barrier();
#endif
#if SPLIT > 1
    float4* const received = (float4*)(lent + LENT_WORDS);  // [2, SPLIT - 1, ROWS, UNITS]
    const u32 rank = cluster_rank();
    u32 exchanges = 0;
#else
    constexpr u32 rank = 0;
#endif
#if DISTRIBUTED
    const States states(lent, Arrivals(&arrival_of_even, &arrival_of_odd));
#endif
    const int part = own_part(), lane = threadIdx.x & 31;
    const int first_unit = blockIdx.x * UNITS;
#if STACKED
    const int direction = (blockIdx.z + 1) / 2;  // the layer; for the blocks between the layers, the second one
    const bool second = direction == 1, between = blockIdx.z == 1, waits = blockIdx.z == 2;
    constexpr bool reverse = false;
#else
    const int direction = p.first_direction + blockIdx.z;
    const bool reverse = direction == 1, second = reverse;
    constexpr bool between = false, waits = false;
#endif
    const u32 step_values = p.step * HIDDEN;
#if INTERLEAVED
    const u32 y_step_values = p.groups * ROWS * EXCHANGED_WIDTH;
    const int y_after = !reverse;  // the states after step t are those of step t + y_after in `y`
#else
    const u32 y_step_values = (u32)p.step * p.y_width, y_row_values = (u32)p.row * p.y_width;
    constexpr int y_after = 0;
    const Value* const h0 = p.h0 + (size_t)direction * p.batch * HIDDEN;
#endif
#if STACKED
    Value* const y = between && p.mask ? p.dropped : second && !between ? p.y[1] : p.y[0];
    const bool drops = p.mask && !second;
#else
    Value* const y = second ? p.y[1] : p.y[0];
#endif
#if DISTRIBUTED
    Value* const gates = kept_pointer(second ? p.gates[1] : p.gates[0]);
#else
    Value* const gates = second ? p.gates[1] : p.gates[0];
#endif
    Value* const cells = second ? p.cells[1] : p.cells[0];
    Value* const unpadded = second ? p.unpadded[1] : p.unpadded[0];
    const int skipped = second ? p.start[1] : p.start[0];

#if INTERLEAVED
    if (!between) store_initial_states(p, y, direction, first_unit, skipped, reverse);  // so that they arrive while the weights are loaded
#endif
    Weights weights;
    const Value* source = between ? p.between : second ? p.weights[1] : p.weights[0];
    load_rows(weights, lent, source, first_unit - (int)rank * UNITS, (int)rank * WIDTH, between, lane);
    read_biases(biases, second ? p.bias_ih[1] : p.bias_ih[0], second ? p.bias_hh[1] : p.bias_hh[0], first_unit);
    Patience patience = {p.patience, 0, false};
    Masks masks(p, direction, first_unit);
    int parity = 0;
#if SPLIT > 1 || DISTRIBUTED
    await_cluster_barrier();
#endif

    for (int turn = 0, group = blockIdx.y; group < p.groups; group = group_of(++turn)) {
        const int first_row = group * ROWS;
        const int steps = read_ends(row_ends, p.lengths, p.order, skipped, first_row, p.batch, p.time);
        const Ends ends = {row_ends, p.time, first_row, p.batch};
        Episodes episodes(p, skipped, reverse);
        episodes.start(ends, reverse ? steps - 1 : 0, reverse ? steps - 2 : 1, parity);
        masks.start(ends, direction, first_unit, reverse ? steps - 1 : 0, reverse ? steps - 2 : 1);
        bool inside[CELLS];
        // The index of a cell's values at the first step: in tensors [tokens, H], [tokens, 4H] and in the outputs.
        u32 own[CELLS], four_own[CELLS], y_own[CELLS];
        float c[CELLS];
#if ZONES_HIDDEN
        float h[CELLS];  // the hidden state of the step before
#endif
        FourGates input[CELLS], coming[CELLS];  // the input's part of the gate sums of the next step, and of the one after it, as loaded
        auto load = [&](int cell, int step) {
            const int t = reverse ? steps - 1 - step : step;
#if STACKED
            return !between && inside[cell] && step < steps ? load_gates_exchanged(step_of(gates, t, 4 * step_values) + four_own[cell]) : four_zeros();
#else
            return inside[cell] && step < steps ? load_gates(step_of(gates, t, 4 * step_values) + four_own[cell]) : four_zeros();
#endif
        };
#pragma unroll
        for (int cell = 0; cell < CELLS; ++cell) {
            const Place at = place_of(cell);
            const int unit = first_unit + at.unit, n = ends.batch_row(at.exists ? at.row : 0);
            inside[cell] = at.exists && has_place(unit) && first_row + at.row < p.batch;
            own[cell] = n * p.row * HIDDEN + unit;
            four_own[cell] = gates_place(n * p.row, unit);
#if INTERLEAVED
            y_own[cell] = interleaved_place(first_row, at.exists ? at.row : 0, unit);
#else
            y_own[cell] = n * y_row_values + unit;
#endif
            c[cell] = inside[cell] && unit < SIZE ? widened(p.c0[(direction * p.batch + n) * SIZE + unit]) : 0.f;
#if ZONES_HIDDEN
            h[cell] = inside[cell] && unit < SIZE ? widened(p.masks.hidden[(direction * p.batch + n) * SIZE + unit]) : 0.f;
#endif
            input[cell] = load(cell, 0);
            if (!waits) input[cell] = gathered(input[cell]);
            if (EARLIER == 2) coming[cell] = load(cell, 1);
        }
#if !DISTRIBUTED
#if INTERLEAVED
        const LanePlaces places(first_row, p.batch, rank * WIDTH);
#endif
        auto row_at = [&](int row, int step) -> Row {
            const int t = reverse ? steps - 1 - step : step, before = between ? t : reverse ? t + 1 : t - 1;
#if INTERLEAVED
            const bool polled = step < steps && (!RAGGED || t < ends.of(row));
            const int from = STACKED && !polled ? 0 : before + y_after;
            return {places.of(step_of(y, from, y_step_values), row), polled, polled};
#else
            const u32 n = min(ends.batch_row(row), p.batch - 1);
            const bool polled = (between || step > 0) && step < steps && (!RAGGED || max(t, before) < ends.of(row));
            const u32 place = n * (polled ? y_row_values : HIDDEN) + rank * WIDTH + depth_of(0);
            return {(polled ? step_of(y, before, y_step_values) : h0) + place, polled, !RAGGED || t < ends.of(row)};
#endif
        };
#endif
#if STACKED
        auto survival = [&](int cell, int step) -> u32 {
            const Place at = place_of(cell);
            if (!drops || !inside[cell] || step >= steps || first_unit + at.unit >= SIZE) return 0;
            return p.mask[step * (size_t)p.mask_step + ends.batch_row(at.row) * (size_t)p.mask_row + first_unit + at.unit];
        };
        u32 survives[CELLS];
#pragma unroll
        for (int cell = 0; cell < CELLS; ++cell) survives[cell] = survival(cell, 0);
#endif
#if DISTRIBUTED
        states.start(lent, [&](int row) -> const Value* { return first_row + row < p.batch ? h0 + (size_t)ends.batch_row(row) * HIDDEN : nullptr; });
        // A row that begins later than others, in the reverse direction, reads the states before its first step.
        u32 initial[CELLS] = {};
#pragma unroll
        for (int cell = 0; cell < CELLS; ++cell)
            if (RAGGED && reverse && inside[cell]) initial[cell] = h0[ends.batch_row(place_of(cell).row) * HIDDEN + first_unit + place_of(cell).unit];
        __syncthreads();
#else
        InFlight words;
        Scales scales;
        scales.start();
        begin_product(words, row_at, 0);
#endif
        for (int step = 0; step < steps; ++step, parity ^= 1) {
            const int t = reverse ? steps - 1 - step : step;
            Value* const now = step_of(y, t + y_after, y_step_values);
            float* const sums = partials + (BUFFERS == 2 ? parity : 0) * PARTS * PARTIAL_FLOATS;
#if STACKED
            // The second layer's inputs come from the blocks between the layers; most have arrived when they are loaded first.
            patience.polls = 0;
#pragma unroll
            for (int cell = 0; cell < CELLS; ++cell) {
                if (!waits || !warp_owns(cell)) continue;
                while (__any_sync(EVERY_LANE, is_unwritten(input[cell])) && patience.is_left()) input[cell] = load(cell, step);
                input[cell] = gathered(input[cell]);
            }
#endif
#if DISTRIBUTED
            if (step > 0) states.arrivals.await(step - 1);
            states.multiply_before(step, weights, sums + part * PARTIAL_FLOATS);
#else
            finish_product(words, weights, row_at, step, sums + part * PARTIAL_FLOATS, patience, scales);
            if (between) begin_product(words, row_at, step + 1);  // these loads delay no other block
#endif
            __syncthreads();
#if STACKED
            if (between) {
                pass_to_second_layer(gates, sums, inside, four_own, step_values, t);
                barrier_if_one_buffer();
                continue;
            }
#endif
#if SPLIT > 1
            float4* const inbox = received + parity * RECEIVED;
            u64* const arrival = parity ? &arrival_of_odd : &arrival_of_even;
            if (threadIdx.x == 0) expect_bytes(arrival, RECEIVED * 16);
#pragma unroll
            for (int first = 0; first < RECEIVED; first += THREADS) {
                const int item = first + threadIdx.x;
                if (first + THREADS > RECEIVED && item >= RECEIVED) continue;
                const int other = item / (ROWS * UNITS), cell = item % (ROWS * UNITS), row = cell / UNITS, unit = cell % UNITS;
                const u32 to = other < rank ? other : other + 1, place = (rank < to ? rank : rank - 1) * ROWS * UNITS + cell;
                send(address_in(shared_address(inbox + place), to), summed(sums, row, (to * UNITS + unit) * 4), address_in(shared_address(arrival), to));
            }
            float4 product_of[CELLS];
#pragma unroll
            for (int cell = 0; cell < CELLS; ++cell) {
                const Place at = place_of(cell);
                if (warp_owns(cell)) product_of[cell] = summed(sums, at.exists ? at.row : 0, (rank * UNITS + at.unit) * 4);
            }
            // This wait has no limit, as in the backward pass.
            if (warp_owns(0))
                while (!has_arrived(arrival, exchanges >> 1 & 1)) {}
            ++exchanges;
#endif
            // First the arithmetic, then the stores that other blocks wait for, then those for the backward pass.
            Gates gate[CELLS];
            u32 output[CELLS];
#if DROPS_HIDDEN
            u32 whole[CELLS];  // the output without dropout
#else
            u32(&whole)[CELLS] = output;
#endif
            bool active[CELLS];
#if INTERLEAVED
            // Rows beyond the batch are stored, too, because other blocks may load them and would wait for them. With lengths
            // no block loads them.
            auto stores = [&](int cell) { return RAGGED ? inside[cell] && active[cell] : place_of(cell).exists && has_place(first_unit + place_of(cell).unit); };
#else
            auto stores = [&](int cell) { return inside[cell]; };
#endif
#pragma unroll
            for (int cell = 0; cell < CELLS; ++cell) {
                if (!warp_owns(cell)) continue;
                const Place at = place_of(cell);
                active[cell] = inside[cell] && (!RAGGED || t < ends.of(at.row));
                const bool begins = episodes.begins(at, parity);
#if SPLIT > 1
                float4 product = product_of[cell];
#pragma unroll
                for (int other = 0; other < SPLIT - 1; ++other) {
                    const float4 part = inbox[(other * ROWS + (at.exists ? at.row : 0)) * UNITS + at.unit];
                    product.x += part.x, product.y += part.y, product.z += part.z, product.w += part.w;
                }
#else
                const float4 product = summed(sums, at.exists ? at.row : 0, at.unit * 4);
#endif
                const float4 sum = begins ? make_float4(0.f, 0.f, 0.f, 0.f) : product;
#if CELL_MASKS
                const Stepped after = stepped(total_sums(sum, widened(input[cell]), biases[at.exists ? at.unit : 0]), begins ? 0.f : c[cell], masks.of(cell));
#else
                const Stepped after = stepped(total_sums(sum, widened(input[cell]), biases[at.exists ? at.unit : 0]), begins ? 0.f : c[cell]);
#endif
                gate[cell] = after.kept;
#if ZONES_HIDDEN
                const float before = begins ? 0.f : CARRIES_HIDDEN ? c[cell] : h[cell];
                const float keeps = masks.of(cell).keeps_hidden(), hidden = keeps * before + (1.f - keeps) * after.hidden;
                if (active[cell]) c[cell] = CARRIES_HIDDEN ? hidden : after.state, h[cell] = hidden;
#else
                const float hidden = after.hidden;
                if (active[cell]) c[cell] = after.state;
#endif
                // Units that pad a row are zeros: their sums are no numbers where a state is infinite.
                const bool counts = active[cell] && (!DISTRIBUTED || SIZE == HIDDEN || first_unit + at.unit < SIZE);
                output[cell] = exchanged(DROPS_HIDDEN ? hidden * masks.factor(cell) : hidden, counts);
#if DROPS_HIDDEN
                whole[cell] = active[cell] ? canonical(hidden) : 0u;
#endif
            }
#if DISTRIBUTED
#pragma unroll
            for (int cell = 0; cell < CELLS; ++cell) {
                u32 word = output[cell];
                if (RAGGED && reverse) word = paired(active[cell] ? (u32)own_value(word) : initial[cell]);
                states.send_row(step, place_of(cell).row, word, step + 1 < steps);
            }
            if (step + 1 < steps) states.expect(step);
#pragma unroll
            for (int cell = 0; cell < CELLS; ++cell) store_exchanged_if(inside[cell] && lane % VALUES_PER_WORD == 0, now + y_own[cell], output[cell]);
#else
#pragma unroll
            for (int cell = 0; cell < CELLS; ++cell)
                if (stores(cell) && lane % VALUES_PER_WORD == 0) store_exchanged(now + y_own[cell], output[cell]);
#if PAUSE
            const long long stored = clock64();
#endif
#endif
#pragma unroll
            for (int cell = 0; cell < CELLS; ++cell) {
                if (!warp_owns(cell)) continue;
                input[cell] = EARLIER == 2 ? coming[cell] : load(cell, step + 1);
                if (!waits) input[cell] = gathered(input[cell]);
                if (EARLIER == 2) coming[cell] = load(cell, step + 2);
                const bool fetches = !waits && inside[cell] && step + FETCHED_AHEAD < steps;
                const int later = reverse ? t - FETCHED_AHEAD : t + FETCHED_AHEAD;
#if DISTRIBUTED
                prefetch_if(fetches, step_of(gates, later, 4 * step_values) + four_own[cell]);
#else
                if (fetches) prefetch_gates(step_of(gates, later, 4 * step_values) + four_own[cell]);
#endif
                masks.advance(ends, first_unit, cell, reverse ? t - 1 : t + 1, reverse ? t - 2 : t + 2, reverse ? t - FETCHED_AHEAD : t + FETCHED_AHEAD);
            }
#if STACKED
            if (drops) {
#pragma unroll
                for (int cell = 0; cell < CELLS; ++cell) {
                    if (!warp_owns(cell)) continue;
                    const float value = widened(own_value(output[cell])) * (survives[cell] ? p.scale : 0.f);
                    const u32 word = exchanged(value, active[cell]);
                    if (stores(cell) && lane % VALUES_PER_WORD == 0) store_exchanged(step_of(p.dropped, t + y_after, y_step_values) + y_own[cell], word);
                    survives[cell] = survival(cell, step + 1);
                }
            }
#endif
            if (MAY_BE_UNPADDED && unpadded) store_unpadded(p, unpadded, whole, inside, ends, first_unit, t);
            if (cells) {
#pragma unroll
                for (int cell = 0; cell < CELLS; ++cell) {
                    if (!warp_owns(cell)) continue;
                    const FourGates turned = scattered(gate[cell]);
#if DISTRIBUTED
                    store_gates_if(active[cell] && p.keep_gates, step_of(gates, t, 4 * step_values) + four_own[cell], turned);
                    store_value_if(active[cell], step_of(cells, t, step_values) + own[cell], (Value)canonical(c[cell]));
#else
                    if (!active[cell]) continue;
                    if (p.keep_gates) store_gates(step_of(gates, t, 4 * step_values) + four_own[cell], turned);
                    step_of(cells, t, step_values)[own[cell]] = (Value)canonical(c[cell]);
#endif
                }
            }
#if PAUSE
            // Loads that begin before other blocks' values are there have to be repeated.
            if (!between && step + 1 < steps) while (clock64() - stored < PAUSE) {}
#endif
#if !DISTRIBUTED
            begin_product(words, row_at, step + 1);
#endif
            episodes.advance(ends, reverse ? t - 2 : t + 2, parity);
            barrier_if_one_buffer();
        }
        if (between) continue;
        __syncwarp();  // a neighbouring lane stored some of the last outputs
#pragma unroll
        for (int cell = 0; cell < CELLS; ++cell) {
            if (!inside[cell]) continue;
            const Place at = place_of(cell);
            const int end = ends.of(at.row);
            const int n = ends.batch_row(at.row), unit = first_unit + at.unit;
            if (unit < SIZE) {
                const size_t own_state = (direction * p.batch + n) * (size_t)SIZE + unit;
#if INTERLEAVED
                p.h_n[own_state] = *(volatile Value*)(step_of(y, reverse ? 0 : end, y_step_values) + y_own[cell]);
#elif DROPS_HIDDEN
                const size_t token = (reverse ? 0 : end - 1) * (size_t)p.step + n * p.row;
                p.h_n[own_state] = end ? unpadded[token * p.directions * SIZE + unit] : p.masks.hidden[own_state];
#else
                const Value* const last = y + (size_t)(n * p.row) * p.y_width + unit + (reverse ? 0 : end - 1) * (size_t)y_step_values;
                p.h_n[own_state] = end ? *(volatile Value*)last : h0[n * HIDDEN + unit];
#endif
                p.c_n[own_state] = (Value)canonical(c[cell]);
            }
            if (RAGGED && unpadded && unit < SIZE)
                for (int t = steps; t < p.time; ++t) unpadded[(t * (size_t)p.step + n * p.row) * p.directions * SIZE + unit] = 0;
        }
#if RAGGED && !INTERLEAVED
        fill_beyond(y, y_step_values, y_row_values, ends, first_unit, steps);
#if STACKED
        if (drops) fill_beyond(p.dropped, y_step_values, y_row_values, ends, first_unit, steps);
#endif
#endif
    }
    if (patience.lost) *(volatile int*)p.failure = 1;
#if SPLIT > 1 || DISTRIBUTED
    cluster_barrier();
#endif
}
