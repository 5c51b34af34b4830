"""Figures as SVG that is the same in every run, and legible on white and on black."""

import math
import re
import runpy
from collections.abc import Iterator, Mapping
from io import StringIO
from pathlib import Path
from typing import Any

from llorch.stages.table import CHECKPOINTS

ROWS = {  # of the strip, in the order in which lessons are learned
    "from text to the end of a block": ("00", "01", "02", "01b", "03", "04", "05", "05b", "06", "06b", "07"),
    "from a block to text, and with other numbers": ("08", "09", "10", "11", "12", "13", "14"),
    "training": ("15", "16", "17", "18", "19", "20"),
}
GREY, LIT = "#7d7d7d", "#d9702b"  # on both grounds 4 to 1 or more; 3 to 1
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


def strip(number: str) -> str:
    """Draw a box for each lesson, with the lesson itself lit."""
    parts = []
    for row, (title, numbers) in enumerate(ROWS.items()):
        parts.append(f'<text class="row" x="4" y="{row * 86 + 14}">{title}</text>')
        parts += [_box(label, 4 + 80 * column, row * 86 + 20, label == number) for column, label in enumerate(numbers)]
    title = f"Checkpoint {number}, {CHECKPOINTS[number].replace('_', ' ')}, among all {len(CHECKPOINTS)}"
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 884 260" width="884" height="260" role="img">
<title>{title}</title>
<style>
text {{ font: 11px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: {GREY} }}
.no {{ font-size: 20px; font-weight: 600 }}
.box text {{ text-anchor: middle }}
.box rect {{ fill: none; stroke: {GREY} }}
.lit text {{ fill: #ffffff }}
.lit rect {{ fill: #b8561a; stroke: #b8561a }}
</style>
{chr(10).join(parts)}
</svg>
"""


def _box(number: str, x: int, y: int, lit: bool) -> str:
    first, _, second = CHECKPOINTS[number].partition("_")
    words = [first, second] if len(CHECKPOINTS[number]) > 11 else [f"{first} {second}".strip()]
    lines = "".join(f'<text x="{x + 37}" y="{y + 38 + 13 * n}">{word}</text>' for n, word in enumerate(words))
    return (
        f'<g class="box{" lit" if lit else ""}"><rect x="{x}" y="{y}" width="74" height="58" rx="6"/>'
        f'<text class="no" x="{x + 37}" y="{y + 23}">{number}</text>{lines}</g>'
    )
