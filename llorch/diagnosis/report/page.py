"""Render a diagnosis as one self-contained HTML page without scripts or links; `page.html` is the template.

Figures are small SVG drawings coloured by CSS class, for light and dark mode: the stages of a layer (strip), the errors
of successive layers (ladder), heat maps by token, head and channel, and a histogram of errors in ulps. A figure has
only numbers and llorch's strings, never the dump's; the text next to it gives the same facts.
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
from llorch.diagnosis.report.record import explained, headline, ranges, short, span, times, verdict
from llorch.diagnosis.verdict import Diagnosis, StageCheck, count
from llorch.runtime.errors import printable
from llorch.stages.comparison import FAIL, NOT_RUN, PASS, ROUNDING, safe_ratio
from llorch.stages.table import STAGES

MAX_FIGURES = 6  # findings with heat maps; a page of hundreds would load for minutes
MARKS = {PASS: "✓", ROUNDING: "≈", FAIL: "✗", NOT_RUN: "-"}
WIDTH, HEIGHT, LEFT, BOTTOM = 400, 210, 42, 24
MAX_CELLS = 128
LEVELS = ("within the tolerance", "up to 10 times the tolerance", "100", "1000", "1e4", "1e5", "more")  # of a heat map
ULP_LABELS = {0: "0", 1: "1", 5: "16", 11: "1024", 17: "65536", N_ULPS - 1: "more"}


@dataclass(frozen=True)
class Rung:
    """One layer in the chart of errors: its local error, the tolerance, and the total error up to it."""

    label: str
    local: float
    limit: float
    total: float


def heat(values: np.ndarray, limit: float, axis_name: str) -> str:
    """Draw a row of cells, redder the farther a value exceeds the tolerance.

    If there are too many values, one cell shows the largest of several neighbours.
    """
    cells = [part.max() for part in np.array_split(values, min(len(values), MAX_CELLS))]
    step = WIDTH / len(cells)
    cells_svg = "".join(
        f'<rect class="h{_level(float(value), limit)}" x="{index * step:.2f}" width="{step + 0.05:.2f}" height="20"/>'
        for index, value in enumerate(cells)
    )
    last = _svg_text(WIDTH, 34, str(len(values) - 1), "end") if len(values) > 1 else ""
    return _svg(cells_svg + _svg_text(0, 34, f"{axis_name} 0", "start") + last, 38, f"error by {axis_name}")


def _level(value: float, limit: float) -> int:
    ratio = safe_ratio(value, limit)
    if not math.isfinite(ratio):
        return len(LEVELS) - 1
    return 0 if ratio <= 1 else min(1 + int(math.log10(ratio)), len(LEVELS) - 1)


def ladder(rungs: Sequence[Rung]) -> str:
    """Draw the errors of successive layers on a logarithmic scale."""
    sizes = [size for rung in rungs for size in (rung.local, rung.limit, rung.total) if 0 < size < math.inf]
    low, high = math.floor(math.log10(min(sizes, default=1e-7))), math.ceil(math.log10(max(sizes, default=1.0)))
    has_infinite = any(math.inf in (rung.local, rung.total) for rung in rungs)
    high = max(high, low + 1) + has_infinite

    def y(size: float) -> float:
        exponent = high if size == math.inf else math.log10(size) if size > 0 else low
        return 8 + (HEIGHT - BOTTOM - 16) * (high - exponent) / (high - low)

    xs = [LEFT + 8 + (WIDTH - LEFT - 16) * i / max(len(rungs) - 1, 1) for i in range(len(rungs))]
    step = max(1, (high - low) // 6)
    lines = "".join(
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH}" y1="{y(10.0**i):.1f}" y2="{y(10.0**i):.1f}"/>'
        + _svg_text(LEFT - 4, y(10.0**i) + 4, "∞" if has_infinite and i == high else f"1e{i}", "end")
        for i in range(high, low - 1, -step)
    )
    stride = max(1, math.ceil(len(rungs) / 7))
    labels = "".join(_svg_text(xs[i], HEIGHT - 6, rungs[i].label, "middle") for i in range(0, len(rungs), stride))
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
    """Draw the number of elements by error in float32 ulps."""
    step, floor, top = WIDTH / len(counts), HEIGHT - BOTTOM, max(int(counts.max()), 1)
    bars = "".join(
        f'<rect class="bar" x="{i * step + 1:.1f}" y="{floor - (floor - 20) * n / top:.1f}" width="{step - 2:.1f}" '
        f'height="{(floor - 20) * n / top:.1f}"/>'
        for i, n in enumerate(counts)
    )
    labels = "".join(
        _svg_text((i + 0.5) * step, HEIGHT - 6, text, "end" if i == N_ULPS - 1 else "middle" if i else "start")
        for i, text in ULP_LABELS.items()
    )
    peak = int(counts.argmax())
    share = _svg_text((peak + 0.5) * step, 14, f"{counts[peak] / counts.sum():.0%}", "end" if peak > 20 else "middle")
    return _svg(bars + labels + share, HEIGHT, "elements by their error in float32 steps")


def _line(name: str, points: Sequence[tuple[float, float]]) -> str:
    return f'<polyline class="{name}" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"/>'


def _svg_text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'


def _svg(shapes: str, height: int, label: str) -> str:
    return f'<svg role="img" aria-label="{label}" viewBox="0 0 {WIDTH} {height}">{shapes}</svg>'


@dataclass(frozen=True)
class Cell:
    """Stage in the strip of one layer; without a `result` if the dump lacks it."""

    stage: str
    result: StageCheck | None
    is_first: bool


@dataclass(frozen=True)
class Map:
    """Heat map (`drawn`, SVG) of the errors along one axis (`what`), with its description (`words`)."""

    what: str
    drawn: str
    words: str


def page(diagnosis: Diagnosis) -> str:
    """Render a diagnosis as an HTML document. Names from the dump are escaped, control characters shown as text."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, finalize=_printable_value, trim_blocks=True)
    environment.filters |= {f.__name__: f for f in (short, times, ranges, explained, count, span)}
    template = environment.from_string(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
    checks_by_key = {(check.n_pass, check.key): check for check in diagnosis.results}
    shown_check = _choose_stage(diagnosis)
    steps = rungs(diagnosis.results, shown_check) if shown_check else []
    causes_first = sorted(diagnosis.findings, key=lambda finding: finding.kind == "rounding")
    return template.render(
        diagnosis=diagnosis, verdict=verdict(diagnosis), headline=headline(diagnosis), marks=MARKS,
        n_causes=len(diagnosis.failures), arithmetics=Counter(check.arithmetic for check in diagnosis.results),
        n_passes=len({check.n_pass for check in diagnosis.results}), looked_at=shown_check,
        strip=strip(diagnosis, shown_check) if shown_check else [], ladder=ladder(steps) if len(steps) > 1 else "",
        findings=[
            (finding, checks_by_key.get((finding.n_pass, finding.key)) if index < MAX_FIGURES else None)
            for index, finding in enumerate(causes_first)
        ],
        maps=maps, levels=LEVELS, ulps=histogram,
    )  # fmt: skip


def _printable_value(value: object) -> object:
    return printable(value) if type(value) is str else value


def _choose_stage(diagnosis: Diagnosis) -> StageCheck | None:
    """Choose the stage to show: the first wrong one; in a right dump, the one nearest to its tolerance."""
    wrong_checks = [check for check in diagnosis.results if check.verdict == FAIL]
    stage_refs = {(finding.n_pass, finding.key) for finding in diagnosis.failures[:1]}
    first = [check for check in wrong_checks if (check.n_pass, check.key) in stage_refs]
    return (first or wrong_checks or sorted(diagnosis.results, key=lambda check: -check.over) or [None])[0]


def strip(diagnosis: Diagnosis, chosen: StageCheck) -> list[Cell]:
    """List the stages of one layer in the order of the forward pass, with the stages outside the layers."""
    layer_checks = {
        check.stage: check
        for check in diagnosis.results
        if check.n_pass == chosen.n_pass and check.layer in (chosen.layer, None)
    }
    dumped_stages = {check.stage for check in diagnosis.results}
    first = chosen if chosen.verdict == FAIL else None
    return [
        Cell(
            stage.name, layer_checks.get(stage.name), layer_checks.get(stage.name, 0) is first
        )  # 0: `first` may be None
        for stage in STAGES
        if (chosen.layer is not None or not stage.in_layer) and (stage.name in dumped_stages or stage.is_dense)
    ]


def rungs(checks: Sequence[StageCheck], chosen: StageCheck) -> list[Rung]:
    """Summarise each layer: its worst local error, the tolerance of that error, and the total error at its end."""
    steps, pass_checks = [], (check for check in checks if check.n_pass == chosen.n_pass)
    for _, layer_checks in groupby(pass_checks, key=lambda check: check.key if check.layer is None else check.layer):
        group = list(layer_checks)
        worst = max(group, key=lambda check: safe_ratio(_error(check), check.isolated.tolerance.error))
        label = worst.key.removeprefix("final_") if worst.layer is None else str(worst.layer)
        total = group[-1].chained  # None if it needs passes before the dump
        inherited = _error(worst) if total is None else total.difference.error
        steps.append(Rung(label, _error(worst), worst.isolated.tolerance.error, inherited))
    return steps


def _error(check: StageCheck) -> float:
    return check.isolated.difference.error


def maps(check: StageCheck) -> list[Map]:
    """Map the error of a wrong stage to tokens, heads and channels."""
    assert check.profile is not None
    keys = "key" if check.stage in ("attn_scores", "attn_probs") else "channel"
    parts = {"token": check.profile.tokens, "head": check.profile.heads, keys: check.profile.channels}
    if check.stage == "logits":
        parts["stretch of the vocabulary"] = parts.pop(keys)
    tolerance = check.isolated.tolerance.error
    return [
        Map(axis_name, heat(values, tolerance, axis_name), _describe(values, tolerance, axis_name))
        for axis_name, values in parts.items()
        if values is not None and len(values)
    ]


def _describe(values: np.ndarray, tolerance: float, axis_name: str) -> str:
    n_over, peak = int((values > tolerance).sum()), int(values.argmax())
    return f"{n_over} of {len(values)} above tolerance; largest {short(values[peak])} at {axis_name} {peak}"
