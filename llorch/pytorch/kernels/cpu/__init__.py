"""Kernels of the torch model for the CPU, in C where a compiler is at hand.

Input: tensors of the modules that they replace. Output: the same results in one pass over memory. Read `library` first
(the C files are built, kept and loaded there), then `layer` and `linear` with `cpu_numbers.h`, `cpu_layer.c`,
`cpu_attention.c` and `cpu_fixed.c`, `quantised` with `cpu_products.c` and `cpu_packing.c`, and
`block`, which has the table of all kernels and runs a block in one call.
"""
