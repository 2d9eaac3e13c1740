"""The words: problems, devices, criteria, kernels, decisions and errors, without any tensor operation."""
