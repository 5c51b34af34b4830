"""Figure of lesson 15, of the adapter of the goldens."""

import numpy as np
from matplotlib.figure import Figure

from llorch.judging.expectations.training import stored

MATRIX = "layers.0.q_proj"


def rank() -> Figure:
    """Plot the singular values of a frozen matrix and of its adapter's product."""
    weights, golden = stored("micro-llama")
    adapter = golden.adapter_for(weights.config)
    lora = adapter.tensors[MATRIX]
    delta = adapter.scaling(MATRIX) * lora.lora_B.astype(np.float64) @ lora.lora_A
    figure = Figure(figsize=(6.4, 3.2), layout="constrained")
    axes = figure.subplots()
    singular_values = np.linalg.svd(weights.array(MATRIX).astype(np.float64), compute_uv=False)
    axes.semilogy(np.arange(1, len(singular_values) + 1), singular_values, ".", color="#7d7d7d", label="W, frozen")
    singular_values = np.linalg.svd(delta, compute_uv=False)[: adapter.config.rank_of(adapter.targets[MATRIX])]
    axes.semilogy(np.arange(1, len(singular_values) + 1), singular_values, "o", color="C1", label="s B A, of rank 2")
    axes.annotate("and no third one", (3, 2e-2), color="C1", va="center")
    axes.set(xlabel="singular value, the largest first", ylabel="size", ylim=(1e-3, 30))
    axes.legend(frameon=False)
    return figure


def figures() -> dict[str, Figure]:
    """Return the figures by name."""
    return {"rank": rank()}
