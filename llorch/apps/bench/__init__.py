"""Speed of a model on this machine: `measure` for NumPy and the reports, `torch` for torch."""
