"""Figures as SVG that is the same in every run, and legible on white and on black."""

import math
import re
import runpy
from collections.abc import Iterator, Mapping
from io import StringIO
from pathlib import Path
from typing import Any

from checkpoints.maps import GREY, strip

LIT = "#d9702b"  # on both grounds 3 to 1 or more
STYLE = {
    "svg.hashsalt": "llorch", "svg.fonttype": "none", "savefig.transparent": True, "savefig.bbox": "tight",
    "font.family": "sans-serif", "font.size": 11, "figure.figsize": (7.2, 3.6), "axes.facecolor": "none",
    "text.color": GREY, "axes.labelcolor": GREY, "axes.edgecolor": GREY, "axes.titlecolor": GREY,
    "xtick.color": GREY, "ytick.color": GREY, "grid.color": GREY, "grid.alpha": 0.25, "legend.framealpha": 0.0,
    "axes.spines.top": False, "axes.spines.right": False, "figure.constrained_layout.use": True,
}  # fmt: skip
COLOURS = ("#3b82c4", LIT, "#2f9e6e", "#c0568f", "#8a6fd1", "#a08a20")  # C0 to C5
NUMBER = re.compile(r"-?\d+\.?\d*(?:e[+-]?\d+)?")
PIXELS = re.compile(r"data:image/png;base64,[^\"]*")  # as the compressor at hand packs them
HASHED = re.compile(r"\b[mpC][0-9a-f]{10}\b|\bimage[0-9a-f]{10}\b")  # ids made of what is drawn, last digits included


def draw(number: str, lesson: Path) -> Mapping[str, str]:
    """Draw the figures of a lesson.

    Args:
        number: Number of the checkpoint.
        lesson: Its folder; `figures()` of its `figures.py` gives the figures by name.

    Returns:
        Name to SVG, the strip `where` among them.
    """
    drawn = {"where": strip(number)}
    if (lesson / "figures.py").is_file():
        drawn |= dict(_plotted(lesson / "figures.py"))
    return drawn


def _plotted(path: Path) -> Iterator[tuple[str, str]]:
    import matplotlib as mpl

    mpl.use("svg")
    from cycler import cycler
    from matplotlib import pyplot as plt

    style: Any = STYLE | {"axes.prop_cycle": cycler(color=COLOURS)}
    with mpl.rc_context(style):
        for name, figure in runpy.run_path(str(path))["figures"]().items():
            text = StringIO()
            figure.savefig(text, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
            plt.close(figure)
            yield name, "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


def same_figure(old: str, new: str) -> bool:
    """Compare two figures to a unit of the drawing, because rounding errors in them depend on the processor.

    Without AVX512 a point of lesson 17 moves by 0.62 units of 300.
    """
    old, new = (HASHED.sub("id", PIXELS.sub("", text)) for text in (old, new))
    if NUMBER.sub("#", old) != NUMBER.sub("#", new):
        return False
    return all(
        math.isclose(float(a), float(b), rel_tol=1e-3, abs_tol=1)
        for a, b in zip(NUMBER.findall(old), NUMBER.findall(new), strict=True)
    )
