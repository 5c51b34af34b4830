"""Figures of lesson 07: the wiring of a block, and the stream of one token through story."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import llorch

GREY = "#7d7d7d"
SENTENCE = "Once upon a time there was a little fox"


def branch(axes: Axes, start: float, colour: str, boxes: tuple[str, ...]) -> None:
    """Draw a way out of the stream, through some boxes, and back into a plus."""
    end, step = start + 4.1, 3.1 / len(boxes)
    line = {"color": colour, "linewidth": 1.5}
    axes.plot([start, start], [0, 1.2], **line)
    axes.plot([start, end], [1.2, 1.2], **line)
    axes.annotate("", (end, 0.2), (end, 1.22), arrowprops={"arrowstyle": "->", **line})
    for i, name in enumerate(boxes):
        x = start + 0.5 + step * (i + 0.5)
        axes.text(
            x,
            1.2,
            name,
            ha="center",
            va="center",
            color="white",
            bbox={"boxstyle": "round,pad=0.5", "fc": colour, "ec": "none"},
        )
    axes.plot(end, 0, "o", markersize=19, color=GREY)
    axes.text(end, -0.02, "+", ha="center", va="center", color="white", fontsize=15)


def wiring() -> Figure:
    """Draw the stream with its two branches."""
    figure = Figure(figsize=(8.4, 2.3), layout="constrained")
    axes = figure.subplots()
    axes.annotate("", (11.2, 0), (-0.5, 0), arrowprops={"arrowstyle": "->", "color": GREY, "linewidth": 3})
    branch(axes, 0.5, "#3b82c4", ("attn_norm", "attention"))
    branch(axes, 5.6, "#d9702b", ("ffn_norm", "feed-forward"))
    for x, name in ((-0.3, "x"), (5.1, "r"), (10.6, "y")):
        axes.text(x, -0.45, name, ha="center", style="italic", fontsize=13)
    axes.set(xlim=(-0.7, 11.4), ylim=(-0.7, 1.8))
    axes.axis("off")
    return figure


def stream() -> Figure:
    """Plot the size of the last token's row before and after each addition."""
    story, trace = llorch.load("story"), {}
    story.forward(story.tokenizer.encode(SENTENCE), trace=trace)
    layers = range(story.config.n_layers)
    names = ["embed", *(f"l{i}.{stage}" for i in layers for stage in ("attn_residual", "block_out"))]
    size = [float(np.sqrt(np.mean(trace[name][-1] ** 2))) for name in names]
    figure = Figure(figsize=(7.2, 3.8), layout="constrained")
    axes = figure.subplots()
    for half, (name, colour) in enumerate((("attention", "C0"), ("feed-forward", "C1"))):
        bars = range(half, 2 * len(layers), 2)
        axes.bar(bars, [size[i + 1] - size[i] for i in bars], bottom=[size[i] for i in bars], color=colour, label=name)
    for i, height in enumerate(size[1:]):
        axes.text(i, height * 1.08, f"{height:.3g}", ha="center", fontsize=9)
        axes.plot([i - 0.4, i + 1.4 if i + 1 < len(size) - 1 else i + 0.4], [height, height], color=GREY, linewidth=1)
    axes.set_yscale("log")
    axes.set_xticks([2 * i + 0.5 for i in layers], [f"layer {i}" for i in layers])
    axes.set(ylabel="root mean square of fox", ylim=(0.09, 200))
    axes.legend(frameon=False, loc="lower right")
    return figure


def figures() -> dict[str, Figure]:
    """Return the figures by name."""
    return {"wiring": wiring(), "stream": stream()}
