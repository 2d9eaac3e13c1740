"""The derivation of code from the definition of a cell: its step and its gradients in PyTorch and in CUDA C++.

| module | contents |
|---|---|
| `trace` | the operations of a step, recorded by symbolic tracing |
| `adjoint` | the derivatives of a step, computed with SymPy |
| `pointwise` | step and derivatives as PyTorch functions, for the kernel `eager` |
| `fused` | the adjoint in the form that fused kernels compute: few kept values, and two stages |
| `device` | step and adjoint of fused kernels as CUDA C++ |
| `levels` | the statistics of a step over hidden units, and the levels in which they depend on each other |
| `jacobian` | the gradients of all statistics from one combination of hidden units |
| `row` | step and adjoint of a whole batch row as CUDA C++, for cells that `device` does not support |
| `row_text`, `row_step`, `row_adjoint` | the parts of `row` |
| `unit` | step and adjoint of fused kernels as PyTorch functions |
| `printing` | operations and SymPy expressions as source text |
"""
