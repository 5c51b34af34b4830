"""Figures of lesson 02, of the weights of micro-llama."""

from matplotlib.figure import Figure
from matplotlib.patches import ConnectionPatch, Rectangle

import llorch

GAP = 12  # rows between heads


def heads() -> Figure:
    """Draw the rows of the three matrices in blocks by head, coloured by the key head that they belong to."""
    model = llorch.load("micro-llama")
    config, weights = model.config, model.weights.layer(0)
    figure = Figure(figsize=(7.2, 4.4), layout="constrained")
    figure.get_layout_engine().set(wspace=0.25)
    middles: list[list[float]] = []
    for name, axes in zip(("q_proj", "k_proj", "v_proj"), figure.subplots(1, 3, sharey=True), strict=True):
        n_heads, width = len(weights[name]) // config.head_dim, weights[name].shape[1]
        step = config.head_dim + GAP
        top = (config.n_heads - n_heads) * step / 2
        middles.append([top + head * step + config.head_dim / 2 for head in range(n_heads)])
        for head in range(n_heads):
            colour = f"C{head * config.n_kv_heads // n_heads}"
            block = Rectangle(
                (0, top + head * step), width, config.head_dim, edgecolor=colour, facecolor="none", linewidth=2
            )
            axes.add_patch(block)
            first = head * config.head_dim
            text = f"head {head}\nrows {first}-{first + config.head_dim - 1}"
            axes.text(width / 2, middles[-1][head], text, ha="center", va="center", fontsize=9)
        axes.set(xlim=(-2, width + 2), ylim=(config.n_heads * step, -GAP), xticks=[], yticks=[])
        axes.set_title(f"{name} {weights[name].shape}", fontsize=10)
        axes.spines[:].set_visible(False)
    for start, end, a, b in zip(figure.axes, figure.axes[1:], middles, middles[1:], strict=False):
        for head, y in enumerate(a):
            shared = head * len(b) // len(a)
            line = ConnectionPatch(
                (96, y), (0, b[shared]), "data", "data", axesA=start, axesB=end, color=f"C{shared}", arrowstyle="->"
            )
            figure.add_artist(line)
    return figure


def figures() -> dict[str, Figure]:
    """Return the figures by name."""
    return {"heads": heads()}
