"""Leaves of the torch model that are faster than the plain ones, each tested against its plain twin.

Functions under `triton.jit` are compiled from their source, not called. The checks of types that tests hook into every
function of llorch must leave them alone, so `no_type_check` stands below every `triton.jit`. The compiler runs when one
is first called on a device. What only it finds (a name with two shapes in two branches) passes in the interpreter, so
that a test compiles every kernel for a device; that takes none.
"""
