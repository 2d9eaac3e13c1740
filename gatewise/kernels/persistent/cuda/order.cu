// Sorts the rows of a batch by length, the longest first; the sort is stable.
// Compile-time constant: THREADS of a block.
using i64 = long long;

struct Order {
    const i64* lengths;  // [B]
    int* order;          // [B]: the sorted rows
    int batch;
};

// Each thread counts the rows that come before its own.
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
