"""Long contexts and far positions: the last tokens of every stage, against the float64 reference.

A long text is read in one pass, and in chunks of several sizes with single steps across a growth of the cache. NumPy in
float64 has to equal the reference at 1e-12, plus what an angle at a far position loses by rounding. A run in float32
may be `FACTOR` times as far from the reference as the farther engine is at that stage, in the layer where it is worst.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from llorch.engines import LoadPath
from llorch.files import Weights
from llorch.judging.compare import judge
from llorch.judging.goldens.float64_reference import FLOAT64_REFERENCE
from llorch.judging.goldens.long_contexts import LAST, LongGolden, compared_stages, last_tokens
from llorch.judging.runners import Runner
from llorch.judging.runners.numpy import OWN_SUMS
from llorch.judging.tolerances.forward import MATHEMATICS, WORST
from llorch.judging.types import Comparison, Expectation
from llorch.stages.comparison import FACTOR, FLOORS, Tolerance
from llorch.stages.stage_ref import Pass, StageRef, token_axis
from llorch.stages.table import Stage

DTYPES = ("float32", "float64")
WHOLE, IN_PARTS = LONG_MODES = "whole", "in parts"  # modes of rows
# Tokens of one chunk after the other: the cache of 513 tokens grows to 1,026, which single steps cross; then sevens.
_SIZES = (513, *[64] * 7, *[7] * 9, *[1] * 8)


class LongSuite:
    """Comparisons of one model."""

    def __init__(self, model: str, weights: Weights, golden: LongGolden, load_path: LoadPath | None = None) -> None:
        """Prepare; nothing is computed yet. The `load_path` is that of the file into the float64 reference."""
        self.model, self.golden, self.load_path = model, golden, load_path
        self._stages = {name: (stage, layer) for name, stage, layer in compared_stages(weights.config)}

    def comparisons(self, runner: Runner) -> Iterator[Comparison]:
        """Judge a runner; there is no tolerance for half precision, and sums are those of the user's run."""
        if runner.dtype not in DTYPES or runner.name == OWN_SUMS:
            return
        for case, this in self.golden.cases.items():
            for mode, bounds in bounds_of(this).items():
                with runner.arithmetic():
                    seen = LastTokens(self._stages, this)
                    runner.in_parts(this, bounds, seen.observe)
                for name, (stage, _) in self._stages.items():
                    if stage.name not in runner.hidden:
                        expectation = self._expectation(runner, case, mode, name)
                        comparison = judge(expectation, seen.of(name), model=self.model, backend=runner.name)
                        yield replace(comparison, load_path=self.load_path)

    def _expectation(self, runner: Runner, case: str, mode: str, name: str) -> Expectation:
        stage, layer = self._stages[name]
        reference, stage_ref = self.golden.reference[case][name], StageRef(stage.checkpoint, stage.name, layer, case)
        expected, tolerance = reference.astype(runner.dtype), self.tolerance(runner, case, name)
        return Expectation(stage_ref, mode, FLOAT64_REFERENCE, expected, tolerance, reference=reference, stage=stage)

    def tolerance(self, runner: Runner, case: str, name: str) -> Tolerance:
        """Make a tolerance of the engines' distances; in float64 of what rounding costs an angle at a far position."""
        if runner.dtype == "float64":
            angle = float(self.golden.cases[case].positions[-1]) * 2.0**-52  # two roundings of position * inv_freq
            return Tolerance(MATHEMATICS.error + angle, MATHEMATICS.worst + angle)
        same = [key for key, (stage, _) in self._stages.items() if stage is self._stages[name][0]]  # in all layers
        found = [cases[case][key] for cases in self.golden.distances.values() if case in cases for key in same]
        floor = FLOORS[runner.dtype]
        error, worst = FACTOR * max(one.error for one in found), FACTOR * max(one.worst for one in found)
        return Tolerance(error, max(worst, WORST * error)).at_least(Tolerance(floor, floor))


def bounds_of(this: Pass) -> dict[str, list[int]]:
    """Choose the cuts of a pass, by mode: no cut, and for a long text chunks, with single steps at the growth."""
    n = len(this.ids)
    whole = {WHOLE: [0, n]}
    if n <= LAST:
        return whole
    bounds = [0]
    for size in _SIZES:
        bounds.append(min(bounds[-1] + size, n))
    while bounds[-1] < n - LAST:
        bounds.append(min(bounds[-1] + 7, n - LAST))
    return whole | {IN_PARTS: [*dict.fromkeys([*bounds, *range(n - LAST, n + 1)])]}


class LastTokens:
    """Collects the last tokens of every stage over the parts of a pass."""

    def __init__(self, stages: Mapping[str, tuple[Stage, int | None]], this: Pass) -> None:
        """Start with nothing."""
        self._stages, self._n = stages, len(this.ids)
        self._parts: dict[str, list[np.ndarray]] = {}

    def observe(self, name: str, array: np.ndarray, stop: int) -> None:
        """Keep what belongs to the last tokens of a part that ends with token `stop`."""
        if name not in self._stages or stop <= self._n - LAST:
            return
        stage, _ = self._stages[name]
        is_new = "seq" in stage.axes.split()
        if is_new:
            self._parts.setdefault(name, []).append(last_tokens(stage, array, stop - (self._n - LAST)).copy())
        elif stop == self._n:
            self._parts[name] = [last_tokens(stage, array).copy()]

    def of(self, name: str) -> np.ndarray | None:
        """Return the stage of the last tokens; None if it never came."""
        parts = self._parts.get(name)
        return None if parts is None else np.concatenate(parts, axis=token_axis(self._stages[name][0]) or 0)
