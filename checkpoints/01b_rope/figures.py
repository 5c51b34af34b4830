"""Figures of lesson 01b, of the numbers of micro-llama."""

import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Circle

import llorch
from llorch.apps.learn.lessons import BY_NUMBER, typed_mistakes
from llorch.judging.goldens.forward import read
from llorch.ops.rope import frequencies, rope, rope_tables
from llorch.runtime.builtin import goldens_folder

GREY, BLUE = "#8b949e", "#2f81f7"
PAIRS, POSITIONS = (0, 2, 4, 8), range(8)


def clocks() -> Figure:
    """Draw one hand for each pair and position."""
    config = llorch.load("micro-llama").config
    speed = frequencies(config.head_dim, config.rope_theta)
    half = config.head_dim // 2
    figure = Figure(figsize=(6.4, 3.5), layout="constrained")
    for row, axes in zip(PAIRS, figure.subplots(len(PAIRS), len(POSITIONS)), strict=True):
        for position, clock in zip(POSITIONS, axes, strict=True):
            clock.add_patch(Circle((0, 0), 1, fill=False, color=GREY, linewidth=0.8))
            angle = position * speed[row]
            clock.plot([0, np.cos(angle)], [0, np.sin(angle)], color=BLUE, linewidth=2)
            clock.set(xlim=(-1.1, 1.1), ylim=(-1.1, 1.1), aspect="equal", xticks=[], yticks=[])
            clock.spines[:].set_visible(False)
            if row == PAIRS[0]:
                clock.set_title(f"{position}" if position else "position 0", fontsize=9)
        label = f"pair ({row}, {row + half})\nround in {2 * np.pi / speed[row]:.0f}"
        axes[0].set_ylabel(label, rotation=0, ha="right", va="center", fontsize=9)
    return figure


def wrong_pairs() -> Figure:
    """Plot the error of the numbers of a head when neighbours are rotated."""
    trace, golden = {}, read(goldens_folder() / "micro-llama")
    model = llorch.load("micro-llama")
    model.forward(list(golden.cases["near"].ids), trace=trace)
    config = model.config
    q = trace["l0.q_proj"].reshape(-1, config.n_heads, config.head_dim)
    cos, sin = rope_tables(np.arange(len(q)), head_dim=config.head_dim, theta=config.rope_theta, scaling=None)
    wrong = typed_mistakes(BY_NUMBER["01b"])["rope"]["rope-interleaved-pairs"](q, cos, sin)
    errors = np.abs(wrong - rope(q, cos, sin))[:, 0]
    figure = Figure(figsize=(6.4, 2.9), layout="constrained")
    axes = figure.subplots()
    cells = axes.pcolormesh(np.maximum(errors, 1e-4), norm=LogNorm(1e-4, 10), cmap="viridis")
    axes.invert_yaxis()
    axes.set(xlabel="number of the head", ylabel="position")
    axes.set_xticks(np.arange(0, 32, 4) + 0.5, range(0, 32, 4))
    axes.set_yticks(np.arange(0, 12, 2) + 0.5, range(0, 12, 2))
    figure.colorbar(cells, ax=axes, label="off by")
    return figure


def figures() -> dict[str, Figure]:
    """Return the figures by name."""
    return {"clocks": clocks(), "wrong_pairs": wrong_pairs()}
