// Makes gates, as the forward pass keeps them, of gate sums without biases, in place. Fills memory for their gradients with
// the pattern that means "not yet written".
// Compile-time: SIZE (H), HIDDEN (H rounded up to a multiple of 8), FLOAT16, FLOAT32, EXACT.
#include "cell.cuh"
#include "exchange.cuh"

constexpr int VALUES = 16 / sizeof(Value);  // of a load
constexpr int LOADS = 4 * HIDDEN / VALUES;  // of a token

struct Activate {
    Value* gates[2];          // [tokens, 4H] for each direction
    Value* unwritten[2];      // as large, or null
    const Value* bias_ih[2];  // [4 * SIZE], or null
    const Value* bias_hh[2];
    int tokens;
};

extern "C" __global__ void lstm_activate(const Activate p) {
    const int load = blockIdx.y * blockDim.x + threadIdx.x;
    if (load >= LOADS) return;
    const bool reverse = blockIdx.z == 1;
    const Value* const bias_ih = reverse ? p.bias_ih[1] : p.bias_ih[0];
    const Value* const bias_hh = reverse ? p.bias_hh[1] : p.bias_hh[0];
    const int gate = load * VALUES / HIDDEN, unit = load * VALUES % HIDDEN;
    float bias[VALUES];
#pragma unroll
    for (int i = 0; i < VALUES; ++i) {
        const int at = gate * SIZE + unit + i;
        bias[i] = bias_ih && unit + i < SIZE ? widened(bias_ih[at]) + widened(bias_hh[at]) : 0.f;
    }
    auto activated = [&](float sum) { return gate == 2 ? tanh_of(sum) : sigmoid_of(sum); };
    auto word = [&](u32 sums, int i) {
#if FLOAT32
        return marked(narrowed(activated(widened(sums) + bias[i])));
#else
        return packed(activated(low_half(sums) + bias[2 * i]), activated(high_half(sums) + bias[2 * i + 1]));
#endif
    };
    uint4* const gates = (uint4*)(reverse ? p.gates[1] : p.gates[0]) + load;
    uint4* const unwritten = (uint4*)(reverse ? p.unwritten[1] : p.unwritten[0]);
#pragma unroll 4
    for (int token = blockIdx.x; token < p.tokens; token += gridDim.x) {
        const uint4 sums = gates[(size_t)token * LOADS];
        gates[(size_t)token * LOADS] = make_uint4(word(sums.x, 0), word(sums.y, 1), word(sums.z, 2), word(sums.w, 3));
        if (unwritten) unwritten[(size_t)token * LOADS + load] = make_uint4(UNWRITTEN, UNWRITTEN, UNWRITTEN, UNWRITTEN);
    }
}
