"""The model in NumPy: `forward` and `backward` are one screen each, `model` is the class that users load."""
