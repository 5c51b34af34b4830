"""Figure of lesson 09: the likeliest tokens of every row of logits."""

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

import llorch
from llorch.ops.sampling import softmax

BLUE, LIT = "#2f81f7", "#d9702b"
SENTENCE, SHOWN = "Once upon a time there was a little fox", 5


def rows() -> Figure:
    """Show the likeliest tokens after each token of a sentence."""
    story = llorch.load("story")
    ids = story.tokenizer.encode(SENTENCE)
    figure = Figure(figsize=(7.2, 2.8), layout="constrained")
    axes = figure.subplots()
    for column, (i, row) in enumerate(zip(ids, story.forward(ids).astype(np.float64), strict=True)):
        piece = story.tokenizer.token_bytes(int(i)).decode().strip() or "begin"
        axes.text(column, -1.0, piece, ha="center", va="center", fontsize=10, weight="bold")
        likely = softmax(row)
        for line, best in enumerate(np.argsort(-row)[:SHOWN]):
            axes.add_patch(
                Rectangle((column - 0.46, line - 0.42), 0.92, 0.84, color=BLUE, alpha=round(0.5 * likely[best], 3))
            )
            word = story.tokenizer.token_bytes(int(best)).decode().strip()
            axes.text(column, line - 0.12, word, ha="center", va="center", fontsize=8.5)
            axes.text(column, line + 0.24, f"{likely[best]:.2f}", ha="center", va="center", fontsize=7)
    axes.add_patch(Rectangle((len(ids) - 1.49, -0.5), 0.98, SHOWN, fill=False, edgecolor=LIT, linewidth=2))
    axes.set(xlim=(-0.6, len(ids) - 0.4), ylim=(SHOWN - 0.4, -1.4))
    axes.axis("off")
    return figure


def figures() -> dict[str, Figure]:
    """Return the figures by name."""
    return {"rows": rows()}
