"""Kernels of the torch model for the CPU, in the C files of `llorch.ops.compiled` if a compiler is installed.

Each kernel has the inputs and the results of the module that it replaces, in one pass over memory. Read `layer` and
`linear` first, then `quantised`, and `block`, which has the table of all kernels and runs a block in one call.
"""
