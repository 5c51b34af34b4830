"""Small figures in SVG: no script, no address, colours by class, so that a page decides on light and dark.

Numbers and words that we wrote are all that enters; what a figure shows it also says in words.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llorch.diagnosis.profile import N_ULPS
from llorch.stages.comparison import times_over

WIDTH, HEIGHT, LEFT, BOTTOM = 400, 210, 42, 24
MAX_CELLS = 128
LEVELS = ("within the tolerance", "up to 10 times the tolerance", "100", "1000", "1e4", "1e5", "more")  # of a heat map
ULP_LABELS = {0: "0", 1: "1", 5: "16", 11: "1024", 17: "65536", N_ULPS - 1: "more"}


@dataclass(frozen=True)
class Rung:
    """One step of a ladder: the error made there, its limit, and what has come together so far."""

    label: str
    local: float
    limit: float
    total: float


def heat(values: np.ndarray, limit: float, what: str) -> str:
    """Draw a row of cells, redder with the distance beyond the tolerance.

    If the values do not fit, one cell shows the largest of some neighbours.
    """
    cells = [part.max() for part in np.array_split(values, min(len(values), MAX_CELLS))]
    step = WIDTH / len(cells)
    drawn = "".join(
        f'<rect class="h{_level(float(value), limit)}" x="{at * step:.2f}" width="{step + 0.05:.2f}" height="20"/>'
        for at, value in enumerate(cells)
    )
    last = _svg_text(WIDTH, 34, str(len(values) - 1), "end") if len(values) > 1 else ""
    return _svg(drawn + _svg_text(0, 34, f"{what} 0", "start") + last, 38, f"error by {what}")


def _level(value: float, limit: float) -> int:
    over = times_over(value, limit)
    if not math.isfinite(over):
        return len(LEVELS) - 1
    return 0 if over <= 1 else min(1 + int(math.log10(over)), len(LEVELS) - 1)


def ladder(rungs: Sequence[Rung]) -> str:
    """Draw errors from layer to layer on a logarithmic scale."""
    sizes = [size for rung in rungs for size in (rung.local, rung.limit, rung.total) if 0 < size < math.inf]
    low, high = math.floor(math.log10(min(sizes, default=1e-7))), math.ceil(math.log10(max(sizes, default=1.0)))
    endless = any(math.inf in (rung.local, rung.total) for rung in rungs)
    high = max(high, low + 1) + endless

    def y(size: float) -> float:
        at = high if size == math.inf else math.log10(size) if size > 0 else low
        return 8 + (HEIGHT - BOTTOM - 16) * (high - at) / (high - low)

    xs = [LEFT + 8 + (WIDTH - LEFT - 16) * at / max(len(rungs) - 1, 1) for at in range(len(rungs))]
    step = max(1, (high - low) // 6)
    lines = "".join(
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH}" y1="{y(10.0**at):.1f}" y2="{y(10.0**at):.1f}"/>'
        + _svg_text(LEFT - 4, y(10.0**at) + 4, "∞" if endless and at == high else f"1e{at}", "end")
        for at in range(high, low - 1, -step)
    )
    every = max(1, math.ceil(len(rungs) / 7))
    labels = "".join(_svg_text(xs[at], HEIGHT - 6, rungs[at].label, "middle") for at in range(0, len(rungs), every))
    limits = _line("limit", [(x, y(rung.limit)) for x, rung in zip(xs, rungs, strict=True)])
    totals = _line("total", [(x, y(rung.total)) for x, rung in zip(xs, rungs, strict=True)])
    size = 4 if len(rungs) < 60 else 2
    dots = "".join(
        f'<circle class="{"over" if rung.local > rung.limit else "local"}" cx="{x:.1f}" cy="{y(rung.local):.1f}" '
        f'r="{size}"/>'
        for x, rung in zip(xs, rungs, strict=True)
    )
    return _svg(lines + labels + limits + totals + dots, HEIGHT, "error from layer to layer, logarithmic")


def histogram(counts: np.ndarray) -> str:
    """Draw the number of elements for each error in steps of rounding (ulps)."""
    step, floor, top = WIDTH / len(counts), HEIGHT - BOTTOM, max(int(counts.max()), 1)
    bars = "".join(
        f'<rect class="bar" x="{at * step + 1:.1f}" y="{floor - (floor - 20) * n / top:.1f}" width="{step - 2:.1f}" '
        f'height="{(floor - 20) * n / top:.1f}"/>'
        for at, n in enumerate(counts)
    )
    labels = "".join(
        _svg_text((at + 0.5) * step, HEIGHT - 6, text, "end" if at == N_ULPS - 1 else "middle" if at else "start")
        for at, text in ULP_LABELS.items()
    )
    most = int(counts.argmax())
    share = _svg_text((most + 0.5) * step, 14, f"{counts[most] / counts.sum():.0%}", "end" if most > 20 else "middle")
    return _svg(bars + labels + share, HEIGHT, "elements by their error in float32 steps")


def _line(name: str, points: Sequence[tuple[float, float]]) -> str:
    return f'<polyline class="{name}" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"/>'


def _svg_text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'


def _svg(drawn: str, height: int, label: str) -> str:
    return f'<svg role="img" aria-label="{label}" viewBox="0 0 {WIDTH} {height}">{drawn}</svg>'
