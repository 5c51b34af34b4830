"""Figure of lesson 12: the text of story, with the probability of every token."""

import numpy as np
from matplotlib.figure import Figure

import llorch

BLUE, GREY, WIDTH, TOKENS = "#2f81f7", "#7d7d7d", 60, 60


def text() -> Figure:
    """Show tokens in lines, each on a background as strong as its probability."""
    story = llorch.load("story")
    figure = Figure(figsize=(7.2, 2.4))
    axes = figure.subplots()
    column, line = 0, 0
    for token in story.generate("Once upon a time", max_tokens=TOKENS):
        piece = token.text
        if column + len(piece) > WIDTH:
            column, line, piece = 0, line + 1, piece.lstrip()
        likely = float(np.exp(token.logprob))
        axes.broken_barh(
            [(column + 0.04, len(piece) - 0.08)], (line - 0.44, 0.62), facecolor=BLUE, alpha=round(0.45 * likely, 2)
        )
        for offset, letter in enumerate(piece):
            axes.text(column + offset + 0.5, line, letter, family="monospace", fontsize=12, ha="center", va="center")
        if likely < 0.3:
            middle = column + len(piece) / 2
            axes.text(middle, line + 0.38, f"{likely:.2f}", fontsize=8, ha="center", va="center", color=GREY)
        column += len(piece)
    axes.set(xlim=(0, WIDTH), ylim=(line + 0.7, -0.7))
    axes.axis("off")
    return figure


def figures() -> dict[str, Figure]:
    """Return the figures by name."""
    return {"text": text()}
