"""Every stage of a dump compared with llorch's: local error, inherited error, and the tolerance of a right engine.

`profile` finds the tokens, heads and channels of an error, and its size in steps of float32.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from jaxtyping import Float

from llorch.diagnosis.earlier_passes import first_past, first_variances, unknown_stages
from llorch.diagnosis.expected import EngineArithmetic, Expectations, Expected, rows
from llorch.diagnosis.replay import EMBED, Arrays, Past, Replay
from llorch.diagnosis.verdict import Profile, StageCheck
from llorch.engines.dumps.stage_dump import DumpedArray
from llorch.families.config import ModelConfig
from llorch.judging.compare import judge_difference
from llorch.judging.expert_selection import ExpertSelection
from llorch.judging.runners.numpy import FLOAT64, GGML
from llorch.stages.comparison import FAIL, PASS, ROUNDING, Difference, measure
from llorch.stages.stage_ref import StageRef, token_axis
from llorch.stages.table import Stage

Progress = Callable[[str], None]


@dataclass(frozen=True)
class ArrayPair:
    """Array of the engine, and llorch's array of the same stage and tokens."""

    theirs: np.ndarray
    ours: np.ndarray
    masked: bool
    token_axis: int | None

    @property
    def difference(self) -> Difference:
        """Difference between the engine's array and llorch's, for each token too."""
        return measure(self.theirs, self.ours, masked=self.masked, token_axis=self.token_axis)

    @property
    def sizes(self) -> np.ndarray | None:
        """Norm of each token's row in llorch's array, by which the error of the row is measured."""
        if self.token_axis is None:
            return None
        others = tuple(axis for axis in range(self.ours.ndim) if axis != self.token_axis)
        return np.sqrt(np.square(np.where(np.isfinite(self.ours), self.ours, 0)).sum(axis=others))

    @property
    def has_numbers(self) -> bool:
        """Tell if both arrays are finite somewhere. Two arrays of NaN alone are equal whatever the cause."""
        if self.theirs.shape != self.ours.shape:
            return True
        return bool((np.isfinite(self.theirs) & np.isfinite(self.ours)).any())

    def where_finite(self) -> "ArrayPair":
        """Set entries to 0 where both arrays are not finite: a mistake may produce just such values."""
        if self.masked or self.theirs.shape != self.ours.shape:
            return self
        nothing = ~np.isfinite(self.theirs) & ~np.isfinite(self.ours)
        return replace(self, theirs=np.where(nothing, 0, self.theirs), ours=np.where(nothing, 0, self.ours))


def pair_of(
    replay: Replay,
    dumped: DumpedArray,
    name: str,
    ours: np.ndarray,
    chosen_by: tuple[np.ndarray, np.ndarray] | None = None,
) -> ArrayPair:
    """Pair a dumped stage with the same tokens of llorch's; scores and variances tell the ties of a choice."""
    stage, _ = replay.stages[name]
    theirs, ours = dumped.read().astype(ours.dtype), rows(ours, stage, dumped)
    if chosen_by is not None:
        theirs = ExpertSelection(ours, *(rows(array, stage, dumped) for array in chosen_by)).settled(theirs)
    if stage.is_choice:  # their order says nothing
        theirs, ours = np.sort(theirs, axis=-1), np.sort(ours, axis=-1)
    return ArrayPair(theirs, ours, stage.masked, token_axis(stage))


@dataclass
class _ReplayRun:
    """llorch's run of the passes of a dump, one part of the model after the other.

    Attributes:
        replay: The replay of the dump.
        past: Caches before the pass.
        engine_fed: Arrays of the dump replace llorch's; False for a run of llorch alone.
        made: Arrays of the last part, as llorch computed them.
        passed: Arrays of the last part, as later stages get them.
    """

    replay: Replay
    past: Past
    engine_fed: bool = True
    made: dict[str, np.ndarray] = field(default_factory=dict)
    passed: Arrays = field(default_factory=dict)

    def compute(self, n_pass: int, part: int) -> None:
        """Run a part of the model on the output of the part before it."""
        x = np.empty(0) if part == EMBED else self.passed[self.replay.input_of(part)]
        self.made = {}
        keep = self.made.__setitem__
        with np.errstate(all="ignore"):  # an engine's own numbers may lead anywhere
            self.passed = self.replay.run(n_pass, keep, self.past, first=part, last=part, x=x, fed=self.engine_fed)

    def end_pass(self) -> None:
        """Keep the caches for the next pass, and drop the arrays."""
        self.past, self.made, self.passed = self.past.next(), {}, {}


class DumpChecker:
    """Judges the passes of a dump, one after the other.

    Three runs go side by side. Two take the engine's arrays, with the caches as the dump shows them and with caches of
    appended rows; the third is llorch's alone.
    """

    def __init__(self, replay: Replay, progress: Progress = lambda line: None, *, model: str = "") -> None:
        """Prepare; nothing is computed yet. `model` is the name of the model, for reports."""
        backend = GGML if replay.weights.numerics.rounds_activations else FLOAT64
        engine = replay.dump.features.engine or "dump"
        self._compare = partial(judge_difference, engine=engine, model=model, backend=backend)
        self.replay, self.pasts = replay, list[tuple[Past, ...]]()  # caches of the fed runs before each pass
        self.not_run: list[tuple[int, str]] = []  # pass and stage key of what the dump cannot be judged by
        self._say, self._engine = progress, EngineArithmetic(replay.dump)
        as_shown, appended, alone = (first_past(replay, as_given=as_given) for as_given in (True, False, True))
        self._fed = _ReplayRun(replay, as_shown), _ReplayRun(replay, appended)
        self._own = _ReplayRun(replay, alone, engine_fed=False)
        self._held = first_variances(replay, as_shown), dict[str, np.ndarray]()  # of caches and states; states

    def results(self) -> Iterator[StageCheck]:
        """Yield every stage of every pass, in the order of the run."""
        unknown = zip(unknown_stages(self.replay), unknown_stages(self.replay, fed=False), strict=True)
        for n_pass, (here, in_own_run) in enumerate(unknown):
            self.pasts.append(tuple(run.past for run in self._fed))
            for result in self._results_of_pass(n_pass):
                if result.key in here:
                    self.not_run.append((n_pass, result.key))
                else:
                    yield replace(result, chained=None) if result.key in in_own_run else result
            for run in (*self._fed, self._own):
                run.end_pass()

    def _results_of_pass(self, n_pass: int) -> Iterator[StageCheck]:
        """Yield the results of one pass, part by part of the model."""
        expected = Expectations(self.replay, n_pass, self._engine, *self._held)
        for part in range(EMBED, self.replay.config.n_layers + 1):
            self._say(f"pass {n_pass + 1} of {len(self.replay.dump.passes)}, {self._part(part)}")
            for run in (*self._fed, self._own):
                run.compute(n_pass, part)
            for name, allowed in expected.of_part(part, self._fed[0].made, self._fed[0].passed):
                dumped = self.replay.dump.dumped.get((n_pass, name))
                if dumped is not None:
                    yield self._result(n_pass, name, dumped, expected, allowed(dumped))

    def _part(self, part: int) -> str:
        n_layers = self.replay.config.n_layers
        return f"layer {part + 1} of {n_layers}" if 0 <= part < n_layers else "outside the layers"

    def _result(
        self, n_pass: int, name: str, dumped: DumpedArray, expected: Expectations, allowed: Expected
    ) -> StageCheck:
        """Judge a stage with the cache that is nearer to what the engine did."""
        (stage, layer), mode = self.replay.stages[name], self._engine.mode_at(n_pass, name)
        pairs = [
            pair_of(self.replay, dumped, name, run.made[name], expected.chosen_by(name, run.passed))
            for run in self._fed
        ]
        found = [(here if np.isfinite(here.ours).all() else here.where_finite()).difference for here in pairs]
        local, here = min(zip(found, pairs, strict=True), key=lambda pair: pair[0].over(allowed.local))
        total = pair_of(self.replay, dumped, name, self._own.made[name]).difference
        stage_ref = StageRef(stage.checkpoint, stage.name, layer, f"pass {n_pass}", n_pass=n_pass)
        isolated = self._compare(local, allowed.local, stage_ref, "isolated")
        is_located = isolated.verdict == FAIL and not local.fault and not stage.is_choice
        check = StageCheck(
            isolated,
            self._compare(total, allowed.total, stage_ref, "chained"),
            self.replay.ran_since(n_pass, name),
            dumped.name,
            mode.name or "float32",
            profile(here.theirs, here.ours, stage, self.replay.config) if is_located else None,
        )
        return check.with_verdict(ROUNDING) if mode.name and check.verdict == PASS else check


MAX_STRETCHES = 512  # of a vocabulary
N_ULPS = 26  # 0, up to 1, 2, 4 ... 2^23, which is the number itself; and all that is farther off
AT_ONCE = 2**22  # elements that are looked at


def profile(
    actual: Float[np.ndarray, "*shape"], expected: Float[np.ndarray, "*shape"], stage: Stage, config: ModelConfig
) -> Profile:
    """Find the tokens, heads and channels in which two arrays of the same tokens differ.

    Return the relative error of each, infinite where zero is right and the engine has another value; no heads for a
    stage without them, and at most `MAX_STRETCHES` stretches of logits. Also count the errors by their size in float32
    ulps. Entries that both arrays mask with -inf are equal.
    """
    theirs, ours = (by_token(array, stage, config) for array in (actual, expected))
    n_tokens, n_heads, width = ours.shape
    stretches = np.arange(width) * min(width, MAX_STRETCHES) // width if stage.name == "logits" else np.arange(width)
    tokens, heads, channels = np.zeros((2, n_tokens)), np.zeros((2, n_heads)), np.zeros((2, width))
    ulps = np.zeros(N_ULPS, np.int64)
    step = max(1, AT_ONCE // (n_heads * width))
    for start in range(0, n_tokens, step):
        rows = slice(start, start + step)
        off, right = _absolute_differences(theirs[rows], ours[rows])
        ulps += _ulps(off, right)
        for at, squares in enumerate((np.square(off), np.square(right))):
            tokens[at, rows] = squares.sum(axis=(1, 2))
            heads[at] += squares.sum(axis=(0, 2))
            channels[at] += squares.sum(axis=(0, 1))
    shares = _share(np.stack([np.bincount(stretches, weights=of) for of in channels]))
    return Profile(_share(tokens), _share(heads) if has_heads(stage) else None, shares, ulps)


def has_heads(stage: Stage) -> bool:
    """Tell if a stage, or its width, is cut into heads."""
    return bool({"heads", "kv_heads", "q_width", "kv_width"} & set(stage.axes.split()))


def by_token(array: np.ndarray, stage: Stage, config: ModelConfig) -> np.ndarray:
    """Reshape a stage to (token, head, channel); one head if the stage has none."""
    axes = stage.axes.split()
    if axes[-1] in ("q_width", "kv_width"):
        return array.reshape(len(array), -1, config.head_dim)
    if len(axes) == 2:
        return array[:, None]
    return array if axes[0] == "seq" else array.swapaxes(0, 1)


def _absolute_differences(actual: np.ndarray, expected: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return absolute differences and the right values, in float64; 0 where both mask."""
    a, b = actual.astype(np.float64), expected.astype(np.float64)
    masked = np.isneginf(b)
    with np.errstate(invalid="ignore"):
        off = np.where(masked & np.isneginf(a), 0.0, np.abs(a - b))
    return np.where(np.isnan(off), math.inf, off), np.where(masked, 0.0, b)


def _ulps(off: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Count the errors by their number of float32 steps, in bins of powers of two; bin 0 holds exact values."""
    size = np.fmin(np.abs(right), 2.0**127).astype(np.float32)  # whose next number float32 has, too
    step = np.spacing(size).astype(np.float64)
    with np.errstate(divide="ignore"):
        n = np.ceil(np.log2(off / step))
    bins = np.where(off == 0, 0, np.clip(n, 0, N_ULPS - 2) + 1)
    return np.bincount(bins.astype(np.int64).ravel(), minlength=N_ULPS)


def _share(squares: np.ndarray) -> np.ndarray:
    """Divide norms of the difference by norms of the right values."""
    off, size = np.sqrt(squares)
    return np.where(size > 0, off / np.where(size > 0, size, 1.0), np.where(off > 0, math.inf, 0.0))
