// The backward pass of a recurrent layer over a whole sequence, in one launch: the gradients of the gate sums of all steps.
//
// Block (x, y, z) computes the hidden units from x * UNITS on of direction z, for the batch groups y, y + gridDim.y, ... of
// ROWS rows each.
// dh_t = W_hh^T dgates_{t +- 1} is a product of depth 4H. With SPLIT > 1 the blocks of a cluster share the depth: block r
// multiplies the gates from r * 4 / SPLIT on (with INTERLEAVED all gates of the units from r * H / SPLIT on) for the units of the
// whole cluster, and receives the partial sums of its own units from the other blocks.
// With STACKED the launch computes a pair of layers with one direction, the first layer a step behind the second: blocks of
// z = 0 compute the second layer, those of z = 1 multiply its gradients with its input weights, and those of z = 2 compute
// the first layer.
//
// Compile-time constants (the tiling, see tiling.py): SIZE (H), HIDDEN (H padded to a multiple of 8), UNITS (a multiple of 4),
// SPLIT (1, 2 or 4), ROWS (a multiple of 8), WARPS, EIGHTS, SPANS, RESIDENT, CHUNK and MOST_AHEAD (see product.cuh), BUFFERS (see
// sequence.cuh), STAGED, SHARED_BYTES; DISTRIBUTED (the BLOCKS of a group of rows are one cluster, and exchange values as in
// distributed_gradients.cuh); INTERLEAVED and SKIPPED_BEYOND (see sequence.cuh); RAGGED (rows have lengths), STACKED; PAUSE (the
// clock cycles between the stores of a step and the first loads of those of other blocks); RESETS (see episodes.cuh); DTYPE
// (see numbers.cuh), EXACT (see matrix.cuh), ONE_ROW (the batch size is 1); with masks, those of masks.cuh.
#define WIDTH (4 * HIDDEN / SPLIT)
#define TILES ((SPLIT * UNITS + 15) / 16)
#define MARKED SCALED
#include "gate_sums.cuh"
#include "sequence.cuh"
#include "episodes.cuh"
#include "masks.cuh"
#if DISTRIBUTED
#include "distributed_gradients.cuh"

constexpr int RECEIVED = 0;
static_assert(DISTRIBUTED_BYTES >= ROWS * UNITS * 16, "the gradients of the biases fit in shared memory");
#else
#if VALUE_BYTES == 4
constexpr int STAGING_BYTES = 0;
#else
#include "staging.cuh"
constexpr int STAGING_BYTES = WARPS * STAGED * SPAN_PITCH;
#endif
constexpr int SUM_BYTES = BUFFERS * WARPS * PARTIAL_FLOATS * 4;
constexpr int WORKING_BYTES = SUM_BYTES > STAGING_BYTES ? SUM_BYTES : STAGING_BYTES;  // of shared memory
#if SPLIT > 1
#include "cluster.cuh"

constexpr int RECEIVED = SPLIT * ROWS * UNITS;  // floats a block receives in a step
#else
constexpr int RECEIVED = 0;
#endif
static_assert(WORKING_BYTES + LENT_WORDS * 16 + 2 * RECEIVED * 4 == SHARED_BYTES, "the same as in tiling.py");
static_assert(BUFFERS * WARPS * PARTIAL_FLOATS >= ROWS * UNITS * 4, "the gradients of the biases fit in the memory of the partial sums");
#endif

#if INTERLEAVED && (DISTRIBUTED || VALUE_BYTES == 4)
#error "INTERLEAVED excludes DISTRIBUTED and float32"
#endif

// Arrays of two pointers are for the two directions, with STACKED for the two layers of a pair; then D is 2 in the shapes of
// states and 1 in the shapes of columns. A tensor with a value for each token has that of step t and row n at index
// t * step + n * row, so that tokens are in the order of steps or in the order of rows.
struct Backward {
    const Value* weights[2];  // [GATES * SIZE, SIZE]
    const Value* gates[2];    // [tokens, 4H]: the kept gates
    const Value* cells[2];    // [tokens, H]: the kept states
    const Value* dy[2];       // [tokens, D * SIZE], or null for zeros
    Value* dgates[2];         // [tokens, 4H]: with INTERLEAVED, and if MARKED perhaps, `gates` itself; otherwise all bits 1 beforehand unless DISTRIBUTED
    Value* exchange[2];       // [time, groups * ROWS / 8, 4H / SPAN, 8, SPAN], all bits 1 beforehand: the same gradients for other blocks, those of a unit side by side; used only with INTERLEAVED
    const Value* c0;          // [D, B, SIZE]
    const Value* dh_n;        // [D, B, SIZE], or null for zeros
    const Value* dc_n;        // [D, B, SIZE], or null for zeros; not read if CARRIES_HIDDEN
    Value* dh0;               // [D, B, SIZE]
    Value* dc0;               // [D, B, SIZE]; not written if CARRIES_HIDDEN
    void* bias;               // the gradients of both biases, Value [2, D, 4H]; if gridDim.y > 1 the partial sums of each block's rows, float [gridDim.y, D, 4H]
    Value* dbias_ih[2];       // [GATES * SIZE]: the gradients of the biases, or null: then they remain in `bias`
    Value* dbias_hh[2];
    u32* done;                // [D, gridDim.x], all bits 1 beforehand: counts the blocks of the same units that have written to `bias`
    const i64* lengths;       // [B]: the sequence lengths; read only if RAGGED
    const int* order;         // [B]: the order in which batch rows form groups, or null; read only if RAGGED
    int* failure;             // set to 1 when a block gives up waiting
    int start[2];             // the steps of the sequence before the first one here, for each direction
    int earlier;              // the number of partial sums [D, 4H] of earlier launches in front of `bias`, which are added, too
    int time, batch, groups, first_direction, directions;
    int step, row;
    u32 patience;
    // Only with STACKED.
    const Value* between;     // [GATES * SIZE, SIZE]: the input weights of the second layer
    Value* dy_between;        // [tokens, H], all bits 1 beforehand: the gradients of the first layer's outputs
    const unsigned char* mask;  // the dropout mask between the layers, with step t and row n at t * mask_step + n * mask_row; or null
    int mask_step, mask_row;
    float scale;              // the factor of outputs that survive dropout
#if RESETS || WITH_MASKS
    const unsigned char* resets;  // [total, B]: the resets of the whole sequence
    int total;                // the steps of the whole sequence
#endif
#if WITH_MASKS
    MaskArguments masks;
#endif
};

// The values that a cell reads at one step.
struct Inputs {
    FourGates gates;
    u32 before, dy;  // the state c of the step before, the gradient of the output
};

// Whether the loop has what is done in the first and in the last step of a row alone. With DISTRIBUTED all blocks would wait for it
// in every step, so that it is outside of the loop where all rows begin and end at the same steps.
constexpr bool ENDS_IN_LOOP = RAGGED || !DISTRIBUTED;
constexpr bool FETCHES = !EXACT;  // exact products leave no registers for prefetching

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT_BLOCKS) recurrent_backward(const Backward p) {
    extern __shared__ float4 shared[];
    __shared__ int row_ends[2 * ROWS];
    float* const partials = (float*)shared;  // [BUFFERS, WARPS, ROWS, PARTIAL_STRIDE]
#if DISTRIBUTED
    __shared__ u64 arrival_of_even;
    __shared__ u64 arrival_of_odd;
    const Gradients own_gradients(shared, Arrivals(&arrival_of_even, &arrival_of_odd));
    if (threadIdx.x == 0) {
        initialise_arrival(&arrival_of_even);
        initialise_arrival(&arrival_of_odd);
    }
#else
    uint4* const lent = (uint4*)((char*)shared + WORKING_BYTES);
#endif
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
#if STACKED
    const int direction = 1 - blockIdx.z / 2;  // the layer; for the blocks between the layers, the second one
    const bool second = direction == 1, between = blockIdx.z == 1;
    constexpr bool reverse = false;
    const int dy_width = second ? SIZE : HIDDEN;
    const Value* const dy = second ? p.dy[1] : p.dy_between;
    const bool dy_is_there = second;
#else
    constexpr int dy_width = SIZE;
    const int direction = p.first_direction + blockIdx.z;
    const bool reverse = direction == 1, second = reverse;
    constexpr bool between = false, dy_is_there = true;
    const Value* const dy = second ? p.dy[1] : p.dy[0];
#endif
    const u32 step_values = p.step * HIDDEN, dy_step_values = p.step * p.directions * dy_width;
#if DISTRIBUTED
    const Value* const gates = kept_pointer(second ? p.gates[1] : p.gates[0]);
    const Value* const cells = kept_pointer(second ? p.cells[1] : p.cells[0]);
    Value* const dgates = kept_pointer(second ? p.dgates[1] : p.dgates[0]);
#else
    const Value* const gates = second ? p.gates[1] : p.gates[0];
    const Value* const cells = second ? p.cells[1] : p.cells[0];
    Value* const dgates = second ? p.dgates[1] : p.dgates[0];
#endif
#if INTERLEAVED
    Value* const exchange = second ? p.exchange[1] : p.exchange[0];
#endif
    const int skipped = second ? p.start[1] : p.start[0];

    // The rows of W_hh run along the units; the columns of a tile do.
    Weights weights;
    const int units = first_unit - (int)rank * UNITS;  // the first unit of the tiles
    const Value* const matrix = (between ? p.between : second ? p.weights[1] : p.weights[0]) + units;
    const int first_sum = (int)rank * (4 / SPLIT);
#if DISTRIBUTED
    load_weights(weights, (char*)shared, [&](int sum, int unit) -> const Value* {
        const int gate = gate_of(sum, false), own = first_unit + unit;
        return gate >= 0 && is_unit(own) ? (second ? p.weights[1] : p.weights[0]) + ((size_t)gate * SIZE + own) * SIZE : nullptr;
    });
#elif VALUE_BYTES == 4
    load_weights(weights, lent, [](int) {}, [&](int tile, int span) -> Pair {
        const int depth = depth_of(span), sum = (SUMS_ARE_GATES && HIDDEN == SIZE) || SPLIT == 4 ? 0 : depth / HIDDEN;
        const int within = depth - sum * HIDDEN, gate = gate_of(first_sum + sum, between);
        const int column = tile * 16 + (lane >> 2);
        const Value* const from = matrix + (size_t)(gate * SIZE + within) * SIZE + column;
        u32 turned[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int k = i >> 1, further = (i & 1) * 8;
            const bool exists = (WARPS * SPANS * SPAN == WIDTH || depth + k < WIDTH) && (HIDDEN == SIZE || within + k < SIZE) &&
                                (SUMS_ARE_GATES || gate >= 0) && is_unit(units + column + further);
            turned[i] = exists ? from[k * SIZE + further] : 0u;
        }
        return {{make_uint4(turned[0], turned[1], turned[2], turned[3]), make_uint4(turned[4], turned[5], turned[6], turned[7])}};
    });
#else
    const Staging staging = {(char*)shared + warp * STAGED * SPAN_PITCH, matrix, INTERLEAVED ? (int)rank * WIDTH : first_sum, between};
    load_weights(weights, lent, [&](int span) { staging.arrive(span, units); }, [&](int tile, int span) { return staging.pair_at(tile, span); });
#endif
    Patience patience = {p.patience, 0, false};
    Masks masks(p, direction, first_unit);
    int parity = 0;
    GateSums bias[CELLS] = {};
#if SPLIT > 1
    await_cluster_barrier();
#elif DISTRIBUTED
    cluster_barrier();  // other blocks send to memory in which this one had its weights
#endif
#if !DISTRIBUTED
    __syncthreads();  // the weights were staged in the memory of the partial sums
#endif

    for (int turn = 0, group = blockIdx.y; group < p.groups; group = group_of(++turn)) {
        const int first_row = group * ROWS;
        const int steps = read_ends(row_ends, p.lengths, p.order, skipped, first_row, p.batch, p.time);
        const Ends ends = {row_ends, p.time, first_row, p.batch};
        Episodes episodes(p, skipped, reverse);
        episodes.start(ends, reverse ? 0 : steps - 1, reverse ? 1 : steps - 2, parity);
        masks.start(ends, direction, first_unit, reverse ? 0 : steps - 1, reverse ? 1 : steps - 2);
        bool inside[CELLS];
        u32 own[CELLS], four_own[CELLS];  // the index of a cell's values at the first step, in tensors [tokens, H] and [tokens, 4H]
        float dc[CELLS];
#if ZONES_HIDDEN
        float dh[CELLS] = {};  // the gradient of a hidden state that zoneout kept; 0 if CARRIES_HIDDEN, as `dc` has it
#endif
        u32 cell_now[CELLS];
        Inputs input[CELLS], coming[CELLS];  // the values for the next step, and for the one after it, as loaded
        // Only the state before a step is loaded: the state after it is the one that was `before` of the step visited last.
        // A cell that does not exist has the addresses of the first row, which it does not use.
        auto row_of_group = [&](Place at) { return BRANCHES || at.exists ? at.row : 0; };
        auto own_state = [&](Place at) { return (direction * p.batch + ends.batch_row(row_of_group(at))) * (size_t)SIZE + first_unit + at.unit; };
        auto is_real = [&](Place at) { return first_unit + at.unit < SIZE; };
        auto dy_column = [&](Place at) { return (u32)(ends.batch_row(row_of_group(at)) * p.row * p.directions * dy_width + first_unit + at.unit); };
#if DISTRIBUTED
        const Value* initial_state[CELLS];
#pragma unroll
        for (int cell = 0; cell < CELLS; ++cell) initial_state[cell] = kept_pointer(p.c0 + own_state(place_of(cell)));
#endif
        auto load = [&](int cell, int step) -> Inputs {
            const int t = reverse ? step : steps - 1 - step;
            const bool wanted = !between && inside[cell] && step < steps;
            if (BRANCHES && !wanted) return {four_zeros(), 0, 0};
            const Place at = place_of(cell);
            const bool first = reverse ? t + 1 >= ends.of(row_of_group(at)) : t == 0;
#if DISTRIBUTED
            const Value* const initial = initial_state[cell];
            const Value* const before = first ? initial : step_of(cells, reverse ? t + 1 : t - 1, step_values) + own[cell];
#else
            const Value* const before = first ? p.c0 + own_state(at) : step_of(cells, reverse ? t + 1 : t - 1, step_values) + own[cell];
#endif
            const bool carries = !first || is_real(at), above = wanted && dy && is_real(at);
            auto dy_at = [&] { return step_of(dy, t, dy_step_values) + dy_column(at); };
            return {load_gates_if(wanted, step_of(gates, t, 4 * step_values) + four_own[cell]), !BRANCHES || carries ? load_if(wanted && carries, before) : 0u,
                    STACKED ? above ? load_exchanged_value(dy_at()) : 0u : !BRANCHES || above ? load_if(above, dy_at()) : 0u};
        };
#pragma unroll
        for (int cell = 0; cell < CELLS; ++cell) {
            const Place at = place_of(cell);
            const int unit = first_unit + at.unit, n = ends.batch_row(at.exists ? at.row : 0);
            inside[cell] = at.exists && has_place(unit) && first_row + at.row < p.batch;
            own[cell] = n * p.row * HIDDEN + unit;
            four_own[cell] = gates_place(n * p.row, unit);
            const int end = inside[cell] ? ends.of(at.row) : 0;
            dc[cell] = !CARRIES_HIDDEN && inside[cell] && is_real(at) && p.dc_n ? widened(p.dc_n[own_state(at)]) : 0.f;
            cell_now[cell] = end ? step_of(cells, reverse ? 0 : end - 1, step_values)[own[cell]] : 0u;
            input[cell] = load(cell, 0);
            input[cell].gates = gathered(input[cell].gates);
            if (EARLIER == 2) coming[cell] = load(cell, 1);
        }
#if !DISTRIBUTED
#if INTERLEAVED
        const LanePlaces places(first_row, p.batch, rank * WIDTH);
#endif
        auto row_at = [&](int row, int step) -> Row {
            // The step visited before; for the blocks between the layers, this step.
            const int after = between ? steps - 1 - step : reverse ? step - 1 : steps - step;
            const bool polled = (between ? step < steps : step > 0 && step <= steps) && (!RAGGED || after < ends.of(row));
#if INTERLEAVED
            const Value* const gradients = step_of(exchange, polled ? after : 0, p.groups * ROWS * EXCHANGED_WIDTH);
            const bool loaded = polled && (SKIPPED_BEYOND < 2 || first_row + (row & ~7) < p.batch);
            return {places.of(gradients, row), loaded, loaded};
#else
            const u32 n = min(ends.batch_row(row), p.batch - 1);
            const u32 place = n * (p.row * 4 * HIDDEN) + rank * WIDTH + depth_of(0);
            return {step_of(dgates, polled ? after : 0, 4 * step_values) + place, polled, polled};
#endif
        };
        InFlight words;
        Scales scales;
        scales.start();
        begin_product(words, row_at, 0);
#endif
#if DISTRIBUTED
        Slopes slope[CELLS];
        auto find_slopes = [&](int parity) {
#pragma unroll
            for (int cell = 0; cell < CELLS; ++cell)
                slope[cell] = slopes(widened(input[cell].gates), widened(cell_now[cell]), episodes.begins(place_of(cell), parity) ? 0.f : widened(input[cell].before));
        };
        __syncthreads();  // the resets of the first step are visible
        find_slopes(parity);
        // The gradients of the hidden states after the last step, and in the end of those before the first.
        float outer_dh[CELLS];
#pragma unroll
        for (int cell = 0; cell < CELLS; ++cell) outer_dh[cell] = !RAGGED && inside[cell] && p.dh_n && is_real(place_of(cell)) ? widened(p.dh_n[own_state(place_of(cell))]) : 0.f;
#endif
        // There is one more step than the sequence has, which computes the gradient of h0.
        for (int step = 0; step <= steps; ++step, parity ^= 1) {
            const int t = reverse ? step : steps - 1 - step;
#if !DISTRIBUTED
            float* const sums = partials + (BUFFERS == 2 ? parity : 0) * WARPS * PARTIAL_FLOATS;
#endif
#if STACKED
            // The first layer's gradients come from the blocks between the layers; most have arrived when they are loaded first.
            patience.polls = 0;
#pragma unroll
            for (int cell = 0; cell < CELLS; ++cell) {
                if (dy_is_there || !warp_owns(cell)) continue;
                while (__any_sync(EVERY_LANE, is_unwritten(input[cell].dy)) && patience.is_left()) input[cell].dy = load(cell, step).dy;
            }
#endif
#if !DISTRIBUTED
            finish_product(words, weights, row_at, step, sums + warp * PARTIAL_FLOATS, patience, scales);
            if (between) begin_product(words, row_at, step + 1);  // these loads delay no other block
            __syncthreads();
#endif
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
#endif
#if !DISTRIBUTED
            // First the arithmetic that does not depend on data that is waited for.
            Slopes slope[CELLS];
#pragma unroll
            for (int cell = 0; cell < CELLS; ++cell)
#if CELL_MASKS
                if (warp_owns(cell)) slope[cell] = slopes(widened(input[cell].gates), widened(cell_now[cell]), episodes.begins(place_of(cell), parity) ? 0.f : widened(input[cell].before), masks.of(cell));
#else
                if (warp_owns(cell)) slope[cell] = slopes(widened(input[cell].gates), widened(cell_now[cell]), episodes.begins(place_of(cell), parity) ? 0.f : widened(input[cell].before));
#endif
#endif
#if SPLIT > 1
            // This wait has no limit: all blocks of a cluster run at the same time and send in every step, even after they gave up
            // waiting, and a block that ran ahead would arrive twice in one phase of its barrier, which is a hardware error.
            if (warp_owns(0))
                while (!has_arrived(&arrival, parity)) {}
#elif DISTRIBUTED
            if (step > 0) own_gradients.arrivals.await(step - 1);
#endif
            // First the arithmetic, then the stores that other blocks wait for, then the loads for later steps.
            FourGates grads[CELLS];
#if STACKED
            u32 handed[CELLS];  // the gradients for the first layer
#endif
#pragma unroll
            for (int cell = 0; cell < CELLS; ++cell) {
                if (!warp_owns(cell)) continue;
                const Place at = place_of(cell);
                const int end = ends.of(at.exists ? at.row : 0);
                const bool start = !RAGGED ? step == 0 : reverse ? t == 0 : t + 1 == end;
                const bool finish = !RAGGED ? step == steps : reverse ? t == end : t < 0;
                // Gradients of units that pad a row are zeros: their kept numbers may be none, as in the forward pass.
                const bool active = inside[cell] && (!DISTRIBUTED || SIZE == HIDDEN || is_real(at)) && (RAGGED ? t >= 0 && t < end : step < steps);
                float recurrent = 0.f;
                if (at.exists) {
#if DISTRIBUTED
                    recurrent = step > 0 ? own_gradients.received(step - 1, at.row, at.unit) : outer_dh[cell];
#elif SPLIT > 1
#pragma unroll
                    for (int from = 0; from < SPLIT; ++from) recurrent += inbox[(from * ROWS + at.row) * UNITS + at.unit];
                    if (patience.lost) recurrent = Float32::not_a_number();  // some of the sums never arrived
#else
                    const float* sum = sums + at.row * PARTIAL_STRIDE + at.unit;
#pragma unroll
                    for (int part = 0; part < WARPS; ++part) recurrent += sum[part * PARTIAL_FLOATS];
#endif
                }
#if STACKED
                if (between) {
                    if (p.mask && active && is_real(at)) {
                        const size_t token = t * (size_t)p.mask_step + ends.batch_row(at.row) * (size_t)p.mask_row;
                        recurrent *= p.mask[token + first_unit + at.unit] ? p.scale : 0.f;
                    }
                    handed[cell] = exchanged(recurrent, active);
                    continue;
                }
#endif
#if DROPS_HIDDEN
                recurrent *= masks.factor(cell);
#endif
                // The step visited before did not read the states of this one.
#if ZONES_HIDDEN
                if (episodes.followed(at, parity)) dh[cell] = 0.f;
#endif
                if (episodes.followed(at, parity)) recurrent = dc[cell] = 0.f;
                // At a row's first step here, this gradient is that of its final state.
                if (ENDS_IN_LOOP && inside[cell] && start) recurrent = p.dh_n && is_real(at) ? widened(p.dh_n[own_state(at)]) : 0.f;
#if ZONES_HIDDEN
                recurrent += dh[cell];
#endif
                if (ENDS_IN_LOOP && inside[cell] && finish && is_real(at)) {
                    p.dh0[own_state(at)] = (Value)canonical(CARRIES_HIDDEN ? recurrent + dc[cell] : recurrent);
                    if (!CARRIES_HIDDEN) p.dc0[own_state(at)] = (Value)canonical(dc[cell]);
                }
#if DISTRIBUTED
                outer_dh[cell] = recurrent;
#endif
                const Inputs& in = input[cell];
                float carried = dc[cell];
#if ZONES_HIDDEN
                // Where zoneout keeps the hidden state, its gradient passes by the step.
                const float above = recurrent + widened(in.dy), all = CARRIES_HIDDEN ? above + carried : above;
                const float keeps = masks.of(cell).keeps_hidden(), changes = 1.f - keeps;
                if (CARRIES_HIDDEN) carried *= changes;
                const Gates grad = adjoint(slope[cell], changes * above, carried);
                if (active) dh[cell] = CARRIES_HIDDEN ? 0.f : keeps * all;
                if (CARRIES_HIDDEN) carried += keeps * all;
#else
                const Gates grad = adjoint(slope[cell], recurrent + widened(in.dy), carried);
#endif
                if (active) {
                    dc[cell] = carried, cell_now[cell] = in.before;
#if !EXACT
                    bias[cell].add(grad);
#endif
                }
#if DISTRIBUTED
                grads[cell] = active ? narrowed(grad) : four_zeros();  // of the unit, in the order of the gates
                own_gradients.keep(step, at.row, at.unit, grads[cell]);
#elif INTERLEAVED
                grads[cell] = active ? narrowed(grad) : four_zeros();
                // Rows beyond the batch are stored, too, as in the forward pass.
                const bool stores = RAGGED ? active : at.exists && has_place(first_unit + at.unit) && step < steps;
                if (stores) store_exchanged(step_of(exchange, t, p.groups * ROWS * EXCHANGED_WIDTH) + interleaved_place(first_row, at.row, 4 * (first_unit + at.unit)), grads[cell]);
#else
                grads[cell] = exchanged(grad, active);
#endif
            }
#if DISTRIBUTED
            // All other blocks wait for these sums, so that what this block does for itself alone comes after them.
            episodes.advance(ends, reverse ? t + 2 : t - 2, parity);
            make_visible();
            if (step < steps) own_gradients.multiply(step, weights);
#endif
#if PAUSE && INTERLEAVED
            const long long stored = clock64();
#endif
#pragma unroll
            for (int cell = 0; cell < CELLS; ++cell) {
                const bool stores = inside[cell] && t >= 0 && t < steps;
                if ((BRANCHES || between) && !stores) continue;
                const Place at = place_of(cell);
                const int row = ends.batch_row(row_of_group(at)) * p.row;
#if STACKED
                if (between) {
                    if (lane % VALUES_PER_WORD == 0) store_exchanged(step_of(p.dy_between, t, step_values) + (u32)(row * HIDDEN + first_unit + at.unit), handed[cell]);
                    continue;
                }
#endif
#if DISTRIBUTED || INTERLEAVED
                const FourGates turned = transposed(grads[cell]);
                store_gates_if(stores, step_of(dgates, t, 4 * step_values) + four_own[cell], turned);
#else
                store_exchanged_gates_if(stores, step_of(dgates, t, 4 * step_values), row, first_unit + at.unit, grads[cell]);
#endif
            }
#if PAUSE && !INTERLEAVED
            const long long stored = clock64();
#endif
#if EXACT
            // These sums take several operations, and no other block waits for them.
#pragma unroll
            for (int cell = 0; cell < CELLS; ++cell)
                if (warp_owns(cell)) bias[cell].add(widened(grads[cell]));
#endif
#pragma unroll
            for (int cell = 0; cell < CELLS; ++cell) {
                if (!warp_owns(cell)) continue;
                input[cell] = EARLIER == 2 ? coming[cell] : load(cell, step + 1);
                input[cell].gates = gathered(input[cell].gates);
                if (EARLIER == 2) coming[cell] = load(cell, step + 2);
                const bool fetches = FETCHES && !between && inside[cell] && step + FETCHED_AHEAD < steps;
                if (FETCHES && (!BRANCHES || fetches)) {
                    const Place at = place_of(cell);
                    const int later = reverse ? t + FETCHED_AHEAD : t - FETCHED_AHEAD;
                    const bool above = fetches && dy && dy_is_there && is_real(at);
                    prefetch_gates_if(fetches, at.unit, step_of(gates, later, 4 * step_values) + four_own[cell]);
                    prefetch_value_if(fetches, at.unit, step_of(cells, later, step_values) + own[cell]);
                    if (!BRANCHES || above) prefetch_value_if(above, at.unit, step_of(dy, later, dy_step_values) + dy_column(at));
                }
                masks.advance(ends, first_unit, cell, reverse ? t + 1 : t - 1, reverse ? t + 2 : t - 2, reverse ? t + FETCHED_AHEAD : t - FETCHED_AHEAD);
            }
#if PAUSE
            // Loads that begin before other blocks' values are there have to be repeated.
            if (!between && step < steps) while (clock64() - stored < PAUSE) {}
#endif
#if !DISTRIBUTED
            if (!between) begin_product(words, row_at, step + 1);
            episodes.advance(ends, reverse ? t + 2 : t - 2, parity);
            barrier_if_one_buffer();
#else
            // In the next step they would come after a wait.
            find_slopes(parity ^ 1);
#endif
        }
#if DISTRIBUTED
#pragma unroll
        for (int cell = 0; cell < CELLS; ++cell)
            if (!ENDS_IN_LOOP && inside[cell] && is_real(place_of(cell))) {
                const size_t place = own_state(place_of(cell));
                p.dh0[place] = (Value)canonical(CARRIES_HIDDEN ? outer_dh[cell] + dc[cell] : outer_dh[cell]);
                if (!CARRIES_HIDDEN) p.dc0[place] = (Value)canonical(dc[cell]);
            }
#endif
#if RAGGED
        for (int gate = 0; gate < 4 && !between; ++gate)
            fill_beyond(dgates + gate * HIDDEN, 4 * step_values, 4 * HIDDEN * p.row, ends, first_unit, steps);
#endif
    }
    __syncthreads();
    float4* const collected = (float4*)partials;  // [ROWS, UNITS]
#pragma unroll
    for (int cell = 0; cell < CELLS; ++cell) {
        const Place at = place_of(cell);
        if (at.exists) collected[at.row * UNITS + at.unit] = bias[cell].totals();
    }
    __syncthreads();
    auto put_bias = [&](int gate, int unit, float total) {
        if (first_unit + unit >= SIZE) return;
        const int input = input_gate(gate), recurrent = recurrent_gate(gate);
        const Value rounded_total = (Value)canonical(total);
        if (input >= 0) (second ? p.dbias_ih[1] : p.dbias_ih[0])[input * SIZE + first_unit + unit] = rounded_total;
        if (recurrent >= 0) (second ? p.dbias_hh[1] : p.dbias_hh[0])[recurrent * SIZE + first_unit + unit] = rounded_total;
    };
    for (int i = threadIdx.x; !between && i < 4 * UNITS; i += THREADS) {
        const int gate = i / UNITS, unit = i % UNITS;
        LongSum sum = {};
        for (int row = 0; row < ROWS; ++row) sum.add(((float*)collected)[(row * UNITS + unit) * 4 + gate]);
        if (first_unit + unit >= HIDDEN) continue;
        const int own = (direction * 4 + gate) * HIDDEN + first_unit + unit, all = (STACKED ? 2 : p.directions) * 4 * HIDDEN;
        if (gridDim.y > 1)
            ((float*)p.bias)[blockIdx.y * all + own] = sum.total;
        else if (p.dbias_ih[0])
            put_bias(gate, unit, sum.total);
        else
            ((Value*)p.bias)[own] = ((Value*)p.bias)[all + own] = (Value)canonical(sum.total);
    }
    if (!between && gridDim.y > 1 && p.dbias_ih[0]) {
        // The last of the blocks of the same units adds up the partial sums of all of them, in the order of their rows.
        __shared__ bool last;
        __syncthreads();
        if (threadIdx.x == 0) {
            __threadfence();
            last = atomicAdd(p.done + direction * gridDim.x + blockIdx.x, 1u) + 2 == gridDim.y;  // the counter begins at -1
            __threadfence();
        }
        __syncthreads();
        for (int i = threadIdx.x; last && i < 4 * UNITS; i += THREADS) {
            const int gate = i / UNITS, unit = i % UNITS;
            if (first_unit + unit >= HIDDEN) continue;
            LongSum sum = {};
#pragma unroll 1
            for (int group = -p.earlier; group < (int)gridDim.y; ++group)
                sum.add(((volatile float*)p.bias)[((group * (STACKED ? 2 : p.directions) + direction) * 4 + gate) * HIDDEN + first_unit + unit]);
            put_bias(gate, unit, sum.total);
        }
    }
    if (patience.lost) *(volatile int*)p.failure = 1;
#if SPLIT > 1 || DISTRIBUTED
    cluster_barrier();
#endif
}
