"""Figures of lesson 05, of the numbers of story."""

import numpy as np
from matplotlib.figure import Figure

import llorch

SENTENCE = "Once upon a time there was a little fox"
LAYER = 4


def heads() -> Figure:
    """Plot the length of each head's addition to the stream of the last token, and its part along the sum."""
    story, trace = llorch.load("story"), {}
    story.forward(story.tokenizer.encode(SENTENCE), trace=trace)
    n_heads, head_dim = story.config.n_heads, story.config.head_dim
    context = trace[f"l{LAYER}.attn_context"][-1].reshape(n_heads, head_dim)
    columns = story.weights[f"layers.{LAYER}.o_proj"].reshape(-1, n_heads, head_dim)
    added = np.einsum("hd,ohd->ho", context, columns)  # (heads, hidden)
    total = added.sum(axis=0)
    length, along = np.linalg.norm(added, axis=-1), added @ total / np.linalg.norm(total)
    words = ["(start)", *SENTENCE.split()]
    looks_at = [words[c] for c in trace[f"l{LAYER}.attn_probs"][:, -1].argmax(axis=-1)]
    figure = Figure(figsize=(7.2, 3.4), layout="constrained")
    axes = figure.subplots()
    axes.bar(range(n_heads), length, color="C0", alpha=0.35, label=f"length (together {length.sum():.0f})")
    axes.bar(range(n_heads), along, color="C0", label=f"along the sum (together {along.sum():.0f})")
    axes.set_xticks(range(n_heads), [f"head {h}\n{word}" for h, word in enumerate(looks_at)])
    axes.set_ylabel("added to the stream of fox")
    axes.legend(frameon=False, loc="upper left")
    return figure


def figures() -> dict[str, Figure]:
    """Return the figures by name."""
    return {"heads": heads()}
