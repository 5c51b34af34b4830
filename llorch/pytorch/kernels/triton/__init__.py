"""Kernels of the torch model for a CUDA device. llorch uses a kernel only after it passed its check on that device.

Each kernel has the inputs and the results of the module that it replaces, but is faster. `kernels` has the table of all
kernels. Read `fused` first (norm, rotation, activation), then `trained` (with gradients), `dense_matvec`,
`decode_attention`, `quantised_matvec`, `quantised`, and `graph`, which records a decode step.
`kernels.kernel_check` has the checks.

Functions under `triton.jit` are compiled from their source, not called. The type checks that tests hook into every
function of llorch must skip them, so `no_type_check` follows every `triton.jit`. Triton compiles a kernel at its first
call on a device. Its interpreter misses some errors, such as a name with two shapes in two branches. So a test compiles
every kernel for a device; this needs no device.
"""
