// Programmatic dependent launch: a kernel may start while the preceding kernel of its stream still runs.
#pragma once

// Waits for the end of the preceding kernel, so that its results are visible.
__device__ __forceinline__ void wait_for_preceding_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel of the stream start, if it was launched so, once every block has come here or ended.
__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}
