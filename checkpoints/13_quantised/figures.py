"""Figures of lesson 13: the bytes of a block, and the error of a matrix by type."""

import numpy as np
from gguf import GGMLQuantizationType, dequantize, quantize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

import llorch

BLUE, LIT = "#2f81f7", "#d9702b"
TYPES = ("Q8_0", "Q5_0", "Q4_0")


def block() -> Figure:
    """Draw a block of Q4_0: the elements in the halves of its bytes."""
    figure = Figure(figsize=(7.2, 1.5), layout="constrained")
    axes = figure.subplots()
    axes.add_patch(Rectangle((0, 0), 2, 2, color=LIT, alpha=0.5))
    axes.text(1, 1, "d\nfloat16", ha="center", va="center", fontsize=8)
    for byte in range(16):
        for high in (0, 1):
            axes.add_patch(Rectangle((2 + byte, high), 0.94, 0.94, color=BLUE, alpha=0.25 + 0.3 * high))
            axes.text(2.47 + byte, high + 0.47, str(byte + 16 * high), ha="center", va="center", fontsize=8)
    axes.text(18.2, 0.47, "low half", va="center", fontsize=8)
    axes.text(18.2, 1.47, "high half", va="center", fontsize=8)
    for byte in range(18):
        axes.text(byte + 0.47, -0.5, str(byte), ha="center", va="center", fontsize=7)
    axes.set(xlim=(-0.2, 20.6), ylim=(-0.9, 2.1))
    axes.axis("off")
    return figure


def error() -> Figure:
    """Plot the error that rounding to each type makes in a matrix of story."""
    matrix = np.asarray(llorch.load("story").weights.astype(np.float32).layer(0)["gate_proj"], np.float32)
    figure = Figure(figsize=(7.2, 2.4), layout="constrained")
    axes = figure.subplots()
    edges = np.linspace(-0.2, 0.2, 121)
    for name, color in zip(TYPES, (BLUE, "#8250df", LIT), strict=True):
        kind = GGMLQuantizationType[name]
        errors = (dequantize(quantize(matrix, kind), kind) - matrix) / matrix.std()
        counts, _ = np.histogram(errors, edges)
        axes.stairs(np.maximum(counts / errors.size, 1e-6), edges, color=color, label=f"{name}, rms {errors.std():.3f}")
    axes.set(yscale="log", ylim=(1e-4, 1), xlabel="error, in standard deviations of the matrix", ylabel="share")
    axes.legend(frameon=False)
    return figure


def figures() -> dict[str, Figure]:
    """Return the figures by name."""
    return {"block": block(), "error": error()}
