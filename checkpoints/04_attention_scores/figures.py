"""Figures of lesson 04, of the numbers of story."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import llorch
from llorch.ops.attention import attention_probs

SENTENCE = "Once upon a time there was a little fox"
LAYER, HEAD = 1, 1


def products(trace: dict[str, np.ndarray], config: llorch.ModelConfig) -> np.ndarray:
    """Compute the scaled products of one head, without the mask: (seq, ctx)."""
    q, k = trace[f"l{LAYER}.q_rope"][:, HEAD], trace[f"l{LAYER}.k_cache"][HEAD // config.group_size]
    return q @ k.T / np.sqrt(config.head_dim)


def heat(axes: Axes, values: np.ndarray, words: list[str], title: str, **options: Any) -> None:
    """Draw a heat map with a word at every column."""
    axes.pcolormesh(np.ma.masked_invalid(values), **options)
    axes.set(title=title, aspect="equal")
    axes.invert_yaxis()
    axes.set_xticks(np.arange(len(words)) + 0.5, words, rotation=90)
    axes.set_yticks([])
    for side in axes.spines.values():
        side.set_visible(True)


def heads() -> Figure:
    """Plot scaled products, scores and shares of one head, with row sums at the margin."""
    story, trace = llorch.load("story"), {}
    ids = story.tokenizer.encode(SENTENCE)
    story.forward(ids, trace=trace)
    words = ["(start)", *SENTENCE.split()]
    scaled, scores = products(trace, story.config), trace[f"l{LAYER}.attn_scores"][HEAD]
    shares = attention_probs(scores[None])[0]
    figure = Figure(figsize=(9, 3.9), layout="constrained")
    first, second, third = figure.subplots(1, 3)
    size = np.abs(scaled).max()
    heat(first, scaled, words, "scaled products", cmap="PuOr", vmin=-size, vmax=size)
    heat(second, scores, words, "scores: the future hidden", cmap="PuOr", vmin=-size, vmax=size)
    heat(third, np.where(np.isfinite(scores), shares, np.nan), words, "shares", cmap="Oranges", vmin=0, vmax=1)
    first.set_yticks(np.arange(len(words)) + 0.5, words)
    first.set_ylabel("query")
    for row, total in enumerate(shares.sum(axis=-1)):
        third.text(len(words) + 0.2, row + 0.5, f"{total:.2f}", va="center", fontsize=9)
    return figure


def figures() -> dict[str, Figure]:
    """Return the figures by name."""
    return {"heads": heads()}
