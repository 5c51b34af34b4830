"""Figures of lesson 03, of the sizes of story."""

import numpy as np
from matplotlib.figure import Figure

import llorch


def cost() -> Figure:
    """Plot the cost of the next token, and the numbers in memory, by the length of the text."""
    story = llorch.load("story")
    config, n = story.config, np.arange(1, story.config.max_position_embeddings + 1)
    matrices = sum(w.size for w in story.weights.layer(0).values() if w.ndim == 2)
    per_token = 2 * config.q_width  # with every token that is seen: a score and a share of its value
    with_cache = config.n_layers * (matrices + per_token * n)
    uncached = config.n_layers * (matrices * n + per_token * n * (n + 1) // 2)
    weights = 4 * (config.n_layers * matrices + story.weights["embed_tokens"].size)
    figure = Figure(figsize=(7.2, 3.2), layout="constrained")
    work, memory = figure.subplots(1, 2)
    work.loglog(n, uncached, label="all tokens again")
    work.loglog(n, with_cache, label="one token, and cache")
    work.set(xlabel="tokens in the text", ylabel="multiplications for the next")
    work.legend()
    memory.loglog(n, np.full(len(n), weights), label="weights")
    memory.loglog(n, 4 * 2 * config.n_layers * config.kv_width * n, label="cache")
    memory.set(xlabel="tokens in the text", ylabel="bytes in float32")
    memory.legend()
    return figure


def figures() -> dict[str, Figure]:
    """Return the figures by name."""
    return {"cost": cost()}
