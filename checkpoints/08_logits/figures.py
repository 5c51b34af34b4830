"""Figures of lesson 08, of the numbers of story."""

import numpy as np
from matplotlib.figure import Figure

import llorch
from llorch.ops.linear import linear
from llorch.ops.rms_norm import rms_norm

SENTENCE = "Once upon a time there was a little fox"
N_BEST = 5


def lens() -> Figure:
    """Show the likeliest next tokens, if the model ended after each layer."""
    story, trace = llorch.load("story"), {}
    story.forward(story.tokenizer.encode(SENTENCE), trace=trace)
    streams = {"embedding": "embed"} | {f"after layer {i}": f"l{i}.block_out" for i in range(story.config.n_layers)}
    figure = Figure(figsize=(7.2, 3.6), layout="constrained")
    axes = figure.subplots()
    for row, name in enumerate(streams.values()):
        x = rms_norm(trace[name][-1:], story.weights["final_norm"], eps=story.config.rms_norm_eps)
        logits = linear(x, story.weights["embed_tokens"])[0].astype(np.float64)
        shares = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
        for column, token in enumerate(np.argsort(-shares)[:N_BEST]):
            word = story.tokenizer.decode([int(token)]).strip()
            axes.barh(row + 0.28, 0.9 * shares[token], 0.16, left=column - 0.45, color="C0")
            word = word if word.isalpha() else f'"{word}"'
            axes.text(column - 0.45, row, f"{word}  {shares[token]:.2f}", va="center", fontsize=10)
    axes.set_yticks(range(len(streams)), list(streams))
    axes.set_xticks(np.arange(N_BEST) - 0.45, ["first", "second", "third", "fourth", "fifth"], ha="left")
    axes.xaxis.tick_top()
    axes.set(xlim=(-0.55, N_BEST - 0.45), ylim=(len(streams) - 0.4, -0.6))
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    return figure


def figures() -> dict[str, Figure]:
    """Return the figures by name."""
    return {"lens": lens()}
