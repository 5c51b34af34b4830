"""Speed of a model on this machine: `measure` in NumPy, `torch` on torch."""
