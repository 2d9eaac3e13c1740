// The totals of partial sums in shared memory, [PARTS, ROWS, PARTIAL_STRIDE].
#pragma once

// The total of the partial sums of four neighbouring values of a batch row.
__device__ __forceinline__ float4 summed(const float* partials, int row, int column) {
    float4 total = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int number = 0; number < PARTS; ++number) {
        const float4 part = *(const float4*)(partials + number * PARTIAL_FLOATS + row * PARTIAL_STRIDE + column);
        total.x += part.x, total.y += part.y, total.z += part.z, total.w += part.w;
    }
    return total;
}
