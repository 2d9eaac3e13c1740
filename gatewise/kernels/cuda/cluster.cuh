// Sums across the blocks of a cluster, through distributed shared memory (sm_90 and later).
//
// Each store signals its own arrival: the receiver's barrier counts the bytes that arrive. Received values are in shared
// memory, which is not cached, so they are not acquired at cluster scope: that would invalidate the first-level cache in every
// step.
#pragma once
#include "memory.cuh"

__device__ __forceinline__ u32 cluster_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// The address of the same place in the shared memory of another block of the cluster.
__device__ __forceinline__ u32 address_in(u32 address, u32 rank) {
    u32 remote;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
    return remote;
}

__device__ __forceinline__ void arrive_at_cluster_barrier() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void await_cluster_barrier() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

__device__ __forceinline__ void cluster_barrier() {
    arrive_at_cluster_barrier();
    await_cluster_barrier();
}

__device__ __forceinline__ void initialise_arrival(u64* arrival) {
    asm volatile("mbarrier.init.shared.b64 [%0], 1;\n\tfence.mbarrier_init.release.cluster;" ::"r"(shared_address(arrival)) : "memory");
}

// A barrier is given by its address in shared memory, or by a pointer.
__device__ __forceinline__ void expect_bytes(u32 arrival, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(arrival), "r"(bytes) : "memory");
}
__device__ __forceinline__ void expect_bytes(u64* arrival, u32 bytes) { expect_bytes(shared_address(arrival), bytes); }

__device__ __forceinline__ void send(u32 to, float4 values, u32 arrival) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1,%2,%3,%4}, [%5];" ::"r"(to),
                 "f"(values.x), "f"(values.y), "f"(values.z), "f"(values.w), "r"(arrival)
                 : "memory");
}

__device__ __forceinline__ bool has_arrived(u32 arrival, u32 parity) {
    u32 done;
    asm volatile(
        "{\n\t.reg .pred p;\n\t"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\t"
        "selp.u32 %0, 1, 0, p;\n\t}"
        : "=r"(done)
        : "r"(arrival), "r"(parity)
        : "memory");
    return done != 0;
}
__device__ __forceinline__ bool has_arrived(u64* arrival, u32 parity) { return has_arrived(shared_address(arrival), parity); }
