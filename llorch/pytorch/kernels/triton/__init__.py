"""Kernels of the torch model for a CUDA device. llorch uses a kernel only after it passed its check on that device.

Input: tensors of the modules that they replace, on a device. Output: the same results, faster. `kernels` has the table
of all kernels. Read `fused` first (norm, rotation, activation), then `trained` (with gradients), `dense_matvec`,
`decode_attention`, `quantised_matvec`, `quantised`, and `graph`, which records a step of decoding.
`kernels.kernel_check` has the checks.

Functions under `triton.jit` are compiled from their source, not called. The checks of types that tests hook into every
function of llorch must leave them alone, so `no_type_check` stands below every `triton.jit`. The compiler runs when one
is first called on a device. The interpreter does not find every error, such as a name with two shapes in two branches.
So a test compiles every kernel for a device; that takes no device.
"""
