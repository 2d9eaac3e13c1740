"""The data types of the package, such as problems, devices, kernels and decisions, without any computation."""
