"""A diagnosis as one HTML page that needs nothing else: no script, no address; `page.html` is its template.

Its figures are small SVG drawings with colours by class, so that the page decides on light and dark. Only numbers and
llorch's own words enter a figure; the text beside it gives the same facts.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
from jinja2 import Environment, StrictUndefined

from llorch.diagnosis.dump_checker import N_ULPS
from llorch.diagnosis.report.record import count, explained, headline, ranges, short, span, times, verdict
from llorch.diagnosis.verdict import Diagnosis, StageCheck
from llorch.runtime.errors import printable
from llorch.stages.comparison import FAIL, NOT_RUN, PASS, ROUNDING, times_over
from llorch.stages.table import STAGES

MAX_FIGURES = 6  # findings with heat maps; a page of hundreds would load for minutes
MARKS = {PASS: "✓", ROUNDING: "≈", FAIL: "✗", NOT_RUN: "-"}
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


@dataclass(frozen=True)
class Cell:
    """One stage of the strip."""

    stage: str
    result: StageCheck | None
    is_first: bool


@dataclass(frozen=True)
class Map:
    """A heat map, and what it says."""

    what: str
    drawn: str
    words: str


def page(diagnosis: Diagnosis) -> str:
    """Render a diagnosis as an HTML document. Names that others chose are escaped, control characters written out."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, finalize=_printable_value, trim_blocks=True)
    environment.filters |= {f.__name__: f for f in (short, times, ranges, explained, count, span)}
    template = environment.from_string(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
    by_place = {(result.n_pass, result.key): result for result in diagnosis.results}
    shown = _looked_at(diagnosis)
    steps = rungs(diagnosis.results, shown) if shown else []
    causes_first = sorted(diagnosis.findings, key=lambda finding: finding.kind == "rounding")
    return template.render(
        diagnosis=diagnosis, verdict=verdict(diagnosis), headline=headline(diagnosis), marks=MARKS,
        n_causes=len(diagnosis.failures), arithmetics=Counter(result.arithmetic for result in diagnosis.results),
        n_passes=len({result.n_pass for result in diagnosis.results}), looked_at=shown,
        strip=strip(diagnosis, shown) if shown else [], ladder=ladder(steps) if len(steps) > 1 else "",
        findings=[
            (finding, by_place.get((finding.n_pass, finding.key)) if at < MAX_FIGURES else None)
            for at, finding in enumerate(causes_first)
        ],
        maps=maps, levels=LEVELS, ulps=histogram,
    )  # fmt: skip


def _printable_value(value: object) -> object:
    return printable(value) if type(value) is str else value


def _looked_at(diagnosis: Diagnosis) -> StageCheck | None:
    """Choose the stage to show: the first wrong one; in a right dump, the one that is nearest to its tolerance."""
    wrong = [result for result in diagnosis.results if result.verdict == FAIL]
    places = {(finding.n_pass, finding.key) for finding in diagnosis.failures[:1]}
    first = [result for result in wrong if (result.n_pass, result.key) in places]
    return (first or wrong or sorted(diagnosis.results, key=lambda result: -result.over) or [None])[0]


def strip(diagnosis: Diagnosis, looked_at: StageCheck) -> list[Cell]:
    """List the stages of one layer in the order of the forward pass, with the stages outside the layers."""
    mine = {
        result.stage: result
        for result in diagnosis.results
        if result.n_pass == looked_at.n_pass and result.layer in (looked_at.layer, None)
    }
    shown = {result.stage for result in diagnosis.results}
    first = looked_at if looked_at.verdict == FAIL else None
    return [
        Cell(stage.name, mine.get(stage.name), mine.get(stage.name, 0) is first)
        for stage in STAGES
        if (looked_at.layer is not None or not stage.in_layer) and (stage.name in shown or stage.is_dense)
    ]


def rungs(results: Sequence[StageCheck], looked_at: StageCheck) -> list[Rung]:
    """Summarise each layer: its worst local error, the tolerance of that error, and the total error at its end."""
    found, of_pass = [], (result for result in results if result.n_pass == looked_at.n_pass)
    for _, checks in groupby(of_pass, key=lambda result: result.key if result.layer is None else result.layer):
        group = list(checks)
        worst = max(group, key=lambda result: times_over(_error(result), result.isolated.tolerance.error))
        label = worst.key.removeprefix("final_") if worst.layer is None else str(worst.layer)
        total = group[-1].chained  # None where only the passes before the dump would give it
        inherited = _error(worst) if total is None else total.difference.error
        found.append(Rung(label, _error(worst), worst.isolated.tolerance.error, inherited))
    return found


def _error(result: StageCheck) -> float:
    return result.isolated.difference.error


def maps(result: StageCheck) -> list[Map]:
    """Map the error of a wrong stage to tokens, heads and channels."""
    assert result.profile is not None
    keys = "key" if result.stage in ("attn_scores", "attn_probs") else "channel"
    parts = {"token": result.profile.tokens, "head": result.profile.heads, keys: result.profile.channels}
    if result.stage == "logits":
        parts["stretch of the vocabulary"] = parts.pop(keys)
    limit = result.isolated.tolerance.error
    return [
        Map(what, heat(values, limit, what), _sentence_of(values, limit, what))
        for what, values in parts.items()
        if values is not None and len(values)
    ]


def _sentence_of(values: np.ndarray, limit: float, what: str) -> str:
    n_over, most = int((values > limit).sum()), int(values.argmax())
    return f"{n_over} of {len(values)} above tolerance; largest {short(values[most])} at {what} {most}"
