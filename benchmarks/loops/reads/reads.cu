typedef unsigned int u32; typedef unsigned long long u64;
// LAYOUT 0 strided rows, 1 blocked 8 rows x 64 B, 2 blocked 4x128? ; MODE 0 registers, 1 bulk copies, 2 dsmem halves
#ifndef LAYOUT
#define LAYOUT 0
#endif
#ifndef MODE
#define MODE 0
#endif
#ifndef FLAVOUR
#define FLAVOUR 0
#endif
#ifndef COPIES
#define COPIES 1
#endif
#ifndef ROWBYTES
#define ROWBYTES 3072
#endif
#ifndef STRIDE
#define STRIDE ROWBYTES
#endif
#ifndef ROWS
#define ROWS 24
#endif
#ifndef WARPS
#define WARPS 8
#endif
#ifndef FLIGHT
#define FLIGHT 6
#endif
#ifndef CLUSTER
#define CLUSTER 1
#endif
#ifndef PIECE
#define PIECE 2048
#endif
#ifndef ROTATE
#define ROTATE 0
#endif
#ifndef EARLY
#define EARLY 1
#endif
constexpr int BYTES = ROWS * STRIDE, GROUPS = ROWS / 8, SLICES = ROWBYTES / 64, SPANS = SLICES / WARPS, ITEMS = SPANS * GROUPS;
constexpr int THREADS = WARPS * 32;
struct Args { char* data; u32* done; long long* out; u32* check; int steps; int blocks; };
__device__ __forceinline__ int place(int row, int byte) {
#if LAYOUT == 0 || LAYOUT == 3
    return row * STRIDE + byte;
#elif LAYOUT == 1
    return ((byte / 64) * GROUPS + row / 8) * 512 + (row % 8) * 64 + byte % 64;
#else
    // slices of a group together
    return ((row / 8) * SLICES + byte / 64) * 512 + (row % 8) * 64 + byte % 64;
#endif
}
__device__ __forceinline__ uint4 load(const char* from) {
    uint4 w;
#if FLAVOUR == 0
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w) : "l"(from) : "memory");
#elif FLAVOUR == 1
    asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w) : "l"(from) : "memory");
#elif FLAVOUR == 2
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w) : "l"(from) : "memory");
#elif FLAVOUR == 3
    asm volatile("ld.global.ca.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w) : "l"(from) : "memory");
#else
    asm volatile("ld.volatile.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w) : "l"(from) : "memory");
#endif
    return w;
}
__device__ __forceinline__ bool missing(uint4 w) { return max(max(w.x, w.y), max(w.z, w.w)) == 0xffffffffu; }
__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ bool arrived(u64* bar, u32 parity) {
    u32 ok;
    asm volatile("{\n\t.reg .pred p;\n\tmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\tselp.u32 %0, 1, 0, p;\n\t}" : "=r"(ok) : "r"(shared_address(bar)), "r"(parity) : "memory");
    return ok;
}
extern "C" __global__ void __launch_bounds__(THREADS, 1)
#if CLUSTER > 1
__cluster_dims__(CLUSTER, 1, 1)
#endif
reads(const Args a) {
    extern __shared__ __align__(128) char room[];
    __shared__ u64 bar;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, b = blockIdx.x;
    u32 rank = 0;
#if CLUSTER > 1
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
    if (threadIdx.x == 0) { asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&bar)) : "memory"); asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
    __syncthreads();
#if CLUSTER > 1
    asm volatile("barrier.cluster.arrive.aligned;\n\tbarrier.cluster.wait.aligned;" ::: "memory");
#endif
    u32 total = 0;
    long long clocks = 0;
    const int words = ROWBYTES / 4, per = (words + a.blocks - 1) / a.blocks;
    for (int step = 0; step < a.steps; ++step) {
        char* const all = a.data + (size_t)step * BYTES * COPIES;
        for (int copy = 0; copy < COPIES; ++copy)
            for (int i = threadIdx.x; i < ROWS * per; i += THREADS) {
                const int row = i / per, word = b * per + i % per;
                if (word < words) asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(all + copy * BYTES + place(row, word * 4)), "r"(step * 7919u + row * 31u + word) : "memory");
            }
#if MODE == 1
        if (threadIdx.x == 0) asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&bar)), "r"(BYTES) : "memory");
#elif MODE == 2
        if (threadIdx.x == 0) asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&bar)), "r"(BYTES / CLUSTER * (CLUSTER - 1)) : "memory");
#endif
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) {
            atomicAdd(a.done, 1u);
            while (*(volatile u32*)a.done < (u32)(step + 1) * a.blocks) {}
            __threadfence();
        }
        __syncthreads();
#if MODE == 1
        asm volatile("fence.proxy.async.global;" ::: "memory");
#endif
        { const long long w0 = clock64(); while (clock64() - w0 < 3000) {} }
        const long long t0 = clock64();
        const char* const from = all + (b % COPIES) * BYTES + (t0 >> 62);
#if MODE == 0 || MODE == 2
        uint4 held[FLIGHT];
#if MODE == 2
        constexpr int OWN = ITEMS / CLUSTER;  // items of each rank
        const int first = rank * OWN;
#else
        constexpr int OWN = ITEMS;
        const int first = 0;
#endif
        auto at = [&](int item) {
#if ROTATE
            const int slice = (warp + b) % WARPS * SPANS + (item + first) % SPANS, g = (item + first) / SPANS;
#else
            const int slice = warp * SPANS + (item + first) % SPANS, g = (item + first) / SPANS;
#endif
#if LAYOUT == 3
            const int it = item + first, s = it % SPANS;
            return from + place(g * 8 + ((lane >> 2) & ~1) + (s & 1), (slice & ~1) * 64 + (lane & 7) * 16);
#else
            return from + place(g * 8 + (lane >> 2), slice * 64 + (lane & 3) * 16);
#endif
        };
#pragma unroll
        for (int i = 0; i < FLIGHT && i < OWN; ++i) held[i] = load(at(i));
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            uint4& w = held[i % FLIGHT];
            while (__any_sync(0xffffffffu, missing(w))) w = load(at(i));
#if MODE == 2
            const u32 own = shared_address(room + (first + i) * 512 * WARPS + threadIdx.x * 16);
#pragma unroll
            for (int other = 1; other < CLUSTER; ++other) {
                const u32 to = (rank + other) % CLUSTER;
                u32 there, thebar;
                asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(own), "r"(to));
                asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(thebar) : "r"(shared_address(&bar)), "r"(to));
                asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1,%2,%3,%4}, [%5];" ::"r"(there), "r"(w.x), "r"(w.y), "r"(w.z), "r"(w.w), "r"(thebar) : "memory");
            }
#endif
            asm volatile("xor.b32 %0, %0, %1;\n\txor.b32 %0, %0, %2;\n\txor.b32 %0, %0, %3;\n\txor.b32 %0, %0, %4;" : "+r"(total) : "r"(w.x), "r"(w.y), "r"(w.z), "r"(w.w));
            if (i + FLIGHT < OWN) w = load(at(i + FLIGHT));
            __syncwarp();
        }
#if MODE == 2
        while (!arrived(&bar, step & 1)) {}
#endif
#else
        if (warp == 0) {
            for (int i = lane; i < BYTES / PIECE / CLUSTER; i += 32) {
                int piece = i * CLUSTER + rank;
#if ROTATE
                piece = (i + b / CLUSTER * 7) % (BYTES / PIECE / CLUSTER) * CLUSTER + rank;
#endif
#if CLUSTER == 1
                asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(room + piece * PIECE)), "l"(from + piece * PIECE), "r"(PIECE), "r"(shared_address(&bar)) : "memory");
#else
                asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;" ::"r"(shared_address(room + piece * PIECE)), "l"(from + piece * PIECE), "r"(PIECE), "r"(shared_address(&bar)), "h"((unsigned short)((1 << CLUSTER) - 1)) : "memory");
#endif
            }
        }
        while (!arrived(&bar, step & 1)) {}
#endif
        __syncthreads();
        clocks += clock64() - t0;
#if MODE == 1
        for (int i = threadIdx.x; i < BYTES / 4; i += THREADS) total ^= ((u32*)room)[i];
#elif MODE == 2
        for (int i = 0; i < ITEMS; ++i)
            if (i < first || i >= first + OWN) { const uint4 w = *(uint4*)(room + i * 512 * WARPS + threadIdx.x * 16); total ^= w.x ^ w.y ^ w.z ^ w.w; }
#endif
    }
    total = __reduce_xor_sync(0xffffffffu, total);
    if (lane == 0) atomicXor(a.check + b, total);
    if (threadIdx.x == 0) a.out[b] = clocks;
#if CLUSTER > 1
    asm volatile("barrier.cluster.arrive.aligned;\n\tbarrier.cluster.wait.aligned;" ::: "memory");
#endif
}
