// Adds biases to gate sums and applies the activation functions, in place, which gives the gates that the forward pass would
// have kept; the gates of a cell must depend on its gate sums alone. Fills the memory of their gradients with the pattern
// that means "not yet written".
// Compile-time constants: SIZE (H), HIDDEN (H padded to a multiple of 8), DTYPE (see numbers.cuh), EXACT (see matrix.cuh).
#include "gate_sums.cuh"

constexpr int VALUES = 16 / sizeof(Value);  // values that one instruction loads
constexpr int LOADS = HIDDEN / VALUES;      // loads for one gate of a token

struct Activate {
    Value* gates[2];          // [tokens, 4H], for each direction
    Value* unwritten[2];      // [tokens, 4H]: the memory of the gradients, or null
    const Value* bias_ih[2];  // [GATES * SIZE], or null
    const Value* bias_hh[2];
    int tokens;
};

struct alignas(16) Words {
    u32 at[4];
};
static_assert(sizeof(Words) == 16, "the size of one load");

extern "C" __global__ void recurrent_activate(const Activate p) {
    const int load = blockIdx.y * blockDim.x + threadIdx.x;
    if (load >= LOADS) return;
    const bool reverse = blockIdx.z == 1;
    const Value* const bias_ih = reverse ? p.bias_ih[1] : p.bias_ih[0];
    const Value* const bias_hh = reverse ? p.bias_hh[1] : p.bias_hh[0];
    float4 bias[VALUES];
#pragma unroll
    for (int i = 0; i < VALUES; ++i) {
        const int unit = load * VALUES + i;
        auto of = [&](int sum) { return bias_of(bias_ih, bias_hh, sum, unit); };
        bias[i] = make_float4(of(0), of(1), of(2), of(3));
    }
    auto kept = [&](Gates sums, int i) {
        return stepped({sums.x + bias[i].x, sums.y + bias[i].y, sums.z + bias[i].z, sums.w + bias[i].w}, 0.f).kept;
    };
    Words* const gates = (Words*)(reverse ? p.gates[1] : p.gates[0]) + load;
    uint4* const unwritten = (uint4*)(reverse ? p.unwritten[1] : p.unwritten[0]) + load;
#pragma unroll 2
    for (int token = blockIdx.x; token < p.tokens; token += gridDim.x) {
        Words* const own = gates + (size_t)token * 4 * LOADS;
        Words x = own[0], y = own[LOADS], z = own[2 * LOADS], w = own[3 * LOADS];
#pragma unroll
        for (int i = 0; i < 4; ++i)
            replace_gates(x.at[i], y.at[i], z.at[i], w.at[i], [&](Gates sums, int number) { return kept(sums, VALUES_PER_WORD * i + number); });
        own[0] = x, own[LOADS] = y, own[2 * LOADS] = z, own[3 * LOADS] = w;
        if (reverse ? p.unwritten[1] : p.unwritten[0])
#pragma unroll
            for (int sum = 0; sum < 4; ++sum)
                unwritten[(size_t)token * 4 * LOADS + sum * LOADS] = make_uint4(UNWRITTEN, UNWRITTEN, UNWRITTEN, UNWRITTEN);
    }
}
