// Matrix products of warpgroups, four neighbouring warps, on tensor cores (wgmma, sm_90a): one factor in registers, the other
// in shared memory.
//
// The factor in shared memory has panels of 64 values of each of its ROWS rows, 128 bytes a row, in which the place of 16 bytes
// is exchanged with that of others by the row's number (the swizzle of 128 bytes). A panel begins at a multiple of 1024 bytes.
#pragma once
#include "matrix.cuh"

constexpr int PANEL = 64;                     // values
constexpr int PANEL_BYTES = ROWS * PANEL * 2;

// The place of 16 bytes in a panel: values 8 * `chunk` to 8 * `chunk` + 7 of a row.
__device__ __forceinline__ u32 place_in_panel(int row, int chunk) { return row * PANEL * 2 + ((chunk ^ (row & 7)) << 4); }

// What the instructions know about a panel, from its address in shared memory: eight rows are 1024 bytes, swizzled.
__device__ __forceinline__ u64 described(u32 panel) { return (u64)(panel >> 4 & 0x3fffu) | 1ull << 16 | 64ull << 32 | 1ull << 62; }

// The product with the 16 values from 16 * `step` on.
__device__ __forceinline__ u64 at_step(u64 description, int step) { return description + step * 2; }

__device__ __forceinline__ void store_shared(u32 to, uint4 words) {
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(words.x), "r"(words.y), "r"(words.z), "r"(words.w) : "memory");
}

// Makes this thread's stores to shared memory visible to the products that follow a barrier.
__device__ __forceinline__ void publish_to_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void begin_group_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void end_group_products() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
}

#if DTYPE == 0
#define GROUP_FORMATS "f32.bf16.bf16"
#else
#define GROUP_FORMATS "f32.f16.f16"
#endif
// The operands of the instruction for ROWS rows: its sums, and the factors and the condition after them.
#define SUMS_OF(i) "+f"(sum[i][0]), "+f"(sum[i][1]), "+f"(sum[i][2]), "+f"(sum[i][3])
#if ROWS == 24
#define GROUP_SHAPE "m64n24k16"
#define GROUP_SUMS "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11"
#define GROUP_FACTORS "{%12,%13,%14,%15}, %16"
#define GROUP_ADDS "%17"
#define GROUP_OUTPUTS SUMS_OF(0), SUMS_OF(1), SUMS_OF(2)
#elif ROWS == 32
#define GROUP_SHAPE "m64n32k16"
#define GROUP_SUMS "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define GROUP_FACTORS "{%16,%17,%18,%19}, %20"
#define GROUP_ADDS "%21"
#define GROUP_OUTPUTS SUMS_OF(0), SUMS_OF(1), SUMS_OF(2), SUMS_OF(3)
#elif ROWS == 48
#define GROUP_SHAPE "m64n48k16"
#define GROUP_SUMS "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23"
#define GROUP_FACTORS "{%24,%25,%26,%27}, %28"
#define GROUP_ADDS "%29"
#define GROUP_OUTPUTS SUMS_OF(0), SUMS_OF(1), SUMS_OF(2), SUMS_OF(3), SUMS_OF(4), SUMS_OF(5)
#elif ROWS == 64
#define GROUP_SHAPE "m64n64k16"
#define GROUP_SUMS "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define GROUP_FACTORS "{%32,%33,%34,%35}, %36"
#define GROUP_ADDS "%37"
#define GROUP_OUTPUTS SUMS_OF(0), SUMS_OF(1), SUMS_OF(2), SUMS_OF(3), SUMS_OF(4), SUMS_OF(5), SUMS_OF(6), SUMS_OF(7)
#endif

// sum[64 x ROWS] = or += a[64 x 16] b[16 x ROWS] of a warpgroup, accumulated in float32. A warp has 16 rows of `a` and of the
// sums, and its lanes hold them as in `multiply`; `sum[i]` belongs to rows 8 i to 8 i + 7 of the factor in shared memory.
__device__ __forceinline__ void multiply_in_group(float (&sum)[ROWS / 8][4], const u32 (&a)[4], u64 description, bool adds) {
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, " GROUP_ADDS ", 0;\n\t"
                 "wgmma.mma_async.sync.aligned." GROUP_SHAPE "." GROUP_FORMATS " {" GROUP_SUMS "}, " GROUP_FACTORS ", p, 1, 1, 0;\n\t}"
                 : GROUP_OUTPUTS
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(description), "r"((int)adds));
}
