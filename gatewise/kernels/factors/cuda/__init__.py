"""The CUDA C++ sources that gather and round factors, compiled at run time."""
