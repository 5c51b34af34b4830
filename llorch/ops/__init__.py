"""Pure NumPy operations, one per file, each beside its hand-derived backward: arrays in, arrays out.

The dtype of the input is the dtype of the result.
"""
