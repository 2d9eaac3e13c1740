"""What follows from the statement of a cell: its operations, its adjoint, and both as operators of PyTorch.

`trace` calls a cell's step once and records its operations, `adjoint` derives the gradients from them with SymPy, and
`pointwise` writes both as Python functions.
"""
