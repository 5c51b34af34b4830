"""Figure of lesson 16: the loss of story on every token of two tales."""

import numpy as np
from matplotlib.figure import Figure

import llorch
from llorch.ops.cross_entropy import log_softmax

TALES = (
    "Once upon a time, there was a little fox named Leo who lived in the forest.",
    "Once upon a time, there was a brave pirate named Grace who sailed the sea.",
)


def strip() -> Figure:
    """Draw tokens in boxes, the darker the more surprising."""
    story = llorch.load("story")
    figure = Figure(figsize=(7.2, 3.0), layout="constrained")
    for axes, tale in zip(figure.subplots(len(TALES)), TALES, strict=True):
        ids = np.array(story.tokenizer.encode(tale))
        losses = -log_softmax(story.forward(ids))[np.arange(len(ids) - 1), ids[1:]]
        for column, (token, loss) in enumerate(zip(ids[1:], losses, strict=True)):
            axes.bar(column, loss, width=0.9, color="C1", alpha=0.25 + 0.75 * min(1.0, loss / 8))
            axes.text(column, loss + 0.3, f"{loss:.1f}", ha="center", fontsize=7)
            word = story.tokenizer.decode([int(token)]).strip() or "_"
            axes.text(column, -0.5, word, ha="right", va="top", fontsize=8, rotation=45)
        axes.set(xticks=[], ylabel="nats", ylim=(0, 18), xlim=(-0.7, len(ids) - 1.3))
        axes.axhline(np.log(story.config.vocab_size), color="#7d7d7d", linewidth=0.8, linestyle="--")
    return figure


def figures() -> dict[str, Figure]:
    """Return the figures by name."""
    return {"strip": strip()}
