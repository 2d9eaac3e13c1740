"""Compilation, launch and CUDA graph capture of the library's CUDA kernels, and wrappers of cuBLAS matrix products."""
