"""Figures of lesson 05b, of the numbers of micro-qwen3.5."""

import numpy as np
from matplotlib.figure import Figure

import llorch
from llorch.judging.goldens.forward import read
from llorch.runtime.builtin import goldens_folder


def remaining() -> Figure:
    """Plot the share of each token's update that remains after the decay of later tokens, in the first delta net."""
    model, trace = llorch.load("micro-qwen3.5"), {}
    model.forward(read(goldens_folder() / "micro-qwen3.5").cases["near"].ids, trace=trace)
    first = next(i for i in range(model.config.n_layers) if model.config.layer(i).mixer == "delta_net")
    g = trace[f"l{first}.log_decay"].astype(np.float64)  # (seq, v_heads)
    later_decay = np.cumsum(g[::-1], axis=0)[::-1] - g  # summed over later tokens
    figure = Figure(figsize=(7.2, 3.2), layout="constrained")
    axes = figure.subplots()
    for head, line in enumerate(np.exp(later_decay).T):
        axes.plot(line, color=f"C{head % 6}", linewidth=2, label=f"head {head}")
    axes.set(xlabel="token", ylabel="left at the end", ylim=(0, 1.03), xlim=(0, len(g) - 1))
    axes.legend(frameon=False, loc="upper left")
    return figure


def figures() -> dict[str, Figure]:
    """Return the figures by name."""
    return {"left": remaining()}
