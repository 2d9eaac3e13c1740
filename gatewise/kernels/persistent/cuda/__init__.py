"""The CUDA C++ sources of the persistent kernel, compiled at run time."""
