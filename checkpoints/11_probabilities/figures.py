"""Figure of lesson 11: one row of story through the chain of filters."""

import numpy as np
from matplotlib.figure import Figure

import llorch
from llorch.ops.sampling import keep_min_p, keep_top_k, keep_top_p, penalise, softmax

GREY, BLUE = "#8b949e", "#2f81f7"
PROMPT, SHOWN = "Once upon a time there was a little boy. One day, there was a little", 14


def filters() -> Figure:
    """Plot probabilities of the likeliest tokens, one panel a step; grey is the step before."""
    story = llorch.load("story")
    ids = story.tokenizer.encode(PROMPT)
    z = story.forward(ids, last_only=True)[-1].astype(np.float64)
    steps = {"logits": z}
    steps["penalty 1.1"] = penalise(z, ids, penalty=1.1)
    steps["temperature 0.8"] = steps["penalty 1.1"] / 0.8
    steps["top-k 12"] = keep_top_k(steps["temperature 0.8"], k=12)
    steps["top-p 0.8"] = keep_top_p(steps["top-k 12"], p=0.8)
    steps["min-p 0.1"] = keep_min_p(steps["top-p 0.8"], min_p=0.1)
    best = np.argsort(-z)[:SHOWN]
    figure = Figure(figsize=(7.2, 4.6), layout="constrained")
    panels = figure.subplots(2, 3, sharex=True, sharey=True).ravel()
    previous = softmax(z)[best]
    for axes, (name, logits) in zip(panels, steps.items(), strict=True):
        current = softmax(logits)[best]
        axes.bar(range(SHOWN), previous, color="none", edgecolor=GREY, linewidth=0.8)
        axes.bar(range(SHOWN), current, color=BLUE, width=0.6)
        axes.set_title(f"{name}: {np.isfinite(logits).sum()} tokens", fontsize=10)
        labels = [story.tokenizer.token_bytes(int(i)).decode().strip() for i in best]
        axes.set_xticks(range(SHOWN), labels, rotation=90, fontsize=9)
        previous = current
    return figure


def figures() -> dict[str, Figure]:
    """Return the figures by name."""
    return {"filters": filters()}
