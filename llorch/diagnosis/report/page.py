"""A diagnosis as one HTML page that needs nothing else: no script, no address; `page.html` is its template."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
from jinja2 import Environment, StrictUndefined

from llorch.diagnosis.report.figures import LEVELS, Rung, heat, histogram, ladder
from llorch.diagnosis.report.record import causes, count, explained, headline, ranges, short, span, times, verdict
from llorch.diagnosis.verdict import HONEST, RIGHT, WRONG, Diagnosis, Finding, StageResult
from llorch.runtime.errors import printable
from llorch.stages.comparison import NOT_RUN, times_over
from llorch.stages.table import STAGES

MAX_FIGURES = 6  # findings with heat maps; a page of hundreds would load for minutes
MARKS = {RIGHT: "✓", HONEST: "≈", WRONG: "✗", NOT_RUN: "-"}


@dataclass(frozen=True)
class Cell:
    """One stage of the strip."""

    stage: str
    result: StageResult | None
    is_first: bool


@dataclass(frozen=True)
class Map:
    """A heat map, and what it says."""

    what: str
    drawn: str
    words: str


def page(diagnosis: Diagnosis) -> str:
    """Render a diagnosis as an HTML page.

    Args:
        diagnosis: The findings about a dump.

    Returns:
        A whole HTML document. Names that others chose are escaped, their control characters written out.
    """
    environment = Environment(autoescape=True, undefined=StrictUndefined, finalize=_printable_value, trim_blocks=True)
    environment.filters |= {f.__name__: f for f in (short, times, ranges, explained, count, span)}
    template = environment.from_string(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
    by_place = {(result.n_pass, result.key): result for result in diagnosis.results}
    shown = _looked_at(diagnosis)
    steps = rungs(diagnosis.results, shown) if shown else []
    return template.render(
        diagnosis=diagnosis, verdict=verdict(diagnosis), headline=headline(diagnosis), marks=MARKS,
        n_causes=len(causes(diagnosis)), arithmetics=Counter(result.arithmetic for result in diagnosis.results),
        n_passes=len({result.n_pass for result in diagnosis.results}), looked_at=shown,
        strip=strip(diagnosis, shown) if shown else [], ladder=ladder(steps) if len(steps) > 1 else "",
        findings=[
            (finding, by_place.get((finding.n_pass, finding.key)) if at < MAX_FIGURES else None)
            for at, finding in enumerate(_causes_first(diagnosis))
        ],
        maps=maps, levels=LEVELS, ulps=histogram,
    )  # fmt: skip


def _printable_value(value: object) -> object:
    return printable(value) if type(value) is str else value


def _causes_first(diagnosis: Diagnosis) -> list[Finding]:
    return sorted(diagnosis.findings, key=lambda finding: finding.kind == "honest")


def _looked_at(diagnosis: Diagnosis) -> StageResult | None:
    """Choose the stage to show: the first wrong one; in a right dump, the one that is nearest to its tolerance."""
    wrong = [result for result in diagnosis.results if result.verdict == WRONG]
    places = {(finding.n_pass, finding.key) for finding in causes(diagnosis)[:1]}
    first = [result for result in wrong if (result.n_pass, result.key) in places]
    return (first or wrong or sorted(diagnosis.results, key=lambda result: -result.over) or [None])[0]


def strip(diagnosis: Diagnosis, looked_at: StageResult) -> list[Cell]:
    """List the stages of one layer in the order of the forward pass, with the stages outside the layers."""
    mine = {
        result.stage: result
        for result in diagnosis.results
        if result.n_pass == looked_at.n_pass and result.layer in (looked_at.layer, None)
    }
    shown = {result.stage for result in diagnosis.results}
    first = looked_at if looked_at.verdict == WRONG else None
    return [
        Cell(stage.name, mine.get(stage.name), mine.get(stage.name, 0) is first)
        for stage in STAGES
        if (looked_at.layer is not None or not stage.in_layer) and (stage.name in shown or stage.is_dense)
    ]


def rungs(results: Sequence[StageResult], looked_at: StageResult) -> list[Rung]:
    """Summarise each layer: its worst local error, the tolerance of that error, and the total error at its end."""

    def by_layer() -> Iterator[list[StageResult]]:
        of_pass = (result for result in results if result.n_pass == looked_at.n_pass)
        for _, group in groupby(of_pass, key=lambda result: result.key if result.layer is None else result.layer):
            yield list(group)

    found = []
    for group in by_layer():
        worst = max(group, key=lambda result: times_over(result.local.error, result.tolerance.error))
        label = worst.key.removeprefix("final_") if worst.layer is None else str(worst.layer)
        total = group[-1].total.error  # NaN where only the passes before the dump would give it
        inherited = worst.local.error if math.isnan(total) else total
        found.append(Rung(label, worst.local.error, worst.tolerance.error, inherited))
    return found


def maps(result: StageResult) -> list[Map]:
    """Map the error of a wrong stage to tokens, heads and channels."""
    assert result.profile is not None
    keys = "key" if result.stage in ("attn_scores", "attn_probs") else "channel"
    parts = {"token": result.profile.tokens, "head": result.profile.heads, keys: result.profile.channels}
    if result.stage == "logits":
        parts["stretch of the vocabulary"] = parts.pop(keys)
    limit = result.tolerance.error
    return [
        Map(what, heat(values, limit, what), _sentence_of(values, limit, what))
        for what, values in parts.items()
        if values is not None and len(values)
    ]


def _sentence_of(values: np.ndarray, limit: float, what: str) -> str:
    n_over, most = int((values > limit).sum()), int(values.argmax())
    return f"{n_over} of {len(values)} above tolerance; largest {short(values[most])} at {what} {most}"
