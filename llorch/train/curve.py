"""The loss curve of a run as SVG; equal logs give equal bytes."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llorch.errors import MissingExtra
from llorch.files.new_file import new_file

_STYLE: Any = {
    "svg.hashsalt": "llorch",  # names inside the file, otherwise drawn anew each time
    "svg.fonttype": "none",  # text stays text, whatever fonts the machine has
    "font.family": "sans-serif",
}


def draw_curve(records: Sequence[Mapping[str, Any]], path: Path, *, title: str) -> None:
    """Draw training and validation loss of the lines of `log.jsonl` over the steps, as an SVG file."""
    try:
        from matplotlib import rc_context
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise MissingExtra("train", "matplotlib") from None
    with rc_context(_STYLE):
        figure = Figure(figsize=(7, 4), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.subplots()
        for name, label, style in (("loss", "training", "-"), ("valid_loss", "validation", "o-")):
            points = [(record["step"], record[name]) for record in records if name in record]
            if points:
                axes.plot(*zip(*points, strict=True), style, label=label, linewidth=1.2, markersize=4)
        axes.set(title=title, xlabel="optimizer step", ylabel="loss per trained token (nats)")
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend()
        with new_file(path) as temporary:
            figure.savefig(temporary, format="svg", metadata={"Date": None})
