"""Long contexts and far positions: the last tokens of every stage, against the float64 reference.

A long text runs as one pass (mode `whole`), and in chunks of several sizes with single decode steps while the cache
grows (`in parts`). NumPy in float64 must equal the reference, transformers in float64, within 1e-12 plus the rounding
error of a RoPE angle at a far position. A float32 run may err by `FACTOR` times the largest error of an engine at that
stage, over all layers.
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
WHOLE, IN_PARTS = LONG_MODES = "whole", "in parts"
# Chunk sizes: after 513 tokens the cache grows to 1,026, and single steps cross that size. Chunks of 7 follow.
_SIZES = (513, *[64] * 7, *[7] * 9, *[1] * 8)


class LongSuite:
    """Comparisons of one model at long contexts."""

    def __init__(self, model: str, weights: Weights, golden: LongGolden, load_path: LoadPath | None = None) -> None:
        """Prepare the comparisons; `load_path` lists the tools that loaded the file for the float64 reference."""
        self.model, self.golden, self.load_path = model, golden, load_path
        self._stages = {name: (stage, layer) for name, stage, layer in compared_stages(weights.config)}

    def comparisons(self, runner: Runner) -> Iterator[Comparison]:
        """Compare a runner; skip half precision, which has no tolerance, and the runner `OWN_SUMS`."""
        if runner.dtype not in DTYPES or runner.name == OWN_SUMS:
            return
        for case, inputs in self.golden.cases.items():
            for mode, bounds in chunk_bounds(inputs).items():
                with runner.arithmetic():
                    last = LastTokens(self._stages, inputs)
                    runner.in_chunks(inputs, bounds, last.observe)
                for name, (stage, _) in self._stages.items():
                    if stage.name not in runner.hidden:
                        expectation = self._expectation(runner, case, mode, name)
                        comparison = judge(expectation, last.array(name), model=self.model, backend=runner.name)
                        yield replace(comparison, load_path=self.load_path)

    def _expectation(self, runner: Runner, case: str, mode: str, name: str) -> Expectation:
        stage, layer = self._stages[name]
        reference, stage_ref = self.golden.reference[case][name], StageRef(stage.checkpoint, stage.name, layer, case)
        expected, tolerance = reference.astype(runner.dtype), self.tolerance(runner, case, name)
        return Expectation(stage_ref, mode, FLOAT64_REFERENCE, expected, tolerance, reference=reference, stage=stage)

    def tolerance(self, runner: Runner, case: str, name: str) -> Tolerance:
        """Derive the tolerance of a stage from the engines' distances; in float64, from the rounding of an angle."""
        if runner.dtype == "float64":
            angle = float(self.golden.cases[case].positions[-1]) * 2.0**-52  # two roundings of position * inv_freq
            return Tolerance(MATHEMATICS.error + angle, MATHEMATICS.worst + angle)
        keys = [key for key, (stage, _) in self._stages.items() if stage is self._stages[name][0]]  # all layers
        distances = [cases[case][key] for cases in self.golden.distances.values() if case in cases for key in keys]
        floor = FLOORS[runner.dtype]
        error, worst = FACTOR * max(d.error for d in distances), FACTOR * max(d.worst for d in distances)
        return Tolerance(error, max(worst, WORST * error)).at_least(Tolerance(floor, floor))


def chunk_bounds(inputs: Pass) -> dict[str, list[int]]:
    """Return the chunk bounds of a pass, by mode: one chunk, and for a long text many, the last tokens one by one."""
    n_tokens = len(inputs.ids)
    one_chunk = {WHOLE: [0, n_tokens]}
    if n_tokens <= LAST:
        return one_chunk
    bounds = [0]
    for size in _SIZES:
        bounds.append(min(bounds[-1] + size, n_tokens))
    while bounds[-1] < n_tokens - LAST:
        bounds.append(min(bounds[-1] + 7, n_tokens - LAST))
    return one_chunk | {IN_PARTS: [*dict.fromkeys([*bounds, *range(n_tokens - LAST, n_tokens + 1)])]}


class LastTokens:
    """Last tokens of every stage, collected over the chunks of a pass."""

    def __init__(self, stages: Mapping[str, tuple[Stage, int | None]], inputs: Pass) -> None:
        """Start an empty collection."""
        self._stages, self._n = stages, len(inputs.ids)
        self._parts: dict[str, list[np.ndarray]] = {}

    def observe(self, name: str, array: np.ndarray, stop: int) -> None:
        """Store the entries of the last `LAST` tokens that are in a chunk, which ends before token `stop`."""
        if name not in self._stages or stop <= self._n - LAST:
            return
        stage, _ = self._stages[name]
        has_new_tokens = "seq" in stage.axes.split()  # else a cache or state, complete after the last chunk
        if has_new_tokens:
            self._parts.setdefault(name, []).append(last_tokens(stage, array, stop - (self._n - LAST)).copy())
        elif stop == self._n:
            self._parts[name] = [last_tokens(stage, array).copy()]

    def array(self, name: str) -> np.ndarray | None:
        """Return the last tokens of a stage; None if the stage was never observed."""
        chunks = self._parts.get(name)
        return None if chunks is None else np.concatenate(chunks, axis=token_axis(self._stages[name][0]) or 0)
