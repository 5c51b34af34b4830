"""The model in NumPy: `forward` and `backward` are one screen each, `model` has the class that users load."""
