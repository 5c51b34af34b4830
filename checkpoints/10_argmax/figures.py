"""Figure of lesson 10: the lead of the best token."""

import numpy as np
from matplotlib.figure import Figure

from llorch.apps.learn.checks.forward import suite_of
from llorch.judging.goldens.forward import read
from llorch.runtime.builtin import BUILTIN, goldens_folder

GREY, BLUE = "#8b949e", "#2f81f7"


def leads() -> Figure:
    """Plot the lead of the best token at every step of the greedy text of each model, on a logarithmic axis."""
    figure = Figure(figsize=(6.4, 2.8), layout="constrained")
    axes = figure.subplots()
    for line, name in enumerate(BUILTIN):
        logits = read(goldens_folder() / name).reference.step_logits
        steps = np.sort(logits, axis=1)
        gaps = (steps[:, -1] - steps[:, -2]) / np.sqrt(np.mean(logits**2, axis=1))
        axes.semilogx(gaps, np.full(len(gaps), line), ".", color=BLUE, markersize=7, alpha=0.7)
    moved = max(suite_of(name).tolerances("near").largest_swap() for name in BUILTIN)
    axes.axvline(moved, color=GREY, linestyle="--", linewidth=1)
    axes.text(moved * 1.2, -0.6, "rounding of float32", color=GREY, va="center", fontsize=9)
    axes.set_yticks(range(len(BUILTIN)), BUILTIN)
    axes.set(
        ylim=(len(BUILTIN) - 0.5, -0.9),
        xlim=(1e-6, 50),
        xlabel="lead of the best logit over the second, by the root mean square of the row",
    )
    return figure


def figures() -> dict[str, Figure]:
    """Return the figures by name."""
    return {"leads": leads()}
