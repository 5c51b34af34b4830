"""Kernels of the torch model for the CPU, in C if a compiler is installed.

Each kernel has the inputs and the results of the module that it replaces, in one pass over memory. Read `library` first
(it builds, caches and loads the C files), then `layer` and `linear` with `cpu_numbers.h`, `cpu_layer.c`,
`cpu_attention.c` and `cpu_fixed.c`, `quantised` with `cpu_products.c` and `cpu_packing.c`, and
`block`, which has the table of all kernels and runs a block in one call.
"""
