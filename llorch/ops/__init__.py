"""Pure NumPy operations, one per file: arrays in, arrays out, the dtype of the input is the dtype of the result."""
