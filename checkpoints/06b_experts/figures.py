"""Figures of lesson 06b, of the numbers of micro-qwen3-moe."""

import numpy as np
from matplotlib.figure import Figure

import llorch
from llorch.judging.goldens.forward import read
from llorch.ops.routing import spread
from llorch.runtime.builtin import goldens_folder


def chosen() -> Figure:
    """Plot the weights of the experts of every token, in the first layer."""
    model, trace = llorch.load("micro-qwen3-moe"), {}
    model.forward(read(goldens_folder() / "micro-qwen3-moe").cases["near"].ids[:24], trace=trace)
    ids, weights = trace["l0.topk_ids"], trace["l0.topk_weights"]
    table = spread(weights, ids, n_experts=model.config.experts.n_experts)  # (seq, experts)
    figure = Figure(figsize=(7.2, 2.6), layout="constrained")
    axes = figure.subplots()
    nonzero = np.ma.masked_equal(table.T, 0)
    axes.pcolormesh(nonzero, cmap="Blues", vmin=0, vmax=1, edgecolors="#7d7d7d", linewidth=0.2)
    axes.set(xlabel="token", ylabel="expert", yticks=np.arange(len(table.T)) + 0.5, yticklabels=range(len(table.T)))
    axes.invert_yaxis()
    return figure


def figures() -> dict[str, Figure]:
    """Return the figures by name."""
    return {"chosen": chosen()}
