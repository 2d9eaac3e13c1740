#ifndef __CUDACC_RTC__
#include <cstdio>
#include <cstring>
#include <cstdlib>
#include <cmath>
#include <vector>
#include <cuda_runtime.h>
#endif
typedef unsigned int u32; typedef unsigned long long u64; typedef unsigned short u16;
__device__ __forceinline__ u32 saddr(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ float bf(u16 v) { return __uint_as_float((u32)v << 16); }
__device__ __forceinline__ u16 tobf(float f) { u16 r; asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(f)); return r; }
__device__ __forceinline__ float tanh_(float x) { float r; asm("tanh.approx.f32 %0, %1;" : "=f"(r) : "f"(x)); return r; }
__device__ __forceinline__ float sig_(float x) { return fmaf(0.5f, tanh_(0.5f * x), 0.5f); }
__device__ __forceinline__ uint4 lds4(u32 a) { uint4 w; asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w) : "r"(a) : "memory"); return w; }
__device__ __forceinline__ void sts4(u32 a, uint4 w) { asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(a), "r"(w.x), "r"(w.y), "r"(w.z), "r"(w.w) : "memory"); }
__device__ __forceinline__ uint4 ldx(const void* p) { uint4 w; asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w) : "l"(p) : "memory"); return w; }
__device__ __forceinline__ void stx(void* p, uint4 w) { asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(w.x), "r"(w.y), "r"(w.z), "r"(w.w) : "memory"); }
__device__ __forceinline__ bool unwritten(uint4 w) { return max(max(w.x, w.y), max(w.z, w.w)) == 0xffffffffu; }
__device__ __forceinline__ void cpa(u32 to, const void* from) { asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory"); }
__device__ __forceinline__ void cpa_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> __device__ __forceinline__ void cpa_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }
__device__ __forceinline__ bool try_wait(u32 bar, u32 parity) {
    u32 done;
    asm volatile("{\n\t.reg .pred p;\n\tmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\tselp.u32 %0,1,0,p;\n\t}" : "=r"(done) : "r"(bar), "r"(parity) : "memory");
    return done;
}
#define SUMS(i) "+f"(s[i][0]), "+f"(s[i][1]), "+f"(s[i][2]), "+f"(s[i][3])
template <int ROWS> struct Mma;
#define A_(a) "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(d), "r"(add)
#define WG(SHAPE, S, F, P) "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, " P ", 0;\n\twgmma.mma_async.sync.aligned." SHAPE ".f32.bf16.bf16 {" S "}, " F ", p, 1, 1, 0;\n\t}"
template <> struct Mma<16> { __device__ static __forceinline__ void go(float (&s)[2][4], const u32 (&a)[4], u64 d, int add) {
    asm volatile(WG("m64n16k16", "%0,%1,%2,%3,%4,%5,%6,%7", "{%8,%9,%10,%11}, %12", "%13") : SUMS(0), SUMS(1) : A_(a)); } };
template <> struct Mma<32> { __device__ static __forceinline__ void go(float (&s)[4][4], const u32 (&a)[4], u64 d, int add) {
    asm volatile(WG("m64n32k16", "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15", "{%16,%17,%18,%19}, %20", "%21") : SUMS(0), SUMS(1), SUMS(2), SUMS(3) : A_(a)); } };
template <> struct Mma<64> { __device__ static __forceinline__ void go(float (&s)[8][4], const u32 (&a)[4], u64 d, int add) {
    asm volatile(WG("m64n64k16", "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31", "{%32,%33,%34,%35}, %36", "%37")
        : SUMS(0), SUMS(1), SUMS(2), SUMS(3), SUMS(4), SUMS(5), SUMS(6), SUMS(7) : A_(a)); } };

template <> struct Mma<24> { __device__ static __forceinline__ void go(float (&s)[3][4], const u32 (&a)[4], u64 d, int add) {
    asm volatile(WG("m64n24k16", "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11", "{%12,%13,%14,%15}, %16", "%17") : SUMS(0), SUMS(1), SUMS(2) : A_(a)); } };
template <> struct Mma<40> { __device__ static __forceinline__ void go(float (&s)[5][4], const u32 (&a)[4], u64 d, int add) {
    asm volatile(WG("m64n40k16", "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19", "{%20,%21,%22,%23}, %24", "%25") : SUMS(0), SUMS(1), SUMS(2), SUMS(3), SUMS(4) : A_(a)); } };
template <> struct Mma<80> { __device__ static __forceinline__ void go(float (&s)[10][4], const u32 (&a)[4], u64 d, int add) {
    asm volatile(WG("m64n80k16", "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39", "{%40,%41,%42,%43}, %44", "%45") : SUMS(0), SUMS(1), SUMS(2), SUMS(3), SUMS(4), SUMS(5), SUMS(6), SUMS(7), SUMS(8), SUMS(9) : A_(a)); } };
template <> struct Mma<128> { __device__ static __forceinline__ void go(float (&s)[16][4], const u32 (&a)[4], u64 d, int add) {
    asm volatile(WG("m64n128k16", "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63", "{%64,%65,%66,%67}, %68", "%69") : SUMS(0), SUMS(1), SUMS(2), SUMS(3), SUMS(4), SUMS(5), SUMS(6), SUMS(7), SUMS(8), SUMS(9), SUMS(10), SUMS(11), SUMS(12), SUMS(13), SUMS(14), SUMS(15) : A_(a)); } };
template <> struct Mma<48> { __device__ static __forceinline__ void go(float (&s)[6][4], const u32 (&a)[4], u64 d, int add) {
    asm volatile(WG("m64n48k16", "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23", "{%24,%25,%26,%27}, %28", "%29") : SUMS(0), SUMS(1), SUMS(2), SUMS(3), SUMS(4), SUMS(5) : A_(a)); } };
// MODE 0: per-thread relaxed loads to registers, then shared memory; 1: bulk copies checked before the product; 2: the product runs while they are checked;
// 3: flags (a counter for each step and group), bulk copies without checks.
template <int H, int UNITS, int ROWS, int CL, int MODE, int PAUSE, int ABL = 0>
__global__ void __launch_bounds__(256, 1) fwd(u16* gates, const u16* W, char* X, u32* counters, u16* y, u16* cells, int T, int B) {
    constexpr int TG = UNITS * 4 / 64, PARTS = 2 / TG, SLICE = H / PARTS, KS = SLICE / 16;
    constexpr int PANEL = ROWS * 128, TILE = H / 64 * PANEL, NT = ROWS / 8;
    constexpr int GP = 4 * UNITS * 2 + 16, HP = UNITS * 2 + 16;  // bytes of a row, without bank conflicts
    constexpr int GSTAGE = ROWS * GP;  // [row][gate][unit]
    constexpr int STAGES = 3;
    extern __shared__ char raw[];
    char* const base = (char*)(((u64)raw + 1023) & ~1023ull);
    const u32 tile = saddr(base);
    char* const gst = base + 2 * TILE;
    char* const hst = gst + STAGES * GSTAGE;           // [row][unit]
    char* const cst = hst + ROWS * HP;
    float* const part = (float*)(cst + ROWS * HP);  // PARTS == 2: 128 threads x NT/2 x 4, both ways
    __shared__ __align__(8) u64 bars[2];
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, wg = warp >> 2, w4 = warp & 3;
    const int ug = blockIdx.x, bg = blockIdx.y;
    const int own_part = wg / TG, own_tg = wg % TG;
    const int unit0 = ug * UNITS, row0 = bg * ROWS;
    const u32 bar = saddr(bars);
    if (tid == 0) {
        asm volatile("mbarrier.init.shared.b64 [%0], 1;\n\tmbarrier.init.shared.b64 [%1], 1;\n\tfence.mbarrier_init.release.cluster;" ::"r"(bar), "r"(bar + 8) : "memory");
    }
    u32 a[KS][4];
    {
        auto row_of = [&](int rr) { const int unit = unit0 + own_tg * 16 + w4 * 4 + (rr & 7) / 2, gate = (rr & 1) + (rr >= 8 ? 2 : 0); return W + (size_t)(gate * H + unit) * H + own_part * SLICE; };
        const u16 *lo = row_of(lane >> 2), *hi = row_of((lane >> 2) + 8);
        const int c = 2 * (lane & 3);
#pragma unroll
        for (int k = 0; k < KS; ++k) {
            a[k][0] = *(const u32*)(lo + k * 16 + c), a[k][1] = *(const u32*)(hi + k * 16 + c);
            a[k][2] = *(const u32*)(lo + k * 16 + c + 8), a[k][3] = *(const u32*)(hi + k * 16 + c + 8);
        }
    }
    auto load_inputs = [&](int t) {  // 16-byte chunks: ROWS * 4 * UNITS / 8
        constexpr int CH = UNITS / 8;
        if (t < T)
#pragma unroll
            for (int i = tid; i < ROWS * 4 * CH; i += 256) {
                const int ch = i % CH, gate = i / CH % 4, row = i / CH / 4;
                cpa(saddr(gst) + t % STAGES * GSTAGE + row * GP + (gate * CH + ch) * 16, gates + ((size_t)t * B + row0 + row) * 4 * H + gate * H + unit0 + ch * 8);
            }
        cpa_commit();
    };
    load_inputs(0), load_inputs(1);
    constexpr int CELLS = NT / PARTS;
    float c[CELLS];
#pragma unroll
    for (int i = 0; i < CELLS; ++i) c[i] = 0.f;
    if (CL > 1) { asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory"); }
    else __syncthreads();
    u32 rank = 0;
    if (CL > 1) asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    const int x = lane >> 2 & 1, q = lane & 3;
    const size_t step_bytes = (size_t)gridDim.y * TILE;
    int retries = 0;
    for (int t = 0; t < T; ++t) {
        float s[NT][4];
#pragma unroll
        for (int j = 0; j < NT; ++j) s[j][0] = s[j][1] = s[j][2] = s[j][3] = 0.f;
        const u32 here = tile + (t & 1) * TILE;
        cpa_wait<1>();
        auto product = [&]() {
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
            for (int k = 0; k < (ABL & 1 ? 1 : KS); ++k) {
                const u32 panel = here + (own_part * (SLICE / 64) + k / 4) * PANEL;
                const u64 d = ((u64)(panel >> 4 & 0x3fffu) | 1ull << 16 | 64ull << 32 | 1ull << 62) + k % 4 * 2;
                Mma<ROWS>::go(s, a[k], d, k > 0);
            }
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        };
        auto product_wait = [&]() {
            asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
            for (int j = 0; j < NT; ++j) asm volatile("" : SUMS(j) :: "memory");
        };
        if (t > 0) {
            const char* from = X + (size_t)(t - 1) * step_bytes + (size_t)bg * TILE;
            constexpr int N = TILE / 16 / 256; static_assert(N * 256 * 16 == TILE, "");
            if (MODE == 0) {
                constexpr int G = N < 8 ? N : 8;
#pragma unroll
                for (int i = 0; i < N; i += G) {
                    uint4 w[G];
#pragma unroll
                    for (int k = 0; k < G; ++k) w[k] = ldx(from + ((i + k) * 256 + tid) * 16);
#pragma unroll
                    for (int k = 0; k < G; ++k) {
                        while (unwritten(w[k]) && ++retries < 10000000) w[k] = ldx(from + ((i + k) * 256 + tid) * 16);
                        sts4(here + ((i + k) * 256 + tid) * 16, w[k]);
                    }
                }
                asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
                __syncthreads();
                product(), product_wait();
            } else {
                while (!try_wait(bar + (t & 1) * 8, ((t - 1) >> 1) & 1)) {}
                if (MODE == 3) { product(), product_wait(); }
                else if (MODE == 1 || MODE == 4) {
                    bool any = false;
#pragma unroll
                    for (int i = 0; i < N; ++i) {
                        uint4 w = lds4(here + (i * 256 + tid) * 16);
                        if (unwritten(w)) {
                            any = true;
                            do w = ldx(from + (i * 256 + tid) * 16); while (unwritten(w) && ++retries < 10000000);
                            sts4(here + (i * 256 + tid) * 16, w);
                        }
                    }
                    if (any) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
                    retries += any;
                    __syncthreads();
                    product(), product_wait();
                } else {
                    product();
                    bool any = false;
#pragma unroll
                    for (int i = 0; i < N; ++i) any |= unwritten(lds4(here + (i * 256 + tid) * 16));
                    product_wait();
                    retries += any;
                    while (__syncthreads_or(any)) {
                        any = false;
#pragma unroll 1
                        for (int i = 0; i < N; ++i) {
                            uint4 w = lds4(here + (i * 256 + tid) * 16);
                            if (!unwritten(w)) continue;
                            do w = ldx(from + (i * 256 + tid) * 16); while (unwritten(w) && ++retries < 10000000);
                            sts4(here + (i * 256 + tid) * 16, w);
                        }
                        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
                        __syncthreads();
                        product(), product_wait();
                    }
                }
            }
        }
        // the inputs of this step are in shared memory once all threads have waited
        __syncthreads();
        if (PARTS == 2) {  // a warpgroup finishes half of the rows
#pragma unroll
            for (int j = 0; j < NT / 2; ++j) {
                const int other = wg ? j : j + NT / 2;
                *(float4*)(part + ((wg * NT / 2 + j) * 128 + (tid & 127)) * 4) = make_float4(s[other][0], s[other][1], s[other][2], s[other][3]);
            }
            __syncthreads();
#pragma unroll
            for (int j = 0; j < NT / 2; ++j) {
                const float4 v = *(float4*)(part + (((wg ^ 1) * NT / 2 + j) * 128 + (tid & 127)) * 4);
                float* const mine = wg ? s[j + NT / 2] : s[j];
                const float m0 = mine[0] + v.x, m1 = mine[1] + v.y, m2 = mine[2] + v.z, m3 = mine[3] + v.w;
                s[j][0] = m0, s[j][1] = m1, s[j][2] = m2, s[j][3] = m3;
            }
        }
        char* const gs = gst + t % STAGES * GSTAGE;
        const int unit = own_tg * 16 + w4 * 4 + (lane >> 3);
#pragma unroll
        for (int j = 0; j < CELLS; ++j) {
            const float r0 = __shfl_xor_sync(~0u, x ? s[j][0] : s[j][1], 4), r1 = __shfl_xor_sync(~0u, x ? s[j][2] : s[j][3], 4);
            float gi = x ? r0 : s[j][0], gf = x ? s[j][1] : r0, gg = x ? r1 : s[j][2], go = x ? s[j][3] : r1;
            const int row = (PARTS == 2 ? wg * NT / 2 + j : j) * 8 + 2 * q + x;
            u16* const g = (u16*)(gs + row * GP) + unit;
            gi = sig_(gi + bf(g[0])), gf = sig_(gf + bf(g[UNITS])), gg = tanh_(gg + bf(g[2 * UNITS])), go = sig_(go + bf(g[3 * UNITS]));
            c[j] = gf * c[j] + gi * gg;
            ((u16*)(hst + row * HP))[unit] = tobf(go * tanh_(c[j]));
            g[0] = tobf(gi), g[UNITS] = tobf(gf), g[2 * UNITS] = tobf(gg), g[3 * UNITS] = tobf(go);
            ((u16*)(cst + row * HP))[unit] = tobf(c[j]);
        }
        __syncthreads();
        constexpr int CH = UNITS / 8;
        char* const to = X + (size_t)t * step_bytes + (size_t)bg * TILE;
        if (tid < ROWS * CH) {
            const int row = tid / CH, ch = tid % CH, first = unit0 / 8 + ch;
            const uint4 v = *(uint4*)(hst + row * HP + ch * 16);
            stx(to + first / 8 * PANEL + row * 128 + ((first % 8 ^ (row & 7)) << 4), v);
            if (MODE == 3) {
                __syncwarp();
                if (lane == 0) asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counters + t * gridDim.y + bg) : "memory");
            }
        }
        if (MODE == 4 && warp == 7 && t + 1 < T) {
            const int producer = rank * (gridDim.x / CL) + lane, last = producer * CH + CH - 1, row = ROWS - 1;
            u32 seen = lane < gridDim.x / CL ? ~0u : 0;
            const char* const word = to + last / 8 * PANEL + row * 128 + ((last % 8 ^ (row & 7)) << 4) + 12;
            do if (seen == ~0u) asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(word) : "memory"); while (__any_sync(~0u, seen == ~0u) && ++retries < 10000000);
        }
        if (MODE && tid == 255 && t + 1 < T) {
            if (MODE == 4) {
            } else if (MODE == 3) {
                u32 seen;
                do { asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(counters + t * gridDim.y + bg) : "memory"); } while (seen < gridDim.x * ROWS * CH / 32 && ++retries < 10000000);
                asm volatile("fence.proxy.async;" ::: "memory");
            } else {
                const long long stored = clock64();
                while (clock64() - stored < PAUSE) {}
            }
            const u32 b = bar + ((t + 1) & 1) * 8;
            asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(b), "r"(TILE) : "memory");
            const u32 off = rank * (TILE / CL);
            if (CL > 1)
                asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;" ::"r"(tile + ((t + 1) & 1) * TILE + off), "l"(to + off), "r"(TILE / CL), "r"(b), "h"((u16)((1 << CL) - 1)) : "memory");
            else
                asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(tile + ((t + 1) & 1) * TILE), "l"(to), "r"(TILE), "r"(b) : "memory");
        }
#pragma unroll
        for (int i = tid; i < (ABL & 2 ? 0 : ROWS * 4 * CH); i += 256) {
            const int ch = i % CH, gate = i / CH % 4, row = i / CH / 4;
            *(uint4*)(gates + ((size_t)t * B + row0 + row) * 4 * H + gate * H + unit0 + ch * 8) = *(uint4*)(gs + row * GP + (gate * CH + ch) * 16);
        }
        if (tid < ROWS * CH) {
            const int row = tid / CH, ch = tid % CH;
            const size_t at = ((size_t)t * B + row0 + row) * H + unit0 + ch * 8;
            *(uint4*)(y + at) = *(uint4*)(hst + row * HP + ch * 16);
            *(uint4*)(cells + at) = *(uint4*)(cst + row * HP + ch * 16);
        }
        if (ABL & 4) cpa_commit(); else load_inputs(t + 2);
    }
    if (CL > 1) { asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory"); }
    if (tid == 0 || tid == 255) atomicAdd(counters + (size_t)T * gridDim.y, (u32)retries);
}


// The backward pass: clusters of 4 blocks, block r multiplies the gradients of gate r with the weights of the cluster's 4 * 32 units.
template <int H, int ROWS, int MODE, int PAUSE, int ABL = 0>
__global__ void __launch_bounds__(256, 1) bwd(const u16* gates, const u16* cells, const u16* dy, const u16* W, char* X, u32* counters, u16* dgates, int T, int B) {
    constexpr int UNITS = 32, KS = H / 16, PANEL = ROWS * 128, TILE = H / 64 * PANEL, NT = ROWS / 8, STAGES = 3;
    constexpr int GP = 6 * 64 + 16, GSTAGE = ROWS * GP;  // [row][four gates, the state before, dy][unit]
    constexpr int ITEMS = NT * 2 * 32, PER = ITEMS / 256;
    extern __shared__ char raw[];
    char* const base = (char*)(((u64)raw + 1023) & ~1023ull);
    const u32 tile = saddr(base);
    char* const gst = base + 2 * TILE;
    char* const got = gst + STAGES * GSTAGE;  // [from][ITEMS] float4
    __shared__ __align__(8) u64 bars[3];
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, wg = warp >> 2, w4 = warp & 3;
    const int bg = blockIdx.y, unit0 = blockIdx.x * UNITS, row0 = bg * ROWS;
    u32 rank; asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    const u32 bar = saddr(bars);
    if (tid == 0)
        asm volatile("mbarrier.init.shared.b64 [%0], 1;\n\tmbarrier.init.shared.b64 [%1], 1;\n\tmbarrier.init.shared.b64 [%2], 1;\n\tfence.mbarrier_init.release.cluster;" ::"r"(bar), "r"(bar + 8), "r"(bar + 16) : "memory");
    u32 a[KS][4];
    {
        const u16* const w = W + (size_t)rank * H * H + (unit0 - rank * UNITS) + wg * 64 + w4 * 16 + (lane >> 2);
        auto two = [&](int k, int u) { return (u32)w[(size_t)k * H + u] | (u32)w[(size_t)(k + 1) * H + u] << 16; };
        const int c = 2 * (lane & 3);
#pragma unroll
        for (int k = 0; k < KS; ++k) a[k][0] = two(k * 16 + c, 0), a[k][1] = two(k * 16 + c, 8), a[k][2] = two(k * 16 + c + 8, 0), a[k][3] = two(k * 16 + c + 8, 8);
    }
    auto load_inputs = [&](int t) {
        if (t >= 0)
#pragma unroll
            for (int i = tid; i < ROWS * 6 * 4; i += 256) {
                const int ch = i % 4, what = i / 4 % 6, row = i / 24;
                const size_t token = (size_t)t * B + row0 + row, before = (size_t)(t ? t - 1 : 0) * B + row0 + row;
                const u16* from = what < 4 ? gates + token * 4 * H + what * H : what == 4 ? cells + before * H : dy + token * H;
                cpa(saddr(gst) + t % STAGES * GSTAGE + row * GP + (what * 4 + ch) * 16, from + unit0 + ch * 8);
            }
        cpa_commit();
    };
    load_inputs(T - 1), load_inputs(T - 2);
    float dc[PER][4], cn[PER][4];
#pragma unroll
    for (int i = 0; i < PER; ++i)
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const int item = i * 256 + tid, l = item & 31, j = item / 32 % NT, half = item / 32 / NT;
            dc[i][k] = 0.f, cn[i][k] = bf(cells[((size_t)(T - 1) * B + row0 + 8 * j + 2 * (l & 3) + (k & 1)) * H + unit0 + half * 16 + (l >> 2) + (k >> 1) * 8]);
        }
    asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
    const size_t step_bytes = (size_t)gridDim.y * 4 * TILE;
    int retries = 0;
    for (int t = T - 1, n = 0; t >= 0; --t, ++n) {
        cpa_wait<1>();
        if (n > 0) {
            float s[NT][4];
#pragma unroll
            for (int j = 0; j < NT; ++j) s[j][0] = s[j][1] = s[j][2] = s[j][3] = 0.f;
            const u32 here = tile + (n & 1) * TILE;
            const char* from = X + (size_t)(t + 1) * step_bytes + ((size_t)bg * 4 + rank) * TILE;
            constexpr int N = TILE / 16 / 256;
            while (!try_wait(bar + (n & 1) * 8, ((n - 1) >> 1) & 1)) {}
            if (MODE == 1 || MODE == 4) {
                bool any = false;
#pragma unroll
                for (int i = 0; i < N; ++i) {
                    uint4 w = lds4(here + (i * 256 + tid) * 16);
                    if (unwritten(w)) {
                        any = true;
                        do w = ldx(from + (i * 256 + tid) * 16); while (unwritten(w) && ++retries < 10000000);
                        sts4(here + (i * 256 + tid) * 16, w);
                    }
                }
                if (any) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
                retries += any;
                __syncthreads();
            }
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
            for (int k = 0; k < (ABL & 1 ? 1 : KS); ++k) {
                const u32 panel = here + k / 4 * PANEL;
                const u64 d = ((u64)(panel >> 4 & 0x3fffu) | 1ull << 16 | 64ull << 32 | 1ull << 62) + k % 4 * 2;
                Mma<ROWS>::go(s, a[k], d, k > 0);
            }
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
            asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
            if (tid == 0) asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(bar + 16), "r"(4 * ITEMS * 16) : "memory");
            const u32 to_rank = wg * 2 + w4 / 2;
            u32 to, to_bar;
            asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to) : "r"(saddr(got) + (rank * ITEMS + (w4 & 1) * NT * 32 + lane) * 16), "r"(to_rank));
            asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to_bar) : "r"(bar + 16), "r"(to_rank));
#pragma unroll
            for (int j = 0; j < NT; ++j)
                asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1,%2,%3,%4}, [%5];" ::"r"(to + j * 512), "f"(s[j][0]), "f"(s[j][1]), "f"(s[j][2]), "f"(s[j][3]), "r"(to_bar) : "memory");
            while (!try_wait(bar + 16, (n - 1) & 1)) {}
        }
        __syncthreads();  // all inputs are there
        char* const gs = gst + t % STAGES * GSTAGE;
#pragma unroll
        for (int i = 0; i < PER; ++i) {
            const int item = i * 256 + tid, l = item & 31, j = item / 32 % NT, half = item / 32 / NT;
            float4 dh = make_float4(0, 0, 0, 0);
            if (n > 0)
#pragma unroll
                for (int r = 0; r < 4; ++r) {
                    const float4 v = *(float4*)(got + (r * ITEMS + item) * 16);
                    dh.x += v.x, dh.y += v.y, dh.z += v.z, dh.w += v.w;
                }
            const float all[4] = {dh.x, dh.y, dh.z, dh.w};
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const int row = 8 * j + 2 * (l & 3) + (k & 1), unit = half * 16 + (l >> 2) + (k >> 1) * 8;
                u16* const g = (u16*)(gs + row * GP) + unit;
                const float gi = bf(g[0]), gf = bf(g[UNITS]), gg = bf(g[2 * UNITS]), go = bf(g[3 * UNITS]), before = t ? bf(g[4 * UNITS]) : 0.f;
                const float h = all[k] + bf(g[5 * UNITS]), th = tanh_(cn[i][k]);
                const float d = dc[i][k] + h * go * (1 - th * th);
                g[0] = tobf(d * gg * gi * (1 - gi)), g[UNITS] = tobf(d * before * gf * (1 - gf)), g[2 * UNITS] = tobf(d * gi * (1 - gg * gg)), g[3 * UNITS] = tobf(h * th * go * (1 - go));
                dc[i][k] = d * gf, cn[i][k] = before;
            }
        }
        __syncthreads();
        char* const to = X + (size_t)t * step_bytes + (size_t)bg * 4 * TILE;
#pragma unroll
        for (int i = tid; i < ROWS * 16; i += 256) {
            const int ch = i % 4, row = i / 4 % ROWS, gate = i / 4 / ROWS, first = unit0 / 8 + ch;
            const uint4 v = *(uint4*)(gs + row * GP + gate * 64 + ch * 16);
            stx(to + gate * TILE + first / 8 * PANEL + row * 128 + ((first % 8 ^ (row & 7)) << 4), v);
            if (MODE == 3) {
                __syncwarp();
                if (lane == 0) asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counters + (t * gridDim.y + bg) * 4 + gate) : "memory");
            }
        }
        if (MODE == 4 && warp == 7 && t > 0) {
            const int last = lane * 4 + 3, row = ROWS - 1;
            u32 seen = lane < gridDim.x ? ~0u : 0;
            const char* const word = to + rank * TILE + last / 8 * PANEL + row * 128 + ((last % 8 ^ (row & 7)) << 4) + 12;
            do if (seen == ~0u) asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(word) : "memory"); while (__any_sync(~0u, seen == ~0u) && ++retries < 10000000);
        }
        if (tid == 255 && t > 0) {
            if (MODE == 4) {
            } else if (MODE == 3) {
                u32 seen;
                do { asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(counters + (t * gridDim.y + bg) * 4 + rank) : "memory"); } while (seen < gridDim.x * ROWS * 4 / 32 && ++retries < 10000000);
                asm volatile("fence.proxy.async;" ::: "memory");
            } else {
                const long long stored = clock64();
                while (clock64() - stored < PAUSE) {}
            }
            const u32 b = bar + ((n + 1) & 1) * 8;
            asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(b), "r"(TILE) : "memory");
            asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(tile + ((n + 1) & 1) * TILE), "l"(to + rank * TILE), "r"(TILE), "r"(b) : "memory");
        }
#pragma unroll
        for (int i = tid; i < ROWS * 16; i += 256) {
            const int ch = i % 4, gate = i / 4 % 4, row = i / 16;
            *(uint4*)(dgates + ((size_t)t * B + row0 + row) * 4 * H + gate * H + unit0 + ch * 8) = *(uint4*)(gs + row * GP + gate * 64 + ch * 16);
        }
        if (ABL & 4) cpa_commit(); else load_inputs(t - 2);
    }
    asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
    if (tid == 0 || tid == 255) atomicAdd(counters + (size_t)T * gridDim.y * 4, (u32)retries);
}
#ifndef __CUDACC_RTC__
#define CK(x) do { cudaError_t e = (x); if (e != cudaSuccess) { printf("%s at %d: %s\n", #x, __LINE__, cudaGetErrorString(e)); exit(1); } } while (0)
static u32 seed = 1; static float rnd() { seed = seed * 1664525u + 1013904223u; return (seed >> 8) / 16777216.f - 0.5f; }
static u16 hbf(float f) { u32 u; memcpy(&u, &f, 4); u += 0x7fff + (u >> 16 & 1); return u >> 16; }
static float hf(u16 v) { u32 u = (u32)v << 16; float f; memcpy(&f, &u, 4); return f; }
template <int H, int UNITS, int ROWS, int CL, int MODE, int PAUSE, int ABL = 0> void go(int T, int B) {
    if (B % ROWS) return;
    constexpr int TILE = H / 64 * ROWS * 128;
    const int BG = B / ROWS, UG = H / UNITS;
    const int smem = 1024 + 2 * TILE + 3 * ROWS * (8 * UNITS + 16) + 2 * ROWS * (2 * UNITS + 16) + (UNITS == 16 ? ROWS / 8 * 128 * 16 : 0);
    if (smem > 227 * 1024 || UG * BG > 132) { printf("H %d B %d units %d rows %d: does not fit (%d bytes, %d blocks)\n", H, B, UNITS, ROWS, smem, UG * BG); return; }
    std::vector<u16> g((size_t)T * B * 4 * H), w((size_t)4 * H * H), out((size_t)T * B * H);
    seed = 1; for (auto& v : g) v = hbf(2 * rnd()); for (auto& v : w) v = hbf(4 * rnd() / sqrtf(H));
    u16 *dg, *dg0, *dw, *dy, *dc; char* dx; u32* dn;
    CK(cudaMalloc(&dg, g.size() * 2)); CK(cudaMalloc(&dg0, g.size() * 2)); CK(cudaMalloc(&dw, w.size() * 2)); CK(cudaMalloc(&dy, out.size() * 2)); CK(cudaMalloc(&dc, out.size() * 2));
    CK(cudaMalloc(&dx, out.size() * 2)); CK(cudaMalloc(&dn, (T * BG + 1) * 4));
    CK(cudaMemcpy(dg0, g.data(), g.size() * 2, cudaMemcpyHostToDevice)); CK(cudaMemcpy(dw, w.data(), w.size() * 2, cudaMemcpyHostToDevice));
    auto kernel = fwd<H, UNITS, ROWS, CL, MODE, PAUSE, ABL>;
    CK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem));
    cudaFuncAttributes at; CK(cudaFuncGetAttributes(&at, kernel));
    cudaLaunchConfig_t cfg = {}; cfg.gridDim = dim3(UG, BG); cfg.blockDim = dim3(256); cfg.dynamicSmemBytes = smem;
    cudaLaunchAttribute attr[2]; attr[0].id = cudaLaunchAttributeClusterDimension; attr[0].val.clusterDim.x = CL; attr[0].val.clusterDim.y = 1; attr[0].val.clusterDim.z = 1;
    attr[1].id = cudaLaunchAttributeCooperative; attr[1].val.cooperative = 1;
    cfg.attrs = attr; cfg.numAttrs = 2;
    if (CL > 1) { int n = 0; cfg.numAttrs = 1; CK(cudaOccupancyMaxActiveClusters(&n, kernel, &cfg)); cfg.numAttrs = 2; if (n * CL < UG * BG) { printf("H %d B %d units %d rows %d cl %d: only %d clusters\n", H, B, UNITS, ROWS, CL, n); return; } }
    cudaEvent_t e0, e1; cudaEventCreate(&e0); cudaEventCreate(&e1);
    float best = 1e9; u32 retries = 0;
    for (int rep = 0; rep < 6; ++rep) {
        CK(cudaMemcpy(dg, dg0, g.size() * 2, cudaMemcpyDeviceToDevice)); CK(cudaMemset(dx, 0xff, out.size() * 2)); CK(cudaMemset(dn, 0, (T * BG + 1) * 4)); CK(cudaDeviceSynchronize());
        cudaEventRecord(e0); CK(cudaLaunchKernelEx(&cfg, kernel, dg, (const u16*)dw, dx, dn, dy, dc, T, B)); cudaEventRecord(e1); CK(cudaDeviceSynchronize());
        float ms; cudaEventElapsedTime(&ms, e0, e1); if (ms < best) best = ms;
    }
    CK(cudaMemcpy(&retries, dn + T * BG, 4, cudaMemcpyDeviceToHost));
    CK(cudaMemcpy(out.data(), dy, out.size() * 2, cudaMemcpyDeviceToHost));
    // reference: a few rows, 4 steps and the values of the device afterwards as inputs (one step from its own h)
    double worst = 0;
    for (int row = 0; row < B; row += B / 3) {
        std::vector<float> h(H, 0.f), c(H, 0.f);
        for (int t = 0; t < T; ++t) {
            std::vector<float> n(H);
            for (int u = 0; u < H; ++u) {
                float s[4];
                for (int k = 0; k < 4; ++k) { s[k] = hf(g[((size_t)t * B + row) * 4 * H + k * H + u]); if (t && t < 6) for (int i = 0; i < H; ++i) s[k] += hf(w[(size_t)(k * H + u) * H + i]) * h[i]; }
                c[u] = c[u] / (1 + expf(-s[1])) + tanhf(s[2]) / (1 + expf(-s[0])); n[u] = tanhf(c[u]) / (1 + expf(-s[3]));
                if (t < 6) worst = fmax(worst, fabs(n[u] - hf(out[((size_t)t * B + row) * H + u])));
            }
            if (t >= 6) break;
            for (int u = 0; u < H; ++u) h[u] = hf(out[((size_t)t * B + row) * H + u]);
        }
    }
    printf("H %4d B %3d units %2d rows %2d cluster %d mode %d pause %4d without %d: %7.3f us a step, error %.4f, retries %u, %d registers, %d local\n", H, B, UNITS, ROWS, CL, MODE, PAUSE, ABL, best * 1000 / T, worst, retries, at.numRegs, (int)at.localSizeBytes);
    fflush(stdout);
    cudaFree(dg); cudaFree(dg0); cudaFree(dw); cudaFree(dy); cudaFree(dc); cudaFree(dx); cudaFree(dn);
}

template <int H, int ROWS, int MODE, int PAUSE, int ABL = 0> void back(int T, int B) {
    constexpr int TILE = H / 64 * ROWS * 128;
    const int BG = B / ROWS, UG = H / 32;
    const int smem = 1024 + 2 * TILE + 3 * ROWS * 400 + 4 * ROWS / 8 * 1024;
    if (smem > 227 * 1024 || UG * BG > 120) { printf("backward H %d B %d rows %d: does not fit (%d bytes, %d blocks)\n", H, B, ROWS, smem, UG * BG); return; }
    std::vector<u16> g((size_t)T * B * 4 * H), w((size_t)4 * H * H), c((size_t)T * B * H), dy(c.size()), out(g.size());
    seed = 1; for (auto& v : g) v = hbf(0.5f + rnd()); for (auto& v : w) v = hbf(2 * rnd() / sqrtf(H)); for (auto& v : c) v = hbf(2 * rnd()); for (auto& v : dy) v = hbf(rnd());
    u16 *dg, *dw, *dd, *dc, *ddy; char* dx; u32* dn;
    CK(cudaMalloc(&dg, g.size() * 2)); CK(cudaMalloc(&dd, g.size() * 2)); CK(cudaMalloc(&dw, w.size() * 2)); CK(cudaMalloc(&ddy, c.size() * 2)); CK(cudaMalloc(&dc, c.size() * 2));
    CK(cudaMalloc(&dx, g.size() * 2)); CK(cudaMalloc(&dn, (T * BG * 4 + 1) * 4));
    CK(cudaMemcpy(dg, g.data(), g.size() * 2, cudaMemcpyHostToDevice)); CK(cudaMemcpy(dw, w.data(), w.size() * 2, cudaMemcpyHostToDevice)); CK(cudaMemcpy(dc, c.data(), c.size() * 2, cudaMemcpyHostToDevice)); CK(cudaMemcpy(ddy, dy.data(), c.size() * 2, cudaMemcpyHostToDevice));
    auto kernel = bwd<H, ROWS, MODE, PAUSE, ABL>;
    CK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem));
    cudaFuncAttributes at; CK(cudaFuncGetAttributes(&at, kernel));
    cudaLaunchConfig_t cfg = {}; cfg.gridDim = dim3(UG, BG); cfg.blockDim = dim3(256); cfg.dynamicSmemBytes = smem;
    cudaLaunchAttribute attr[2]; attr[0].id = cudaLaunchAttributeClusterDimension; attr[0].val.clusterDim.x = 4; attr[0].val.clusterDim.y = 1; attr[0].val.clusterDim.z = 1;
    attr[1].id = cudaLaunchAttributeCooperative; attr[1].val.cooperative = 1; cfg.attrs = attr; cfg.numAttrs = 2;
    cudaEvent_t e0, e1; cudaEventCreate(&e0); cudaEventCreate(&e1);
    float best = 1e9; u32 retries = 0;
    for (int rep = 0; rep < 6; ++rep) {
        CK(cudaMemset(dx, 0xff, g.size() * 2)); CK(cudaMemset(dn, 0, (T * BG * 4 + 1) * 4)); CK(cudaDeviceSynchronize());
        cudaEventRecord(e0); CK(cudaLaunchKernelEx(&cfg, kernel, (const u16*)dg, (const u16*)dc, (const u16*)ddy, (const u16*)dw, dx, dn, dd, T, B)); cudaEventRecord(e1); CK(cudaDeviceSynchronize());
        float ms; cudaEventElapsedTime(&ms, e0, e1); if (ms < best) best = ms;
    }
    CK(cudaMemcpy(&retries, dn + T * BG * 4, 4, cudaMemcpyDeviceToHost)); CK(cudaMemcpy(out.data(), dd, out.size() * 2, cudaMemcpyDeviceToHost));
    double worst = 0;
    for (int row = 0; row < B; row += B / 3) {
        std::vector<float> d(H, 0.f), dh(H, 0.f);
        for (int t = T - 1; t > T - 6; --t) {
            for (int u = 0; u < H; ++u) {
                const size_t at = (size_t)t * B + row; float v[4]; for (int k = 0; k < 4; ++k) v[k] = hf(g[at * 4 * H + k * H + u]);
                const float before = hf(c[(at - B) * H + u]), h = dh[u] + hf(dy[at * H + u]), th = tanhf(hf(c[at * H + u])), e = d[u] + h * v[3] * (1 - th * th);
                const float o[4] = {e * v[2] * v[0] * (1 - v[0]), e * before * v[1] * (1 - v[1]), e * v[0] * (1 - v[2] * v[2]), h * th * v[3] * (1 - v[3])};
                for (int k = 0; k < 4; ++k) worst = fmax(worst, fabs(o[k] - hf(out[at * 4 * H + k * H + u])));
                d[u] = e * v[1];
            }
            for (int u = 0; u < H; ++u) { dh[u] = 0; for (int k = 0; k < 4 * H; ++k) dh[u] += hf(out[((size_t)t * B + row) * 4 * H + k]) * hf(w[(size_t)k * H + u]); }
        }
    }
    printf("backward H %4d B %3d rows %2d mode %d pause %4d without %d: %7.3f us a step, error %.4f, retries %u, %d registers, %d local\n", H, B, ROWS, MODE, PAUSE, ABL, best * 1000 / T, worst, retries, at.numRegs, (int)at.localSizeBytes);
    fflush(stdout);
    cudaFree(dg); cudaFree(dd); cudaFree(dw); cudaFree(ddy); cudaFree(dc); cudaFree(dx); cudaFree(dn);
}
#define ALL(H, U, R, B) go<H, U, R, 1, 0, 0>(T, B); go<H, U, R, 1, 1, 600>(T, B); go<H, U, R, 2, 1, 600>(T, B); go<H, U, R, 2, 1, 1200>(T, B); go<H, U, R, 1, 4, 0>(T, B); go<H, U, R, 2, 4, 0>(T, B); go<H, U, R, 2, 3, 0>(T, B); go<H, U, R, 2, 4, 0, 1>(T, B); go<H, U, R, 2, 4, 0, 2>(T, B); go<H, U, R, 2, 4, 0, 6>(T, B);
int main() {
    const int T = 100;
#if PART == 0
    ALL(512, 32, 16, 128)
#elif PART == 1
    ALL(512, 32, 32, 256)
#elif PART == 2
    ALL(512, 32, 64, 512)
#elif PART == 3
    ALL(1024, 16, 32, 64)
#elif PART == 4
    back<512, 32, 1, 600>(T, 224); back<512, 32, 1, 900>(T, 224); back<512, 32, 4, 0>(T, 224); back<512, 32, 3, 0>(T, 224); back<512, 32, 4, 0, 1>(T, 224); back<512, 32, 4, 0, 4>(T, 224); back<512, 48, 4, 0>(T, 336);
#else
    go<512, 32, 40, 4, 4, 0>(T, 280); go<512, 32, 24, 4, 4, 0>(T, 168); go<512, 32, 80, 4, 4, 0>(T, 560); go<1024, 16, 48, 2, 4, 0>(T, 96); go<1024, 16, 48, 2, 3, 0>(T, 96);
#endif
}
#endif
