"""Figures of lesson 06, of the numbers of story."""

import math

import numpy as np
from matplotlib.figure import Figure

import llorch

SENTENCE = "Once upon a time there was a little fox"


def curves() -> Figure:
    """Plot SiLU and functions that are mistaken for it, over the gates that a sentence makes."""
    story, trace = llorch.load("story"), {}
    story.forward(story.tokenizer.encode(SENTENCE), trace=trace)
    gates = np.concatenate([trace[f"l{i}.ffn_gate"].ravel() for i in range(story.config.n_layers)])
    z = np.linspace(-6, 4, 401)
    gelu = z * (1 + np.vectorize(math.erf)(z / math.sqrt(2))) / 2
    figure = Figure(figsize=(7.2, 3.8), layout="constrained")
    axes = figure.subplots()
    counts = axes.twinx()
    counts.hist(gates, bins=[*np.arange(-6, 4.01, 0.25)], color="#8b949e", alpha=0.35)
    counts.set_yticks([])
    counts.spines["right"].set_visible(False)
    axes.set_zorder(counts.get_zorder() + 1)
    axes.plot(z, z / (1 + np.exp(-z)), color="C0", linewidth=2.5, label="SiLU")
    axes.plot(z, gelu, color="C1", linewidth=1.5, label="GELU")
    axes.plot(z, np.maximum(z, 0), color="C2", linewidth=1.5, linestyle="--", label="ReLU")
    axes.set(xlabel="gate", ylabel="what passes", xlim=(-6, 4), ylim=(-0.6, 2.5))
    axes.legend(frameon=False, loc="upper left")
    return figure


def figures() -> dict[str, Figure]:
    """Return the figures by name."""
    return {"curves": curves()}
