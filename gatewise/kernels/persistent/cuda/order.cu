// Puts the rows of a batch in the order of their lengths, the longest first; rows of the same length stay in theirs.
// Compile-time: THREADS.
using i64 = long long;

struct Order {
    const i64* lengths;  // [B]
    int* order;          // [B]
    int batch;
};

// Every thread counts the rows that come before its own.
extern "C" __global__ void __launch_bounds__(THREADS) recurrent_order(const Order p) {
    __shared__ int lengths[THREADS];
    const int row = blockIdx.x * THREADS + threadIdx.x;
    auto length = [&](int row) { return (int)min(p.lengths[row], 0x7fffffffll); };
    const int own = row < p.batch ? length(row) : 0;
    int before = 0;
    for (int first = 0; first < p.batch; first += THREADS) {
        __syncthreads();
        if (first + (int)threadIdx.x < p.batch) lengths[threadIdx.x] = length(first + threadIdx.x);
        __syncthreads();
        const int count = min(THREADS, p.batch - first);
#pragma unroll 8
        for (int other = 0; other < count; ++other) before += lengths[other] > own || (lengths[other] == own && first + other < row);
    }
    if (row < p.batch) p.order[before] = row;
}
